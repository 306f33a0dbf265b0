"""A process that is killed (-9) at one of the files it writes."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable

import torch

from kvmap import files


def ends(work: Callable[[], object], write: int, *, before: bool = True, suffix: str = "") -> bool:
    """Whether a process that does this work comes to its end.

    Args:
        work: what it does.
        write: number, from 1, of the file at which it is killed.
        before: before the file is there, or just after.
        suffix: files of other names do not count.
    """

    def start() -> None:
        torch.set_num_threads(1)
        n_writes, replace = 0, os.replace

        def replacing(temporary: str, path: str) -> None:
            nonlocal n_writes
            counts = str(path).endswith(suffix)
            n_writes += counts
            if counts and n_writes == write and before:
                os.kill(os.getpid(), signal.SIGKILL)
            replace(temporary, path)
            if counts and n_writes == write:
                os.kill(os.getpid(), signal.SIGKILL)

        files.os.replace = replacing
        work()

    process = multiprocessing.get_context("fork").Process(target=start)
    process.start()
    process.join(timeout=100)
    assert process.exitcode in (0, -signal.SIGKILL)
    return process.exitcode == 0
