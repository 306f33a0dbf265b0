"""The W&B copy: read back from W&B's own files and compared with ours; broken, it costs a warning."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from kvmap.errors import KvmapError
from kvmap.tracking import Metric, Run, read_metrics
from tests.tracking.test_run import METRICS, do_work, record
from tests.tracking.wandb_records import history, records_so_far, segments, wandb_records


@pytest.mark.slow
def test_offline_run_holds_what_the_local_files_hold(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    config = {"mapper": {"top_k": 8}, "pair": "tiny"}
    with Run(tmp_path / "job", "study", config, "wandb") as run:
        do_work(run)
        run.log({f"evaluate/many/mapped/metric_{index}": Metric(float(index)) for index in range(3000)})
    logged: dict[str, Any] = {}
    settings: dict[str, Any] = {}
    starts, ends = [], []
    records = wandb_records(tmp_path / "job")
    for entry in records:
        if entry.HasField("run"):
            starts.append(entry.run)
            updates = entry.run.config.update
            settings.update({item.key: json.loads(item.value_json) for item in updates})
        elif entry.HasField("exit"):
            ends.append(entry.exit.exit_code)
    for row in history(records):
        logged.update(row)
    for key, metric in read_metrics(tmp_path / "job").items():
        assert logged[key] == metric.value or math.isnan(float(logged[key]))
        assert logged.get(f"{key}.n") == metric.n
        assert logged.get(f"{key}.standard_error") == metric.standard_error
    for picture in ("tables/arms", "figures/empty"):
        assert any(key.startswith(picture) for key in logged)
    assert settings.items() >= config.items()
    assert {start.run_id for start in starts} == {record(tmp_path / "job")["wandb"]["id"]}
    assert ends == [0]


def test_two_runs_in_one_process_do_not_share_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_RUN_ID", "shared")
    for name in ("a", "b"):
        with Run(tmp_path / name, "study", {}, "wandb") as run:
            run.log({f"x/y/z/{name}": Metric(1.0)})
    assert record(tmp_path / "a")["wandb"]["id"] != record(tmp_path / "b")["wandb"]["id"]
    for name in ("a", "b"):
        assert len(list((tmp_path / name / "wandb").glob("offline-run-*"))) == 1


def test_a_run_that_is_taken_up_again_keeps_its_id_and_every_segment(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    directory = tmp_path / "study" / "sweep" / "3"
    with suppress(KvmapError), Run(directory, "study", {}, "wandb") as run:
        run.log({"x/y/z/old": Metric(1.0)})
        raise KvmapError("node lost")
    with Run(directory, "study", {}, "wandb") as run:
        run.log({"x/y/z/new": Metric(2.0)})
    wandb_records(directory)  # waits for the end
    first, second = (list(records_so_far(file)) for file in segments(directory))
    starts = [entry.run for part in (first, second) for entry in part if entry.HasField("run")]
    assert {start.run_id for start in starts} == {record(directory)["wandb"]["id"]}
    assert {start.run_group for start in starts} == {"study"}
    assert {start.display_name for start in starts} == {"study/sweep/3"}
    assert (history(first)[0]["x/y/z/old"], history(second)[0]["x/y/z/new"]) == (1.0, 2.0)
    steps = [row["_step"] for row in [*history(first), *history(second)]]
    assert steps == sorted(set(steps))


def test_the_service_of_a_process_that_submitted_the_job_is_not_asked(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    program = f"""
from pathlib import Path
from kvmap.tracking import Metric, Run
with Run(Path({str(tmp_path)!r}), "study", {{}}, "wandb") as run:
    run.log({{"x/y/z/a": Metric(1.0)}})
"""
    gone = {**os.environ, "WANDB_SERVICE": "3-1-tcp-localhost-9"}
    subprocess.run([sys.executable, "-c", program], check=True, env=gone)
    assert "going on without it" not in (tmp_path / "run.log").read_text()
    assert any("x/y/z/a" in row for row in history(wandb_records(tmp_path)))


@pytest.mark.slow
def test_a_service_process_that_hangs_holds_up_neither_the_run_nor_the_next(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    program = f"""
import os, signal
from pathlib import Path
from kvmap.tracking import Metric, Run

def service():
    for status in Path("/proc").glob("[0-9]*/stat"):
        name, rest = status.read_text().rsplit(")", 1)
        if name.endswith("(wandb-core") and int(rest.split()[1]) == os.getpid():
            return int(status.parent.name)

for job, seconds in (("a", 5), ("b", 30)):
    with Run(Path({str(tmp_path)!r}) / job, "study", {{}}, "wandb", seconds=seconds) as run:
        run.log({{f"x/y/z/{{job}}": Metric(1.0)}})
        if job == "a":
            os.kill(service(), signal.SIGSTOP)
"""
    began = time.monotonic()
    with open(tmp_path / "said", "w+") as said:  # a pipe would outlive us in a process that hangs
        done = subprocess.run(
            [sys.executable, "-c", program],
            stdout=said,
            stderr=said,
            timeout=60,
            check=False,
        )
        said.seek(0)
        assert done.returncode == 0, said.read()
    assert time.monotonic() - began < 45
    assert "W&B finish failed" in (tmp_path / "a" / "run.log").read_text()
    assert [record(tmp_path / job)["status"] for job in "ab"] == ["done", "done"]
    (row,) = [row for row in history(wandb_records(tmp_path / "b")) if "x/y/z/b" in row]
    assert row["x/y/z/b"] == 1.0


@pytest.mark.parametrize("broken", ["absent", "raises", "exits", "hangs", "breaks_later", "hangs_at_the_end"])
def test_a_failing_wandb_costs_a_warning_only(
    tmp_path: Path, broken: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None if broken == "absent" else BrokenWandb(broken))
    ended: list[str] = []  # other tests use the service of this process
    monkeypatch.setattr("kvmap.tracking.wandb_mirror._end_service", lambda: ended.append(broken))
    began = time.monotonic()
    with Run(tmp_path, "study", {}, "wandb", seconds=0.3) as run:
        do_work(run)
    assert time.monotonic() - began < 5
    assert record(tmp_path)["status"] == "done"
    assert len(read_metrics(tmp_path)) == len(METRICS)
    assert [line for line in caplog.messages if "W&B" in line] == [
        line for line in caplog.messages if "going on without it" in line
    ]
    assert caplog.text.count("going on without it") == 1
    assert ended == [broken] * broken.startswith("hangs")


class BrokenWandb:
    """Stands in for the package, and fails in a chosen way."""

    def __init__(self, how: str) -> None:
        self.how = how
        self.config, self.summary = MagicMock(), {}

    def Settings(self, **_: object) -> None:  # noqa: N802 (the package's own name)
        return None

    def init(self, **_: object) -> BrokenWandb:
        if self.how == "raises":
            raise RuntimeError("no key")
        if self.how == "exits":
            raise SystemExit(1)
        if self.how == "hangs":
            time.sleep(3)
        return self

    def log(self, _: object, **__: object) -> None:
        if self.how != "hangs_at_the_end":
            raise ConnectionError("lost")

    def Table(self, **_: object) -> None:  # noqa: N802
        return None

    def Image(self, _: object) -> None:  # noqa: N802
        return None

    def Artifact(self, *_: object, **__: object) -> MagicMock:  # noqa: N802
        return MagicMock()

    def log_artifact(self, _: object) -> None:
        return None

    def finish(self, exit_code: int) -> None:
        del exit_code
        if self.how == "hangs_at_the_end":
            time.sleep(3)
