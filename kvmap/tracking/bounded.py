"""Calls into services that may fail or hang: bounded in time, and none after the first fault."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

SECONDS_TO_END = 5.0

_logger = logging.getLogger(__name__)


class Bounded:
    """Runs calls in threads with a time limit. After an error or a time-out, one warning and no more calls.

    Args:
        service: What is called, for the warning.
        seconds: Longest time any one call may take.
        on_hang: Called once a call has not come back in time, for a few seconds; its faults are dropped.
    """

    def __init__(self, service: str, seconds: float, on_hang: Callable[[], None] | None = None) -> None:
        self.service = service
        self.seconds = seconds
        self.dead = self._hangs = False
        self._on_hang = on_hang
        self._deadline: float | None = None

    def hurry(self) -> None:
        """From now on all calls together get the time of one."""
        self._deadline = time.monotonic() + self.seconds

    def call(self, what: str, action: Callable[[], None]) -> bool:
        """Whether the action was done: it was tried, came back in time, and raised nothing."""
        return not self.dead and self._try(what, action)

    def last(self, what: str, action: Callable[[], None]) -> bool:
        """As `call`, and after an error too: what was sent before it is to be closed in good order."""
        return not self._hangs and self._try(what, action)

    def _try(self, what: str, action: Callable[[], None]) -> bool:
        limit = self.seconds
        if self._deadline is not None:
            limit = max(0.0, min(limit, self._deadline - time.monotonic()))
        fault, self._hangs = _guarded(f"{self.service} {what}", action, limit)
        if fault is None:
            return True
        first, self.dead = not self.dead, True
        if first:
            self._warn(what, fault)
        if self._hangs and self._on_hang is not None:
            _guarded(f"{self.service} end", self._on_hang, SECONDS_TO_END)
        return False

    def _warn(self, what: str, fault: BaseException) -> None:
        reason = str(fault).strip().splitlines() or [type(fault).__name__]
        _logger.warning(
            "%s %s failed (%s); going on without it, all results are in the run directory",
            self.service,
            what,
            reason[0],
        )


def _guarded(name: str, action: Callable[[], None], seconds: float) -> tuple[BaseException | None, bool]:
    """What went wrong, if anything, and whether it was that the action did not come back."""
    faults: list[BaseException] = []

    def run() -> None:
        try:
            action()
        except BaseException as fault:  # some services end processes with SystemExit
            faults.append(fault)

    thread = threading.Thread(target=run, daemon=True, name=name)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        return TimeoutError(f"no answer within {seconds:g} s"), True
    return (faults[0] if faults else None), False
