"""A lock that is a file: it works between processes and machines, and outlives no holder."""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

_logger = logging.getLogger(__name__)
_SECONDS_BETWEEN_LINES = 60.0


def machine() -> str:
    """A name for the space in which process ids mean the same: host and, in containers, pid namespace."""
    try:
        namespace = re.sub(r"\D", "", os.readlink("/proc/self/ns/pid"))
    except OSError:
        namespace = "0"
    return re.sub(r"[^A-Za-z0-9.]", "_", socket.gethostname()) + "." + namespace


def process_lives(pid: int) -> bool:
    """Whether a process of this machine has this id."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def process_start(pid: int) -> str | None:
    """When a process began, in the system's own ticks: tells it from a later one with the same id."""
    try:
        # The second field, the program's name in parentheses, may itself hold blanks and parentheses.
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[19]
    except (OSError, IndexError):
        return None


class BuildLock:
    """An exclusive lock held by creating one file, kept fresh by a heartbeat.

    A holder counts as dead when its process is gone (on this machine) or its heartbeat has stood still, as
    watched by the one who waits, for `stale_seconds`: watching needs no agreement between clocks. The lock
    saves work done twice; that nothing half-written is ever seen is the atomic rename's business.

    Args:
        path: The lock file; its folder exists.
        stale_seconds: See above; the heartbeat is twelve times as fast.
        poll_seconds: Time between two looks.
    """

    def __init__(self, path: Path, stale_seconds: float, poll_seconds: float = 0.2) -> None:
        self.path = path
        self.stale_seconds = stale_seconds
        self.poll_seconds = poll_seconds
        self._token = secrets.token_hex(8)
        self._stop = threading.Event()
        self._heart: threading.Thread | None = None

    def acquire(self, unless: Callable[[], bool] | None = None) -> bool:
        """Waits for the lock. False, without it, as soon as `unless()` is true while another holds it.

        The caller enters the lock as a context manager next, which releases it at the end.
        """
        watched: tuple[Any, ...] | None = None
        since = spoken = time.monotonic()
        while not self._create():
            if unless is not None and unless():
                return False
            state, holder = self._observe()
            moment = time.monotonic()
            if state != watched:
                watched, since = state, moment
            if holder and (_is_gone(holder) or moment - since > self.stale_seconds):
                self._take_over(holder)
                continue
            if moment - spoken > _SECONDS_BETWEEN_LINES or spoken == since:
                spoken = moment + 1e-9
                _logger.info("waiting for %s, held by %s", self.path.name, _name(holder))
            time.sleep(self.poll_seconds)
        self._heart = threading.Thread(target=self._beat, daemon=True, name=f"heartbeat {self.path.name}")
        self._heart.start()
        return True

    def release(self) -> None:
        """Gives the lock up; does nothing to a lock that another has meanwhile taken over."""
        self._stop.set()
        if self._heart is not None:
            self._heart.join()
        if _read_holder(self.path).get("token") == self._token:
            with suppress(FileNotFoundError):
                self.path.unlink()

    def __enter__(self) -> BuildLock:
        """The lock, which `acquire` has got."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Releases."""
        self.release()

    def _create(self) -> bool:
        """Makes the file, content and all, in one step: written aside, then linked unless it exists."""
        aside = self.path.with_name(f".{self.path.name}.{self._token}")
        facts = {
            "machine": machine(),
            "pid": os.getpid(),
            "process_start": process_start(os.getpid()),
            "token": self._token,
        }
        try:
            aside.write_text(json.dumps(facts))
            os.link(aside, self.path)
        except FileExistsError:
            return False
        finally:
            with suppress(FileNotFoundError):
                aside.unlink()
        return True

    def _observe(self) -> tuple[tuple[Any, ...] | None, dict[str, Any]]:
        try:
            state = self.path.stat()
        except FileNotFoundError:
            return None, {}
        return (state.st_ino, state.st_mtime_ns), _read_holder(self.path)

    def _take_over(self, holder: dict[str, Any]) -> None:
        """Moves a dead holder's file away. Of several who try, the rename lets one succeed."""
        aside = self.path.with_name(f".{self.path.name}.stale-{self._token}")
        try:
            os.rename(self.path, aside)
        except FileNotFoundError:
            return
        if _read_holder(aside).get("token") == holder.get("token"):
            _logger.warning("took over %s from %s, which is gone", self.path.name, _name(holder))
        else:  # between our look and our rename another took over: give it back its lock
            with suppress(FileExistsError):
                os.link(aside, self.path)
        with suppress(FileNotFoundError):
            aside.unlink()

    def _beat(self) -> None:
        while not self._stop.wait(self.stale_seconds / 12):
            with suppress(OSError):
                os.utime(self.path)


def _read_holder(path: Path) -> dict[str, Any]:
    try:
        facts = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError):
        return {"token": None}
    return facts if isinstance(facts, dict) else {"token": None}


def _is_gone(holder: dict[str, Any]) -> bool:
    if holder.get("machine") != machine() or not isinstance(holder.get("pid"), int):
        return False
    pid = holder["pid"]
    return not process_lives(pid) or holder.get("process_start") != process_start(pid)


def _name(holder: dict[str, Any]) -> str:
    return f"process {holder.get('pid', '?')} on {holder.get('machine', '?')}"
