"""One pass over texts: each batch is read by both models and handed over, each target layer seen once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kvmap.diagnostics.attention import attention_sums
from kvmap.diagnostics.concentration import concentration_sums
from kvmap.diagnostics.errors import error_sums, key_view
from kvmap.diagnostics.next_token import Predicted, compare, compare_continuation, continued_states
from kvmap.diagnostics.source_reads import SourceRead, rotates_alike, source_reads
from kvmap.diagnostics.sums import TextSums
from kvmap.diagnostics.texts import Text, TextBatch
from kvmap.diagnostics.token_groups import N_KINDS, membership, n_bins
from kvmap.diagnostics.token_kinds import TokenKinds
from kvmap.errors import KvmapError
from kvmap.mappers import Mapper
from kvmap.models.cache import KVCache
from kvmap.models.capture import positions_from_mask
from kvmap.models.logits import keep_hidden_states
from kvmap.models.pair import LoadedModel, ModelPair
from kvmap.models.queries import read_queries
from kvmap.transfer import HandOff, TransferOptions, transfer


def diagnose_texts(
    pair: ModelPair,
    mapper: Mapper,
    texts: Sequence[Text],
    kinds: TokenKinds,
    options: TransferOptions,
    *,
    batch_size: int = 8,
    query_block: int = 128,
    sequential: bool = False,
) -> dict[str, TextSums]:
    """Everything that a mapped cache and the target's own, side by side, say of a mapper.

    For each batch the source reads it, its cache is handed over with one token held back, and the target
    reads it natively while each layer's queries are judged. The cache that is judged is that of `transfer`:
    native head, native layers and recomputed tokens are in it. Queries and columns that count are the mapped
    ones, see `TextSums`. Then the next-token predictions: of a halved text, its first half is handed over and
    the second predicted, token by token; of another text, the one token after it.

    Memory for a batch: three caches, its last hidden states, and blocks of scores and of logits.

    Args:
        pair: source and target.
        mapper: of this pair.
        texts, kinds, options, batch_size, query_block, sequential: see `diagnose_mappers`.

    Returns:
        The sums of each text, by name.

    Raises:
        KvmapError, UnsupportedModel: see `diagnose_mappers`.
    """
    return diagnose_mappers(
        pair,
        {"": mapper},
        texts,
        kinds,
        options,
        batch_size=batch_size,
        query_block=query_block,
        sequential=sequential,
    )[""]


def diagnose_mappers(
    pair: ModelPair,
    mappers: Mapping[str, Mapper],
    texts: Sequence[Text],
    kinds: TokenKinds,
    options: TransferOptions,
    *,
    batch_size: int = 8,
    query_block: int = 128,
    sequential: bool = False,
) -> dict[str, dict[str, TextSums]]:
    """`diagnose_texts` of several mappers of one pair: the source and the native target read each batch once.

    Memory for a batch is that of one mapper, and one more cache for each other.

    Args:
        pair: source and target.
        mappers: of this pair, by name.
        texts: what is read, under different names.
        kinds: sorts tokens.
        options: how a cache is handed over. `hold_back` counts for predictions only.
        batch_size: contexts at a time.
        query_block: query tokens at a time.
        sequential: one model in memory at a time; the source is released, and its caches wait on disk.

    Returns:
        By the name of the mapper, the sums of each text, by its name.

    Raises:
        KvmapError: no text, one that cannot be diagnosed, or a mapper of other models, shapes or another
            strategy.
        UnsupportedModel: a target whose queries cannot be had.
    """
    if batch_size < 1 or query_block < 1:
        raise KvmapError(f"batch_size={batch_size}, query_block={query_block}: expected 1 or more each")
    if not texts or len({text.name for text in texts}) < len(texts):
        raise KvmapError(f"texts {[text.name for text in texts]}: expected one or more, of different names")
    for text in texts:
        text.check(options.native_head)
    for mapper in mappers.values():
        mapper.check_models(pair.source_identity, pair.target_identity, options.rope)
    batches = [batch for text in texts for batch in text.batches(batch_size)]
    sums = {
        name: {
            text.name: TextSums(text.name, mapper.native_layers, N_KINDS + n_bins(text.longest))
            for text in texts
        }
        for name, mapper in mappers.items()
    }
    with source_reads(pair, batches, sequential) as caches:
        readers = [
            (_Pass(pair.target, _on_device(mapper, pair.target), kinds, options, query_block), sums[name])
            for name, mapper in mappers.items()
        ]
        for batch, read in caches:
            _add(pair.target, [(reader, of_text[batch.text]) for reader, of_text in readers], batch, read)
    return sums


def _on_device(mapper: Mapper, target: LoadedModel) -> Mapper:
    return mapper if mapper.device in (None, target.device) else mapper.to(target.device)


def _add(
    target: LoadedModel, readers: Sequence[tuple[_Pass, TextSums]], batch: TextBatch, read: SourceRead
) -> None:
    """Add what one batch says to the sums of every mapper, given what the source has read of it."""
    handed = [reader.hand_over(batch, read) for reader, _ in readers]
    judges = [
        reader.judge(batch, read, given, sums) for (reader, sums), given in zip(readers, handed, strict=True)
    ]

    def judge(*layer: Any) -> None:
        for each in judges:
            each(*layer)

    with keep_hidden_states(target) as states:
        read_queries(target, batch.ids, batch.mask, judge)
    for (reader, sums), given in zip(readers, handed, strict=True):
        if (predicted := reader.predict(batch, read, given, states[0])) is not None:
            sums.predicted.append(predicted)


@dataclass(frozen=True)
class _Pass:
    """What is the same for all batches."""

    target: LoadedModel
    mapper: Mapper
    kinds: TokenKinds
    options: TransferOptions
    query_block: int

    def hand_over(self, batch: TextBatch, read: SourceRead) -> HandOff:
        """The cache that is judged."""
        return self._hand_over(read.whole, batch.ids, batch.mask, replace(self.options, hold_back=1))

    def judge(self, batch: TextBatch, read: SourceRead, handed: HandOff, sums: TextSums) -> _Judge:
        """What adds each layer of the batch to the sums."""
        mapped = handed.kv.slice_tokens(0, batch.ids.shape[1] - 1)
        kinds = self.kinds.of(batch.ids, positions_from_mask(batch.mask))
        turned = self._turned(read.whole, batch, handed)
        windows = [layer.window for layer in self.target.geometry.layers]
        return _Judge(mapped, kinds[:, :-1], turned, self.options, self.query_block, windows, sums)

    def predict(
        self, batch: TextBatch, read: SourceRead, handed: HandOff, states: Tensor
    ) -> Predicted | None:
        """Next tokens from the mapped cache, against native last hidden states; None where none is mapped."""
        told = self._second_half if batch.halved else self._last_token
        return told(batch, read, handed, states)

    def _hand_over(self, source_kv: KVCache, ids: Tensor, mask: Tensor, options: TransferOptions) -> HandOff:
        # every column is judged, also those of windowed layers that no later token sees
        return transfer(source_kv, self.mapper, self.target, ids, mask, every_column=True, **asdict(options))

    def _turned(self, source_kv: KVCache, batch: TextBatch, handed: HandOff) -> Tensor:
        """(batch, columns) bool: which columns' keys carry the target's rotation.

        Under "no_rerotate" the recomputed ones do and the mapped ones do not; a hand-off without recompute
        tells them apart.
        """
        mask = handed.kv.mask[:, :-1]
        if self.options.rope != "no_rerotate":
            return torch.ones_like(mask)
        if handed.n_recomputed == 0:
            return torch.zeros_like(mask)
        bare = replace(self.options, hold_back=1, recompute_share=0.0)
        plain = self._hand_over(source_kv, batch.ids, batch.mask, bare)
        turned = torch.zeros_like(mask)
        for one, other in zip(handed.kv.keys, plain.kv.keys, strict=True):
            turned |= (one != other).any(3).any(1)[:, :-1].to(turned.device)
        return turned

    def _last_token(
        self, batch: TextBatch, read: SourceRead, handed: HandOff, states: Tensor
    ) -> Predicted | None:
        """The one token after each context; contexts of which nothing was mapped are left out."""
        if self.options.hold_back != 1:
            handed = self._hand_over(read.whole, batch.ids, batch.mask, self.options)
        rows = torch.tensor(handed.n_mapped_of_row) > 0
        if not bool(rows.any()):
            return None
        logits = handed.logits[rows.to(handed.logits.device)].unsqueeze(1)
        return Predicted(*compare(self.target, states[rows.to(states.device), -1:], logits))

    def _second_half(
        self, batch: TextBatch, read: SourceRead, handed: HandOff, states: Tensor
    ) -> Predicted | None:
        """Tokens of the second halves; None where the first halves leave nothing to map."""
        half, end = batch.half, batch.end
        if handed.n_mapped == 0 or half <= self.options.native_head + self.options.hold_back:
            return None
        alike = rotates_alike(self.target, batch)
        if alike and read.half is None and self.options.hold_back == 1 and self.options.recompute_share == 0:
            # tokens are mapped one by one: the hand-off of the half is the first columns of the whole one's
            kv = handed.kv
        else:
            source_kv = read.whole.slice_tokens(0, half) if read.half is None else read.half
            kv = self._hand_over(source_kv, batch.ids[:, :half], batch.mask[:, :half], self.options).kv
        read_on, predicted = batch.ids[:, half - 1 : end - 1], batch.ids[:, half:end]
        if alike:
            states = states[:, half - 1 : end - 1]
        else:
            # the target's own cache of half the text is one of other frequencies, as the mapped one is
            states = continued_states(self.target, batch.ids[:, :half], read_on)
        kl, same = compare_continuation(self.target, kv.slice_tokens(0, half - 1), states, read_on)
        return Predicted(kl, same, self.kinds.of(predicted, torch.ones_like(predicted)))


class _Judge:
    """An `OnLayer` that adds what one batch says of each layer to the sums."""

    def __init__(
        self,
        mapped: KVCache,
        kinds: Tensor,
        turned: Tensor,
        options: TransferOptions,
        query_block: int,
        windows: Sequence[int | None],
        sums: TextSums,
    ) -> None:
        self.mapped, self.turned, self.windows, self.sums = mapped, turned, windows, sums
        self.rope, self.query_block = options.rope, query_block
        self.counted = mapped.mask & (mapped.positions >= options.native_head)
        bins = sums.n_groups - N_KINDS
        positions = mapped.positions[self.counted]
        self.groups = membership(kinds.to(positions.device)[self.counted], positions, bins)
        sums.counts += self.groups.sum(0).cpu()

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, softcap: float | None, /
    ) -> None:
        device, n = query.device, self.mapped.n_tokens
        mask, counted, groups = (part.to(device) for part in (self.mapped.mask, self.counted, self.groups))
        query = query[:, :, :n]
        own = key[:, :, :n].float(), value[:, :, :n].float()
        found = tuple(part[layer].to(device).float() for part in (self.mapped.keys, self.mapped.values))
        sums, squares = attention_sums(
            query,
            own,
            (found[0], found[1]),
            mask,
            counted,
            groups,
            scaling,
            softcap,
            self.query_block,
            self.windows[layer],
        )
        rotations = self.mapped.rotations
        error, true = key_view(
            own[0],
            found[0],
            self.mapped.positions.to(device),
            None if rotations is None else rotations[layer],
            self.rope,
            self.turned.to(device),
        )
        rows = [part.transpose(1, 2)[counted] for part in (error, true, found[1] - own[1], own[1])]
        sums |= error_sums("key", rows[0], rows[1], groups)
        sums |= error_sums("value", rows[2], rows[3], groups)
        turned = (found[0] - own[0]).transpose(1, 2)[counted]
        sums |= concentration_sums(query, turned, rows[2], squares, counted)
        self.sums.add(layer, sums)
