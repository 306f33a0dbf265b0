"""Stage `diagnose`: how well the mapper rebuilds the cache, and what the target makes of it."""

from __future__ import annotations

from typing import Any, TypeAlias

from kvmap.diagnostics.conditioning import conditioning_metrics, conditioning_rows
from kvmap.diagnostics.findings import text_metrics, text_tables
from kvmap.diagnostics.first_token import first_token_metrics, first_token_rows
from kvmap.diagnostics.reconstruction import probe_rows, r2_metrics, r2_rows, r2_rows_from_caches
from kvmap.diagnostics.streaming import diagnose_texts
from kvmap.diagnostics.token_kinds import TokenKinds
from kvmap.stages.build import fitted_systems
from kvmap.stages.context import Context
from kvmap.stages.diagnosed_texts import texts_of

Row: TypeAlias = dict[str, Any]


def run(ctx: Context) -> None:
    """Tables and metrics of everything that can be said without asking a question.

    From calibration: `r2`, `probes` (what each source layer alone says of each target layer), `first_token`
    (the attention sink, whoever computes it in the end) and `conditioning` of the systems that a linear map
    solved. From reading `diagnostics.texts`: the tables of `kvmap.diagnostics.findings`, of which the R² goes
    to table `r2` beside the others.
    """
    rows = _r2(ctx)
    _probes(ctx)
    _first_token(ctx)
    _conditioning(ctx)
    _texts(ctx, rows)


def _r2(ctx: Context) -> list[Row]:
    """Of the calibration's splits: from moments where the map is linear, else by mapping captured caches."""
    splits = ctx.cfg.diagnostics.splits
    if hasattr(ctx.mapper, "linear_weights"):
        rows = r2_rows(ctx.mapper, ctx.moments, splits)
    else:
        calibrated = ctx.calibrated
        batches = calibrated.kept_captures().stream({split: calibrated.splits[split] for split in splits})
        rows = r2_rows_from_caches(
            ctx.mapper, batches, ctx.moments, calibrated.options, calibrated.counting_rule
        )
    ctx.run.table("r2", rows)
    ctx.run.log(r2_metrics(rows))
    return rows


def _probes(ctx: Context) -> None:
    probes = ctx.calibrated.probes
    if probes is None:
        return
    ctx.run.table("probes", probe_rows(probes.r2))
    if probes.fallbacks:
        columns = ("kind", "source_layer", "head")
        ctx.run.table("probe_fallbacks", [dict(zip(columns, row, strict=True)) for row in probes.fallbacks])


def _first_token(ctx: Context) -> None:
    rows = first_token_rows(
        ctx.pair,
        ctx.mapper,
        ctx.tokens.input_ids,
        ctx.cfg.rope.strategy,
        sequential=ctx.cfg.calibration.sequential,
    )
    ctx.run.table("first_token", rows)
    ctx.run.log(first_token_metrics(rows))


def _conditioning(ctx: Context) -> None:
    recipe = getattr(ctx.mapper, "recipe", None)
    if not ctx.cfg.diagnostics.conditioning or recipe is None or ctx.cfg.mapper.kind != "linear":
        return
    systems = [
        row
        for part, penalties in fitted_systems(ctx, recipe)
        for row in conditioning_rows(ctx.moments, part, penalties)
    ]
    ctx.run.table("conditioning", systems)
    ctx.run.log(conditioning_metrics(systems))


def _texts(ctx: Context, r2: list[Row]) -> None:
    """Everything that is learnt by reading texts; `r2` are the rows of that table so far."""
    texts = texts_of(ctx)
    if not texts:
        return
    found = diagnose_texts(
        ctx.pair,
        ctx.mapper,
        texts,
        TokenKinds(ctx.pair.tokenizer, ctx.tokens.input_ids, ctx.cfg.diagnostics.rare_share),
        ctx.options,
        batch_size=ctx.cfg.calibration.batch_size,
        sequential=ctx.cfg.calibration.sequential,
    )
    tables = text_tables(found.values())
    # of a split the moments know the R² on all its rows; some of its sequences say no more
    splits = ctx.cfg.diagnostics.splits
    tables["r2"] = r2 + [row for row in tables["r2"] if row["split"] not in splits]
    for name, rows in tables.items():
        ctx.run.table(name, rows)
    for sums in found.values():
        ctx.run.log(text_metrics(sums, tables))
