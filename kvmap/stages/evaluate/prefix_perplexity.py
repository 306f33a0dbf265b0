"""Part of stage `evaluate`: perplexity of a continuation, given its prefix's cache."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from kvmap.data import TokenBlocks, check_disjoint, read_texts, token_blocks
from kvmap.errors import KvmapError
from kvmap.evaluation.arms import unavailable
from kvmap.evaluation.perplexity import PerplexityResult, evaluate_perplexity
from kvmap.evaluation.summary import summarise_perplexity
from kvmap.mappers import Mapper
from kvmap.stages.context import Context, text_spec
from kvmap.stages.evaluate.ledger import Ledger, kept


def run(ctx: Context, arms: Mapping[str, Mapper | KvmapError | None]) -> list[dict[str, Any]]:
    """Score every arm on the run's sequences; each goes to table `sequences`, the metrics to the run."""
    if not ctx.cfg.evaluation.perplexity.n_sequences:
        return []
    evaluation = ctx.cfg.evaluation
    with kept(ctx, "sequences") as ledger:
        results = evaluate_perplexity(
            ctx.pair,
            arms,
            _blocks(ctx),
            prefix_tokens=evaluation.perplexity.prefix_tokens,
            options=ctx.options,
            batch_size=evaluation.batch_size,
            sequential=evaluation.sequential,
            on_batch=lambda found: ledger.add(_numbered(found, ledger)),
        )
    metrics, rows = summarise_perplexity(
        results,
        unavailable=unavailable(arms),
        n_resamples=evaluation.bootstrap_samples,
        seed=evaluation.seed,
    )
    ctx.run.log(metrics)
    return rows


def _numbered(found: Mapping[str, PerplexityResult], ledger: Ledger) -> Iterator[dict[str, Any]]:
    """A batch's rows with the numbers their sequences have among all; batches come in order."""
    start = ledger.n_rows // len(found)
    for result in found.values():
        for row in result.rows():
            yield {**row, "sequence": start + row["sequence"]}


def _blocks(ctx: Context) -> TokenBlocks:
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
    ctx.run.note(perplexity={"source": blocks.source, "fingerprint": blocks.fingerprint, "skipped": skip})
    return blocks
