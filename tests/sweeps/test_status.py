"""How far a study got, in every state that a point can be in; and starting again exactly what is not done."""

from __future__ import annotations

import json
import os
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvmap.locks import machine, process_start
from kvmap.sweeps.board import Board
from kvmap.sweeps.register import Register
from kvmap.sweeps.resubmit import choose
from kvmap.sweeps.submission import Point, write_submission
from kvmap.tracking import Metric, Run
from tests.sweeps.conftest import Sweep, contents, records, summary, sweep_directories, top_k_of

STATES = ("done", "running", "preempted", "died", "failed", "missing", "refused", "deleted")
EXPECTED = {
    **{state: state for state in STATES},
    "refused": "failed",  # a job that ended before there was a run
    "deleted": "missing",
}


def write_points(sweep: Path, names: tuple[str, ...]) -> None:
    points = [Point(n, (f"mapper.kind={name}", "seed=0"), identity(name)) for n, name in enumerate(names)]
    write_submission(
        sweep,
        points,
        study=sweep.parent.name,
        outputs=sweep.parent.parent,
        hydra_overrides=["hydra/launcher=slurm", "hydra.mode=MULTIRUN"],
        task_overrides=[f"mapper.kind={','.join(names)}", "seed=0"],
        files={},
    )


def identity(name: str) -> str:
    return name.encode().hex()[:16].ljust(16, "0")


def leave(run: Path, **facts: Any) -> None:
    """Changes the record that a run left."""
    record = json.loads((run / "run.json").read_text())
    record.update(facts)
    (run / "run.json").write_text(json.dumps(record))


@pytest.fixture
def study(tmp_path: Path) -> Path:
    """A study with one sweep, and one point in every state."""
    study = tmp_path / "study"
    sweep, register = study / "sweep", Register(study)
    write_points(sweep, STATES)
    for number, name in enumerate(STATES):
        if name in ("missing", "refused"):
            continue
        run = sweep / str(number)
        register.record(identity(name), run)
        with Run(run, "study", {"mapper": {"kind": name}}, "none") as record:
            record.log({"evaluate/x/mapped/accuracy": Metric(number)})
        leave(run, status=name if name in ("preempted", "failed") else "done")
    here = {"machine": machine(), "pid": os.getpid(), "start": process_start(os.getpid())}
    gone = {**here, "pid": 2**22 + 1}
    for name, process in (("running", here), ("died", gone)):
        host = {"host": "node7", "process": process}
        leave(sweep / str(STATES.index(name)), status="running", host=host)
    leave(sweep / "4", error="OutOfMemory: no room for 3 GiB")
    (sweep / "6").mkdir()
    (sweep / "6" / "refused.json").write_text(json.dumps({"error": "2 mistakes:\n  - a\n  - b"}))
    shutil.rmtree(sweep / "7")
    with register.lock(identity("running")) as lock:
        assert lock.try_acquire()
        (register.lock_path(identity("died"))).write_text("{}")
        yield study


def test_every_state_is_told_apart(study: Path, status: Sweep) -> None:
    code, out, _ = status(str(study), "--json")
    assert code == 1
    found = json.loads(out)
    assert {p["overrides"][0]: p["status"] for p in found["points"]} == {
        f"mapper.kind={name}": expected for name, expected in EXPECTED.items()
    }
    assert found["counts"] == {"done": 1, "running": 1, "preempted": 1, "died": 1, "failed": 2, "missing": 2}
    assert found["all_done"] is False
    points = {point["overrides"][0].split("=")[1]: point for point in found["points"]}
    assert points["failed"]["error"] == "OutOfMemory: no room for 3 GiB"
    assert points["failed"]["log"] == str(study / "sweep" / "4" / "run.log")
    assert points["refused"]["error"] == "2 mistakes: - a - b"
    assert points["running"]["holder"] == f"process {os.getpid()} on node7"
    assert "its process is gone" in points["died"]["error"]


def test_the_table_names_errors_and_logs(study: Path, status: Sweep) -> None:
    code, out, _ = status(str(study))
    assert code == 1
    assert "failed " + identity("failed") + ": OutOfMemory: no room for 3 GiB" in out
    assert f"log: {study}/sweep/4/run.log" in out
    assert "8 points: 1 done, 1 running, 1 preempted, 1 died, 2 failed, 2 missing" in out
    assert "mapper.kind=preempted" in out
    assert "seed=0" not in out  # all have it


def test_the_summary_has_each_identity_once_in_its_newest_state(study: Path, status: Sweep) -> None:
    """A second sweep finds some of the points again, and one run was made singly."""
    write_points(study / "later", ("failed", "done", "new"))
    with Run(study / "single", "study", {"mapper": {"kind": "single"}}, "none"):
        pass
    Register(study).record(identity("single"), study / "single")
    assert status(str(study))[0] == 1
    rows = {row["identity"]: row for row in summary(study)}
    assert len(rows) == len(summary(study)) == len(STATES) + 2
    expected = {**EXPECTED, "new": "missing", "single": "done"}
    assert {key: row["status"] for key, row in rows.items()} == {
        identity(name): status for name, status in expected.items()
    }
    assert rows[identity("done")]["job"] == "sweep/0"
    assert rows[identity("failed")]["evaluate/x/mapped/accuracy"] == "4.0"
    assert rows[identity("new")]["mapper.kind"] == ""
    assert rows[identity("new")]["overrides"] == "mapper.kind=new"
    # of a sweep, its own points alone
    status(str(study / "later"))
    assert [row["overrides"] for row in summary(study / "later")] == [
        "mapper.kind=failed",
        "mapper.kind=done",
        "mapper.kind=new",
    ]


@pytest.mark.parametrize(
    ("which", "names"),
    [
        ("failed", {"failed", "refused", "died", "preempted"}),
        ("missing", {"missing", "deleted"}),
        ("all", {"failed", "refused", "died", "preempted", "missing", "deleted"}),
    ],
)
def test_what_is_done_or_running_is_never_started_again(
    study: Path, status: Sweep, which: str, names: set[str]
) -> None:
    ((submission, entries),) = choose(Board.read(study).entries, which)
    assert submission.directory == study / "sweep"
    assert {entry.identity for entry in entries} == {identity(name) for name in names}
    code, out, _ = status(str(study), "--resubmit", which, "--dry-run")
    assert code == 1
    commands = [shlex.split(line) for line in out.splitlines()]
    start = ["python", "-m", "kvmap.run", "-m", "hydra/launcher=slurm"]
    assert sorted(commands) == sorted(
        [*start, f"mapper.kind={name}", "seed=0", f"outputs={study.parent}"] for name in names
    )


def test_each_point_is_started_with_its_last_submission(study: Path) -> None:
    write_points(study / "later", ("failed", "missing"))
    chosen = choose(Board.read(study).entries, "all")
    assert [(s.directory.name, len(entries)) for s, entries in chosen] == [("later", 2), ("sweep", 4)]


def test_a_folder_that_is_no_study_is_refused(tmp_path: Path, status: Sweep) -> None:
    code, _, err = status(str(tmp_path))
    assert (code, "holds neither */submission.json nor .jobs/" in err) == (2, True)


@pytest.mark.slow
def test_only_what_failed_is_started_again(
    start: Sweep, status: Sweep, tmp_path: Path, fail_at: Callable[[Any], None]
) -> None:
    study = tmp_path / "debug"
    fail_at(2)
    assert start("-m", "mapper.top_k=1,2")[0] == 1
    before = contents(study)
    assert len(before) > 4
    code, out, _ = status(str(study), "--resubmit", "failed")  # it fails again
    assert (code, "1 done, 1 failed" in out) == (1, True)
    fail_at(None)
    code, out, err = status(str(study), "--resubmit", "failed")
    assert (code, "2 points: 2 done" in out) == (0, True), err
    assert sorted(top_k_of(study)) == [1, 2]
    assert {file: file.read_bytes() for file in before} == before
    (failed,) = (record for record in records(study).values() if record["config"]["mapper"]["top_k"] == 2)
    assert [attempt["status"] for attempt in failed["attempts"]] == ["failed", "failed"]
    # A sweep of the one point alone, which refers to it where it was.
    assert [sorted(path.name for path in sweep.glob("[0-9]*")) for sweep in sweep_directories(study)] == [
        ["0", "1"],
        ["0"],
        ["0"],
    ]
    assert status(str(study), "--resubmit", "all")[0] == 0  # nothing is left


@pytest.mark.slow
def test_what_was_never_started_is_started_with_the_same_values(
    start: Sweep, status: Sweep, tmp_path: Path
) -> None:
    """An awkward value, a job whose directory was deleted, and an outputs folder of its own."""
    outputs = tmp_path / "the outputs"
    value = "it's/a, b=[c]"
    given = value.replace("'", "\\'")
    start("-m", f"calibration.data.path='{given}',x", f"outputs='{outputs}'")
    study = outputs / "debug"
    shutil.rmtree(sweep_directories(study)[0] / "0")
    code, out, err = status(str(study), "--resubmit", "missing")
    assert (code, "2 points: 2 done" in out) == (0, True), err
    paths = [record["config"]["calibration"]["data"]["path"] for record in records(study).values()]
    assert sorted(paths) == sorted([value, "x"])
