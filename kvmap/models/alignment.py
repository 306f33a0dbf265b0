"""Two tokenizers over one text: which source tokens stand where a target token stands. Experimental."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from kvmap.errors import KvmapError, UnknownName
from kvmap.models.cache import KVCache
from kvmap.models.rope import apply_rotation, strip_rotation

ALIGNMENT_RULES = ("last", "ended", "mean")

Ids = list[int]
Runs = list[tuple[int, int]]
"""For each target token the first and the last of the source tokens that it takes, both included."""


class AlignmentError(KvmapError):
    """Tokens that cannot be laid over one text."""


@dataclass(frozen=True, eq=False)
class AlignedIds:
    """What the source reads in place of target ids, and where its columns go.

    Attributes:
        ids: (batch, source tokens) int64, padded on the left.
        mask: (batch, source tokens) bool, True at real tokens.
        first, last: (batch, target tokens) int64, the columns of `ids` whose mean a target column takes,
            both included; 0 at the target's padding.
    """

    ids: Tensor
    mask: Tensor
    first: Tensor
    last: Tensor

    @property
    def one_to_one(self) -> bool:
        """Whether every column takes the one column in its own place, so that nothing moves."""
        places = torch.arange(self.mask.shape[1])
        return self.first.shape == self.mask.shape and all(
            bool((taken == places)[self.mask].all()) for taken in (self.first, self.last)
        )


class Alignment:
    """Target ids → the source's ids of the same text, and for each target token the source tokens it takes.

    The text is what the target's ids decode to, cut at special tokens. Each piece is encoded by both
    tokenizers with character offsets. A target token whose characters end before position e takes, by rule:

    * "last": the source token that contains character e − 1. It may reach beyond e, and has then read more
      than the target token.
    * "ended": the last source token that ends at e or before. It has read no more than the target token.
    * "mean": the mean of all source tokens that share a character with it, the one of "last" included.

    Where several tokens end with the same character, the last of them is the one that has read it whole. A
    special token takes the source's token of the same name, else of the same role (BOS, EOS), else the
    last token of its name as text. Tokens that the source puts before any text stand before all pieces; what
    the target puts there takes the last of them, or the first token of the text where there are none.
    """

    def __init__(self, source: Any, target: Any, rule: str = "last") -> None:
        """Args: both tokenizers, of the tokenizers library; the rule.

        Raises:
            UnknownName: another rule.
            AlignmentError: a tokenizer that gives no character offsets.
        """
        if rule not in ALIGNMENT_RULES:
            raise UnknownName("alignment rule", rule, ALIGNMENT_RULES)
        self.rule = rule
        self._source, self._target = _backend(source, "source"), _backend(target, "target")
        self._source_prefix, self._target_prefix = (_prefix(side) for side in (self._source, self._target))
        self._pad = source.pad_token_id or 0
        self._unknown = target.unk_token_id
        self._specials = _counterparts(source, target, self._source)

    @property
    def name(self) -> str:
        """What a cache's content depends on beside the two models."""
        return f"spans:{self.rule}"

    def align(self, input_ids: Tensor, mask: Tensor) -> AlignedIds:
        """The source's ids of the text of target ids.

        Args:
            input_ids: (batch, tokens) the target's.
            mask: (batch, tokens), True at real tokens; left padding only.

        Raises:
            AlignmentError: an unknown token, whose text is lost, or a row without text.
        """
        ids, real = input_ids.cpu(), mask.cpu().bool()
        rows = [self._align_row(row[kept].tolist()) for row, kept in zip(ids, real, strict=True)]
        longest = max(len(theirs) for theirs, _ in rows)
        found = torch.full((len(rows), longest), self._pad)
        found_mask = torch.zeros(len(rows), longest, dtype=torch.bool)
        first, last = torch.zeros_like(ids), torch.zeros_like(ids)
        for row, (theirs, runs) in enumerate(rows):
            start = longest - len(theirs)
            found[row, start:] = torch.tensor(theirs)
            found_mask[row, start:] = True
            spans = torch.tensor(runs).reshape(-1, 2) + start
            first[row, real[row]], last[row, real[row]] = spans[:, 0], spans[:, 1]
        return AlignedIds(found, found_mask, first, last)

    def _align_row(self, ids: Ids) -> tuple[Ids, Runs]:
        prefix = self._target_prefix if ids[: len(self._target_prefix)] == self._target_prefix else []
        theirs: Ids = list(self._source_prefix)
        place = max(len(theirs) - 1, 0)
        runs: Runs = [(place, place)] * len(prefix)
        for piece in self._pieces(ids[len(prefix) :]):
            counterpart = self._specials.get(piece[0])
            if counterpart is None:
                encoded, piece_runs = self._align_text(piece)
            else:
                encoded, piece_runs = counterpart, [(len(counterpart) - 1,) * 2]
            # a token before which the source has nothing of this piece yet takes what came before the piece
            runs += [(max(len(theirs) + start, 0), max(len(theirs) + stop, 0)) for start, stop in piece_runs]
            theirs += encoded
        if not theirs:
            raise AlignmentError(
                f"the source's tokenizer makes no token of the text of {len(ids)} target tokens "
                f"(ids {ids[:8]}): nothing could be aligned; leave such texts out"
            )
        return theirs, runs

    def _pieces(self, ids: Ids) -> list[Ids]:
        """Runs of ordinary tokens, and each special token alone."""
        pieces: list[Ids] = []
        in_text = False
        for token in ids:
            special = token in self._specials
            if special or not in_text:
                pieces.append([])
            pieces[-1].append(token)
            in_text = not special
        return pieces

    def _align_text(self, ids: Ids) -> tuple[Ids, Runs]:
        """One piece of text: the source's ids, and runs that count from its first token, −1 before it."""
        if self._unknown is not None and self._unknown in ids:
            raise AlignmentError(
                "the target's ids hold its unknown token, whose text is lost, so that the source cannot read "
                "it: leave out texts with characters that the target's tokenizer does not know"
            )
        text, target_ends = _read_ends(self._target, ids)
        encoded = self._source.encode(text, add_special_tokens=False)
        return list(encoded.ids), _runs(_ends(encoded.offsets), target_ends, self.rule)


def take_columns(kv: KVCache, aligned: AlignedIds, positions: Tensor, mask: Tensor) -> KVCache:
    """A source's cache laid over the target's columns: content keys and values moved, keys turned anew.

    `k[i] = R(positions[i]) · mean_j R(position_j)^-1 k_j`, `v[i] = mean_j v_j` over the run of column i, in
    float32, by the rotations that the source's own forward used; then in the cache's dtype.

    Args:
        kv: the source's cache over the columns of `aligned.ids`, as captured.
        aligned: which columns go where.
        positions: (batch, target tokens) int64, the target's own.
        mask: (batch, target tokens) bool, its real tokens.

    Returns:
        A cache like any other over the target's columns, of the source's layers. It is not exact: the source
        could not go on from it. Columns at the target's padding are 0. Where nothing moves, `kv` itself.
    """
    if aligned.one_to_one:
        return kv
    rotations = kv.rotations or (None,) * kv.n_layers
    layers = []
    for key, value, rotation in zip(kv.keys, kv.values, rotations, strict=True):
        content = strip_rotation(key, kv.positions, rotation)
        moved = apply_rotation(_mean_of_runs(content, aligned, mask), positions, rotation)
        layers.append((moved.to(key.dtype), _mean_of_runs(value, aligned, mask).to(value.dtype)))
    keys, values = zip(*layers, strict=True)
    return replace(kv, keys=keys, values=values, positions=positions, mask=mask, exact=False)


def _mean_of_runs(states: Tensor, aligned: AlignedIds, mask: Tensor) -> Tensor:
    """(batch, heads, target tokens, head_dim): each column the mean of its run of columns of `states`."""
    first, last = aligned.first.to(states.device), aligned.last.to(states.device)
    lengths = last - first + 1
    shape = (*states.shape[:2], first.shape[1], states.shape[3])
    wide = states if states.dtype == torch.float64 else states.float()
    total = torch.zeros(shape, dtype=wide.dtype, device=wide.device)
    for step in range(int(lengths.max())):
        column = (first + step).minimum(last)[:, None, :, None].expand(shape)
        total += wide.gather(2, column) * (lengths > step)[:, None, :, None]
    return total / lengths[:, None, :, None] * mask.to(wide.device)[:, None, :, None]


def _backend(tokenizer: Any, side: str) -> Any:
    """A tokenizer of the tokenizers library whose offsets cover every character, white space included."""
    from tokenizers import Tokenizer

    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise AlignmentError(
            f"the {side}'s tokenizer, {type(tokenizer).__name__}, gives no character offsets: aligning by "
            "spans needs a fast tokenizer (a tokenizer.json) on both sides"
        )
    content = json.loads(backend.to_str())
    content["truncation"] = content["padding"] = None
    _keep_white_space(content["post_processor"])
    return Tokenizer.from_str(json.dumps(content))


def _keep_white_space(node: Any) -> None:
    """Offsets that leave out a token's white space would end it too early."""
    for value in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        _keep_white_space(value)
    if isinstance(node, dict) and "trim_offsets" in node:
        node["trim_offsets"] = False


def _prefix(backend: Any) -> Ids:
    """What a tokenizer puts before any text: [BOS], or nothing."""
    encoded = backend.encode("a", add_special_tokens=True)
    n_leading = 0
    while n_leading < len(encoded.ids) and encoded.special_tokens_mask[n_leading]:
        n_leading += 1
    return list(encoded.ids[:n_leading])


def _counterparts(source: Any, target: Any, source_backend: Any) -> dict[int, Ids]:
    """By id of the target's special tokens but the unknown one, the source's ids in its place."""
    found: dict[int, Ids] = {}
    theirs = source_backend.get_added_tokens_decoder()
    by_name = {token.content: number for number, token in theirs.items()}
    roles = {
        getattr(target, role): getattr(source, role)
        for role in ("bos_token_id", "eos_token_id")
        if getattr(target, role) is not None
    }
    for number, token in target.added_tokens_decoder.items():
        if not token.special or number == target.unk_token_id:
            continue
        if token.content in by_name:
            found[number] = [by_name[token.content]]
        elif roles.get(number) is not None:
            found[number] = [roles[number]]
        else:
            spelled = list(source_backend.encode(token.content, add_special_tokens=False).ids)
            if spelled:
                found[number] = spelled
    return found


def _read_ends(backend: Any, ids: Ids) -> tuple[str, list[int]]:
    """The text of ids, and for each of them where its characters end there."""
    text = backend.decode(ids, skip_special_tokens=False)
    encoded = backend.encode(text, add_special_tokens=False)
    if list(encoded.ids) == ids:
        return text, _ends(encoded.offsets)
    return _read_ends_one_by_one(backend, ids)


def _read_ends_one_by_one(backend: Any, ids: Ids) -> tuple[str, list[int]]:
    """The same for ids that their text would not give again: encoded in parts, or cut within a character.

    Each token adds what decoding a few tokens with it shows beyond decoding them without it. A token that
    leaves a character incomplete ends where that character does.
    """
    text = ""
    ends: list[int] = []
    start = shown = 0
    for stop in range(1, len(ids) + 1):
        without = backend.decode(ids[start:shown], skip_special_tokens=False)
        grown = backend.decode(ids[start:stop], skip_special_tokens=False)
        if grown.endswith("\ufffd") and stop < len(ids):
            continue
        text += grown[len(without) :]
        ends += [len(text)] * (stop - len(ends))
        start, shown = shown, stop
    return text, ends


def _ends(offsets: Sequence[tuple[int, int]]) -> list[int]:
    """Where each token ends, never before the one in front of it."""
    return list(accumulate((stop for _, stop in offsets), max))


def _runs(source: Sequence[int], target: Sequence[int], rule: str) -> Runs:
    """The runs of one piece, from where tokens end; see `Alignment`."""
    ours, theirs = torch.tensor(target, dtype=torch.long), torch.tensor(source, dtype=torch.long)
    if not source:
        return [(-1, -1)] * len(target)
    ended = torch.searchsorted(theirs, ours, right=True) - 1
    if rule == "ended":
        return [(place, place) for place in ended.tolist()]
    holding = theirs[torch.searchsorted(theirs, ours).clamp(max=len(source) - 1)]
    last = torch.searchsorted(theirs, holding, right=True) - 1
    if rule == "last":
        return [(place, place) for place in last.tolist()]
    begins = torch.cat((ours.new_zeros(1), ours[:-1]))
    first = torch.searchsorted(theirs, begins, right=True).minimum(last)
    return list(zip(first.tolist(), last.tolist(), strict=True))
