"""Stage `diagnose`: how well the mapper rebuilds the cache, and what the target's attention makes of it."""

from __future__ import annotations

from typing import Any

from kvmap.diagnostics.attention_output import attention_output_metrics, attention_output_rows
from kvmap.diagnostics.conditioning import conditioning_metrics, conditioning_rows
from kvmap.diagnostics.first_token import first_token_metrics, first_token_rows
from kvmap.diagnostics.reconstruction import probe_rows, r2_metrics, r2_rows, r2_rows_from_caches
from kvmap.stages.build import fitted_systems
from kvmap.stages.context import Context


def run(ctx: Context) -> None:
    """Log R² of the mapper, the error at the first token apart, and the attention-output cosine.

    Tables: `r2`, `probes` (what each source layer alone says of each target layer), `first_token` (the
    attention sink, whoever computes it in the end), `attention_output`, and `conditioning` of the systems
    that a linear map solved.
    """
    rows = _r2(ctx)
    ctx.run.table("r2", rows)
    ctx.run.log(r2_metrics(rows))
    _probes(ctx)
    sequential, rope = ctx.cfg.calibration.sequential, ctx.cfg.rope.strategy
    sinks = first_token_rows(ctx.pair, ctx.mapper, ctx.tokens.input_ids, rope, sequential=sequential)
    ctx.run.table("first_token", sinks)
    ctx.run.log(first_token_metrics(sinks))
    if ctx.cfg.diagnostics.attention_output:
        held_out = ctx.calibrated.splits["held_out"][: ctx.cfg.diagnostics.n_sequences]
        cosines = attention_output_rows(
            ctx.pair,
            ctx.mapper,
            ctx.tokens.input_ids[held_out],
            ctx.options,
            batch_size=ctx.cfg.calibration.batch_size,
            sequential=sequential,
        )
        ctx.run.table("attention_output", cosines)
        ctx.run.log(attention_output_metrics(cosines))
    recipe = getattr(ctx.mapper, "recipe", None)
    if ctx.cfg.diagnostics.conditioning and recipe is not None and ctx.cfg.mapper.kind == "linear":
        systems = [
            row
            for part, penalties in fitted_systems(ctx, recipe)
            for row in conditioning_rows(ctx.moments, part, penalties)
        ]
        ctx.run.table("conditioning", systems)
        ctx.run.log(conditioning_metrics(systems))


def _r2(ctx: Context) -> list[dict[str, Any]]:
    """From moments where the map is linear, else by mapping captured caches."""
    splits = ctx.cfg.diagnostics.splits
    if hasattr(ctx.mapper, "linear_weights"):
        return r2_rows(ctx.mapper, ctx.moments, splits)
    calibrated = ctx.calibrated
    wanted = {split: calibrated.splits[split] for split in splits}
    batches = calibrated.kept_captures().stream(wanted)
    return r2_rows_from_caches(ctx.mapper, batches, ctx.moments, calibrated.options, calibrated.counting_rule)


def _probes(ctx: Context) -> None:
    probes = ctx.calibrated.probes
    if probes is None:
        return
    ctx.run.table("probes", probe_rows(probes.r2))
    if probes.fallbacks:
        columns = ("kind", "source_layer", "head")
        ctx.run.table("probe_fallbacks", [dict(zip(columns, row, strict=True)) for row in probes.fallbacks])
