"""What a run wrote, read back: its record, its tables, and which directories hold runs."""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from typing import Any, TypeAlias

from kvmap.errors import KvmapError
from kvmap.figures.style import ARMS
from kvmap.files import read_json
from kvmap.tracking import read_metrics

Row: TypeAlias = dict[str, Any]


def read_table(directory: Path, name: str) -> list[Row]:
    """Rows of tables/<name>.csv, numbers as numbers, empty cells as None; [] without such a table."""
    path = Path(directory) / "tables" / f"{name}.csv"
    if not path.is_file():
        return []
    with open(path, encoding="utf-8", newline="") as stream:
        return [{column: _cell(text) for column, text in row.items()} for row in csv.DictReader(stream)]


def _cell(text: str | None) -> Any:
    if text is None or text == "":
        return None
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def read_arms(directory: Path) -> list[Row]:
    """Rows of the table `arms`; without one, those that the keys of metrics.json stand for."""
    rows = read_table(directory, "arms")
    if rows:
        return rows
    for key, metric in read_metrics(directory).items():
        parts = key.split("/")
        if len(parts) == 4 and parts[0] == "evaluate" and parts[2] in ARMS:
            facts = {"value": metric.value, "n": metric.n, "standard_error": metric.standard_error}
            rows.append({"task": parts[1], "arm": parts[2], "metric": parts[3], **facts})
    return rows


def read_run(directory: Path) -> Row:
    """The run's `run.json`.

    Raises:
        KvmapError: The directory holds no run.
    """
    file = Path(directory) / "run.json"
    if not file.is_file():
        raise KvmapError(
            f"{directory} holds no run.json: give the directory of a run (its last line names it)"
        )
    record: Row = read_json(file)
    return record


def is_run(directory: Path) -> bool:
    return (Path(directory) / "run.json").is_file()


def runs_below(root: Path) -> list[Path]:
    """Directories of the runs of a sweep or a study, in the order of their names, numbers by value.

    They lie in it, or in the sweeps that lie in it. What a run put away of an earlier attempt of its own is
    no run.

    Raises:
        KvmapError: There is none.
    """
    found: list[Path] = []
    for path in _folders(root):
        found += [path] if is_run(path) else [job for job in _folders(path) if is_run(job)]
    if not found:
        raise KvmapError(
            f"{root} holds no run.json, nor do the folders in it (*/run.json, */*/run.json): give the "
            "directory of a run, a sweep or a study"
        )
    return found


def _folders(root: Path) -> list[Path]:
    return sorted((path for path in Path(root).glob("*") if path.is_dir()), key=natural)


def natural(path: Path) -> tuple[int, str]:
    """Sorts the numbered jobs of a sweep by number, and before all others."""
    return (int(path.name), "") if path.name.isdigit() else (sys.maxsize, path.name)
