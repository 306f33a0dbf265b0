"""Stage `benchmark`: mapping against re-prefill on this machine's device."""

from __future__ import annotations

from kvmap.benchmark.latency import break_even, latency_metrics, latency_rows, ratio_rows, transport_rows
from kvmap.stages.context import Context


def run(ctx: Context) -> None:
    """Tables: `latency` by length, its `ratios`, and `transport`, the caches' way over a network."""
    settings = ctx.cfg.benchmark
    rows = latency_rows(
        ctx.pair,
        ctx.mapper,
        settings.lengths,
        batch_size=settings.batch_size,
        repeats=settings.repeats,
        warmup=settings.warmup,
        options=ctx.options,
        seed=settings.seed,
    )
    ctx.run.table("latency", rows)
    ctx.run.table("ratios", ratio_rows(rows))
    ctx.run.table("transport", transport_rows(rows))
    ctx.run.log(latency_metrics(rows))
    ctx.run.note(break_even=break_even(rows))
