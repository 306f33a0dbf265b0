"""Stage `evaluate`: questions and prefix perplexity, for the mapped cache and what it is held against."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvmap.data import TokenBlocks, check_disjoint, read_texts, token_blocks
from kvmap.evaluation.arms import unavailable
from kvmap.evaluation.choices import evaluate_items
from kvmap.evaluation.items import Item, jsonl_items, world_items
from kvmap.evaluation.perplexity import PerplexityResult, evaluate_perplexity
from kvmap.evaluation.summary import summarise_items, summarise_perplexity
from kvmap.stages.build import build_arms
from kvmap.stages.context import Context, text_spec

SECONDS_BETWEEN_WRITES = 5.0


def run(ctx: Context) -> None:
    """Score every arm on the same items and sequences; save each answer, then the summary as table `arms`."""
    evaluation = ctx.cfg.evaluation
    arms = build_arms(ctx)
    rows: list[dict[str, Any]] = []
    if items := _items(ctx):
        rows += _questions(ctx, arms, items)
        ctx.run.table("arms", rows)
    if evaluation.perplexity.n_sequences:
        rows += _perplexity(ctx, arms)
    ctx.run.table("arms", rows)
    if reasons := unavailable(arms):
        ctx.run.note(unavailable_arms=reasons)


def _items(ctx: Context) -> list[Item]:
    evaluation = ctx.cfg.evaluation
    items: list[Item] = []
    if evaluation.world.n_per_kind:
        items += world_items(evaluation.world.seed, evaluation.world.n_per_kind, evaluation.world.kinds)
    for path in evaluation.jsonl.paths:
        items += jsonl_items(Path(path), evaluation.jsonl.limit, evaluation.jsonl.seed)
    return items


def _questions(ctx: Context, arms: dict[str, Any], items: list[Item]) -> list[dict[str, Any]]:
    evaluation = ctx.cfg.evaluation
    with _kept(ctx, "items") as ledger:
        results = evaluate_items(
            ctx.pair,
            arms,
            items,
            options=ctx.options,
            batch_size=evaluation.batch_size,
            max_tokens=evaluation.max_tokens,
            generate=evaluation.generate,
            max_new_tokens=evaluation.max_new_tokens,
            stop=evaluation.stop,
            sequential=evaluation.sequential,
            on_batch=lambda found: ledger.add(result.row() for result in found),
        )
    metrics, rows = summarise_items(
        results,
        unavailable=unavailable(arms),
        n_resamples=evaluation.bootstrap_samples,
        seed=evaluation.seed,
    )
    ctx.run.log(metrics)
    return rows


def _perplexity(ctx: Context, arms: dict[str, Any]) -> list[dict[str, Any]]:
    evaluation = ctx.cfg.evaluation
    with _kept(ctx, "sequences") as ledger:
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


def _numbered(found: Mapping[str, PerplexityResult], ledger: _Ledger) -> Iterator[dict[str, Any]]:
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


class _Ledger:
    """Rows of a table that grows while models run; on disk within seconds, and at the latest when it ends."""

    def __init__(self, ctx: Context, name: str) -> None:
        self._run, self._name = ctx.run, name
        self._rows: list[dict[str, Any]] = []
        self._written = 0.0

    @property
    def n_rows(self) -> int:
        """Rows taken so far."""
        return len(self._rows)

    def add(self, rows: Iterable[dict[str, Any]]) -> None:
        """Take rows; write the table if that has not been done for a while."""
        self._rows += list(rows)
        if time.monotonic() - self._written > SECONDS_BETWEEN_WRITES:
            self.write()

    def write(self) -> None:
        """Write the table as it is now."""
        self._run.table(self._name, self._rows)
        self._written = time.monotonic()


@contextmanager
def _kept(ctx: Context, name: str) -> Iterator[_Ledger]:
    """A ledger that is written out however the block ends: an interrupted evaluation keeps its answers."""
    ledger = _Ledger(ctx, name)
    try:
        yield ledger
    finally:
        ledger.write()
