"""Whose turn a run directory is: finished, being written, or left by an attempt that came to nothing."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvmap.errors import KvmapError
from kvmap.files import read_json, remove_temporaries, write_json
from kvmap.locks import machine, process_lives, process_start


class RunExists(KvmapError):
    """The directory holds a finished run, or one that is being written."""


def this_process() -> dict[str, Any]:
    """What tells this process from every other."""
    pid = os.getpid()
    return {"machine": machine(), "pid": pid, "start": process_start(pid)}


def is_alive(process: Mapping[str, Any]) -> bool:
    """False where it cannot be known: a requeued job comes back on another machine."""
    if process["machine"] != machine():
        return False
    return process_lives(process["pid"]) and process_start(process["pid"]) == process["start"]


def put_away_earlier(directory: Path) -> list[dict[str, Any]]:
    """Moves what an attempt that came to nothing left into `attempt-<n>/`; gives the attempts so far.

    Its run.json is copied, and stays until the new one takes its place: whoever is killed in between leaves
    what the next start finishes.

    Raises:
        RunExists: The directory's run is done or alive.
    """
    file = directory / "run.json"
    if not file.exists():
        return []
    earlier = read_json(file)
    if earlier["status"] == "done":
        raise RunExists(f"{directory} holds a finished run; give another directory, or delete that one")
    if earlier["status"] == "running" and is_alive(earlier["host"]["process"]):
        process = earlier["host"]["process"]
        raise RunExists(f"{directory} is being written by process {process['pid']} on {process['machine']}")
    attempts = list(earlier.get("attempts", []))
    folder = directory / f"attempt-{len(attempts) + 1}"
    folder.mkdir(exist_ok=True)
    remove_temporaries(directory)
    write_json(folder / "run.json", earlier)
    for name in ("metrics.json", "tables", "figures", "traceback.txt", "dirty.diff"):
        if (directory / name).exists():
            (directory / name).rename(folder / name)
    facts = {name: earlier.get(name) for name in ("status", "started", "ended", "error", "wandb")}
    return [*attempts, {"directory": folder.name, **facts}]


def check_ours(directory: Path) -> None:
    """Whether the directory's run is still this process's: one that stood still may have been followed.

    Raises:
        RunExists: Another process has taken the run over.
    """
    process = read_json(directory / "run.json")["host"]["process"]
    if process != this_process():
        raise RunExists(
            f"{directory}: process {process['pid']} on {process['machine']} took this run over while this "
            "one stood still, and goes on with it"
        )


def known_id(attempts: Sequence[Mapping[str, Any]]) -> str | None:
    """The W&B id that earlier attempts had, the newest first; None: none of them had one."""
    ids = ((attempt.get("wandb") or {}).get("id") for attempt in reversed(attempts))
    return next((str(each) for each in ids if each), None)
