from __future__ import annotations

import csv
import json
import logging
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvmap.errors import KvmapError
from kvmap.files import read_json
from kvmap.tracking import Metric, Run, RunExists, read_metrics

METRICS = {
    "evaluate/lookup/mapped/accuracy": Metric(0.5, 120, 0.046),
    "evaluate/lookup/raw/accuracy": Metric(math.nan),
    "benchmark/512/map/p50_ms": Metric(1.25, 20),
}
ROWS = [{"arm": "target", "value": 0.5}, {"arm": "mapped, k=8", "value": None, "low": 0.1}]


def small_figure() -> Any:
    from matplotlib.figure import Figure

    return Figure(figsize=(1, 1))


def do_work(run: Run) -> None:
    with run.stage("evaluate"):
        run.log(METRICS)
        run.table("arms", ROWS)
        run.figure("empty", small_figure())
        run.note(models={"source": "a"}, data={"fingerprint": "f"})
        run.note(models={"target": "b"})


def record(directory: Path) -> dict[str, Any]:
    return read_json(directory / "run.json")


def local_files(directory: Path) -> set[str]:
    files = (path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file())
    return {name for name in files if not name.startswith(("wandb/", "tensorboard/"))}


@pytest.mark.parametrize("backend", ["none", "wandb", "tensorboard"])
def test_local_files_are_the_same_with_every_tracker(tmp_path: Path, backend: str) -> None:
    with Run(tmp_path / "run", "study", {"mapper": {"top_k": 8}}, backend, seeds={"calibration": 3}) as run:
        do_work(run)
    log = {"run.json", "metrics.json", "run.log", "tables/arms.csv", "figures/empty.png"}
    assert local_files(tmp_path / "run") - {"dirty.diff"} == log
    assert (tmp_path / "run" / "wandb").exists() == (backend == "wandb")
    assert (tmp_path / "run" / "tensorboard").exists() == (backend == "tensorboard")


def test_record_says_what_was_asked_and_where_it_came_from(tmp_path: Path) -> None:
    config = {"mapper": {"top_k": 8}}
    with Run(tmp_path, "study", config, "none", argv=["run", "a=1"], seeds={"data": 3}) as run:
        running = record(tmp_path)
        do_work(run)
    assert running["status"] == "running"
    done = record(tmp_path)
    assert done["status"] == "done"
    assert done["config"] == config
    assert done["argv"] == ["run", "a=1"]
    assert done["seeds"] == {"data": 3}
    assert done["facts"] == {"models": {"source": "a", "target": "b"}, "data": {"fingerprint": "f"}}
    assert done["stages"]["evaluate"]["status"] == "done"
    assert 0 <= done["stages"]["evaluate"]["seconds"] <= done["seconds"]
    assert done["versions"]["torch"]
    assert done["host"]["pid"] == os.getpid()
    assert done["device"]["type"] in ("cpu", "cuda")
    assert done["threads"]["torch"] == 1
    assert 0 <= done["usage"]["cpu_seconds"] <= 60
    assert done["usage"]["peak_memory_bytes"] > 1e7
    assert done["host"]["memory_bytes"] > done["usage"]["peak_memory_bytes"]
    assert set(done["git"]) >= {"sha", "dirty"} or done["git"] == {}


def test_slurm_ids_come_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    with Run(tmp_path, "study", {}, "none"):
        pass
    assert record(tmp_path)["slurm"]["job_id"] == "77"


def test_metrics_merge_and_come_back(tmp_path: Path) -> None:
    with Run(tmp_path, "study", {}, "none") as run:
        run.log(METRICS)
        run.log({"evaluate/lookup/mapped/accuracy": Metric(0.75, 240, 0.03)})
    raw = json.loads((tmp_path / "metrics.json").read_text(), parse_constant=pytest.fail)
    assert raw["evaluate/lookup/mapped/accuracy"] == {"value": 0.75, "n": 240, "standard_error": 0.03}
    metrics = read_metrics(tmp_path)
    assert metrics["benchmark/512/map/p50_ms"] == METRICS["benchmark/512/map/p50_ms"]
    assert math.isnan(metrics["evaluate/lookup/raw/accuracy"].value)


def test_tables_have_every_column(tmp_path: Path) -> None:
    with Run(tmp_path, "study", {}, "none") as run:
        path = run.table("arms", ROWS)
        empty = run.table("nothing", [])
    with open(path, newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert rows[0] == {"arm": "target", "value": "0.5", "low": ""}
    assert rows[1] == {"arm": "mapped, k=8", "value": "", "low": "0.1"}
    assert empty.read_text() == ""


def test_names_cannot_leave_the_directory(tmp_path: Path) -> None:
    with Run(tmp_path, "study", {}, "none") as run, pytest.raises(ValueError, match="plain name"):
        run.table("../arms", ROWS)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (KvmapError("pair 'x' is unknown\nmore"), "KvmapError: pair 'x' is unknown more"),
        (KeyboardInterrupt(), "interrupted"),
        (SystemExit(3), "SystemExit: 3"),
        (ValueError(), "ValueError"),
    ],
)
def test_a_failure_is_recorded_and_passed_on(tmp_path: Path, error: BaseException, said: str) -> None:
    def work() -> None:
        with Run(tmp_path, "study", {}, "none") as run, run.stage("fit"):
            run.log(METRICS)
            raise error

    with pytest.raises(type(error)):
        work()
    failed = record(tmp_path)
    assert failed["status"] == "failed"
    assert failed["error"] == said
    assert failed["stages"]["fit"]["status"] == "failed"
    assert type(error).__name__ in (tmp_path / failed["traceback_file"]).read_text()
    assert len(read_metrics(tmp_path)) == len(METRICS)


def test_a_finished_run_is_never_overwritten(tmp_path: Path) -> None:
    with Run(tmp_path, "study", {}, "none") as run:
        run.log(METRICS)
    before = (tmp_path / "metrics.json").read_text()
    with pytest.raises(RunExists, match="finished run"), Run(tmp_path, "study", {}, "none"):
        pass
    assert (tmp_path / "metrics.json").read_text() == before


def test_a_living_run_is_not_disturbed(tmp_path: Path) -> None:
    with (
        Run(tmp_path, "study", {}, "none"),
        pytest.raises(RunExists, match=f"process {os.getpid()}"),
        Run(tmp_path, "study", {}, "none"),
    ):
        pass
    assert record(tmp_path)["status"] == "done"


def test_a_killed_or_failed_attempt_is_kept_aside(tmp_path: Path) -> None:
    program = f"""
import os, sys
from pathlib import Path
from kvmap.tracking import Metric, Run
with Run(Path({str(tmp_path)!r}), "study", {{}}, "none") as run:
    run.log({{"a/b/c/old": Metric(1.0)}})
    os._exit(9)
"""
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 9
    assert record(tmp_path)["status"] == "running"
    with pytest.raises(ValueError, match="second"), Run(tmp_path, "study", {}, "none"):
        raise ValueError("second")
    with Run(tmp_path, "study", {}, "none") as run:
        run.log({"a/b/c/new": Metric(2.0)})
    assert set(read_metrics(tmp_path)) == {"a/b/c/new"}
    assert set(read_metrics(tmp_path / "attempt-1")) == {"a/b/c/old"}
    attempts = record(tmp_path)["attempts"]
    assert [attempt["status"] for attempt in attempts] == ["running", "failed"]


def test_the_log_goes_to_the_run_it_belongs_to(tmp_path: Path) -> None:
    for name in ("first", "second"):
        with Run(tmp_path / name, "study", {}, "none"):
            logging.getLogger("kvmap.anything").info("message of %s", name)
    assert "message of first" in (tmp_path / "first" / "run.log").read_text()
    assert "first" not in (tmp_path / "second" / "run.log").read_text()


def test_an_unknown_backend_gets_a_suggestion(tmp_path: Path) -> None:
    with pytest.raises(KvmapError, match="Did you mean 'wandb'"):
        Run(tmp_path, "study", {}, "wanbd")
