"""A sweep of 40 jobs under fire, and what is left of it after one resubmission.

    python experiments/sweep_faults/faults.py FOLDER [--points 40] [--every 3]

Every few seconds one of the running jobs is killed (-9); now and then it is cancelled, requeued or sent
SIGUSR2 instead. Once slurmctld is killed, once a node. The process that submitted is killed at the start.
Then the points that are not done are submitted again, once, and left alone. The same sweep runs undisturbed
before, to compare with.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from points import STUDY, sweep_of

from tests.slurm.cluster import Cluster
from tests.slurm.processes import NoCluster, wait_until
from tests.slurm.sweeping import Sweep, queue_is_empty, running_jobs, wait_for_queue

HOURS = 3600.0
# What the strikes are, in turn; killing is the rule.
ROUND = ("kill", "kill", "cancel", "kill", "requeue", "kill", "signal", "kill")
CONTROLLER_STRIKE, NODE_STRIKE = 6, 12
PERSONAL = ("seconds", "reused", "n_parts_made", "process/all/peak_bytes")


def strike(cluster: Cluster, fault: str, job: str) -> bool:
    """Does it to a job; whether it met one."""
    pids = cluster.processes_of(job)
    if fault == "cancel":
        cluster.run("scancel", job, check=False)
    elif fault == "requeue":
        cluster.run("scontrol", "requeue", job, check=False)
    else:
        for pid in pids:
            os.kill(pid, signal.SIGKILL if fault == "kill" else signal.SIGUSR2)
    return bool(pids)


def settled(cluster: Cluster) -> bool:
    """Whether no job is left but those held because their launch met a fault; these are cancelled."""
    if queue_is_empty(cluster):
        return True
    lines = cluster.run("squeue", "-h", "-r", "-o", "%i %T %r", check=False).splitlines()
    held = [line.split()[0] for line in lines if "PENDING" in line and "held" in line.lower()]
    if not held or len(held) < len(lines):
        return False
    cluster.run("scancel", *held)
    return True


def under_fire(cluster: Cluster, every: float, log: Path) -> list[dict[str, Any]]:
    """Strikes until no job is left; every strike is noted."""
    chance, began = random.Random(0), time.monotonic()
    strikes: list[dict[str, Any]] = []
    while not settled(cluster) and time.monotonic() - began < HOURS:
        time.sleep(every)
        if len(strikes) == CONTROLLER_STRIKE:
            cluster.kill_controller()
            met, fault, job = not cluster.is_whole(), "controller", ""
            time.sleep(every)
            cluster.start_controller()
            wait_until(cluster.is_whole, 60, "the controller")
        elif len(strikes) == NODE_STRIKE:
            fault, job = "node", cluster.nodes[0]
            cluster.kill_node(job)
            wait_until(lambda: not cluster.is_whole(), 60, "the node's end")
            met = True
            cluster.start_node(job)
        elif jobs := running_jobs(cluster):
            fault, job = ROUND[len(strikes) % len(ROUND)], chance.choice(jobs)
            met = strike(cluster, fault, job)
        else:
            continue
        strikes.append({"second": round(time.monotonic() - began, 1), "fault": fault, "job": job, "met": met})
        with open(log, "w", newline="") as stream:
            writer = csv.DictWriter(stream, strikes[0])
            writer.writeheader()
            writer.writerows(strikes)
    return strikes


def status(cluster: Cluster, outputs: Path, *options: str) -> dict[str, Any]:
    """What `python -m kvmap.sweep status` says."""
    result = subprocess.run(
        [sys.executable, "-m", "kvmap.sweep", "status", str(outputs / STUDY), *options],
        env=os.environ | cluster.environment,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
        timeout=HOURS,
    )
    if options != ("--json",):
        return {}
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def results(points: list[dict[str, Any]]) -> dict[str, dict[str, float | None]]:
    """The numbers of every finished point, those left out that no two runs share."""
    found = {}
    for point in points:
        if point["status"] == "done":
            content = json.loads((Path(point["directory"]) / "metrics.json").read_text())
            found[point["identity"]] = {
                key: entry["value"] for key, entry in content.items() if not key.endswith(PERSONAL)
            }
    return found


def corrupt_artifacts(store: Path) -> list[str]:
    """Artifacts with a file that is missing, foreign or not as its checksum says, and those set aside."""
    wrong = [str(path) for path in store.glob("*/*.corrupt-*")]
    for manifest in store.glob("*/*/artifact.json"):
        files = json.loads(manifest.read_text())["files"]
        there = {
            str(path.relative_to(manifest.parent)) for path in manifest.parent.rglob("*") if path.is_file()
        }
        sound = there == {*files, "artifact.json"} and all(
            hashlib.sha256((manifest.parent / name).read_bytes()).hexdigest() == facts["sha256"]
            for name, facts in files.items()
        )
        wrong += [] if sound else [str(manifest.parent)]
    return wrong


def examine(
    cluster: Cluster, disturbed: Path, expected: dict[str, dict[str, float | None]]
) -> dict[str, Any]:
    """What must hold after the resubmission."""
    board = status(cluster, disturbed, "--json")
    found = results(board["points"])
    with open(disturbed / STUDY / "summary.csv") as stream:
        rows = [row["identity"] for row in csv.DictReader(stream)]
    apart = [
        abs(value - expected[identity][key])  # type: ignore[operator]
        for identity, numbers in found.items()
        for key, value in numbers.items()
        if value is not None
    ]
    return {
        "done": len(found),
        "expected": len(expected),
        "equal": sum(found.get(identity) == numbers for identity, numbers in expected.items()),
        "largest_difference": max(apart, default=math.nan),
        "corrupt_artifacts": corrupt_artifacts(disturbed / "artifacts"),
        "rows": len(rows),
        "duplicate_rows": len(rows) - len(set(rows)),
    }


def main() -> int:
    """Runs, prints, and tells by the exit status whether nothing was lost."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--points", type=int, default=40)
    parser.add_argument("--every", type=float, default=3.0)
    given = parser.parse_args()
    overrides = sweep_of(2, given.points)
    quiet, disturbed = given.folder / "undisturbed", given.folder / "disturbed"
    cluster = Cluster(Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp")))
    cluster.up()
    try:
        sweep = Sweep(cluster, quiet, *overrides)
        assert sweep.wait(HOURS) == 0, sweep.log.read_text()
        expected = results(status(cluster, quiet, "--json")["points"])
        wait_for_queue(cluster, 60)
        attacked = Sweep(cluster, disturbed, *overrides)
        _ = attacked.array
        attacked.abandon()
        strikes = under_fire(cluster, given.every, given.folder / "strikes.csv")
        after_fire = status(cluster, disturbed, "--json")["counts"]
        wait_for_queue(cluster, 60)
        status(cluster, disturbed, "--resubmit", "all")
        wait_for_queue(cluster, HOURS)
        found = examine(cluster, disturbed, expected)
    except NoCluster as error:
        print(f"the cluster did not hold: {error}", file=sys.stderr)
        return 2
    finally:
        cluster.down()
    found |= {
        "strikes": dict(Counter(each["fault"] for each in strikes if each["met"])),
        "after_the_faults": after_fire,
    }
    (given.folder / "faults.json").write_text(json.dumps(found, indent=2) + "\n")
    print(json.dumps(found, indent=2))
    whole = found["done"] == found["equal"] == found["expected"] == found["rows"]
    return 0 if whole and not found["corrupt_artifacts"] and not found["duplicate_rows"] else 1


if __name__ == "__main__":
    sys.exit(main())
