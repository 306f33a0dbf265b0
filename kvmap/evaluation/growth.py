"""Map once, then grow: what becomes of the tokens that the target adds itself to a mapped cache.

A prefix is handed over once. The target then reads a continuation token by token on top of it, as it would
while generating, only that the tokens are given. Every token it adds is computed by itself, but from what it
attends to: the mapped prefix, and its own tokens before. Against a native run on the same tokens, by how many
the target has added: how much worse it predicts, and how far its own new keys and values are off.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, TypeAlias

import torch
from torch import Tensor

from kvmap.data import TokenBlocks, prompt_prefix
from kvmap.errors import KvmapError
from kvmap.evaluation.answers import CONTENT_CHARACTERS, Answers, item_key, lacking
from kvmap.evaluation.arms import (
    Arms,
    Batch,
    Progress,
    SourcePart,
    available,
    check_arms,
    check_something_maps,
    placed,
    read_source,
    run_passes,
    target_hand_offs,
    tokenizer_of,
)
from kvmap.evaluation.limits import context_limit
from kvmap.evaluation.long_context_windows import Growth, Piece, WindowSums, pieces_of, window_edges
from kvmap.evaluation.perplexity import Predictions, sequence_key
from kvmap.mappers import Mapper
from kvmap.models.cache import KVCache
from kvmap.models.capture import forward
from kvmap.models.pair import LoadedModel, ModelPair
from kvmap.progress import track
from kvmap.transfer import TransferOptions

MAX_SPILL_BYTES = 8 * 2**30
"""Disk for the source's full distributions where models run one after the other; beyond it its KL is nan."""


def evaluate_growth(
    pair: ModelPair,
    arms: Arms,
    blocks: TokenBlocks,
    *,
    prefix_tokens: int,
    n_windows: int,
    options: TransferOptions,
    batch_size: int = 1,
    sequential: bool = False,
    answers: Mapping[str, Answers] | None = None,
    progress: Progress = track,
) -> dict[str, list[Growth]]:
    """Hands a prefix over and lets the target add the continuation to it.

    block = prefix (`prefix_tokens`) + g added tokens + one that is only predicted. The token after the i-th
    added one is predicted from the prefix and i tokens that the target has added itself. `no_context` is fed
    the continuation alone (after BOS, where the tokenizer adds it), `source` its own cache.

    Keys are compared as content keys, without rotation: `no_context` has its tokens at other positions.

    Args:
        pair: source and target.
        arms: arm to mapper; `target` must be among them.
        blocks: sequences of equal length, disjoint from the calibration text.
        prefix_tokens: length of the prefix.
        n_windows: parts of the continuation that are summed apart.
        options: how a cache is transferred.
        batch_size: sequences at a time.
        sequential: one model in memory at a time.
        answers: what is kept of each arm under these very settings: an arm grows only sequences it has not
            grown yet, and adds them. The target reads again what it is to be compared with.
        progress: wraps the loop over batches.

    Returns:
        By arm, in the order given, one entry a sequence.

    Raises:
        KvmapError: no `target` among the arms, a prefix of which nothing would be mapped, no continuation,
            fewer added tokens than windows, or blocks longer than the models take.
    """
    check_arms(arms)
    usable = available(arms)
    n_added = blocks.length - prefix_tokens - 1
    _check(pair, usable, blocks, prefix_tokens)
    check_something_maps(usable, [prefix_tokens], options)
    pieces = pieces_of(window_edges(n_added, n_windows))
    tokenizer = tokenizer_of(pair)
    keys = [_key(blocks, number, prefix_tokens, n_windows) for number in range(blocks.n_sequences)]
    contents = [
        sequence_key(blocks, n, prefix_tokens)[:CONTENT_CHARACTERS] for n in range(blocks.n_sequences)
    ]
    books = {arm: (answers or {}).get(arm) or Answers.in_memory() for arm in usable}
    asked = _open_batches(books, keys, blocks, prefix_tokens, batch_size)
    grown = {
        arm: {
            number: Growth.from_row(row, contents[number])
            for number, key in enumerate(keys)
            if (row := book.get(key)) is not None
        }
        for arm, book in books.items()
    }

    def continuation(batch: Batch) -> Tensor:
        return blocks.input_ids[list(batch.index), prefix_tokens:]

    def source_pass(batch: Batch) -> SourcePart:
        wanted = {arm: usable[arm] for arm in asked[batch]}
        if "source" not in wanted and all(mapper is None for mapper in wanted.values()):
            return SourcePart(None)
        kv, own = read_source(pair.source, batch, wanted, options)
        if own is None:
            return SourcePart(kv)
        size = 4 * blocks.n_sequences * n_added * pair.source.geometry.vocab_size
        keep_all = not sequential or size <= MAX_SPILL_BYTES
        steps = _grow(pair.source, own.kv, continuation(batch), pieces, keep_all)
        return SourcePart(kv, (predicted for predicted, _ in steps))

    @cache
    def on_target() -> dict[str, Mapper | None]:
        return placed(open_arms, pair.target)

    def target_pass(batch: Batch, part: SourcePart) -> None:
        wanted = {arm: on_target()[arm] for arm in usable if arm in asked[batch] or arm == "target"}
        streams = _streams(pair.target, tokenizer, batch, part, wanted, continuation(batch), pieces, options)
        found = _measure(streams, pieces, len(batch.index))
        for arm in asked[batch]:
            new = {
                number: replace(growth, content=contents[number])
                for number, growth in zip(batch.index, found[arm], strict=True)
            }
            # Without its KL a growth is not whole: the next run, with more room, is to have it.
            books[arm].add({keys[n]: growth.row() for n, growth in new.items() if growth.is_whole})
            grown[arm].update(new)

    arms_asked = {"target"}.union(*asked.values())
    open_arms = {arm: mapper for arm, mapper in usable.items() if arm in arms_asked}
    if asked:
        run_passes(
            pair,
            list(asked),
            open_arms,
            source_pass,
            target_pass,
            sequential=sequential,
            progress=progress,
            description="evaluate growth",
        )
    return {arm: [of_arm[number] for number in range(blocks.n_sequences)] for arm, of_arm in grown.items()}


def _key(blocks: TokenBlocks, number: int, prefix_tokens: int, n_windows: int) -> str:
    ids = blocks.input_ids[number].tolist()
    return item_key(ids[:prefix_tokens], ids[prefix_tokens:], n_windows)


def _check(
    pair: ModelPair, arms: Mapping[str, Mapper | None], blocks: TokenBlocks, prefix_tokens: int
) -> None:
    if "target" not in arms:
        raise KvmapError(f"growth arms {sorted(arms)}: 'target' is needed, all are held against it; add it")
    if not 1 <= prefix_tokens <= blocks.length - 2:
        raise KvmapError(
            f"prefix_tokens={prefix_tokens} of blocks of {blocks.length} tokens: expected at least one "
            "prefix token, one that is added and one that is predicted"
        )
    limit = context_limit(pair)
    if blocks.length > limit:
        raise KvmapError(
            f"blocks of {blocks.length} tokens do not fit a pair that takes {limit}; shorten the prefix or "
            "the continuation"
        )


def _open_batches(
    books: Mapping[str, Answers],
    keys: Sequence[str],
    blocks: TokenBlocks,
    prefix_tokens: int,
    batch_size: int,
) -> dict[Batch, tuple[str, ...]]:
    """Batches of what some arm has not grown, in order, each with the arms that have not."""
    if batch_size < 1:
        raise KvmapError(f"batch_size={batch_size}: expected at least 1")
    asked: dict[Batch, tuple[str, ...]] = {}
    for arms, numbers in lacking(books, keys).items():
        for start in range(0, len(numbers), batch_size):
            index = tuple(numbers[start : start + batch_size])
            ids = blocks.input_ids[list(index), :prefix_tokens]
            asked[Batch(index, ids, torch.ones_like(ids, dtype=torch.bool))] = arms
    return asked


_Step: TypeAlias = tuple[Predictions, KVCache | None]
"""What was predicted after each token of a piece, and the piece's own columns with content keys; None for the
source, whose columns are not looked at."""


def _grow(
    model: LoadedModel,
    kv: KVCache | None,
    continuation: Tensor,
    pieces: Sequence[Piece],
    keep_all: bool = True,
) -> Iterator[_Step]:
    """Adds the continuation, all but its last token, to a cache that itself does not change."""
    for piece in pieces:
        fed = continuation[:, piece.start : piece.stop]
        true = continuation[:, piece.start + 1 : piece.stop + 1]
        logits, kv = forward(model, fed, kv)
        log_probs = logits.float().log_softmax(-1)
        predicted = {
            "token": log_probs.gather(-1, true.to(log_probs.device).unsqueeze(-1)).squeeze(-1),
            "top": log_probs.argmax(-1),
        }
        if keep_all:
            predicted["all"] = log_probs
        # These columns all carry what this forward rotated by, whatever those before them carry.
        own = replace(kv.slice_tokens(kv.n_tokens - fed.shape[1], None), mixed=False)
        yield predicted, own.strip()


def _streams(
    target: LoadedModel,
    tokenizer: Any,
    batch: Batch,
    part: SourcePart,
    arms: Mapping[str, Mapper | None],
    continuation: Tensor,
    pieces: Sequence[Piece],
    options: TransferOptions,
) -> dict[str, Iterator[_Step]]:
    """Every arm's steps, to be taken side by side."""
    with_cache = {arm: mapper for arm, mapper in arms.items() if arm != "no_context"}
    streams = {
        arm: _grow(target, hand_off.kv, continuation, pieces)
        for arm, hand_off in target_hand_offs(target, tokenizer, batch, with_cache, part.cache, options)
    }
    if "no_context" in arms:
        prefix = prompt_prefix(tokenizer)
        kv = forward(target, torch.tensor([prefix] * len(batch.index)), None)[1] if prefix else None
        streams["no_context"] = _grow(target, kv, continuation, pieces)
    if "source" in arms:
        streams["source"] = ((predicted, None) for predicted in part.stream)
    return {arm: streams[arm] for arm in arms}


def _measure(
    streams: Mapping[str, Iterator[_Step]], pieces: Sequence[Piece], n_rows: int
) -> dict[str, list[Growth]]:
    """Adds up all arms, piece by piece."""
    windows = {arm: [WindowSums() for _ in range(1 + pieces[-1].window)] for arm in streams}
    for piece in pieces:
        steps = {arm: next(stream) for arm, stream in streams.items()}
        native, native_own = steps["target"]
        for arm, (predicted, own) in steps.items():
            sums = windows[arm][piece.window]
            sums.add_tokens(piece, native, predicted)
            if own is not None and native_own is not None:
                sums.add_columns(native_own, own)
    return {
        arm: [Growth(tuple(sums.window(row) for sums in of_arm)) for row in range(n_rows)]
        for arm, of_arm in windows.items()
    }
