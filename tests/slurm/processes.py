"""Processes of this machine: what they are, what runs below them, and waiting for them."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path


class NoCluster(Exception):
    """Slurm cannot be had here; the message says why."""


def wait_until(condition: Callable[[], bool], seconds: float, what: str) -> None:
    """Waits for a condition.

    Raises:
        NoCluster: It did not come true in time.
    """
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise NoCluster(f"waited {seconds:.0f} s in vain for {what}")
        time.sleep(0.1)


def command_of(pid: int) -> str:
    """A process's command line; empty for one that is gone, or a zombie."""
    try:
        if Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] in "ZX":
            return ""
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except (OSError, IndexError):
        return ""


def descendants(pid: int) -> list[int]:
    """Ids of all processes below one, the lowest first."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError, IndexError):
                parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
                children.setdefault(parent, []).append(int(entry.name))

    def below(parent: int) -> list[int]:
        return [found for child in children.get(parent, []) for found in [*below(child), child]]

    return below(pid)
