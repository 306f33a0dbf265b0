"""A signal ends a run in good order: real processes and signals, submitit's handler, a noting `scontrol`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from kvmap import preemption
from kvmap.files import read_json
from kvmap.preemption import EXIT_PREEMPTED, Preempted, time_is_up, wants_requeue, watched

BOTH = ("SIGTERM", "SIGUSR2")
RUN = """
import sys, time
from pathlib import Path
from kvmap.preemption import watched
from kvmap.tracking import Run

directory, seconds = Path(sys.argv[1]), float(sys.argv[2])
with watched(), Run(directory, "study", {}, "none", argv=[]) as run:
    with run.stage("fit"):
        run.table("half", [{"a": 1}])
        print("ready", flush=True)
        time.sleep(seconds)
    print("ran", flush=True)
"""


def start(program: str, *arguments: object) -> subprocess.Popen[str]:
    """A process that has said `ready`."""
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program), *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line == "ready\n", line + (process.stderr.read() if process.stderr else "")
    return process


@pytest.mark.parametrize("name", BOTH)
def test_a_signalled_run_is_recorded_and_the_next_start_goes_on(tmp_path: Path, name: str) -> None:
    process = start(RUN, tmp_path, 60)
    process.send_signal(getattr(signal, name))
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (EXIT_PREEMPTED, "")
    assert f"preempted ({name})" in err
    record = read_json(tmp_path / "run.json")
    assert (record["status"], record["stages"]["fit"]["status"]) == ("preempted", "preempted")
    assert record["error"] == f"Preempted: {name}"

    again = start(RUN, tmp_path, 0)
    assert again.communicate(timeout=30)[0] == "ran\n"
    assert again.returncode == 0
    record = read_json(tmp_path / "run.json")
    assert record["status"] == "done"
    assert [attempt["status"] for attempt in record["attempts"]] == ["preempted"]
    assert (tmp_path / "attempt-1" / "tables" / "half.csv").is_file()


def raised_at(action: Any) -> list[str]:
    """The signals by which what `action` does was ended."""
    try:
        with watched():
            action()
    except Preempted as preempted:
        return [str(preempted)]
    return []


def test_no_clause_for_exceptions_swallows_it() -> None:
    def stubborn() -> None:
        try:
            signal.raise_signal(signal.SIGTERM)
        except Exception:
            pytest.fail("swallowed")

    assert raised_at(stubborn) == ["SIGTERM"]


def test_uncaught_it_is_the_exit_status() -> None:
    assert Preempted("SIGTERM").code == EXIT_PREEMPTED


def test_where_it_was_swallowed_the_next_check_raises_it_again() -> None:
    swallowed = []

    def careless() -> None:
        try:
            signal.raise_signal(signal.SIGUSR2)
        except BaseException:
            swallowed.append(True)
        preemption.check()

    assert raised_at(careless) == ["SIGUSR2"]
    assert swallowed


def test_a_second_signal_does_not_disturb_the_end() -> None:
    unwound = []

    def ends() -> None:
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            signal.raise_signal(signal.SIGUSR2)
            unwound.append(True)

    assert raised_at(ends) == ["SIGTERM"]
    assert unwound


def test_put_off_it_waits_for_the_next_check() -> None:
    reached = []

    def writes() -> None:
        with preemption.put_off():
            signal.raise_signal(signal.SIGTERM)
            reached.append("in the block")
        reached.append("after it")
        preemption.check()

    assert raised_at(writes) == ["SIGTERM"]
    assert reached == ["in the block", "after it"]


def test_a_run_that_ends_as_the_signal_comes_is_done_and_no_other_starts(tmp_path: Path) -> None:
    program = """
    import os, signal, sys
    from pathlib import Path
    from kvmap.tracking import run as tracking
    from kvmap.preemption import watched

    write = tracking.write_json
    def struck(path, content):
        if content.get("status") == "done":
            print("ready", flush=True)
            os.kill(os.getpid(), signal.SIGTERM)
        write(path, content)
    tracking.write_json = struck
    with watched(), tracking.Run(Path(sys.argv[1]), "study", {}, "none", argv=[]):
        pass
    print("the next job", flush=True)
    """
    process = start(program, tmp_path)
    assert process.communicate(timeout=30)[0] == ""
    assert process.returncode == -signal.SIGTERM
    assert read_json(tmp_path / "run.json")["status"] == "done"


def test_outside_the_main_thread_nothing_is_watched() -> None:
    handlers: list[Any] = []

    def look() -> None:
        with watched():
            handlers.extend(signal.getsignal(each) for each in preemption.SIGNALS)

    before = [signal.getsignal(each) for each in preemption.SIGNALS]
    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert handlers == before


def test_the_handlers_before_come_back() -> None:
    before = [signal.getsignal(each) for each in preemption.SIGNALS]
    raised_at(lambda: signal.raise_signal(signal.SIGTERM))
    assert [signal.getsignal(each) for each in preemption.SIGNALS] == before


RUNNING = {"JobState": "RUNNING", "PreemptTime": "None"}
PREEMPTED = {"JobState": "RUNNING", "PreemptTime": "2026-01-01T10:00:00"}
CANCELLED = {"JobState": "CANCELLED", "PreemptTime": "None"}


@pytest.mark.parametrize(
    ("heard", "job", "wanted"),
    [
        (["SIGUSR2"], RUNNING, True),
        (["SIGTERM", "SIGUSR2"], RUNNING, True),
        (["SIGTERM"], PREEMPTED, True),
        (["SIGTERM"], RUNNING, False),
        (["SIGTERM"], CANCELLED, False),
        (["SIGUSR2"], CANCELLED, False),
        (["SIGUSR2"], {"JobState": "COMPLETING"}, False),
        (["SIGUSR2"], {}, False),
    ],
)
def test_only_a_running_job_that_should_come_back_is_requeued(
    heard: list[str], job: dict[str, str], wanted: bool
) -> None:
    assert wants_requeue(heard, job) is wanted


@pytest.mark.parametrize(
    ("left", "preempted", "up"),
    [(100, False, True), (184, False, True), (186, False, False), (100, True, False), (None, False, False)],
)
def test_time_is_up_within_the_warning_and_a_minute(left: int | None, preempted: bool, up: bool) -> None:
    now = time.time()
    end = "Unknown" if left is None else datetime.fromtimestamp(now + left).isoformat()
    job = {**(PREEMPTED if preempted else RUNNING), "EndTime": end}
    assert time_is_up(job, now, signal_delay_s=120) is up


class Checkpointable:
    """What submitit can put back: the launcher, in a sweep."""

    def __call__(self) -> None:
        """The job."""

    def checkpoint(self) -> Any:
        """The same once more."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Inside a job 12_3 of a two-minute limit that has run for one; `scontrol` notes what it is asked."""
    asked = tmp_path / "asked"
    asked.touch()
    facts = tmp_path / "facts"
    scontrol = tmp_path / "bin" / "scontrol"
    scontrol.parent.mkdir()
    scontrol.write_text(f'#!/bin/sh\necho "$@" >> {asked}\n[ "$1" = requeue ] || cat {facts}\n')
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", f"{scontrol.parent}:{os.environ['PATH']}")
    for name, value in {
        "SUBMITIT_EXECUTOR": "slurm",
        "SUBMITIT_FOLDER": str(tmp_path / "%j"),
        "SLURM_JOB_ID": "15",
        "SLURM_ARRAY_JOB_ID": "12",
        "SLURM_ARRAY_TASK_ID": "3",
        "SLURM_PROCID": "0",
    }.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "12_3").mkdir()
    say(tmp_path, JobState="RUNNING", PreemptTime="2026-01-01T10:00:00", EndTime="2026-01-01T10:01:00")
    return tmp_path


def say(slurm: Path, **facts: str) -> None:
    words = " ".join(f"{name}={value}" for name, value in facts.items())
    (slurm / "facts").write_text(f"JobId=15 {words} Command=/a/JobState=COMPLETED Comment=EndTime=never\n")


def submitit_job(timeouts: int) -> Any:
    """Installs submitit's handlers for a job of two minutes, as it does before it calls the job."""
    from submitit.core.job_environment import JobEnvironment
    from submitit.core.utils import DelayedSubmission

    delayed = DelayedSubmission(Checkpointable())
    delayed.set_timeout(2, timeouts)
    environment = JobEnvironment()
    environment._handle_signals(environment.paths, delayed)
    return environment.paths.submitted_pickle


@pytest.fixture
def own_handlers() -> Any:
    signals = [signal.SIGTERM, signal.SIGCONT, signal.SIGUSR2]
    before = {each: signal.getsignal(each) for each in signals}
    yield
    for each, handler in before.items():
        signal.signal(each, handler)


def requests(slurm: Path) -> list[str]:
    return [line for line in (slurm / "asked").read_text().splitlines() if line.startswith("requeue")]


@pytest.mark.usefixtures("own_handlers")
class TestUnderSubmitit:
    """`submitit#1656`: by itself it takes any signal to a short job for a time-out."""

    def test_alone_it_gives_up_a_short_preempted_job(self, slurm: Path) -> None:
        from submitit.core.utils import UncompletedJobError

        submitit_job(timeouts=0)
        with pytest.raises(UncompletedJobError, match="timed-out too many times"):
            signal.raise_signal(signal.SIGUSR2)
        assert requests(slurm) == []

    @pytest.mark.parametrize("name", BOTH)
    def test_a_short_preempted_job_is_requeued_after_it_has_unwound(self, slurm: Path, name: str) -> None:
        pickled = submitit_job(timeouts=0)
        order = []

        def job() -> None:
            try:
                signal.raise_signal(getattr(signal, name))
            finally:
                order.extend(["unwound", *requests(slurm)])

        assert raised_at(job) == [name]
        assert order == ["unwound"]
        assert requests(slurm) == ["requeue 12_3"]
        assert pickled.is_file()

    def test_a_timed_out_job_is_requeued_so_often_and_no_oftener(self, slurm: Path) -> None:
        from submitit.core.utils import DelayedSubmission, UncompletedJobError

        say(slurm, JobState="RUNNING", PreemptTime="None", EndTime=datetime.now().isoformat())
        pickled = submitit_job(timeouts=1)
        assert raised_at(lambda: signal.raise_signal(signal.SIGUSR2)) == ["SIGUSR2"]
        assert requests(slurm) == ["requeue 12_3"]
        assert DelayedSubmission.load(pickled)._timeout_countdown == 0
        submitit_job(timeouts=0)
        with pytest.raises(UncompletedJobError, match="timed-out too many times"), watched():
            signal.raise_signal(signal.SIGUSR2)
        assert requests(slurm) == ["requeue 12_3"]

    def test_a_cancelled_job_stays_cancelled(self, slurm: Path) -> None:
        say(slurm, JobState="CANCELLED", PreemptTime="None", EndTime="2026-01-01T10:01:00")
        submitit_job(timeouts=3)
        assert raised_at(lambda: signal.raise_signal(signal.SIGTERM)) == ["SIGTERM"]
        assert (slurm / "asked").read_text() == "-o show job 15\n"

    def test_where_slurm_does_not_answer_the_run_still_ends_in_order(
        self, slurm: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (slurm / "bin" / "scontrol").write_text(
            '#!/bin/sh\n[ "$1" = requeue ] && exit 1\ncat ' + f"{slurm}/facts"
        )
        submitit_job(timeouts=3)
        assert raised_at(lambda: signal.raise_signal(signal.SIGUSR2)) == ["SIGUSR2"]
        assert "not requeued" in capsys.readouterr().err
