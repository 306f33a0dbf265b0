from __future__ import annotations

import csv
import json
import logging
import math
import os
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvmap.errors import KvmapError
from kvmap.files import read_json
from kvmap.progress import HideProgress, track
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
    return {name for name in files if not name.startswith("wandb/")}


def wandb_records(directory: Path) -> list[Any]:
    """Records of the offline W&B run, its exit included.

    W&B's own process writes them, and may do so a moment after `finish` has returned.
    """
    deadline = time.monotonic() + 20
    while True:
        records = list(_records_so_far(directory))
        if any(entry.HasField("exit") for entry in records):
            return records
        assert time.monotonic() < deadline, f"no exit record among {len(records)} records"
        time.sleep(0.1)


def _records_so_far(directory: Path) -> Iterator[Any]:
    """Whole records of the file: protobuf in LevelDB's log format, blocks of 32 KiB."""
    pb = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    (file,) = (directory / "wandb").glob("offline-run-*/run-*.wandb")
    data, block, header = file.read_bytes(), 32768, 7
    place, parts = header, b""  # the file begins with a header as long as a record's
    while place + header <= len(data):
        if block - place % block < header:  # too little is left in this block for a record
            place += block - place % block
            continue
        _, length, kind = struct.unpack("<IHB", data[place : place + header])
        if place + header + length > len(data):
            return
        parts += data[place + header : place + header + length]
        place += header + length
        if kind in (1, 4):  # a whole record, or the last part of one
            entry = pb.Record()
            entry.ParseFromString(parts)
            parts = b""
            yield entry


@pytest.mark.parametrize("backend", ["none", "wandb"])
def test_local_files_are_the_same_with_and_without_wandb(tmp_path: Path, backend: str) -> None:
    with Run(tmp_path / "run", "study", {"mapper": {"top_k": 8}}, backend, seeds={"calibration": 3}) as run:
        do_work(run)
    log = {"run.json", "metrics.json", "run.log", "tables/arms.csv", "figures/empty.png"}
    assert local_files(tmp_path / "run") - {"dirty.diff"} == log
    assert (tmp_path / "run" / "wandb").exists() == (backend == "wandb")


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


class TestWandb:
    def test_offline_run_holds_what_the_local_files_hold(self, tmp_path: Path) -> None:
        pytest.importorskip("wandb")
        config = {"mapper": {"top_k": 8}, "pair": "tiny"}
        with Run(tmp_path / "job", "study", config, "wandb") as run:
            do_work(run)
            run.log({f"evaluate/many/mapped/metric_{index}": Metric(float(index)) for index in range(3000)})
        logged: dict[str, Any] = {}
        settings: dict[str, Any] = {}
        starts, ends = [], []
        for entry in wandb_records(tmp_path / "job"):
            if entry.HasField("run"):
                starts.append(entry.run)
                updates = entry.run.config.update
                settings.update({item.key: json.loads(item.value_json) for item in updates})
            elif entry.HasField("history"):
                for item in entry.history.item:
                    logged["/".join(item.nested_key) or item.key] = json.loads(item.value_json)
            elif entry.HasField("exit"):
                ends.append(entry.exit.exit_code)
        for key, metric in read_metrics(tmp_path / "job").items():
            assert logged[key] == metric.value or math.isnan(float(logged[key]))
            assert logged.get(f"{key}.n") == metric.n
            assert logged.get(f"{key}.standard_error") == metric.standard_error
        for picture in ("tables/arms", "figures/empty"):
            assert any(key.startswith(picture) for key in logged)
        assert settings.items() >= config.items()
        assert {start.run_id for start in starts} == {record(tmp_path / "job")["wandb"]["id"]}
        assert ends == [0]

    def test_two_runs_in_one_process_do_not_share_one(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pytest.importorskip("wandb")
        monkeypatch.setenv("WANDB_RUN_ID", "shared")
        for name in ("a", "b"):
            with Run(tmp_path / name, "study", {}, "wandb") as run:
                run.log({f"x/y/z/{name}": Metric(1.0)})
        assert record(tmp_path / "a")["wandb"]["id"] != record(tmp_path / "b")["wandb"]["id"]
        for name in ("a", "b"):
            assert len(list((tmp_path / name / "wandb").glob("offline-run-*"))) == 1

    @pytest.mark.parametrize("broken", ["absent", "raises", "exits", "hangs", "breaks_later"])
    def test_a_failing_wandb_costs_a_warning_only(
        self, tmp_path: Path, broken: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setitem(sys.modules, "wandb", None if broken == "absent" else BrokenWandb(broken))
        began = time.monotonic()
        with Run(tmp_path, "study", {}, "wandb", wandb_seconds=0.3) as run:
            do_work(run)
        assert time.monotonic() - began < 5
        assert record(tmp_path)["status"] == "done"
        assert len(read_metrics(tmp_path)) == len(METRICS)
        assert [line for line in caplog.messages if "W&B" in line] == [
            line for line in caplog.messages if "going on without it" in line
        ]
        assert caplog.text.count("going on without it") == 1


class BrokenWandb:
    """Stands in for the package, and fails in a chosen way."""

    def __init__(self, how: str) -> None:
        self.how = how

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

    def log(self, _: object) -> None:
        raise ConnectionError("lost")

    def finish(self, exit_code: int) -> None:
        del exit_code


class TestProgress:
    def test_gives_every_item_and_says_when_it_is_done(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO, "kvmap")
        assert list(track(range(5), description="calibrate")) == [0, 1, 2, 3, 4]
        assert list(track((item for item in "ab"), description="read")) == ["a", "b"]
        assert "calibrate: 5 done in" in caplog.messages[0]
        assert "read: 2 done in" in caplog.messages[1]

    def test_says_how_far_and_how_long_to_go(
        self, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        clock = iter(range(0, 1000, 6))
        monkeypatch.setattr("kvmap.progress.time.monotonic", lambda: float(next(clock)))
        caplog.set_level(logging.INFO, "kvmap")
        list(track(range(5), description="fit"))
        assert caplog.messages[0] == "fit: 2 of 5 (40 %), 18 s to go"
        assert len(caplog.messages) == 3

    def test_draws_one_display_for_nested_loops_on_a_terminal(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
        line = logging.LogRecord("kvmap.progress", logging.INFO, "", 0, "fit", (), None)
        pairs = []
        for outer in track(range(2), description="layers"):
            for inner in track(range(2), description="heads"):
                pairs.append((outer, inner))
                assert not HideProgress().filter(line)
        assert pairs == [(0, 0), (0, 1), (1, 0), (1, 1)]
        assert HideProgress().filter(line)
