"""How far the run of an identity got: its own record, and whether whoever says it runs is still there."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from kvmap.files import ArtifactCorrupt, read_json
from kvmap.locks import machine, process_lives, process_start
from kvmap.sweeps.register import Register

STATES = ("done", "running", "preempted", "died", "failed", "missing")
BEATS_MISSED = 3
SECONDS_FOR_SQUEUE = 10.0


@dataclass(frozen=True)
class RunState:
    """What is known of one identity's run.

    Attributes:
        status: one of `STATES`.
        directory: of the run; None where it was never started or was deleted.
        record: its run.json; empty where there is none.
        error: first line of what it failed with.
        holder: who runs it, or ran it last.
    """

    status: str
    directory: Path | None = None
    record: Mapping[str, Any] | None = None
    error: str | None = None
    holder: str | None = None

    @property
    def log(self) -> Path | None:
        """The log to look into."""
        return None if self.directory is None else self.directory / "run.log"


def read_state(register: Register, identity: str) -> RunState:
    """The state of an identity, from its directory, its lock and, where there is one, Slurm's queue."""
    beat = register.seconds_since_beat(identity)
    held = beat is not None and beat < register.stale_seconds
    held = held and not register.lock(identity).holder_is_gone()  # killed before it had a run.json
    directory = register.directory(identity)
    file = None if directory is None else directory / "run.json"
    if file is None or not file.is_file():
        if held:
            return RunState("running", directory, holder="starting")
        return RunState("missing", directory)
    try:
        record = read_json(file)
    except ArtifactCorrupt as fault:
        return RunState("failed", directory, error=str(fault))
    status = str(record["status"])
    if status == "running" and not is_alive(record, register, identity):
        status = "died"
    error = record.get("error") if status not in ("done", "running") else None
    if status == "died":
        error = error or "it says that it runs, but its process is gone"
    first_line = str(error).splitlines()[0] if error else None
    return RunState(status, directory, record, first_line, _holder(record))


def is_alive(record: Mapping[str, Any], register: Register, identity: str) -> bool:
    """Whether the process that wrote `running` is still there.

    On this machine the process is looked for, and its lock. Elsewhere the heartbeat of its lock counts, and
    a job that Slurm no longer knows counts as gone after three heartbeats missed.
    """
    process = record["host"]["process"]
    beat = register.seconds_since_beat(identity)
    if process["machine"] == machine():
        return beat is not None and lives_here(process)
    if beat is None or beat > register.stale_seconds:
        return False
    if beat > BEATS_MISSED * register.stale_seconds / 12:
        queued, name = slurm_jobs(), _slurm_name(record)
        return queued is None or name is None or name in queued
    return True


def lives_here(process: Mapping[str, Any]) -> bool:
    """Whether a process that a run.json names is one of this machine, and still there."""
    if process["machine"] != machine():
        return False
    return process_lives(process["pid"]) and process_start(process["pid"]) == process["start"]


def slurm_jobs() -> frozenset[str] | None:
    """Names (`12`, `12_3`) of this user's jobs in Slurm's queue; None where Slurm cannot be asked.

    It is asked every ten seconds at most.
    """
    return _slurm_jobs(int(time.monotonic() / SECONDS_FOR_SQUEUE))


@lru_cache(maxsize=1)
def _slurm_jobs(moment: int) -> frozenset[str] | None:
    if shutil.which("squeue") is None:
        return None
    command = ["squeue", "--me", "--noheader", "--array", "--format=%i"]
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, timeout=SECONDS_FOR_SQUEUE, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return frozenset(result.stdout.split()) if result.returncode == 0 else None


def _slurm_name(record: Mapping[str, Any]) -> str | None:
    facts = record.get("slurm") or {}
    if "array_job_id" in facts:
        return f"{facts['array_job_id']}_{facts.get('array_task_id')}"
    return facts.get("job_id")


def _holder(record: Mapping[str, Any]) -> str:
    host = record["host"]
    slurm = _slurm_name(record)
    return f"process {host['process']['pid']} on {host['host']}" + (f", Slurm job {slurm}" if slurm else "")
