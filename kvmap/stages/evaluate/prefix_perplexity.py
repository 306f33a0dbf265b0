"""Part of stage `evaluate`: perplexity of a continuation, given its prefix's cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvmap.data import TokenBlocks, check_disjoint, read_texts, token_blocks
from kvmap.errors import KvmapError
from kvmap.evaluation.arms import available, unavailable
from kvmap.evaluation.perplexity import PerplexityResult, evaluate_perplexity
from kvmap.evaluation.summary import summarise_perplexity
from kvmap.mappers import Mapper
from kvmap.stages.context import Context, text_spec
from kvmap.stages.evaluate.book import answers_for, reuse_noted, time_noted
from kvmap.stages.evaluate.ledger import kept

PROTOCOL_VERSION = 1
"""Goes up when the scores of the same ids under the same settings become others."""


def run(ctx: Context, arms: Mapping[str, Mapper | KvmapError | None]) -> list[dict[str, Any]]:
    """Score every arm on the run's sequences; each goes to table `sequences`, the metrics to the run."""
    if not ctx.cfg.evaluation.perplexity.n_sequences:
        return []
    evaluation = ctx.cfg.evaluation
    answers = {arm: answers_for(ctx, arm, _protocol(ctx)) for arm in available(arms)}
    with (
        kept(ctx, "sequences") as ledger,
        reuse_noted(ctx, "prefix_perplexity", answers),
        time_noted(ctx, "perplexity") as watch,
    ):
        results = evaluate_perplexity(
            ctx.pair,
            arms,
            blocks_of(ctx),
            prefix_tokens=evaluation.perplexity.prefix_tokens,
            options=ctx.options,
            batch_size=evaluation.batch_size,
            sequential=evaluation.sequential,
            answers=answers,
            watch=watch,
            on_batch=lambda found: ledger.add(_rows(found)),
        )
        ledger.settle(_rows(results))
    metrics, rows = summarise_perplexity(
        results,
        unavailable=unavailable(arms),
        n_resamples=evaluation.bootstrap_samples,
        seed=evaluation.seed,
    )
    ctx.run.log(metrics)
    return rows


def _rows(found: Mapping[str, PerplexityResult]) -> list[dict[str, Any]]:
    return [row for result in found.values() for row in result.rows()]


def _protocol(ctx: Context) -> dict[str, Any]:
    """How sequences are scored, and what every arm's predictions are compared with."""
    return {
        "name": "prefix_perplexity",
        "version": PROTOCOL_VERSION,
        "batch_size": ctx.cfg.evaluation.batch_size,
        "native": ctx.conditions("target"),
    }


def blocks_of(ctx: Context) -> TokenBlocks:
    """The text to score. The corpus that calibration read is read on from where calibration stopped."""
    settings = ctx.cfg.evaluation.perplexity
    length = settings.prefix_tokens + settings.continuation_tokens
    spec = text_spec(settings.data, length)
    skip = settings.data.skip
    if skip is None:
        same_corpus = spec == text_spec(ctx.cfg.calibration.data, length)
        skip = ctx.tokens.n_read if same_corpus else 0
    blocks = token_blocks(
        read_texts(spec),
        ctx.pair.tokenizer,
        n_sequences=settings.n_sequences,
        length=length,
        packing=settings.packing,
        skip=skip,
        source=spec.describe(),
    )
    check_disjoint(ctx.tokens, blocks)
    ctx.run.note(
        perplexity={
            "source": blocks.source,
            "fingerprint": blocks.fingerprint,
            "skipped": skip,
            "packing": settings.packing,
            "n_sequences": blocks.n_sequences,
            "prefix_tokens": settings.prefix_tokens,
            # Without context there is nothing to predict the first from.
            "n_scored_of_each": settings.continuation_tokens - 1,
            "first_continuation_token_scored": False,
        }
    )
    return blocks
