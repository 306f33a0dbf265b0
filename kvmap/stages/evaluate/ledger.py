"""Rows of a table that grows while models run; an interrupted evaluation keeps its answers."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from kvmap.stages.context import Context

SECONDS_BETWEEN_WRITES = 5.0


class Ledger:
    """Rows of a table that grows while models run; on disk within seconds, and at the latest when it ends."""

    def __init__(self, ctx: Context, name: str) -> None:
        self._run, self._name = ctx.run, name
        self._rows: list[dict[str, Any]] = []
        self._written = 0.0

    def add(self, rows: Iterable[dict[str, Any]]) -> None:
        """Take rows; write the table if that has not been done for a while."""
        self._rows += list(rows)
        if time.monotonic() - self._written > SECONDS_BETWEEN_WRITES:
            self.write()

    def settle(self, rows: Iterable[dict[str, Any]]) -> None:
        """Take the whole table, in its final order, for the rows that came as models ran."""
        self._rows = list(rows)

    def write(self) -> None:
        """Write the table as it is now."""
        self._run.table(self._name, self._rows)
        self._written = time.monotonic()


@contextmanager
def kept(ctx: Context, name: str) -> Iterator[Ledger]:
    """A ledger that is written out however the block ends: an interrupted evaluation keeps its answers."""
    ledger = Ledger(ctx, name)
    try:
        yield ledger
    finally:
        ledger.write()
