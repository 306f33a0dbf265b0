"""Stage `calibrate`: both models read the calibration text; what a fit needs of it is kept as moments."""

from __future__ import annotations

import resource
import sys

from kvmap.artifacts import Artifact
from kvmap.files import read_json
from kvmap.fit.pair_moments import SPLITS
from kvmap.metrics import Metric
from kvmap.stages.context import Context


def run(ctx: Context) -> None:
    """Make or find the moments; log rows, bytes, and whether they were reused."""
    calibrated = ctx.calibrated
    _log_moments(ctx, calibrated.moments_artifact)
    if calibrated.captures is not None:
        ctx.run.note(artifacts={"captures": calibrated.captures.folder.name})


def peak_bytes() -> int:
    """The most memory that this process has held so far, models included, bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _log_moments(ctx: Context, artifact: Artifact) -> None:
    """Rows of each split, mode and bytes; and how many parts this run has made, where there were parts."""
    tables = [table for path in artifact.path.glob("moments.*.json") for table in read_json(path)["tables"]]
    rows = {split: min(table["n_rows"][split] for table in tables) for split in SPLITS}
    metrics = {f"calibrate/rows/{split}/n_rows": Metric(n) for split, n in rows.items()}
    metrics["calibrate/moments/all/reused"] = Metric(float(not artifact.built))
    metrics["calibrate/moments/all/size_bytes"] = Metric(ctx.calibrated.plan.table_bytes)
    metrics["calibrate/moments/all/planned_peak_bytes"] = Metric(ctx.calibrated.plan.peak_bytes)
    metrics["calibrate/process/all/peak_bytes"] = Metric(peak_bytes())
    metrics["calibrate/moments/all/n_passes"] = Metric(ctx.calibrated.plan.n_passes)
    if ctx.cfg.calibration.shards > 1:
        metrics["calibrate/moments/all/n_parts_made"] = Metric(ctx.calibrated.n_parts_made)
    ctx.run.log(metrics)
    ctx.run.note(artifacts={"moments": artifact.path.name}, moments_mode=ctx.calibrated.plan.mode)
