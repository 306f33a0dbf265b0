"""How often 3 pairs x 5 k x 4 lambda calibrate on Slurm, and how long they take.

    python experiments/sweep_faults/sharing.py FOLDER [--points 60]

The unit is what one slot takes for one calibration, and for one fit-and-evaluate, process start included:
measured on the same cluster with all its slots busy, in an outputs folder of its own.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from points import PAIRS, QUESTIONS, STUDY, sweep_of

from tests.slurm.cluster import Cluster
from tests.slurm.sweeping import Sweep, record, wait_for_queue

HOURS = 3600.0


def wall_of_jobs(cluster: Cluster, sweep: Sweep) -> list[float]:
    """Seconds of each job of a sweep by Slurm's clock, which knows the start of the process."""
    assert sweep.wait(HOURS) == 0, sweep.log.read_text()
    wait_for_queue(cluster, 60)
    array = record(sweep.directory / "0")["slurm"]["array_job_id"]
    lines = cluster.run("sacct", "-n", "-X", "-P", "-j", array, "-o", "ElapsedRaw").split()
    return [float(line) for line in lines]


def units(cluster: Cluster, folder: Path) -> tuple[list[float], list[float]]:
    """Seconds of one calibration, of each pair; and of one fit-and-evaluate, of each pair and three k.

    The first k of a pair asks its target and source too, the others find their answers, as in the sweep.
    """
    base = ["tracking=none", QUESTIONS, f"study={STUDY}", f"pair={','.join(PAIRS)}"]
    calibrations = Sweep(cluster, folder, "stages=[calibrate]", *base)
    seconds = wall_of_jobs(cluster, calibrations)
    points = Sweep(cluster, folder, "stages=[fit,evaluate]", "mapper.top_k=1,2,3", *base)
    return seconds, wall_of_jobs(cluster, points)


def measure(cluster: Cluster, folder: Path, n_points: int) -> dict[str, Any]:
    """The figures."""
    calibrations, points = units(cluster, folder / "units")
    began = time.monotonic()
    sweep = Sweep(cluster, folder / "sweep", *sweep_of(len(PAIRS), n_points))
    assert sweep.wait(HOURS) == 0, sweep.log.read_text()
    wall = time.monotonic() - began
    metrics = [json.loads(path.read_text()) for path in sweep.directory.glob("*/metrics.json")]
    made = [entry["calibrate/moments/all/reused"]["value"] for entry in metrics].count(0.0)
    stored = [path for path in (folder / "sweep/artifacts/moments").iterdir() if path.is_dir()]
    slots = cluster.n_nodes * cluster.cpus
    ideal = (sum(calibrations) + len(metrics) * statistics.median(points)) / slots
    return {
        "jobs": len(metrics),
        "slots": slots,
        "calibrations_made": made,
        "calibrations_stored": len(stored),
        "seconds_calibration": calibrations,
        "seconds_fit_and_evaluate": points,
        "seconds_ideal": ideal,
        "seconds_wall": wall,
        "ratio": wall / ideal,
    }


def main() -> int:
    """Measures, prints, and tells by the exit status whether the bounds hold."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--points", type=int, default=60)
    given = parser.parse_args()
    cluster = Cluster(Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp")))
    cluster.up()
    try:
        found = measure(cluster, given.folder, given.points)
    finally:
        cluster.down()
    (given.folder / "sharing.json").write_text(json.dumps(found, indent=2) + "\n")
    print(json.dumps(found, indent=2))
    kept = found["calibrations_made"] == found["calibrations_stored"] == len(PAIRS) and found["ratio"] <= 1.3
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
