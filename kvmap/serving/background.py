"""Threads for work on a storage, which may hang: they never keep an engine from going on, or from ending."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class Background:
    """A few daemon threads. Jobs begin in the order they are given; with one thread they also end in it."""

    def __init__(self, name: str, n_threads: int = 1) -> None:
        """Args: what the threads are called; and how many there are."""
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._since: dict[int, float] = {}
        self._n_threads, self._lock = n_threads, threading.Lock()
        for number in range(n_threads):
            threading.Thread(target=self._work, args=(number,), name=f"{name}-{number}", daemon=True).start()

    def submit(self, job: Callable[..., T], *args: Any) -> Future[T]:
        """Have a job done; what it returns or raises comes by the future."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = job(*args)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        self._jobs.put(run)
        return future

    def stuck_seconds(self) -> float:
        """For how long no thread has been free; 0 while one is."""
        with self._lock:
            if len(self._since) < self._n_threads:
                return 0.0
            return time.monotonic() - max(self._since.values())

    def close(self) -> None:
        """Begin no job that comes later; those that were given are still done while the process lives."""
        for _ in range(self._n_threads):
            self._jobs.put(None)

    def _work(self, number: int) -> None:
        while (job := self._jobs.get()) is not None:
            with self._lock:
                self._since[number] = time.monotonic()
            try:
                job()
            finally:
                with self._lock:
                    del self._since[number]
