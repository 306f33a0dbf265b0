"""Processes that take a lock and say so: what the tests of locks and of the store watch, stop and kill."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

PREAMBLE = """
import errno, os, sys, time
from pathlib import Path
from kvmap.locks import BuildLock

def say(what):
    with open({log!r}, "a") as stream:
        stream.write(f"{{what}} {{os.getpid()}}\\n")
"""

HOLD = """
lock = BuildLock(Path({path!r}), stale_seconds={stale}, poll_seconds=0.02)
for _ in range({times}):
    lock.acquire()
    with lock:
        say("in")
        time.sleep({seconds})
        say("lost" if lock.lost else "out")
"""

WITHOUT_LINKS = """
def no_link(*_):
    raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
os.link = no_link
"""

# The server's clock stands still: every write leaves the same time.
STANDING_CLOCK = """
write = os.write
def write_at_zero(handle, content):
    written = write(handle, content)
    os.utime(handle, (0, 0))
    return written
os.write = write_at_zero
"""

WRONG_CLOCK = """
now = time.time
time.time = lambda: now() + {ahead}
"""


class Holders:
    """Processes around one lock file, and the log that they share."""

    def __init__(self, folder: Path, stale: float) -> None:
        self.path, self.log, self.stale = folder / "a.lock", folder / "log", stale
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, seconds: float, *, times: int = 1, before: str = "") -> subprocess.Popen[bytes]:
        """A process that holds the lock for so long, so many times."""
        hold = HOLD.format(path=str(self.path), stale=self.stale, times=times, seconds=seconds)
        program = PREAMBLE.format(log=str(self.log)) + before + hold
        process = subprocess.Popen([sys.executable, "-c", program])
        self.processes.append(process)
        return process

    def said(self) -> list[tuple[str, int]]:
        """What was said, and by which process, in order."""
        if not self.log.exists():
            return []
        lines = (line.split() for line in self.log.read_text().splitlines())
        return [(what, int(pid)) for what, pid in lines]

    def end(self) -> None:
        """Kills what still runs."""
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
            process.wait()


def until(condition: Callable[[], object], seconds: float = 40.0) -> None:
    """Waits for a condition.

    Raises:
        TimeoutError: it has not come true.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("what the test waits for did not happen")
        time.sleep(0.005)


def pid_of_a_dead_process() -> int:
    """An id that no process has."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    assert not Path(f"/proc/{process.pid}").exists() or os.name != "posix"
    return process.pid
