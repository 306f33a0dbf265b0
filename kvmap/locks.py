"""A lock that is a file: it works between processes and machines, and outlives no holder."""

from __future__ import annotations

import errno
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
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

_logger = logging.getLogger(__name__)
_SECONDS_BETWEEN_LINES = 60.0
_SLOWEST_POLL_SECONDS = 2.0
_HOLDER_BYTES = 1024
_NO_LINKS = {errno.EPERM, errno.EMLINK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EXDEV}


def machine() -> str:
    """A name for the space in which process ids mean the same: host, pid namespace (in containers) and boot.

    Two machines of one name differ in the boot, and so does a machine from itself after a crash.
    """
    try:
        namespace = re.sub(r"\D", "", os.readlink("/proc/self/ns/pid"))
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()[:8]
    except OSError:
        namespace, boot = "0", "0"
    return re.sub(r"[^A-Za-z0-9.]", "_", f"{socket.gethostname()}.{namespace}.{boot.strip()}")


def process_lives(pid: int) -> bool:
    """Whether a process of this machine has this id and has not ended; one that nobody has reaped yet has."""
    facts = _process_facts(pid)
    if facts:
        return facts[0] not in ("Z", "X")
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def process_start(pid: int) -> str | None:
    """When a process began, in the system's own ticks: tells it from a later one with the same id."""
    facts = _process_facts(pid)
    return facts[19] if len(facts) > 19 else None


def _process_facts(pid: int) -> list[str]:
    """The system's line on a process, from its state on; empty where there is none."""
    try:
        # The second field, the program's name in parentheses, may itself hold blanks and parentheses.
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except (OSError, IndexError):
        return []


@dataclass(frozen=True)
class _Seen:
    """A lock file at one moment: who holds it, and what changes with every heartbeat."""

    holder: dict[str, Any]
    state: tuple[Any, ...]


class BuildLock:
    """An exclusive lock held by creating one file, kept fresh by a heartbeat.

    A holder counts as dead when its process is gone (on this machine) or its file has not changed, as watched
    by the one who waits, for `stale_seconds`: watching needs no agreement between clocks. A heartbeat makes
    the file longer by a byte, so it shows where times are coarse or wrong. The lock saves work done twice,
    and no more: a holder that was stopped for longer than that finds it in other hands when it goes on.
    That nothing half-written is ever seen is the business of the atomic rename.

    Args:
        path: The lock file; its folder exists.
        stale_seconds: See above; the heartbeat is twelve times as fast. On a network file system it has to
            be longer than file attributes are cached there (NFS: 60 s unless mounted otherwise).
        poll_seconds: Time between two looks at first; they become rarer in a long wait.
    """

    def __init__(self, path: Path, stale_seconds: float, poll_seconds: float = 0.2) -> None:
        self.path = path
        self.stale_seconds = stale_seconds
        self.poll_seconds = poll_seconds
        self._token = secrets.token_hex(8)
        self._stop = threading.Event()
        self._heart: threading.Thread | None = None
        self._watched: tuple[Any, ...] | None = None
        self._looked = self._silence = 0.0

    def acquire(self, unless: Callable[[], bool] | None = None) -> bool:
        """Waits for the lock. False, without it, as soon as `unless()` is true while another holds it.

        The caller enters the lock as a context manager next, which releases it at the end.

        Raises:
            OSError: The lock file cannot be written.
        """
        began, spoken = time.monotonic(), None
        while not self.try_acquire():
            if unless is not None and unless():
                return False
            waited = time.monotonic() - began
            if spoken is None or waited - spoken > _SECONDS_BETWEEN_LINES:
                spoken = waited
                _logger.info("waiting for %s, held by %s", self.path.name, self.holder_name())
            time.sleep(max(self.poll_seconds, min(waited / 20, _SLOWEST_POLL_SECONDS)))
        return True

    def try_acquire(self) -> bool:
        """One look, without waiting: takes the lock where it is free or its holder dead.

        Call it again on the same object to go on watching a holder. Enter the lock next, as after `acquire`.

        Raises:
            OSError: The lock file cannot be written.
        """
        seen = self._observe()
        if seen is not None:
            if not self._is_dead(seen):
                return False
            self._take_over(seen.holder)
        if not self._create():
            return False
        self._stop.clear()
        self._heart = threading.Thread(target=self._beat, daemon=True, name=f"heartbeat {self.path.name}")
        self._heart.start()
        return True

    def release(self) -> None:
        """Gives the lock up; does nothing to a lock that another has meanwhile taken over."""
        self._stop.set()
        if self._heart is not None:
            self._heart.join()
            self._heart = None
        if self._is_own():
            with suppress(FileNotFoundError):
                self.path.unlink()

    @property
    def lost(self) -> bool:
        """Whether another has taken the lock over from this one, which had got it; looks at the file."""
        return self._heart is not None and not self._is_own()

    def holder_name(self) -> str:
        """Who holds the lock, in words."""
        seen = self._observe()
        return "nobody" if seen is None else _name(seen.holder)

    def holder_is_gone(self) -> bool:
        """Whether whoever holds the lock was a process of this machine, and is no more."""
        seen = self._observe()
        return seen is not None and _is_gone(seen.holder)

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
        facts = {
            "machine": machine(),
            "pid": os.getpid(),
            "process_start": process_start(os.getpid()),
            "token": self._token,
        }
        text = json.dumps(facts) + "\n"
        aside = self.path.with_name(f".{self.path.name}.{self._token}")
        try:
            aside.write_text(text)
            os.link(aside, self.path)
        except FileExistsError:
            return self._is_own()  # a network file system may have linked, lost its answer and tried again
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            return self._create_in_place(text)
        finally:
            with suppress(FileNotFoundError):
                aside.unlink()
        return True

    def _create_in_place(self, text: str) -> bool:
        """For file systems without hard links. Until the text is written, the lock is that of a stranger."""
        try:
            handle = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        except FileExistsError:
            return self._is_own()
        try:
            with os.fdopen(handle, "w") as stream:
                stream.write(text)
        except OSError:
            with suppress(OSError):
                self.path.unlink()
            raise
        return True

    def _is_own(self) -> bool:
        seen = self._observe()
        return seen is not None and seen.holder.get("token") == self._token

    def _observe(self) -> _Seen | None:
        # Opened and not only looked up: that is what makes a network file system ask its server.
        try:
            handle = os.open(self.path, os.O_RDONLY)
        except FileNotFoundError:
            return None
        except OSError:
            return _Seen({"token": None}, ())
        return _seen(handle)

    def _is_dead(self, seen: _Seen) -> bool:
        """Adds up how long the file has not changed.

        Time between two looks counts up to a quarter: the watcher may itself have been stopped, and the
        holder with it.
        """
        now = time.monotonic()
        if seen.state != self._watched:
            self._watched, self._silence = seen.state, 0.0
        else:
            self._silence += min(now - self._looked, self.stale_seconds / 4)
        self._looked = now
        return _is_gone(seen.holder) or self._silence > self.stale_seconds

    def _take_over(self, holder: dict[str, Any]) -> None:
        """Moves a dead holder's file away. Of several who try, the rename lets one succeed."""
        aside = self.path.with_name(f".{self.path.name}.stale-{self._token}")
        try:
            os.rename(self.path, aside)
        except FileNotFoundError:
            return
        if _read_holder(aside).get("token") == holder.get("token"):
            _logger.warning("took over %s from %s, which is gone", self.path.name, _name(holder))
        else:  # between our look and our rename another took over
            self._give_back(aside)
        with suppress(FileNotFoundError):
            aside.unlink()

    def _give_back(self, aside: Path) -> None:
        """Puts a living holder's file back, unless a third has the lock already."""
        try:
            os.link(aside, self.path)
        except FileExistsError:
            return
        except OSError:  # no hard links
            if not self.path.exists():
                os.rename(aside, self.path)

    def _beat(self) -> None:
        while not self._stop.wait(self.stale_seconds / 12):
            # Whatever else the file system says may be over at the next beat.
            with suppress(OSError):
                if not self._touch():
                    _logger.warning("%s was taken over by %s", self.path.name, self.holder_name())
                    return

    def _touch(self) -> bool:
        """Makes the file longer, or at least younger on a full disk; False where it is no longer ours."""
        try:
            handle = os.open(self.path, os.O_RDWR | os.O_APPEND)
        except FileNotFoundError:
            return False
        try:
            if _holder(os.read(handle, _HOLDER_BYTES)).get("token") != self._token:
                return False
            try:
                os.write(handle, b"\n")
            except OSError:
                os.utime(self.path)
        finally:
            os.close(handle)
        return True


def _seen(handle: int) -> _Seen:
    """What an open lock file says; closes it."""
    try:
        facts, holder = os.fstat(handle), _holder(os.read(handle, _HOLDER_BYTES))
    except OSError:
        return _Seen({"token": None}, ())
    finally:
        os.close(handle)
    return _Seen(holder, (holder.get("token"), facts.st_size, facts.st_mtime_ns))


def _holder(content: bytes) -> dict[str, Any]:
    try:
        facts = json.loads(content.split(b"\n", 1)[0])
    except ValueError:
        return {"token": None}
    return facts if isinstance(facts, dict) else {"token": None}


def _read_holder(path: Path) -> dict[str, Any]:
    try:
        return _holder(path.read_bytes())
    except OSError:
        return {"token": None}


def _is_gone(holder: dict[str, Any]) -> bool:
    if holder.get("machine") != machine() or not isinstance(holder.get("pid"), int):
        return False
    pid = holder["pid"]
    return not process_lives(pid) or holder.get("process_start") != process_start(pid)


def _name(holder: dict[str, Any]) -> str:
    return f"process {holder.get('pid', '?')} on {holder.get('machine', '?')}"
