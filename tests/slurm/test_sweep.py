"""Sweeps on a real Slurm that nothing disturbs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster
from tests.slurm.sweeping import Sweep, final_states, record

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(180)]


def test_jobs_are_one_array_in_one_directory_and_one_that_fails_stops_no_other(
    cluster: Cluster, tmp_path: Path
) -> None:
    sweep = Sweep(
        cluster,
        tmp_path,
        "experiment=debug",
        "stages=[plan]",
        "pair.target.id=zoo:tiny-large,zoo:none,zoo:tiny-medium",
    )
    assert sweep.wait() == 1
    assert "unknown model of the tiny family 'none'" in sweep.log.read_text().splitlines()[-1]
    assert len([*(tmp_path / "debug").glob("2*")]) == 1
    runs = [record(sweep.directory / str(number)) for number in range(3)]
    assert [run["status"] for run in runs] == ["done", "failed", "done"]
    assert len({run["slurm"]["array_job_id"] for run in runs}) == 1
    assert [run["slurm"]["array_task_id"] for run in runs] == ["0", "1", "2"]
    assert {run["threads"]["OMP_NUM_THREADS"] for run in runs} == {"1"}
    # Slurm's own word, which is why it is not asked.
    array = runs[0]["slurm"]["array_job_id"]
    assert final_states(cluster, array) == ["COMPLETED"] * 3
    logs = [*sweep.directory.glob(f".submitit/{array}_*/*_log.out")]
    assert len(logs) == 3
    again = Sweep(
        cluster,
        tmp_path,
        "experiment=debug",
        "stages=[plan]",
        "pair.target.id=zoo:tiny-large,zoo:tiny-medium",
    )
    assert again.wait() == 0
    assert [(again.directory / str(number) / "skipped.json").is_file() for number in range(2)] == [True, True]


@pytest.mark.parametrize(("preset", "gpus"), [("slurm_gpu", 1), ("slurm_8gpu", 8)])
def test_gpu_presets_get_their_gpus(cluster: Cluster, tmp_path: Path, preset: str, gpus: int) -> None:
    sweep = Sweep(cluster, tmp_path, "experiment=debug", f"hydra/launcher={preset}", "stages=[plan]")
    assert sweep.wait() == 0
    run = record(sweep.directory / "0")
    assert run["status"] == "done"
    facts = cluster.run("scontrol", "-o", "show", "job", run["slurm"]["job_id"])
    assert re.search(rf"TresPerNode=gres:gpu:{gpus}\b", facts)
    assert "Requeue=1" in facts


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("hydra.launcher.partition=nowhere", "invalid partition specified: nowhere"),
        ("hydra.launcher.mem_gb=900000", "node configuration is not available"),
        ("hydra.launcher.timeout_min=2", "hydra.launcher.timeout_min=2"),
    ],
)
def test_what_slurm_cannot_give_is_said_at_submission(
    cluster: Cluster, tmp_path: Path, override: str, said: str
) -> None:
    sweep = Sweep(cluster, tmp_path, "experiment=debug", override, "stages=[plan]", "seed=0,1")
    assert sweep.wait() != 0
    output = sweep.log.read_text()
    assert said in output
    assert "Traceback" not in output
    assert not [*tmp_path.glob("debug/*/*/run.json")]
