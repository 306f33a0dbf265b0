"""Stage `fit`: probes, selection and the mapper, all from the moments."""

from __future__ import annotations

from kvmap.metrics import Metric
from kvmap.stages.context import Context


def run(ctx: Context) -> None:
    """Make or find the mapper; log its size, its selection and every fallback its solver took."""
    mapper, artifact = ctx.mapper, ctx.mapper_artifact
    settings = mapper.settings()
    fallbacks = settings.get("fallbacks", [])
    recipe = settings.get("recipe")
    ctx.run.log(
        {
            "fit/mapper/all/n_weights": Metric(mapper.n_weights),
            "fit/mapper/all/weights_bytes": Metric(mapper.nbytes),
            "fit/mapper/all/n_fallbacks": Metric(len(fallbacks)),
            "fit/mapper/all/reused": Metric(float(not artifact.built)),
        }
    )
    if fallbacks:
        columns = ("kind", "target_layer", "head", "solver", "rank")
        ctx.run.table("fallbacks", [dict(zip(columns, row, strict=True)) for row in fallbacks])
    if recipe is not None:
        rows = [
            {"kind": kind, "target_layer": layer, "source_layers": " ".join(map(str, chosen))}
            for kind, selection in recipe["selection"].items()
            for layer, chosen in enumerate(selection)
        ]
        ctx.run.table("selection", rows)
    for name, table in ctx.mapper_tables.items():
        ctx.run.table(name, table)
    ctx.run.note(artifacts={"mapper": artifact.path.name})
