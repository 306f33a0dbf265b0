"""A job that Slurm warns of its time limit. It takes minutes: Slurm looks at the limits once in a minute."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster
from tests.slurm.sweeping import Sweep, record

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(600)]

# Minutes of questions, on a slow machine or a fast one. What one start has answered, the next finds.
LONG = ("stages=[fit,evaluate]", "evaluation.world.n_per_kind=70", "evaluation.batch_size=1")


def test_a_job_at_its_limit_saves_comes_back_and_goes_on(cluster: Cluster, tmp_path: Path) -> None:
    limit = ("hydra.launcher.timeout_min=2", "hydra.launcher.signal_delay_s=50")
    often = "hydra.launcher.max_num_timeout=9"
    sweep = Sweep(cluster, tmp_path, "experiment=debug", *LONG, *limit, often)
    assert sweep.wait(500) == 0
    run = record(sweep.directory / "0")
    assert run["status"] == "done"
    assert {attempt["status"] for attempt in run["attempts"]} == {"preempted"}
    assert {attempt["error"] for attempt in run["attempts"]} == {"Preempted: SIGUSR2"}
    assert run["slurm"]["restart_count"] == str(len(run["attempts"]))
    log = "".join(path.read_text() for path in sweep.directory.glob(".submitit/*/*_log.out"))
    assert f"({9 - len(run['attempts'])} remaining timeouts)" in log
