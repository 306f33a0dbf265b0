"""`summary.csv`: a sweep or study in one file, one row an identity."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from kvmap.files import write_csv
from kvmap.report import summary_rows
from kvmap.report.reading import Row
from kvmap.sweeps.board import Board, Entry


def write_summary(root: Path, board: Board | None = None) -> Path:
    """Writes `<root>/summary.csv`.

    Columns: the run's directory (from the root), identity, status, seconds, error, the overrides that differ,
    the settings that differ, every metric.

    Args:
        root: A sweep's or a study's folder.
        board: What `Board.read(root)` gave; None reads it.

    Raises:
        KvmapError: See `Board.read`.
    """
    root = Path(root)
    board = Board.read(root) if board is None else board
    differing = varied_overrides(board.entries)
    rows: list[tuple[Row, Path | None]] = []
    for entry, overrides in zip(board.entries, differing, strict=True):
        state = entry.state
        place = "" if state.directory is None else os.path.relpath(state.directory, root)
        record = state.record or {}
        facts: Row = {"job": place, "identity": entry.identity, "status": state.status}
        facts |= {"seconds": record.get("seconds"), "error": state.error, "overrides": " ".join(overrides)}
        rows.append((facts, state.directory if state.record is not None else None))
    write_csv(root / "summary.csv", summary_rows(rows))
    return root / "summary.csv"


def varied_overrides(entries: Sequence[Entry]) -> list[list[str]]:
    """Of every entry, the overrides that not all have; the outputs folder, where all are, is none of them."""
    given = [list(entry.point.overrides) if entry.point else [] for entry in entries]
    given = [[each for each in overrides if not is_of("outputs", each)] for overrides in given]
    submitted = [set(overrides) for overrides in given if overrides]
    common = set.intersection(*submitted) if len(submitted) > 1 else set()
    return [[override for override in overrides if override not in common] for overrides in given]


def is_of(key: str, override: str) -> bool:
    """Whether an override sets this key."""
    return override.split("=", 1)[0].lstrip("+~") == key
