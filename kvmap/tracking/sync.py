"""Sends W&B segments that were written offline, or broke off while sending: in order, whole, and once.

Each segment is sent by W&B's own command, which joins one to the end of the one before; this module sees to
the order, to what was cut short, to limits in time, and to what is sent already.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from kvmap.errors import KvmapError
from kvmap.files import read_json
from kvmap.locks import BuildLock, machine
from kvmap.tracking.attempts import is_alive
from kvmap.tracking.wandb_files import Segment, segments_in
from kvmap.tracking.wandb_mirror import SYNCED, service_address

LOCK = "sync.lock"
STALE_SECONDS = 120.0
SECONDS_TO_REACH = 10.0
# What a job leaves in its environment for those it starts, and what speaks of the run it is itself.
NOT_INHERITED = (
    "WANDB_MODE",
    "WANDB_RUN_ID",
    "WANDB_RESUME",
    "WANDB_SERVICE",
    "WANDB_RUN_GROUP",
    "WANDB_NAME",
)


class ServiceUnreachable(KvmapError):
    """W&B does not answer, or is not installed."""


@dataclass(frozen=True)
class TrackedRun:
    """One W&B run and the segments that its attempts have written, the earliest first."""

    directory: Path
    id: str
    segments: list[Segment]

    def to_send(self) -> list[Segment]:
        """Segments that have not been sent, or not to their end: those from the first row on.

        Rows are known by their steps, so one that has arrived before takes its own place.
        """
        return [segment for segment in self.segments if not segment.sent]

    def writer(self) -> str | None:
        """Who writes it, as far as its record says; of another machine the end is not known. None: nobody."""
        try:
            record = read_json(self.directory / "run.json")
            process: Mapping[str, Any] = record["host"]["process"]
            running = record["status"] == "running"
        except (KvmapError, KeyError, TypeError):
            return None
        if not running or (process["machine"] == machine() and not is_alive(process)):
            return None
        return f"process {process['pid']} on {process['machine']}"


@dataclass
class Outcome:
    """How it went with one run: `sent`, `running`, `empty` or `failed`, and what there is to say."""

    run: TrackedRun
    status: str = "sent"
    sent: int = 0
    said: list[str] = field(default_factory=list)


def runs_to_send(folder: Path) -> list[TrackedRun]:
    """Every W&B run below a folder (a run, a sweep, a study) of which something has not been sent."""
    groups = groupby(segments_in(folder), key=lambda segment: (segment.directory, segment.id))
    runs = [TrackedRun(directory, name, list(segments)) for (directory, name), segments in groups]
    return [run for run in runs if run.to_send()]


def check_service() -> str:
    """The address of the service, which has answered.

    Raises:
        ServiceUnreachable: It has not, within a few seconds; or W&B is not installed.
    """
    try:
        address = service_address()
    except ImportError as error:
        raise ServiceUnreachable(f"W&B is not installed ({error}); pip install wandb") from error
    try:
        with suppress(urllib.error.HTTPError):  # any answer is an answer
            urllib.request.urlopen(f"{address}/healthz", timeout=SECONDS_TO_REACH).close()
    except (OSError, ValueError) as error:
        raise ServiceUnreachable(
            f"W&B at {address} cannot be reached ({getattr(error, 'reason', error)}); nothing was uploaded "
            "and nothing is lost. Run this again where there is a way to it, or set WANDB_BASE_URL"
        ) from error
    return address


def send(
    runs: list[TrackedRun], *, seconds: float = 600.0, at_once: int = 4, also_running: bool = False
) -> Iterator[Outcome]:
    """Sends runs, several at once, and gives each outcome in the order of the runs.

    Args:
        runs: See `runs_to_send`.
        seconds: Longest time for one segment.
        at_once: How many runs at a time.
        also_running: Send those too of which the record says that they are being written.
    """
    with ThreadPoolExecutor(at_once) as pool:
        yield from pool.map(lambda run: _send_run(run, seconds, also_running), runs)


def _send_run(run: TrackedRun, seconds: float, also_running: bool) -> Outcome:
    outcome = Outcome(run)
    if (writer := run.writer()) and not also_running:
        outcome.status = "running"
        outcome.said.append(f"is being written by {writer}; --unfinished sends it all the same")
        return outcome
    lock = BuildLock(run.directory / "wandb" / LOCK, stale_seconds=STALE_SECONDS)
    if not lock.try_acquire():
        outcome.status = "running"
        outcome.said.append("is being uploaded by another process")
        return outcome
    with lock:
        for segment in run.to_send():
            segment.settle()
            if not segment.holds_run():
                outcome.said.append(f"{segment.file.parent.name} was cut short before it held anything")
                segment.mark(SYNCED).touch()
                continue
            if segment.mend():
                outcome.said.append(f"{segment.file.parent.name} ends in half a record, which is left out")
            if fault := _send_segment(segment, seconds):
                outcome.status = "failed"
                outcome.said.append(f"{segment.file.parent.name}: {fault}")
                return outcome  # what comes after it can only be joined to it
            outcome.sent += 1
    if not outcome.sent:
        outcome.status = "empty"
    return outcome


def _send_segment(segment: Segment, seconds: float) -> str | None:
    """None once W&B has set its mark; else what went wrong."""
    command = [sys.executable, "-m", "wandb", "sync", "--include-online", str(segment.file.absolute())]
    with tempfile.TemporaryDirectory(prefix="kvmap-sync-") as folder, open(f"{folder}/said", "w+b") as said:
        kept = {name: value for name, value in os.environ.items() if name not in NOT_INHERITED}
        process = subprocess.Popen(
            command,
            cwd=folder,
            env={**kept, "WANDB_DIR": folder, "WANDB_ERROR_REPORTING": "false"},
            stdin=subprocess.DEVNULL,
            stdout=said,  # a pipe would stay open as long as a service process that hangs
            stderr=subprocess.STDOUT,
        )
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            return f"not done within {seconds:g} s"
        finally:
            said.seek(0)
            text = said.read().decode(errors="replace")
    return None if segment.sent else _reason(text, process.returncode)


def _reason(text: str, status: int) -> str:
    """The line of W&B's that says most: its first error, else its last."""
    lines = [line.removeprefix("wandb:").strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if "ERROR" in line or "rror:" in line]
    said = (errors or lines[-1:] or ["W&B said nothing"])[0]
    return f"{said} (wandb sync, exit status {status})"
