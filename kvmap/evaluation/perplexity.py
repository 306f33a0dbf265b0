"""Perplexity of a continuation from its prefix's cache, and how far each arm predicts from native."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias

import torch
from torch import Tensor

from kvmap.data import TokenBlocks, prompt_prefix
from kvmap.errors import KvmapError
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


@dataclass(frozen=True)
class PerplexityResult:
    """One arm over all sequences; every list has one entry per sequence, in the order of the blocks.

    Attributes:
        arm: which arm.
        nll: summed negative log-likelihood of the scored tokens, nats.
        n_tokens: scored tokens.
        kl: summed KL(native ‖ arm) of the next-token distributions at the scored positions, nats; nan where
            it could not be had.
        agreement: positions whose likeliest token is native's.
    """

    arm: str
    nll: tuple[float, ...]
    n_tokens: tuple[int, ...]
    kl: tuple[float, ...]
    agreement: tuple[int, ...]

    @property
    def nll_sum(self) -> float:
        """Over all sequences, nats."""
        return math.fsum(self.nll)

    @property
    def perplexity(self) -> float:
        """exp(Σ NLL / Σ tokens); infinite where that overflows."""
        mean = self.nll_sum / sum(self.n_tokens)
        return math.exp(mean) if mean < 700 else math.inf if not math.isnan(mean) else math.nan

    def rows(self) -> list[dict[str, Any]]:
        """One row per sequence."""
        columns = zip(self.nll, self.n_tokens, self.kl, self.agreement, strict=True)
        return [
            {
                "arm": self.arm,
                "sequence": number,
                "nll_nats": nll,
                "n_tokens": n,
                "kl_nats": kl,
                "agreement": same,
            }
            for number, (nll, n, kl, same) in enumerate(columns)
        ]


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
        progress: wraps the loop over batches.
        on_batch: called with each batch's results as they are had, so that none is lost.

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
    kept: dict[str, dict[int, _Score]] = {arm: {} for arm in usable}

    def source_pass(batch: Batch) -> SourcePart:
        stream: Iterator[Predictions] = iter(())
        kv, own = read_source(pair.source, batch, usable, options)
        if own is not None:
            keep_all = not sequential or 4 * n_scored * pair.source.geometry.vocab_size <= max_spill_bytes
            stream = predictions(pair.source, own.kv, _continuation(blocks, batch, prefix_tokens), keep_all)
        return SourcePart(kv, stream)

    @cache
    def on_target() -> dict[str, Mapper | None]:
        return placed(usable, pair.target)

    def target_pass(batch: Batch, part: SourcePart) -> None:
        continuation = _continuation(blocks, batch, prefix_tokens)
        streams = _streams(pair.target, tokenizer, batch, part, on_target(), continuation, options)
        scores = _score(streams, len(batch.index))
        for arm, rows in scores.items():
            kept[arm].update(zip(batch.index, rows, strict=True))
        if on_batch is not None:
            on_batch({arm: _result(arm, rows) for arm, rows in scores.items()})

    run_passes(
        pair,
        _batches(blocks, prefix_tokens, batch_size),
        usable,
        source_pass,
        target_pass,
        sequential=sequential,
        progress=progress,
        description="evaluate perplexity",
    )
    return {arm: _result(arm, [rows[index] for index in sorted(rows)]) for arm, rows in kept.items()}


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


@dataclass
class _Score:
    """Sums over the scored tokens of one sequence under one arm."""

    nll: float = 0.0
    n_tokens: int = 0
    kl: float = 0.0
    agreement: int = 0


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


def _batches(blocks: TokenBlocks, prefix_tokens: int, batch_size: int) -> list[Batch]:
    batches = []
    for start in range(0, blocks.n_sequences, batch_size):
        index = tuple(range(start, min(start + batch_size, blocks.n_sequences)))
        ids = blocks.input_ids[start : start + batch_size, :prefix_tokens]
        batches.append(Batch(index, ids, torch.ones_like(ids, dtype=torch.bool)))
    return batches


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
) -> dict[str, Iterator[Predictions]]:
    """Every arm's predictions, to be read side by side: no arm's whole distributions are ever held."""
    with_cache = {arm: mapper for arm, mapper in arms.items() if arm != "no_context"}
    streams = {
        arm: predictions(target, hand_off.kv, continuation)
        for arm, hand_off in target_hand_offs(target, tokenizer, batch, with_cache, part.cache, options)
    }
    if "no_context" in arms:
        prefix = prompt_prefix(tokenizer)
        kv = None
        if prefix:
            kv = forward(target, torch.tensor([prefix] * len(batch.index)), None)[1]
        streams["no_context"] = predictions(target, kv, continuation)
    if "source" in arms:
        streams["source"] = iter(part.stream)
    return {arm: streams[arm] for arm in arms}


def _score(streams: Mapping[str, Iterator[Predictions]], n_rows: int) -> dict[str, list[_Score]]:
    """Adds up what each arm predicted, one chunk of all arms at a time."""
    scores = {arm: [_Score() for _ in range(n_rows)] for arm in streams}
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


def _result(arm: str, rows: list[_Score]) -> PerplexityResult:
    return PerplexityResult(
        arm=arm,
        nll=tuple(row.nll for row in rows),
        n_tokens=tuple(row.n_tokens for row in rows),
        kl=tuple(row.kl for row in rows),
        agreement=tuple(row.agreement for row in rows),
    )
