"""Stage `diagnose`: how well the mapper rebuilds keys and values, per layer and head, from the moments."""

from __future__ import annotations

from kvmap.diagnostics.first_token import first_token_metrics, first_token_rows
from kvmap.diagnostics.reconstruction import probe_rows, r2_metrics, r2_rows
from kvmap.stages.context import Context


def run(ctx: Context) -> None:
    """Log R² of the mapper, and the error at the first token apart.

    Tables: `r2`, `probes` (what each source layer alone says of each target layer) and `first_token` (the
    attention sink, whoever computes it in the end).
    """
    rows = r2_rows(ctx.mapper, ctx.moments, ctx.cfg.diagnostics.splits)
    ctx.run.table("r2", rows)
    ctx.run.table("probes", probe_rows(ctx.probes.r2))
    ctx.run.log(r2_metrics(rows))
    sinks = first_token_rows(
        ctx.pair,
        ctx.mapper,
        ctx.tokens.input_ids,
        ctx.cfg.rope.strategy,
        sequential=ctx.cfg.calibration.sequential,
    )
    ctx.run.table("first_token", sinks)
    ctx.run.log(first_token_metrics(sinks))
    if ctx.probes.fallbacks:
        columns = ("kind", "source_layer", "head")
        ctx.run.table(
            "probe_fallbacks", [dict(zip(columns, row, strict=True)) for row in ctx.probes.fallbacks]
        )
