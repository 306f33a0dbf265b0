"""Launcher presets: what they compose to and ask of Slurm; and several processes on one machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from submitit.slurm.slurm import _make_sbatch_string

from kvmap.config import register
from kvmap.config.launcher_rules import launcher_mistakes
from kvmap.errors import KvmapError, UnknownName
from kvmap.files import read_json
from kvmap.preemption import EXIT_PREEMPTED
from kvmap.sweeps.failures import JobFailed, crossing, launcher_failure
from kvmap.sweeps.isolation import isolated
from kvmap.sweeps.points import register_resolver
from tests.slurm.processes import command_of, descendants

CONF = Path(__file__).resolve().parent.parent / "conf"
SLURM = ("slurm", "slurm_gpu", "slurm_8gpu")


def launcher(name: str, *overrides: str, searched: Path | None = None) -> dict[str, Any]:
    """`hydra.launcher` as a preset and overrides compose it."""
    register()
    register_resolver()
    place = [] if searched is None else [f"hydra.searchpath=[file://{searched}]"]
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = compose("config", [f"hydra/launcher={name}", *place, *overrides], return_hydra_config=True)
    if name in SLURM:  # these hang on a sweep that runs
        cfg.hydra.launcher.submitit_folder = cfg.hydra.launcher.name = "x"
    composed: dict[str, Any] = OmegaConf.to_container(cfg.hydra.launcher, resolve=True)  # type: ignore[assignment]
    return composed


def sbatch(settings: dict[str, Any]) -> set[str]:
    """The lines of the batch script that submitit makes of them."""
    renamed = {
        "timeout_min": "time",
        "mem_gb": "mem",
        "name": "job_name",
        "tasks_per_node": "ntasks_per_node",
    }
    dropped = ("_target_", "submitit_folder", "max_num_timeout")
    given = {renamed.get(key, key): value for key, value in settings.items() if key not in dropped}
    script: str = _make_sbatch_string("job", "/logs", map_count=100, **given)
    return set(script.splitlines())


@pytest.mark.parametrize(
    ("name", "gpus", "parallel"), [("slurm", None, 32), ("slurm_gpu", 1, 32), ("slurm_8gpu", 8, 4)]
)
def test_a_preset_asks_slurm_for_what_it_says(name: str, gpus: int | None, parallel: int) -> None:
    lines = sbatch(launcher(name))
    assert {line for line in lines if "gpus" in line} == (
        set() if gpus is None else {f"#SBATCH --gpus-per-node={gpus}"}
    )
    assert f"#SBATCH --array=0-99%{parallel}" in lines
    assert {
        "#SBATCH --requeue",
        "#SBATCH --signal=USR2@120",
        "#SBATCH --nodes=1",
        "#SBATCH --time=240",
    } <= lines
    assert {
        "export OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK",
        "export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK",
    } <= lines


def test_site_and_command_line_are_overrides() -> None:
    lines = sbatch(
        launcher(
            "slurm",
            "hydra.launcher.account=lab",
            "hydra.launcher.partition=long",
            "hydra.launcher.qos=high",
            "hydra.launcher.constraint='a100|h100'",
            "+hydra.launcher.additional_parameters.licenses=scratch",
        )
    )
    assert {
        "#SBATCH --account=lab",
        "#SBATCH --partition=long",
        "#SBATCH --qos=high",
        "#SBATCH --constraint='a100|h100'",
        "#SBATCH --licenses=scratch",
        "#SBATCH --requeue",
    } <= lines


@pytest.mark.parametrize("name", SLURM)
def test_a_site_file_counts_for_its_preset_and_the_command_line_counts_more(
    name: str, tmp_path: Path
) -> None:
    (tmp_path / "local").mkdir()
    example = (CONF / "local" / "slurm.yaml.example").read_text()
    (tmp_path / "local" / "slurm.yaml").write_text(example)
    if name != "slurm":
        (tmp_path / "local" / f"{name}.yaml").write_text(
            "defaults: [slurm, _self_]\npartition: gpus\nmem_gb: 7\n"
        )
    settings = launcher(name, "hydra.launcher.timeout_min=33", searched=tmp_path)
    assert (settings["account"], settings["timeout_min"]) == ("my_project", 33)
    assert settings["partition"] == ("short" if name == "slurm" else "gpus")
    assert settings["mem_gb"] == (16 if name == "slurm" else 7)
    assert settings["additional_parameters"] == {"requeue": True, "licenses": "scratch:1"}


def test_the_example_of_a_site_composes(tmp_path: Path) -> None:
    (tmp_path / "local").mkdir()
    (tmp_path / "local" / "site.yaml").write_text((CONF / "local" / "site.yaml.example").read_text())
    register()
    register_resolver()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = compose("config", [f"hydra.searchpath=[file://{tmp_path}]"])
    assert cfg.tracking.entity == "my_team"
    assert cfg.pair.source.dtype == "bfloat16"


@pytest.mark.parametrize("name", [*SLURM, "local", "basic"])
def test_the_presets_are_right(name: str) -> None:
    settings = {"_target_": "BasicLauncher"} if name == "basic" else launcher(name)
    assert launcher_mistakes(settings) == []


@pytest.mark.parametrize(
    ("name", "override", "said"),
    [
        ("slurm", "nodes=2", "would start each job so many times"),
        ("slurm_gpu", "tasks_per_node=8", "would start each job so many times"),
        ("slurm", "timeout_min=3", "may warn a job as soon as it starts; expected more than 3"),
        ("slurm", "array_parallelism=0", "expected at least 1"),
        ("local", "n_jobs=0", "hydra.launcher.n_jobs=0"),
    ],
)
def test_a_mistake_is_named(name: str, override: str, said: str) -> None:
    (mistake,) = launcher_mistakes(launcher(name, f"hydra.launcher.{override}"))
    assert mistake.startswith(f"hydra.launcher.{override.split('=')[0]}")
    assert said in mistake


class LocalSweep:
    """A sweep of two processes at a time, with the threads as they come."""

    def __init__(self, outputs: Path, *overrides: str) -> None:
        own = {key: value for key, value in os.environ.items() if not key.endswith("_NUM_THREADS")}
        self.outputs = outputs
        self.log = outputs / "log"
        command = ["hydra/launcher=local", "hydra.launcher.n_jobs=2", "experiment=debug", *overrides]
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "kvmap.run", "-m", "sweep.allow_changed_code=true", *command],
                env=own | {"KVMAP_OUTPUTS": str(outputs)},
                stdout=log,
                stderr=log,
            )

    def runs(self) -> dict[str, dict[str, Any]]:
        """Every run.json there is, by job."""
        found = sorted(self.outputs.glob("debug/2*/*/run.json"))
        return {path.parent.name: read_json(path) for path in found}

    def running(self, job: str) -> dict[str, Any] | None:
        """A job's run.json, while it says so."""
        run = self.runs().get(job)
        return run if run is not None and run["status"] == "running" else None

    def end(self) -> tuple[int, str]:
        """The exit status, and what was printed."""
        return self.process.wait(100), self.log.read_text()


def wait_for(look: Callable[[], Any]) -> Any:
    """What `look` gives, as soon as that is something."""
    end = time.monotonic() + 60
    while not (found := look()):
        assert time.monotonic() < end
        time.sleep(0.05)
    return found


class TestFailures:
    def test_an_error_of_any_class_crosses_as_ours(self, tmp_path: Path) -> None:
        class Stubborn(Exception):
            def __init__(self, one: int, two: int) -> None:
                super().__init__(f"{one} and\n{two}")

        with (
            pytest.raises(JobFailed, match=r"Stubborn: 1 and 2 \(traceback: .*traceback.txt\)"),
            crossing(tmp_path),
        ):
            raise Stubborn(1, 2)

    def test_ours_crosses_as_it_is(self, tmp_path: Path) -> None:
        with pytest.raises(KvmapError, match=r"^as it is$"), crossing(tmp_path):
            raise KvmapError("as it is")

    def test_what_a_launcher_says_is_told_from_other_errors(self) -> None:
        from joblib.externals.loky.process_executor import TerminatedWorkerError
        from submitit.core.utils import FailedJobError

        trace = "Job (task=0) failed with trace:\n---\nTraceback\n  File x\nImportError: no module\n---\nsee"
        assert "with trace: ImportError: no module\n" in str(launcher_failure(FailedJobError(trace)))
        assert "No partition" in str(launcher_failure(FailedJobError("\nsbatch: No partition\nmore")))
        assert "start the sweep again" in str(launcher_failure(TerminatedWorkerError("killed")))
        assert launcher_failure(RuntimeError("any")) is None


@pytest.mark.slow
def test_processes_share_the_cores_and_neither_a_failed_nor_a_killed_job_stops_another(
    tmp_path: Path,
) -> None:
    models = "zoo:none,zoo:tiny-large,zoo:tiny-medium"
    sweep = LocalSweep(tmp_path, "stages=[plan,fit]", f"pair.target.id={models}")
    struck = wait_for(lambda: sweep.running("1"))
    os.kill(struck["host"]["pid"], signal.SIGKILL)
    status, output = sweep.end()
    assert status == 1
    assert "unknown model of the tiny family 'none'" in output.splitlines()[-1]
    runs = sweep.runs()
    assert {job: run["status"] for job, run in runs.items()} == {"0": "failed", "1": "running", "2": "done"}
    share = max(1, len(os.sched_getaffinity(0)) // 2)
    assert {int(run["threads"]["OMP_NUM_THREADS"]) for run in runs.values()} == {share}
    assert len({run["host"]["pid"] for run in runs.values()}) == 3


@pytest.mark.slow
def test_where_the_launching_process_is_killed_the_jobs_stop_in_order(tmp_path: Path) -> None:
    sweep = LocalSweep(tmp_path, "stages=[plan,fit]", "seed=0,1,2")
    wait_for(lambda: sweep.running("0") or sweep.running("1"))
    below = descendants(sweep.process.pid)
    sweep.process.kill()
    wait_for(
        lambda: not any(command_of(pid) for pid in below if "loky.backend.resource" not in command_of(pid))
    )
    statuses = [run["status"] for run in sweep.runs().values()]
    assert "preempted" in statuses
    assert set(statuses) <= {"done", "preempted"}


@pytest.mark.parametrize(
    ("end", "said"),
    [
        (
            lambda: os.kill(os.getpid(), signal.SIGKILL),
            "ended by SIGKILL, as the system does when memory runs out",
        ),
        (lambda: os.kill(os.getpid(), signal.SIGVTALRM), "ended by SIGVTALRM;"),
        (lambda: sys.exit(EXIT_PREEMPTED), "told to stop"),
        (lambda: os._exit(7), "ended with status 7"),
    ],
)
def test_how_a_job_s_process_ended_is_said(end: Callable[[], None], said: str) -> None:
    with pytest.raises(JobFailed, match=said):
        isolated(end)


def test_an_error_comes_out_of_a_job_s_process_as_it_was() -> None:
    def fails() -> None:
        raise UnknownName("mapper", "liner", ["linear"])

    with pytest.raises(UnknownName, match="Did you mean 'linear'"):
        isolated(fails)
