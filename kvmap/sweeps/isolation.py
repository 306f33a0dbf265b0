"""A process for each job, where a launcher runs several jobs in one: what ends a job ends no other."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection

from kvmap.errors import KvmapError
from kvmap.preemption import EXIT_PREEMPTED
from kvmap.sweeps.failures import JobFailed

SET_PARENT_DEATH_SIGNAL = 1  # prctl's


def isolated(action: Callable[[], None]) -> None:
    """Runs the action in a child process, and raises here what it raised there.

    The child is forked, and inherits what Hydra has set up; it is the first to load torch. Memory, devices
    and trackers are its own and end with it. Child and parent are told to stop where theirs is gone.

    Raises:
        KvmapError: the action's.
        JobFailed: the child was killed, or told to stop.
    """
    _end_with_parent()
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(action, sender, os.getpid()))
    process.start()
    sender.close()
    error = None
    try:
        with suppress(EOFError):
            error = receiver.recv()
    finally:
        process.join()
    if error is not None:
        raise error
    if process.exitcode:
        raise JobFailed(_how_it_ended(process.exitcode))


def _child(action: Callable[[], None], sender: Connection, parent: int) -> None:
    _end_with_parent()
    if os.getppid() != parent:
        return
    try:
        action()
    except KvmapError as error:
        sender.send(error)


def _end_with_parent() -> None:
    """Has SIGTERM sent to this process when its parent ends. Linux alone has that."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGTERM)


def _how_it_ended(status: int) -> str:
    if status == EXIT_PREEMPTED:
        return "the job was told to stop; start the sweep again, and it goes on"
    if status > 0:
        return f"the job's process ended with status {status}; its last words are above"
    killed = signal.Signals(-status).name
    reason = ", as the system does when memory runs out" if killed == "SIGKILL" else ""
    return f"the job's process was ended by {killed}{reason}; start the sweep again, and it goes on"
