"""Being told to stop: SIGTERM and SIGUSR2 end a run in good order, and Slurm gets its job back.

The signal raises `Preempted` in the main thread. What runs unwinds, records the status `preempted` and keeps
what it has finished; then, and only then, a job that submitit started is requeued. The next start goes on
from there.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from types import FrameType
from typing import Any

EXIT_PREEMPTED = 143
SIGNALS = (signal.SIGTERM, signal.SIGUSR2)
SECONDS_FOR_SLURM = 30.0
# Slurm looks at time limits once a minute, so its warning may come that much before it is due.
SECONDS_OF_SLURM_CLOCK = 65.0


class Preempted(SystemExit):
    """A signal asks for the end. No `except Exception` swallows it; uncaught, the process exits with 143."""

    def __init__(self, reason: str) -> None:
        """Args: the signal's name, for the record."""
        super().__init__(reason)
        self.code = EXIT_PREEMPTED


class _Watch:
    """What was heard since the watch began, and whether it may take effect."""

    def __init__(self) -> None:
        self.heard: list[signal.Signals] = []
        self.held = 0

    def hear(self, signum: int, frame: FrameType | None) -> None:
        """The handler. The first signal ends what runs; those that follow find the end under way."""
        self.heard.append(signal.Signals(signum))
        if len(self.heard) == 1:
            self.check()

    def check(self) -> None:
        if self.heard and not self.held:
            raise Preempted(self.heard[0].name)


_watch: _Watch | None = None


@contextmanager
def watched(signal_delay_s: float = 120.0) -> Iterator[None]:
    """SIGTERM or SIGUSR2 ends the block with `Preempted`, and then requeues the Slurm job it runs in.

    The handlers that were there come back at the end. Outside the main thread, where Python delivers no
    signals, and inside another watch it does nothing.

    Args:
        signal_delay_s: How long before its time limit Slurm warns the job: by that a time-out is known.

    Raises:
        Preempted: A signal came; the run is recorded, and the job requeued where that was meant.
    """
    global _watch
    if _watch is not None or threading.current_thread() is not threading.main_thread():
        yield
        return
    watch = _watch = _Watch()
    before = {each: signal.getsignal(each) or signal.SIG_DFL for each in SIGNALS}
    try:
        for each in SIGNALS:
            signal.signal(each, watch.hear)
        yield
    except Preempted as preempted:
        print(f"kvmap: preempted ({preempted}); what was finished is kept", file=sys.stderr, flush=True)
        _requeue(before[SIGNALS[-1]], watch.heard, signal_delay_s)
        raise
    finally:
        _watch = None
        for each, handler in before.items():
            signal.signal(each, handler)
    if watch.heard and not _in_submitit():
        signal.raise_signal(watch.heard[0])  # it came when all was done: a sweep in one process stops here


@contextmanager
def put_off() -> Iterator[None]:
    """A signal that comes in this block waits for the next `check`: for writing how a run began and ended."""
    watch = _watch
    if watch is None:
        yield
        return
    watch.held += 1
    try:
        yield
    finally:
        watch.held -= 1


def check() -> None:
    """Raises where a signal was put off, or was raised at a place that swallows exceptions (a finalizer).

    Raises:
        Preempted: see above.
    """
    if _watch is not None and threading.current_thread() is threading.main_thread():
        _watch.check()


def slurm_job() -> dict[str, str]:
    """What Slurm says of the job this process runs in; empty outside one, or where Slurm does not answer."""
    if "SLURM_JOB_ID" not in os.environ:
        return {}
    command = ["scontrol", "-o", "show", "job", os.environ["SLURM_JOB_ID"]]
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, timeout=SECONDS_FOR_SLURM, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    # Later words may be anybody's text (paths, comments): the first of a name is Slurm's own.
    pairs = [word.split("=", 1) for word in answer.split() if "=" in word]
    return dict(reversed(pairs))


def wants_requeue(heard: Sequence[str], job: Mapping[str, str]) -> bool:
    """Whether a job that was told to stop is to come back, and nobody but itself will see to it.

    SIGUSR2 says so. SIGTERM alone also comes with a cancellation, and from anybody's hand.

    Args:
        heard: The names of the signals.
        job: As `slurm_job` gives it.
    """
    if job.get("JobState") != "RUNNING":  # cancelled, or being requeued already
        return False
    return "SIGUSR2" in heard or _is_preempted(job)


def time_is_up(job: Mapping[str, str], now: float, signal_delay_s: float) -> bool:
    """Whether the signal was the warning before the time limit: only that counts against `max_num_timeout`.

    Args:
        job: As `slurm_job` gives it.
        now: Seconds since the epoch.
        signal_delay_s: How long before its time limit Slurm warns the job.
    """
    try:
        end = datetime.fromisoformat(job.get("EndTime", "")).timestamp()
    except ValueError:  # "Unknown": no limit
        return False
    return not _is_preempted(job) and end - now <= signal_delay_s + SECONDS_OF_SLURM_CLOCK


def _is_preempted(job: Mapping[str, str]) -> bool:
    return job.get("PreemptTime", "None") not in ("None", "N/A", "Unknown", "(null)")


def _in_submitit() -> bool:
    return os.environ.get("SUBMITIT_EXECUTOR") == "slurm"


def _requeue(handler: Any, heard: Sequence[signal.Signals], signal_delay_s: float) -> None:
    """Has submitit put this job back into the queue.

    Its handler is called once the run has unwound, and told whether time is up: by itself it would end the
    run where it stands, and take every signal to a job of ten minutes or less for a time-out.

    Raises:
        Exception: submitit's, where the job has timed out too often.
    """
    owner: Any = getattr(handler, "__self__", None)
    if not _in_submitit() or not hasattr(owner, "checkpoint_and_try_requeue"):
        return
    job = slurm_job()
    if not wants_requeue([each.name for each in heard], job):
        return
    timed_out = time_is_up(job, datetime.now().timestamp(), signal_delay_s)
    owner.has_timed_out = lambda: timed_out
    try:
        owner.checkpoint_and_try_requeue(SIGNALS[-1], None)
    except SystemExit:
        pass
    except (OSError, subprocess.SubprocessError) as error:
        print(f"kvmap: not requeued: {error}; submit the sweep again", file=sys.stderr, flush=True)
