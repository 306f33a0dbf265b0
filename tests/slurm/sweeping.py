"""A sweep on the test cluster: started, watched, waited for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.slurm.cluster import Cluster
from tests.slurm.processes import NoCluster

# Presets ask for more than a small machine has.
SMALL = ("hydra/launcher=slurm", "hydra.launcher.cpus_per_task=1", "hydra.launcher.mem_gb=1")


class SweepFailed(Exception):
    """A sweep did not start, or did not end in time."""


class Sweep:
    """A multirun on the cluster, started and left to itself.

    Args:
        cluster: Where.
        outputs: Its outputs folder.
        overrides: Those of the command line.
    """

    def __init__(self, cluster: Cluster, outputs: Path, *overrides: str) -> None:
        self.cluster = cluster
        self.outputs = outputs
        self.log = outputs / f"parent-{time.monotonic_ns()}.log"
        outputs.mkdir(parents=True, exist_ok=True)
        with open(self.log, "w") as log:
            self.parent = subprocess.Popen(
                [sys.executable, "-m", "kvmap.run", "-m", *SMALL, *overrides],
                env=os.environ | cluster.environment | {"KVMAP_OUTPUTS": str(outputs)},
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
            )

    @property
    def array(self) -> str:
        """The number of the array, once it is in the queue; it is the only one there.

        Raises:
            SweepFailed: Nothing was submitted within a minute.
        """
        end = time.monotonic() + 60
        while time.monotonic() < end and self.parent.poll() is None:
            if numbers := self.cluster.run("squeue", "-h", "-o", "%F", check=False).split():
                return numbers[0]
            time.sleep(0.1)
        raise SweepFailed(f"nothing was submitted:\n{self.log.read_text()}")

    def wait(self, seconds: float = 90) -> int:
        """The parent's exit status.

        Raises:
            SweepFailed: It did not end.
        """
        try:
            return self.parent.wait(seconds)
        except subprocess.TimeoutExpired:
            self.parent.kill()
            raise SweepFailed(f"no end after {seconds:.0f} s:\n{self.log.read_text()}") from None

    def abandon(self) -> None:
        """SIGKILL to the parent; its jobs run on."""
        self.parent.kill()
        self.parent.wait()

    @property
    def directory(self) -> Path:
        """The newest sweep's."""
        return sorted(path for path in self.outputs.glob("*/2*") if path.is_dir())[-1]


def record(directory: Path) -> dict[str, Any]:
    """A run's run.json; empty as long as there is none."""
    try:
        content: dict[str, Any] = json.loads((directory / "run.json").read_text())
    except FileNotFoundError:
        return {}
    return content


def running_jobs(cluster: Cluster) -> list[str]:
    """Names such as `12_3` of the jobs that run."""
    return cluster.run("squeue", "-h", "-r", "-t", "R", "-o", "%i", check=False).split()


def queue_is_empty(cluster: Cluster) -> bool:
    """Whether Slurm says so; not where it does not answer."""
    try:
        return not cluster.run("squeue", "-h", "-r").strip()
    except (NoCluster, subprocess.TimeoutExpired):
        return False


def wait_for_queue(cluster: Cluster, seconds: float) -> None:
    """Waits until no job is left in the queue.

    Raises:
        SweepFailed: Some are.
    """
    end = time.monotonic() + seconds
    while not queue_is_empty(cluster):
        if time.monotonic() > end:
            raise SweepFailed(f"jobs are left:\n{cluster.run('squeue', '-r')}\n{cluster.logs()}")
        time.sleep(0.3)


def final_states(cluster: Cluster, job: str, seconds: float = 30) -> list[str]:
    """The states in Slurm's accounting, which hears of an end later than the queue does.

    Args:
        cluster: Where.
        job: An array, or a job of one such as `12_3`.
        seconds: How long to wait for the last of them to end.

    Returns:
        One word a job, in the array's order; those still running after that time say so.
    """
    end = time.monotonic() + seconds
    while True:
        lines = cluster.run("sacct", "-n", "-X", "-P", "-j", job, "-o", "State").splitlines()
        states = [line.split()[0] for line in lines]
        if (states and not {"PENDING", "RUNNING"} & set(states)) or time.monotonic() > end:
            return states
        time.sleep(0.3)
