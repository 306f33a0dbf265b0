"""Uploading what was cut short, and to a service that does not take it."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from kvmap.tracking.__main__ import main
from kvmap.tracking.sync import runs_to_send
from kvmap.tracking.wandb_files import segments_in
from tests.tracking.wandb_service import Service, attempt, logged

pytest.importorskip("wandb")


@pytest.mark.slow
def test_a_segment_that_was_cut_short_does_not_hold_up_the_next(
    tmp_path: Path, server: Service, capsys: pytest.CaptureFixture[str]
) -> None:
    name = attempt(tmp_path / "job", "a", *"b" * 60, fails=True)
    attempt(tmp_path / "job", "c")
    torn, _ = segments_in(tmp_path)
    whole = torn.file.read_bytes()
    torn.file.write_bytes(whole[: len(whole) // 2])
    empty = tmp_path / "job" / "wandb" / f"offline-run-20200101_000000-{name}" / torn.file.name
    empty.parent.mkdir()
    empty.touch()
    assert main(["sync", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "cut short before it held anything" in said
    assert "ends in half a record" in said
    found = logged(server, name)
    assert found[0] == "a"
    assert found[-1] == "c"
    assert 5 < len(found) < 62
    assert runs_to_send(tmp_path) == []


@pytest.mark.slow
def test_a_killed_attempt_is_uploaded_with_the_next_under_one_id(tmp_path: Path, server: Service) -> None:
    program = f"""
import os, signal
from pathlib import Path
from kvmap.tracking import Metric, Run
with Run(Path({str(tmp_path / "job")!r}), "study", {{}}, "wandb") as run:
    for row in range(6):  # W&B writes whole blocks of 32 KiB
        run.log({{f"evaluate/task/mapped/old{{row}}_{{number}}": Metric(1.0, 10) for number in range(300)}})
    os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == -signal.SIGKILL
    killed = json.loads((tmp_path / "job" / "run.json").read_text())
    assert killed["status"] == "running"
    name = attempt(tmp_path / "job", "new")
    assert name == killed["wandb"]["id"]
    assert main(["sync", str(tmp_path)]) == 0
    found = logged(server, name)
    assert found.count("old0_0") == 1
    assert found[-1] == "new"


@pytest.mark.slow
def test_what_the_service_refuses_is_said_and_tried_again(
    tmp_path: Path, server: Service, capsys: pytest.CaptureFixture[str]
) -> None:
    name = attempt(tmp_path / "job", "a")
    server.refused.add("UpsertBucket")
    assert main(["sync", "--timeout", "20", str(tmp_path)]) == 1
    captured = capsys.readouterr()
    assert "failed" in captured.err
    assert name in captured.err
    server.refused.clear()
    assert main(["sync", str(tmp_path)]) == 0
    assert logged(server, name) == ["a"]


@pytest.mark.parametrize("how", ["refuses", "is silent"])
def test_a_service_that_cannot_be_reached_is_named(
    tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    attempt(tmp_path / "job", "a")
    monkeypatch.setattr("kvmap.tracking.sync.SECONDS_TO_REACH", 0.3)
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        if how == "is silent":
            place.listen()
        address = f"http://127.0.0.1:{place.getsockname()[1]}"
        monkeypatch.setenv("WANDB_BASE_URL", address)
        assert main(["sync", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert address in said
    assert "cannot be reached" in said
    assert len(runs_to_send(tmp_path)) == 1


@pytest.mark.slow
def test_an_upload_that_does_not_come_to_an_end_is_given_up(
    tmp_path: Path, server: Service, capsys: pytest.CaptureFixture[str]
) -> None:
    attempt(tmp_path / "job", "a")
    server.silent.add("UpsertBucket")
    assert main(["sync", "--timeout", "4", str(tmp_path)]) == 1
    assert "not done within 4 s" in capsys.readouterr().err
    assert len(runs_to_send(tmp_path)) == 1


def test_a_wrong_path_is_wrong_usage(tmp_path: Path) -> None:
    assert main(["sync", str(tmp_path / "nothing")]) == 2
    with pytest.raises(SystemExit) as stopped:
        main(["sync", "--jobs", "0", str(tmp_path)])
    assert stopped.value.code == 2
