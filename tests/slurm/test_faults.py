"""A sweep of which every job is struck by another fault, in the middle of its work, on a real Slurm.

One sweep, because each start of a job takes seconds: slurmctld is killed and restarted as the first jobs
evaluate, then they are struck, one after the other. The same command once more finishes what is not done.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from kvmap.files import read_json
from tests.slurm.cluster import Cluster
from tests.slurm.processes import wait_until
from tests.slurm.sweeping import Sweep, final_states, record, wait_for_queue

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(400)]

# Long enough to be struck, short enough to be repeated: some seconds of questions once all is calibrated.
LENGTH = ("stages=[fit,evaluate]", "evaluation.world.n_per_kind=60", "evaluation.batch_size=2")


def usr2(cluster: Cluster, job: str) -> None:
    """To the process: `scancel --signal` sends it again when the job comes back."""
    for pid in cluster.processes_of(job):
        os.kill(pid, signal.SIGUSR2)


def requeue(cluster: Cluster, job: str) -> None:
    cluster.run("scontrol", "requeue", job)


def preempt(cluster: Cluster, job: str) -> None:
    """A job of a higher partition takes the node."""
    node = cluster.run("squeue", "-h", "-r", "-j", job, "-o", "%N").strip()
    cluster.run("sbatch", "-p", "urgent", "-w", node, "-n1", "-o", "/dev/null", "--wrap", "sleep 1")


def kill(cluster: Cluster, job: str) -> None:
    for pid in cluster.processes_of(job):
        os.kill(pid, signal.SIGKILL)


def cancel(cluster: Cluster, job: str) -> None:
    cluster.run("scancel", job)


def lose_node(cluster: Cluster, job: str) -> None:
    """The node's power fails, and is back when Slurm has noticed."""
    node = cluster.run("squeue", "-h", "-r", "-j", job, "-o", "%N").strip()
    cluster.kill_node(node)
    wait_until(
        lambda: "DOWN" in cluster.run("sinfo", "-h", "-n", node, "-o", "%T").upper(), 60, "a node down"
    )
    cluster.start_node(node)


def restart_controller(cluster: Cluster) -> None:
    """Kills slurmctld while jobs run, and waits until a new one knows them."""
    cluster.kill_controller()
    assert not cluster.is_whole()
    cluster.start_controller()
    wait_until(cluster.is_whole, 30, "the controller")


FAULTS: dict[str, Callable[[Cluster, str], None]] = {
    "SIGUSR2": usr2,
    "preemption": preempt,
    "requeue": requeue,
    "kill": kill,
    "cancellation": cancel,
    "lost node": lose_node,
}


@dataclass
class Struck:
    """What the sweep left behind.

    Attributes:
        outputs: Its outputs.
        first: Every job's run.json once the queue was empty, by fault.
        last: The same after the second start.
        states: Slurm's own words after the first.
        exit_status: Of the second start's parent.
    """

    outputs: Path
    first: dict[str, dict[str, Any]] = field(default_factory=dict)
    last: dict[str, dict[str, Any]] = field(default_factory=dict)
    states: dict[str, str] = field(default_factory=dict)
    exit_status: int = -1


@pytest.fixture(scope="module")
def struck(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Struck:
    outputs = tmp_path_factory.mktemp("outputs")
    seeds = f"seed={','.join(str(number) for number in range(len(FAULTS)))}"
    sweep = Sweep(cluster, outputs, "experiment=debug", *LENGTH, seeds)
    array = sweep.array
    sweep.abandon()
    directory = sweep.directory
    waiting = dict(enumerate(FAULTS))
    end = time.monotonic() + 200
    while waiting and time.monotonic() < end:
        for number in [number for number in waiting if evaluates(record(directory / str(number)))]:
            if len(waiting) == len(FAULTS):
                restart_controller(cluster)
            FAULTS[waiting.pop(number)](cluster, f"{array}_{number}")
        time.sleep(0.2)
    assert not waiting, f"never evaluated: {waiting}\n{cluster.run('squeue', '-r')}"
    wait_for_queue(cluster, 120)
    result = Struck(outputs)
    for number, fault in enumerate(FAULTS):
        result.first[fault] = record(directory / str(number))
        (result.states[fault],) = final_states(cluster, f"{array}_{number}")
    again = Sweep(cluster, outputs, "experiment=debug", *LENGTH, seeds)
    result.exit_status = again.wait(120)
    result.last = {fault: record(directory / str(number)) for number, fault in enumerate(FAULTS)}
    return result


def evaluates(run: dict[str, Any]) -> bool:
    return run.get("status") == "running" and run["stages"].get("evaluate", {}).get("status") == "running"


@pytest.mark.parametrize("fault", ["SIGUSR2", "preemption"])
def test_a_preempted_job_saves_comes_back_and_ends_by_itself(struck: Struck, fault: str) -> None:
    run = struck.first[fault]
    assert run["status"] == "done"
    assert [attempt["status"] for attempt in run["attempts"]] == ["preempted"]
    assert run["slurm"]["restart_count"] == "1"


def test_a_requeued_job_comes_back(struck: Struck) -> None:
    run = struck.first["requeue"]
    assert run["status"] == "done"
    assert [attempt["status"] for attempt in run["attempts"]] == ["preempted"]
    assert run["slurm"]["restart_count"] == "1"


def test_a_lost_node_s_job_comes_back(struck: Struck) -> None:
    run = struck.first["lost node"]
    assert run["status"] == "done"
    assert [attempt["status"] for attempt in run["attempts"]] == ["running"]
    assert run["slurm"]["restart_count"] == "1"


def test_a_killed_and_a_cancelled_job_stay_as_they_were(struck: Struck) -> None:
    assert struck.first["kill"]["status"] == "running"
    assert struck.states["kill"] == "FAILED"
    assert struck.first["cancellation"]["status"] == "preempted"
    assert struck.states["cancellation"] == "CANCELLED"


def test_the_same_command_once_more_finishes_all(struck: Struck) -> None:
    assert {fault: run["status"] for fault, run in struck.last.items()} == dict.fromkeys(FAULTS, "done")
    assert [attempt["status"] for attempt in struck.last["kill"]["attempts"]] == ["running"]
    assert [attempt["status"] for attempt in struck.last["cancellation"]["attempts"]] == ["preempted"]
    assert struck.exit_status == 0


def test_what_was_done_was_not_done_again(struck: Struck) -> None:
    for fault in ("SIGUSR2", "preemption", "requeue", "lost node"):
        assert struck.last[fault] == struck.first[fault]


def test_every_job_has_the_same_numbers_however_it_was_struck(struck: Struck) -> None:
    """The seed of the run changes nothing here, so the six jobs are one experiment."""
    (directory, *others) = sorted({path.parent for path in struck.outputs.glob("debug/*/*/metrics.json")})
    numbers = [
        {
            key: entry["value"]
            for key, entry in read_json(path / "metrics.json").items()
            if "seconds" not in key and not key.endswith("/reused")
        }
        for path in (directory, *others)
    ]
    assert len(numbers) == len(FAULTS)
    assert numbers[0]
    assert all(each == numbers[0] for each in numbers[1:])


def test_one_mapper_and_one_calibration_served_all(struck: Struck) -> None:
    kinds = {path.name for path in (struck.outputs / "artifacts").iterdir() if path.is_dir()}
    assert {"mapper", "moments"} <= kinds
    made = [*(struck.outputs / "artifacts" / "mapper").glob("[!.]*")]
    assert len([path for path in made if path.is_dir()]) == 1
