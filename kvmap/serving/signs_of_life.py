"""Signs of life: as long as a source's process lives, what it has announced is known to be still written."""

from __future__ import annotations

import threading
import time
from contextlib import suppress

from kvmap.errors import KvmapError
from kvmap.serving.store import Store

#: between two signs; a reader waits for several of them
INTERVAL_SECONDS = 1.0
#: a writer may need so long for what is computed
ENDING_SECONDS = 60.0


class SignsOfLife:
    """A thread that says of every group again and again that it is being written."""

    def __init__(self, store: Store, interval_seconds: float = INTERVAL_SECONDS) -> None:
        """Args: the store; and the time between two signs."""
        self._store, self._interval = store, interval_seconds
        self._until: dict[str, float] = {}
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def groups(self) -> set[str]:
        """Those that are said to be still written."""
        with self._lock:
            return set(self._until)

    def begin(self, group: str) -> None:
        """From now on, until it is published or dropped."""
        with self._lock:
            self._until[group] = float("inf")
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="kvmap-alive", daemon=True)
                self._thread.start()

    def end(self, group: str) -> None:
        """All of it is computed, or will never be: a writer may still be busy with it, but not for ever."""
        with self._lock:
            if group in self._until:
                self._until[group] = time.monotonic() + ENDING_SECONDS

    def close(self) -> None:
        """No more signs."""
        self._closed.set()

    def _work(self) -> None:
        while not self._closed.wait(self._interval):
            with self._lock:
                groups = dict(self._until)
            # a storage that fails once may be back at the next sign
            with suppress(KvmapError, OSError):
                over = [group for group, until in groups.items() if self._is_over(group, until)]
                with self._lock:
                    for group in over:
                        self._until.pop(group, None)

    def _is_over(self, group: str, until: float) -> bool:
        return until < time.monotonic() or not self._store.still_writing(group)
