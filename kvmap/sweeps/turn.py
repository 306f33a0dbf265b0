"""A job's turn: whether it runs in its own directory, goes on in an earlier one, or has nothing to do."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvmap.errors import KvmapError
from kvmap.files import read_json, storage_errors
from kvmap.locks import BuildLock
from kvmap.sweeps.register import Register
from kvmap.sweeps.states import lives_here

POLL_SECONDS = 0.2
DIRECTORY_LOCK = ".run.lock"


class DirectoryTaken(KvmapError):
    """Another run writes into the directory."""


@dataclass(frozen=True)
class Turn:
    """What a job is to do.

    Attributes:
        status: `new`; `resumed`: go on in a directory that an earlier attempt left unfinished; `done` or
            `running`: nothing is to be done, the run is in `directory`.
        directory: see there; None where it is not known yet who started where.
        holder: who runs it, with `running`.
    """

    status: str
    directory: Path | None
    holder: str | None = None

    @property
    def runs(self) -> bool:
        """Whether there is something to do."""
        return self.status in ("new", "resumed")


@contextmanager
def take_turn(register: Register, identity: str, own: Path) -> Iterator[Turn]:
    """The turn of a job of a sweep; the identity's lock is held inside the block.

    Of several that want one identity at once, one runs. A holder that died is waited for no longer than
    `register.stale_seconds` (on one machine, not at all) and followed.

    Args:
        register: Of the study.
        identity: Of the job.
        own: The job's own directory.

    Raises:
        DirectoryTaken: `own` is to be used, and another run, of another identity, is in it.
        StorageError: The register cannot be written to.
    """
    if done := _done(register, identity):
        yield done
        return
    lock = register.lock(identity)
    if not _wait(lock, lambda: _runs_here(register.directory(identity), lock.path)):
        directory = register.directory(identity)
        yield _done(register, identity) or Turn("running", directory, lock.holder_name())
        return
    with lock:
        if done := _done(register, identity):
            yield done
            return
        earlier = register.directory(identity)
        if holder := _other_process(earlier):
            yield Turn("running", earlier, holder)
            return
        with ExitStack() as stack:
            if earlier is None:
                stack.enter_context(_alone_in(own, register.stale_seconds))
            register.record(identity, earlier or own)
            resumed = earlier is not None and (earlier / "run.json").is_file()
            yield Turn("resumed" if resumed else "new", earlier or own)


@contextmanager
def take_afresh(register: Register, identity: str, own: Path) -> Iterator[Turn]:
    """The turn of a job that runs in its own directory in any case.

    It is registered at once where no finished run is, and once it is finished in any case; not at all where
    another process is about the same identity.

    Raises:
        DirectoryTaken: Another run is in `own`.
        StorageError: The register cannot be written to.
    """
    with ExitStack() as stack:
        stack.enter_context(_alone_in(own, register.stale_seconds))
        lock = register.lock(identity)
        holds = lock.try_acquire()
        if holds:
            stack.enter_context(lock)
            if not _done(register, identity):
                register.record(identity, own)
        yield Turn("new", own)
        if holds:
            register.record(identity, own)


def _done(register: Register, identity: str) -> Turn | None:
    directory = register.directory(identity)
    if directory is None or not (directory / "run.json").is_file():
        return None
    return Turn("done", directory) if read_json(directory / "run.json")["status"] == "done" else None


def _wait(lock: BuildLock, known: Callable[[], bool]) -> bool:
    """True with the lock; False as soon as its holder is known to live, or shows a sign of life."""
    first = None
    while not lock.try_acquire():
        state = _heartbeat(lock.path)
        first = first or state
        if known() or (state is not None and state != first):
            return False
        time.sleep(POLL_SECONDS)
    return True


def _runs_here(directory: Path | None, lock: Path) -> bool:
    """Whether a process of this machine holds the lock and is at the run of this directory."""
    return lock.exists() and _other_process(directory) is not None


def _other_process(directory: Path | None) -> str | None:
    """The other process of this machine that is at the run of a directory, though it may stand still."""
    if directory is None or not (directory / "run.json").is_file():
        return None
    record = read_json(directory / "run.json")
    process = record["host"]["process"]
    if record["status"] != "running" or process["pid"] == os.getpid() or not lives_here(process):
        return None
    return f"process {process['pid']} on {process['machine']}"


def _heartbeat(path: Path) -> tuple[int, int, int] | None:
    """Changes with every sign of life of a holder, and with the holder."""
    try:
        with open(path, "rb") as stream:  # opened, which makes a network file system ask its server
            facts = os.fstat(stream.fileno())
    except OSError:
        return None
    return facts.st_ino, facts.st_size, facts.st_mtime_ns


@contextmanager
def _alone_in(directory: Path, stale_seconds: float) -> Iterator[None]:
    """Holds a directory for one run."""
    with storage_errors(directory / DIRECTORY_LOCK):
        directory.mkdir(parents=True, exist_ok=True)
        lock = BuildLock(directory / DIRECTORY_LOCK, stale_seconds)
        if not _wait(lock, lambda: _runs_here(directory, lock.path)):
            raise DirectoryTaken(
                f"{directory} is being written by {lock.holder_name()}; give another directory "
                "(hydra.run.dir=..., hydra.sweep.dir=...), or none: by default each start has its own"
            )
    with lock:
        yield
