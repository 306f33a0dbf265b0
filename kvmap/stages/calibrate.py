"""Stage `calibrate`: both models read the calibration text; what a fit needs of it is kept as moments."""

from __future__ import annotations

from kvmap.files import read_json
from kvmap.fit.moments import KINDS, SPLITS
from kvmap.metrics import Metric
from kvmap.stages.context import Context


def run(ctx: Context) -> None:
    """Make or find the moments; log how many rows they hold and whether they were reused."""
    artifact = ctx.moments_artifact
    settings = read_json(artifact.path / "moments.json")
    metrics = {
        f"calibrate/{kind}/{split}/n_rows": Metric(settings["n_rows"][f"{kind}.{split}"])
        for kind in KINDS
        for split in SPLITS
    }
    metrics["calibrate/moments/all/reused"] = Metric(float(not artifact.built))
    ctx.run.log(metrics)
    ctx.run.note(artifacts={"moments": artifact.path.name})
