"""Stage `diagnose`: how well the mapper rebuilds keys and values, per layer and head, from the moments."""

from __future__ import annotations

from kvmap.diagnostics.reconstruction import probe_rows, r2_metrics, r2_rows
from kvmap.stages.context import Context


def run(ctx: Context) -> None:
    """Tables: `r2` of the mapper, and `probes`, what each source layer alone says of each target layer."""
    rows = r2_rows(ctx.mapper, ctx.moments, ctx.cfg.diagnostics.splits)
    ctx.run.table("r2", rows)
    ctx.run.table("probes", probe_rows(ctx.probes.r2))
    ctx.run.log(r2_metrics(rows))
