"""Uploading later, against a service that keeps what W&B's own client sends it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvmap.files import read_json
from kvmap.locks import BuildLock
from kvmap.tracking import Metric, Run, read_metrics
from kvmap.tracking.__main__ import main
from kvmap.tracking.sync import LOCK, runs_to_send
from kvmap.tracking.wandb_files import segments_in
from tests.tracking.wandb_service import Service, attempt, logged

pytest.importorskip("wandb")


@pytest.mark.slow
def test_no_segment_is_lost_after_a_resume_and_none_is_sent_twice(
    tmp_path: Path, server: Service, capsys: pytest.CaptureFixture[str]
) -> None:
    first = attempt(tmp_path / "job", "a", "b", fails=True)
    assert attempt(tmp_path / "job", "a", "b", "c") == first
    assert main(["sync", str(tmp_path)]) == 0
    assert "1 sent" in capsys.readouterr().out
    assert logged(server, first) == ["a", "b", "a", "b", "c"]
    rows = server.rows(first)
    steps = [row["_step"] for row in rows]
    assert len(set(steps)) == len(steps)
    assert steps == sorted(steps)
    last = {key: value for row in rows for key, value in row.items()}
    for key, metric in read_metrics(tmp_path / "job").items():
        assert (last[key], last[f"{key}.n"]) == (metric.value, metric.n)
    assert server.settings[first]["groupName"] == "study"
    assert server.settings[first]["displayName"] == "study/job"

    posts = list(server.posts)
    assert main(["sync", str(tmp_path)]) == 0
    assert "0 runs to upload" in capsys.readouterr().out
    assert server.posts == posts


@pytest.mark.slow
def test_what_is_added_later_is_joined_and_what_broke_off_is_sent_again(
    tmp_path: Path, server: Service, capsys: pytest.CaptureFixture[str]
) -> None:
    name = attempt(tmp_path / "job", "a", fails=True)
    assert main(["sync", str(tmp_path)]) == 0
    attempt(tmp_path / "job", "b")
    assert main(["sync", "--dry-run", str(tmp_path)]) == 0
    assert "1 of 2 segments" in capsys.readouterr().out
    assert main(["sync", str(tmp_path)]) == 0
    assert logged(server, name) == ["a", "b"]
    # All rows have arrived, and the process that sent them dies before W&B sets its mark.
    segments_in(tmp_path)[-1].mark(".synced").unlink()
    assert main(["sync", str(tmp_path)]) == 0
    assert logged(server, name) == ["a", "b"]


@pytest.mark.slow
def test_two_jobs_stay_two_runs(tmp_path: Path, server: Service) -> None:
    names = [attempt(tmp_path / job, job) for job in ("x", "y")]
    assert main(["sync", str(tmp_path)]) == 0
    assert [logged(server, name) for name in names] == [["x"], ["y"]]


@pytest.mark.slow
def test_an_online_run_that_lost_its_service_is_uploaded_later(tmp_path: Path, server: Service) -> None:
    directory = tmp_path / "job"
    program = f"""
from pathlib import Path
from kvmap.tracking import Metric, Run
with Run(Path({str(directory)!r}), "study", {{}}, "wandb_online", seconds=20) as run:
    run.log({{"evaluate/task/mapped/a": Metric(1.0)}})
"""
    # W&B reads its environment once in a process.
    subprocess.run([sys.executable, "-c", program], check=True)
    name = read_json(directory / "run.json")["wandb"]["id"]
    assert logged(server, name) == ["a"]
    assert runs_to_send(tmp_path) == []  # all of it went out while it ran
    (segment,) = segments_in(tmp_path)
    segment.mark(".synced").unlink()
    server.lines.clear()
    assert main(["sync", str(tmp_path)]) == 0
    assert logged(server, name) == ["a"]


def test_listing_changes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = attempt(tmp_path / "job", "a")
    before = sorted(tmp_path.rglob("*"))
    assert main(["sync", "--dry-run", str(tmp_path)]) == 0
    assert f"{tmp_path / 'job'} ({name}): 1 of 1 segments" in capsys.readouterr().out
    assert sorted(tmp_path.rglob("*")) == before


def test_a_run_that_is_being_written_is_left(
    tmp_path: Path, server: Service, capsys: pytest.CaptureFixture[str]
) -> None:
    with Run(tmp_path / "job", "study", {}, "wandb") as run:
        run.log({"evaluate/task/mapped/a": Metric(1.0)})
        assert main(["sync", str(tmp_path)]) == 0
        assert f"process {os.getpid()}" in capsys.readouterr().out
    assert server.posts == []
    assert main(["sync", str(tmp_path)]) == 0
    assert len(server.lines) == 1


def test_what_another_process_uploads_is_left_to_it(
    tmp_path: Path, server: Service, capsys: pytest.CaptureFixture[str]
) -> None:
    attempt(tmp_path / "job", "a")
    lock = BuildLock(tmp_path / "job" / "wandb" / LOCK, stale_seconds=60)
    assert lock.try_acquire()
    with lock:
        assert main(["sync", str(tmp_path)]) == 0
    assert "is being uploaded by another process" in capsys.readouterr().out
    assert server.posts == []
