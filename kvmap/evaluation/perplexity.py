"""Perplexity of a continuation from its prefix's cache, and how far each arm predicts from native."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import cache
from typing import Any, TypeAlias

import torch
from torch import Tensor

from kvmap.data import TokenBlocks, prompt_prefix
from kvmap.errors import KvmapError
from kvmap.evaluation.answers import Answers, item_key, lacking
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
from kvmap.evaluation.sequence_scores import PerplexityResult, SequenceScore, result_of
from kvmap.evaluation.stopwatch import Stopwatch
from kvmap.mappers import Mapper
from kvmap.models.cache import KVCache
from kvmap.models.capture import forward
from kvmap.models.pair import LoadedModel, ModelPair
from kvmap.progress import track
from kvmap.transfer import TransferOptions

CHUNK_TOKENS = 64
"""Continuation tokens scored at once: a vocabulary of 150,000 makes 40 MB of logits of each 64 tokens."""

Predictions: TypeAlias = dict[str, Tensor]
"""Of one chunk: `token` (batch, n) log p of the true tokens, `top` (batch, n) likeliest ids, and, where kept,
`all` (batch, n, vocabulary) log p of every token; float32."""


def evaluate_perplexity(
    pair: ModelPair,
    arms: Arms,
    blocks: TokenBlocks,
    *,
    prefix_tokens: int,
    options: TransferOptions,
    batch_size: int = 1,
    sequential: bool = False,
    max_spill_bytes: int = 8 * 2**30,
    answers: Mapping[str, Answers] | None = None,
    watch: Stopwatch | None = None,
    progress: Progress = track,
    on_batch: Callable[[dict[str, PerplexityResult]], None] | None = None,
) -> dict[str, PerplexityResult]:
    """Scores each block's continuation given the cache of its prefix, own or mapped.

    block = prefix (`prefix_tokens`) + continuation. Every arm is fed the continuation and scores its tokens
    after the first, each once, so that `no_context`, which is fed the continuation alone (after BOS, where
    the tokenizer adds it), scores the same tokens.

    Args:
        pair: source and target.
        arms: arm to mapper; see `kvmap.evaluation.arms`. `target` must be among them: KL and agreement
            compare with it.
        blocks: sequences of equal length, disjoint from the calibration text.
        prefix_tokens: length of the prefix.
        options: how a cache is transferred.
        batch_size: sequences at a time.
        sequential: one model in memory at a time; what the source predicted lies on disk meanwhile.
        max_spill_bytes: the disk its full distributions may take; where they need more, its KL is nan.
        answers: what is kept of each arm's scores under these very settings: an arm scores only sequences it
            has not scored yet, and adds them. The target reads again what it is to be compared with. An arm
            that is not named here scores everything.
        watch: takes each arm's time: its hand-off made, and the continuation predicted from it. That of
            comparing predictions is nobody's.
        progress: wraps the loop over batches.
        on_batch: called with results as they are had, so that none is lost; first with those kept.

    Returns:
        By arm, in the order given, the arms that can be run.

    Raises:
        KvmapError: no `target` among the arms, or lengths that leave no prefix, nothing of it to map, or
            fewer than two continuation tokens, or do not fit the models.
    """
    check_arms(arms)
    usable = available(arms)
    _check(pair, usable, blocks, prefix_tokens, batch_size)
    check_something_maps(usable, [prefix_tokens], options)
    tokenizer = tokenizer_of(pair)
    n_scored = blocks.n_sequences * (blocks.length - prefix_tokens - 1)
    keys = [sequence_key(blocks, number, prefix_tokens) for number in range(blocks.n_sequences)]
    watch = watch or Stopwatch()
    books = {arm: (answers or {}).get(arm) or Answers.in_memory() for arm in usable}
    asked = _open_batches(books, keys, blocks, prefix_tokens, batch_size)
    scored = {
        arm: {
            number: SequenceScore(**row)
            for number, key in enumerate(keys)
            if (row := book.get(key)) is not None
        }
        for arm, book in books.items()
    }

    def results(found: Mapping[str, Mapping[int, SequenceScore]]) -> dict[str, PerplexityResult]:
        return {arm: result_of(arm, rows, keys) for arm, rows in found.items() if rows}

    def source_pass(batch: Batch) -> SourcePart:
        wanted = {arm: usable[arm] for arm in asked[batch]}
        if "source" not in wanted and all(mapper is None for mapper in wanted.values()):
            return SourcePart(None)
        stream: Iterator[Predictions] = iter(())
        kv, own = read_source(pair.source, batch, wanted, options, watch)
        if own is not None:
            keep_all = not sequential or 4 * n_scored * pair.source.geometry.vocab_size <= max_spill_bytes
            continued = predictions(
                pair.source, own.kv, _continuation(blocks, batch, prefix_tokens), keep_all
            )
            stream = watch.stream("source", pair.source, batch.index, continued)
        return SourcePart(kv, stream)

    @cache
    def on_target() -> dict[str, Mapper | None]:
        return placed(open_arms, pair.target)

    def target_pass(batch: Batch, part: SourcePart) -> None:
        wanted = {arm: on_target()[arm] for arm in usable if arm in asked[batch] or arm == "target"}
        continuation = _continuation(blocks, batch, prefix_tokens)
        streams, n_mapped = _streams(
            pair.target, tokenizer, batch, part, wanted, continuation, options, watch
        )
        scores = _score(streams, n_mapped, len(batch.index))
        found = {arm: dict(zip(batch.index, scores[arm], strict=True)) for arm in asked[batch]}
        for arm, rows in found.items():
            # Without its KL a score is not whole: the next run, with more room, is to have it.
            books[arm].add({keys[n]: asdict(row) for n, row in rows.items() if not math.isnan(row.kl)})
            scored[arm].update(rows)
        if on_batch is not None:
            on_batch(results(found))

    if on_batch is not None and any(scored.values()):
        on_batch(results(scored))
    open_arms = {
        arm: mapper
        for arm, mapper in usable.items()
        if arm == "target" or any(arm in arms for arms in asked.values())
    }
    if asked:
        run_passes(
            pair,
            list(asked),
            open_arms,
            source_pass,
            target_pass,
            sequential=sequential,
            progress=progress,
            description="evaluate perplexity",
        )
    return results(scored)


def sequence_key(blocks: TokenBlocks, number: int, prefix_tokens: int) -> str:
    """Hash of what is asked of one sequence: the ids of its prefix and of its continuation."""
    ids = blocks.input_ids[number].tolist()
    return item_key(ids[:prefix_tokens], ids[prefix_tokens:])


def predictions(
    model: LoadedModel, kv: KVCache | None, continuation: Tensor, keep_all: bool = True
) -> Iterator[Predictions]:
    """What the model predicts of a continuation after its first token, chunk by chunk.

    Args:
        model: the model that continues.
        kv: what it has read; None: nothing. It does not grow.
        continuation: (batch, n + 1) token ids; the first is fed and not scored, the last scored and not fed.
        keep_all: also the log-probabilities of every token.
    """
    for start in range(0, continuation.shape[1] - 1, CHUNK_TOKENS):
        true = continuation[:, start + 1 : start + 1 + CHUNK_TOKENS]
        logits, kv = forward(model, continuation[:, start : start + true.shape[1]], kv)
        log_probs = logits.float().log_softmax(-1)
        chunk = {
            "token": log_probs.gather(-1, true.to(log_probs.device).unsqueeze(-1)).squeeze(-1),
            "top": log_probs.argmax(-1),
        }
        yield chunk | {"all": log_probs} if keep_all else chunk


def divergence(native: Tensor, other: Tensor) -> Tensor:
    """KL(native ‖ other) = Σ p_native (log p_native − log p_other) over the ids both have, nats.

    A model whose embedding is padded to a rounder size gives the padding some probability; both are
    normalised over the shared ids first. Accumulated in float64.

    Args:
        native: (..., vocabulary) log-probabilities.
        other: (..., vocabulary) log-probabilities.
    """
    shared = min(native.shape[-1], other.shape[-1])
    p, q = native[..., :shared].double(), other[..., :shared].to(native.device).double()
    if native.shape[-1] != other.shape[-1]:
        p, q = p.log_softmax(-1), q.log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1)


def _check(
    pair: ModelPair,
    arms: Mapping[str, Mapper | None],
    blocks: TokenBlocks,
    prefix_tokens: int,
    batch_size: int,
) -> None:
    if "target" not in arms:
        raise KvmapError(f"perplexity arms {sorted(arms)}: 'target' is needed, for KL and agreement; add it")
    if not 1 <= prefix_tokens <= blocks.length - 2:
        raise KvmapError(
            f"prefix_tokens={prefix_tokens} of blocks of {blocks.length} tokens: expected at least one "
            "prefix token and two of continuation, of which the second is the first that is scored"
        )
    if batch_size < 1:
        raise KvmapError(f"batch_size={batch_size}: expected at least 1")
    limit = context_limit(pair)
    if blocks.length + 1 > limit:
        raise KvmapError(
            f"blocks of {blocks.length} tokens do not fit a pair that takes {limit} (with one for BOS); "
            "shorten prefix_tokens or the continuation"
        )


def _open_batches(
    books: Mapping[str, Answers],
    keys: Sequence[str],
    blocks: TokenBlocks,
    prefix_tokens: int,
    batch_size: int,
) -> dict[Batch, tuple[str, ...]]:
    """Batches of what some arm has not scored, in order, each with the arms that have not."""
    asked: dict[Batch, tuple[str, ...]] = {}
    for arms, numbers in lacking(books, keys).items():
        for start in range(0, len(numbers), batch_size):
            index = tuple(numbers[start : start + batch_size])
            ids = blocks.input_ids[list(index), :prefix_tokens]
            asked[Batch(index, ids, torch.ones_like(ids, dtype=torch.bool))] = arms
    return asked


def _continuation(blocks: TokenBlocks, batch: Batch, prefix_tokens: int) -> Tensor:
    return blocks.input_ids[list(batch.index), prefix_tokens:]


def _streams(
    target: LoadedModel,
    tokenizer: Any,
    batch: Batch,
    part: SourcePart,
    arms: Mapping[str, Mapper | None],
    continuation: Tensor,
    options: TransferOptions,
    watch: Stopwatch,
) -> tuple[dict[str, Iterator[Predictions]], dict[str, tuple[int, ...]]]:
    """Every arm's predictions, to be read side by side: no arm's whole distributions are ever held.

    And how many tokens of each row were mapped, by arm; arms that hand nothing over are left out.
    """
    with_cache = {arm: mapper for arm, mapper in arms.items() if arm != "no_context"}
    made = target_hand_offs(target, tokenizer, batch, with_cache, part.cache, options)
    known: dict[str, KVCache | None] = {}
    n_mapped: dict[str, tuple[int, ...]] = {}
    for arm, hand_off in watch.hand_offs(target, batch.index, made):
        known[arm], n_mapped[arm] = hand_off.kv, hand_off.n_mapped_of_row
    if "no_context" in arms:
        prefix = prompt_prefix(tokenizer)
        with watch.lap("no_context", target, batch.index):
            ids = torch.tensor([prefix] * len(batch.index))
            known["no_context"] = forward(target, ids, None)[1] if prefix else None
    streams = {
        arm: watch.stream(arm, target, batch.index, predictions(target, kv, continuation))
        for arm, kv in known.items()
    }
    if "source" in arms:
        streams["source"] = iter(part.stream)
    return {arm: streams[arm] for arm in arms}, n_mapped


def _score(
    streams: Mapping[str, Iterator[Predictions]], n_mapped: Mapping[str, tuple[int, ...]], n_rows: int
) -> dict[str, list[SequenceScore]]:
    """Adds up what each arm predicted, one chunk of all arms at a time."""
    none = (0,) * n_rows
    scores = {arm: [SequenceScore(n_mapped=n) for n in n_mapped.get(arm, none)] for arm in streams}
    others = {arm: stream for arm, stream in streams.items() if arm != "target"}
    for native in streams["target"]:
        chunks = {"target": native} | {arm: next(stream) for arm, stream in others.items()}
        for arm, chunk in chunks.items():
            token = chunk["token"].double().sum(1)
            same = (chunk["top"].to(native["top"].device) == native["top"]).sum(1)
            kl = (
                divergence(native["all"], chunk["all"]).sum(1)
                if "all" in chunk
                else torch.full((n_rows,), math.nan)
            )
            for row, score in enumerate(scores[arm]):
                score.nll -= float(token[row])
                score.n_tokens += chunk["token"].shape[1]
                score.kl += float(kl[row])
                score.agreement += int(same[row])
    return scores
