"""Progress of long work: a bar on a terminal, plain lines in a log everywhere."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sized
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from rich.progress import Progress

T = TypeVar("T")

SECONDS_BETWEEN_LINES = 10.0

_logger = logging.getLogger(__name__)
_bars_lock = threading.Lock()
_bars: list[Progress] = []  # the one live display, to which nested and parallel loops add their rows


class HideProgress(logging.Filter):
    """For handlers that write to a terminal: drops the lines that a bar already shows there."""

    def filter(self, record: logging.LogRecord) -> bool:
        """False for this module's lines while a bar stands on the terminal."""
        return not (record.name == __name__ and _bars)


def track(iterable: Iterable[T], total: int | None = None, description: str = "") -> Iterator[T]:
    """Yields from `iterable` and shows what is being done, how far it is and how long it will take.

    On a terminal (stderr) a bar is drawn; nested loops share one display. Whether or not there is a
    terminal, the same facts go to the log `kvmap.progress`, at most one line each 10 s and one at the end.

    Args:
        iterable: What to go through; consumed lazily.
        total: Number of items; taken from `len(iterable)` where it has one. None: unknown.
        description: What is being done, such as `calibrate`.
    """
    if total is None and isinstance(iterable, Sized):
        total = len(iterable)
    lines = _log_lines(iterable, total, description or "working")
    return _draw_bar(lines, total, description or "working") if sys.stderr.isatty() else lines


def _log_lines(iterable: Iterable[T], total: int | None, description: str) -> Iterator[T]:
    started = spoken = time.monotonic()
    done = 0
    for item in iterable:
        yield item
        done += 1
        moment = time.monotonic()
        if moment - spoken >= SECONDS_BETWEEN_LINES and done != total:
            spoken = moment
            _logger.info("%s: %s", description, _how_far(done, total, moment - started))
    _logger.info("%s: %d done in %s", description, done, _duration(time.monotonic() - started))


def _how_far(done: int, total: int | None, seconds: float) -> str:
    if not total:
        return f"{done} after {_duration(seconds)}"
    left = seconds / done * max(total - done, 0)
    return f"{done} of {total} ({100 * done / total:.0f} %), {_duration(left)} to go"


def _duration(seconds: float) -> str:
    """`0.4 s`, `12 s`, `3:05 min`, `1:03:05 h`."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes}:{rest:02d} min"
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d} h"


def _draw_bar(items: Iterator[T], total: int | None, description: str) -> Iterator[T]:
    with _bars_lock:
        opened = not _bars
        if opened:
            _bars.append(_new_display())
            _bars[0].start()
        display = _bars[0]
        row = display.add_task(description, total=total)
    try:
        for item in items:
            yield item
            display.advance(row)
    finally:
        with _bars_lock:
            if opened:
                display.stop()
                _bars.clear()
            else:
                display.remove_task(row)


def _new_display() -> Progress:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    )
