"""Stage `fit`: probes, selection and the mapper, all from the moments."""

from __future__ import annotations

from kvmap.metrics import Metric
from kvmap.stages.context import Context


def run(ctx: Context) -> None:
    """Make or find the mapper; log its size, its selection and every fallback its solver took."""
    mapper, artifact = ctx.mapper, ctx.mapper_artifact
    settings = mapper.settings()
    fallbacks = settings.get("fallbacks", [])
    ctx.run.log(
        {
            "fit/mapper/all/n_weights": Metric(mapper.n_weights),
            "fit/mapper/all/weights_bytes": Metric(mapper.nbytes),
            "fit/mapper/all/n_fallbacks": Metric(len(fallbacks)),
            "fit/mapper/all/reused": Metric(float(not artifact.built)),
        }
    )
    if fallbacks:
        columns = ("kind", "target_layer", "head", "rank")
        ctx.run.table("fallbacks", [dict(zip(columns, row, strict=True)) for row in fallbacks])
    if (selection := settings.get("selection")) is not None:
        rows = [
            {"target_layer": layer, "source_layers": " ".join(map(str, chosen))}
            for layer, chosen in enumerate(selection)
        ]
        ctx.run.table("selection", rows)
    ctx.run.note(artifacts={"mapper": artifact.path.name})
