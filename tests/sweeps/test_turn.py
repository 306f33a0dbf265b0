"""Several processes want one point: one runs; of a holder that died the next takes over."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvmap.sweeps.register import Register
from kvmap.sweeps.states import read_state
from kvmap.sweeps.turn import DirectoryTaken, take_afresh, take_turn
from kvmap.tracking import Run, RunExists

STALE_SECONDS = 3.0
POINT = "00000000000000aa"

WORKER = f"""
import sys, time
from pathlib import Path
study, own, seconds, machine = sys.argv[1:]
import kvmap.locks
if machine:
    kvmap.locks.machine = lambda: machine
from kvmap.sweeps.register import Register
from kvmap.sweeps.turn import take_turn
from kvmap.tracking import Run
with take_turn(Register(Path(study), {STALE_SECONDS}), "{POINT}", Path(own)) as turn:
    print(turn.status, turn.directory, flush=True)
    if turn.runs:
        with Run(turn.directory, "study", {{}}, "none"):
            print("began", flush=True)
            time.sleep(float(seconds))
"""


class Worker:
    """A process that takes its turn and then works for some seconds."""

    def __init__(self, study: Path, own: str, seconds: float, machine: str = "") -> None:
        arguments = [str(study), str(study / own), str(seconds), machine]
        self.process = subprocess.Popen(
            [sys.executable, "-c", WORKER, *arguments], stdout=subprocess.PIPE, text=True
        )

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def end(self) -> str:
        """What it says until it ends."""
        out, _ = self.process.communicate(timeout=60)
        assert self.process.returncode == 0
        return out

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def work(tmp_path: Path) -> object:
    started: list[Worker] = []

    def begin(*arguments: object, **named: object) -> Worker:
        started.append(Worker(tmp_path, *arguments, **named))  # type: ignore[arg-type]
        return started[-1]

    yield begin
    for worker in started:
        if worker.process.poll() is None:
            os.kill(worker.process.pid, signal.SIGCONT)
            worker.kill()


Begin = Callable[..., Worker]


def finished(directory: Path) -> None:
    with Run(directory, "study", {}, "none"):
        pass


def test_of_several_at_once_one_runs(work: Begin, tmp_path: Path) -> None:
    said = [worker.end() for worker in [work(f"sweep/{n}", 1.5) for n in range(5)]]
    assert sum(text.startswith("new ") for text in said) == 1
    assert all(text.split()[0] in ("new", "running", "done") for text in said)
    assert len(list(tmp_path.glob("sweep/*/run.json"))) == 1


def test_a_killed_holder_is_followed_at_once_where_it_was(work: Begin, tmp_path: Path) -> None:
    first = work("sweep/0", 100)
    assert first.line() == f"new {tmp_path / 'sweep/0'}"
    assert first.line() == "began"
    assert read_state(Register(tmp_path), POINT).status == "running"
    first.kill()
    assert json.loads((tmp_path / "sweep/0/run.json").read_text())["status"] == "running"
    assert read_state(Register(tmp_path), POINT).status == "died"

    began = time.monotonic()
    assert work("sweep/1", 0).end().splitlines() == [f"resumed {tmp_path / 'sweep/0'}", "began"]
    assert time.monotonic() - began < 20
    record = json.loads((tmp_path / "sweep/0/run.json").read_text())
    assert record["status"] == "done"
    assert [attempt["status"] for attempt in record["attempts"]] == ["running"]
    assert read_state(Register(tmp_path), POINT).status == "done"


@pytest.mark.slow
def test_a_holder_on_another_machine_is_believed_while_its_heart_beats(work: Begin, tmp_path: Path) -> None:
    first = work("sweep/0", 100, machine="elsewhere.1")
    assert first.line().startswith("new ")
    assert first.line() == "began"
    assert work("sweep/1", 0).end().startswith("running ")

    first.kill()
    stopped = time.monotonic()
    assert read_state(Register(tmp_path, STALE_SECONDS), POINT).status == "running"  # nobody can know yet
    second = work("sweep/2", 0)
    assert second.line() == f"resumed {tmp_path / 'sweep/0'}"
    assert time.monotonic() - stopped > STALE_SECONDS
    assert second.line() == "began"
    second.end()


def test_a_dead_machine_s_point_counts_as_died_once_its_heart_stood_still(
    work: Begin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = work("sweep/0", 100, machine="elsewhere.1")
    assert (first.line()[:3], first.line()) == ("new", "began")
    first.kill()
    beat = (tmp_path / ".jobs" / f"{POINT}.lock").stat()
    register = Register(tmp_path, STALE_SECONDS)
    monkeypatch.setattr(register, "_now", lambda: beat.st_mtime + STALE_SECONDS - 0.1)
    assert read_state(register, POINT).status == "running"
    monkeypatch.setattr(register, "_now", lambda: beat.st_mtime + STALE_SECONDS + 0.1)
    assert read_state(register, POINT).status == "died"


def test_slurm_s_word_counts_after_missed_heartbeats(
    work: Begin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "5")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "2")
    first = work("sweep/0", 100, machine="elsewhere.1")
    assert (first.line()[:3], first.line()) == ("new", "began")
    first.kill()
    beat = (tmp_path / ".jobs" / f"{POINT}.lock").stat()
    register = Register(tmp_path, STALE_SECONDS)
    monkeypatch.setattr(register, "_now", lambda: beat.st_mtime + STALE_SECONDS / 2)
    squeue = tmp_path / "bin" / "squeue"
    squeue.parent.mkdir()
    monkeypatch.setenv("PATH", f"{squeue.parent}:{os.environ['PATH']}")
    from kvmap.sweeps import states

    for listed, expected in (("5_2\n5_3", "running"), ("5_3", "died")):
        squeue.write_text(f"#!/bin/sh\nprintf '{listed}\\n'\n")
        squeue.chmod(0o755)
        states._slurm_jobs.cache_clear()
        assert read_state(register, POINT).status == expected
    states._slurm_jobs.cache_clear()


def test_what_is_done_is_never_begun_again(tmp_path: Path) -> None:
    register, first = Register(tmp_path), tmp_path / "sweep" / "0"
    with take_turn(register, POINT, first) as turn:
        assert (turn.status, turn.directory, turn.runs) == ("new", first, True)
        finished(first)
    before = (first / "run.json").read_bytes()
    for own in (first, tmp_path / "sweep" / "1"):
        with take_turn(register, POINT, own) as turn:
            assert (turn.status, turn.directory, turn.runs) == ("done", first, False)
    assert (first / "run.json").read_bytes() == before
    assert not register.lock_path(POINT).exists()


def test_a_failed_run_is_gone_on_with_where_it_is(tmp_path: Path) -> None:
    register, first = Register(tmp_path), tmp_path / "sweep" / "0"
    with pytest.raises(ZeroDivisionError), take_turn(register, POINT, first), Run(first, "s", {}, "none"):
        raise ZeroDivisionError
    with take_turn(register, POINT, tmp_path / "sweep" / "1") as turn:
        assert (turn.status, turn.directory) == ("resumed", first)


def test_a_deleted_directory_counts_as_not_there(tmp_path: Path) -> None:
    register, first, second = Register(tmp_path), tmp_path / "a" / "0", tmp_path / "b" / "0"
    with take_turn(register, POINT, first):
        finished(first)
    (tmp_path / "a").rename(tmp_path / "thrown_away")
    assert read_state(register, POINT).status == "missing"
    with take_turn(register, POINT, second) as turn:
        assert (turn.status, turn.directory) == ("new", second)


def test_a_study_that_was_moved_is_known_as_before(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    with take_turn(Register(old), POINT, old / "sweep" / "0"):
        finished(old / "sweep" / "0")
    old.rename(new)
    with take_turn(Register(new), POINT, new / "sweep" / "1") as turn:
        assert (turn.status, turn.directory) == ("done", new / "sweep" / "0")


def test_a_run_made_afresh_takes_the_register_over_only_when_done(tmp_path: Path) -> None:
    register = Register(tmp_path)
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    with take_afresh(register, POINT, first) as turn:
        assert (turn.status, turn.directory) == ("new", first)
        finished(first)
    with pytest.raises(ZeroDivisionError), take_afresh(register, POINT, second):
        raise ZeroDivisionError
    assert register.directory(POINT) == first
    with take_afresh(register, POINT, third):
        assert register.directory(POINT) == first
        finished(third)
    assert register.directory(POINT) == third


def test_a_run_made_afresh_leaves_the_register_to_a_living_holder(work: Begin, tmp_path: Path) -> None:
    first = work("sweep/0", 100)
    assert (first.line()[:3], first.line()) == ("new", "began")
    register = Register(tmp_path)
    with take_afresh(register, POINT, tmp_path / "single"):
        finished(tmp_path / "single")
    assert register.directory(POINT) == tmp_path / "sweep" / "0"


def test_two_configurations_never_share_a_directory(work: Begin, tmp_path: Path) -> None:
    first = work("sweep/0", 100)
    assert (first.line()[:3], first.line()) == ("new", "began")
    other = "00000000000000bb"
    for take in (take_turn, take_afresh):
        with (
            pytest.raises(DirectoryTaken, match=str(first.process.pid)),
            take(Register(tmp_path), other, tmp_path / "sweep" / "0"),
        ):
            pass
    assert read_state(Register(tmp_path), other).status == "missing"
    with pytest.raises(RunExists):
        finished(tmp_path / "sweep" / "0")


def test_a_record_that_cannot_be_read_is_refused_by_name(tmp_path: Path) -> None:
    register, first = Register(tmp_path), tmp_path / "sweep" / "0"
    with take_turn(register, POINT, first):
        finished(first)
    (first / "run.json").write_text("{half")
    state = read_state(register, POINT)
    assert (state.status, str(first / "run.json") in str(state.error)) == ("failed", True)


def test_a_stopped_process_keeps_its_run_on_its_machine(work: Begin, tmp_path: Path) -> None:
    first = work("sweep/0", 1)
    assert (first.line()[:3], first.line()) == ("new", "began")
    os.kill(first.process.pid, signal.SIGSTOP)
    register = Register(tmp_path, stale_seconds=0.5)
    for own in ("1", "2"):  # at first its process is seen, and when the lock is another's, seen again
        with take_turn(register, POINT, tmp_path / "sweep" / own) as turn:
            assert (turn.status, turn.directory) == ("running", tmp_path / "sweep" / "0")
            assert str(first.process.pid) in str(turn.holder)
        register.lock_path(POINT).unlink(missing_ok=True)
    os.kill(first.process.pid, signal.SIGCONT)
    first.end()
    assert read_state(Register(tmp_path), POINT).status == "done"


@pytest.mark.slow
def test_a_process_that_was_followed_elsewhere_writes_no_more(work: Begin, tmp_path: Path) -> None:
    """It stood still for longer than is waited for; woken, it must not disturb who goes on with its run."""
    run = tmp_path / "sweep" / "0"
    first = work("sweep/0", 2, machine="elsewhere.1")
    assert (first.line()[:3], first.line()) == ("new", "began")
    os.kill(first.process.pid, signal.SIGSTOP)
    second = work("sweep/1", 6)
    assert second.line() == f"resumed {run}"
    assert second.line() == "began"
    before = (run / "run.json").read_bytes()
    os.kill(first.process.pid, signal.SIGCONT)
    first.process.wait(timeout=30)
    assert first.process.returncode == 1  # it said so, and ended
    assert (run / "run.json").read_bytes() == before
    second.end()
    record = json.loads((run / "run.json").read_text())
    assert (record["status"], record["host"]["process"]["pid"]) == ("done", second.process.pid)
