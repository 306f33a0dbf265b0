"""What finished runs keep of every item, read back and checked to be of the same items; tables as text."""

from __future__ import annotations

import argparse
import csv
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from kvmap.errors import KvmapError
from kvmap.evaluation.statistics import Floats
from kvmap.files import read_json

ItemId: TypeAlias = tuple[str, str]
"""Task and id."""


@dataclass(frozen=True)
class ItemMeasure:
    """A number that a table has for every item and arm.

    Attributes:
        table: `<run>/tables/<table>.csv`.
        column: whose numbers, or True and False.
        name: what its mean is called.
        per: column to divide by; None: none.
        accuracy: a share of what is right, of which ratios to the target's make sense, and McNemar's test
            where every item is right or wrong.
        ids: columns that together are an item's id.
        task: column whose values part items into tasks.
    """

    table: str
    column: str
    name: str
    per: str | None = None
    accuracy: bool = True
    ids: tuple[str, ...] = ("id",)
    task: str = "task"

    @property
    def average(self) -> str:
        """What the average over tasks is called, as in the run's own metrics."""
        return AVERAGES.get(self.table, "average")


MEASURES = (
    ItemMeasure("items", "correct", "accuracy"),
    ItemMeasure("items", "correct_norm", "accuracy_norm"),
    ItemMeasure("items", "generated_correct", "generated_accuracy"),
    ItemMeasure("tasks_items", "accuracy", "tasks_accuracy"),
    ItemMeasure("sequences", "nll_nats", "nll_nats", per="n_tokens", accuracy=False, ids=("sequence",)),
)
"""Of questions, of lm-eval's tasks, and of sequences; the latter's task is `perplexity`."""

TASKS = {"sequences": "perplexity"}
AVERAGES = {"tasks_items": "tasks_average"}


@dataclass(frozen=True)
class Scored:
    """One item under one arm.

    Attributes:
        value: of the measure.
        content: hash of what was asked.
        n_truncated: context tokens that were cut off.
        chance: what guessing gets; nan where the table does not say.
    """

    value: float
    content: str
    n_truncated: int
    chance: float


def run_record(directory: Path) -> dict[str, Any]:
    """The run's `run.json`.

    Raises:
        KvmapError: the directory holds no run.
    """
    file = Path(directory) / "run.json"
    if not file.is_file():
        raise KvmapError(
            f"{directory} holds no run.json: give the directory of a run (its last line names it)"
        )
    record: dict[str, Any] = read_json(file)
    return record


def settings_of(record: Mapping[str, Any]) -> dict[str, Any]:
    """The run's configuration, flat: `mapper.top_k` to its value."""
    return dict(_leaves(record["config"]))


def _leaves(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def read_scores(directory: Path, measure: ItemMeasure) -> dict[str, dict[ItemId, Scored]]:
    """Arm to item to its score; {} where the run has no such table or column, or no number in it.

    Raises:
        KvmapError: a table that lacks a column by which items are told apart, or that has an item twice.
    """
    rows = rows_of(Path(directory) / "tables" / f"{measure.table}.csv")
    found: dict[str, dict[ItemId, Scored]] = {}
    for row in rows:
        if row.get(measure.column) in (None, ""):
            continue
        parted = measure.task != "task"
        needed = ["arm", "content", *measure.ids, *[name for name in (measure.per,) if name]]
        needed += [measure.task] if parted else []
        if missing := [name for name in needed if not row.get(name)]:
            raise KvmapError(
                f"{directory}: table {measure.table} has no {' and no '.join(missing)}, so that its items "
                "cannot be told from others'; evaluate again with this version of kvmap"
            )
        task = row.get(measure.task) or TASKS.get(measure.table, measure.table)
        task = f"{measure.task}={task}" if parted else task
        item = task, "/".join(row[name] for name in measure.ids)
        of_arm = found.setdefault(row["arm"], {})
        if item in of_arm:
            raise KvmapError(f"{directory}: table {measure.table} has {item} twice under arm {row['arm']!r}")
        divisor = _number(row[measure.per]) if measure.per else 1.0
        of_arm[item] = Scored(
            value=_number(row[measure.column]) / divisor,
            content=row["content"],
            n_truncated=int(row.get("n_truncated") or 0),
            chance=1 / len(row["logliks"].split()) if row.get("logliks") else math.nan,
        )
    return found


def add_measure_arguments(parser: argparse.ArgumentParser) -> None:
    """Options that name another table than those of `MEASURES`."""
    own = parser.add_argument_group("another table than those of questions, tasks and sequences")
    own.add_argument(
        "--table", help="tables/<TABLE>.csv, with the columns arm, content and those named below"
    )
    own.add_argument("--column", help="the measure: numbers, or True and False")
    own.add_argument("--per", help="a column to divide it by")
    own.add_argument("--id", default="id", help="columns that together tell items apart, by commas")
    own.add_argument("--task", default="task", help="a column that parts items into tasks (default: task)")
    own.add_argument(
        "--numbers", action="store_true", help="no accuracy: no ratios to the target's, no tests"
    )


def measures_asked(given: argparse.Namespace) -> Sequence[ItemMeasure]:
    """The measure that the options of `add_measure_arguments` name; `MEASURES` where they name none.

    Raises:
        KvmapError: a table without a column, or the other way round.
    """
    if given.table is None and given.column is None:
        return MEASURES
    if given.table is None or given.column is None:
        raise KvmapError("--table and --column go together: which table, and which of its columns")
    ids = tuple(given.id.split(","))
    accuracy = not given.numbers
    return [ItemMeasure(given.table, given.column, given.column, given.per, accuracy, ids, given.task)]


def is_binary(columns: Iterable[Floats]) -> bool:
    """Whether every value is right (1) or wrong (0), and nothing between."""
    return all(bool(np.isin(column, (0.0, 1.0)).all()) for column in columns)


def check_same_content(what: str, first: Mapping[ItemId, Scored], second: Mapping[ItemId, Scored]) -> None:
    """Refuses items that share a task and an id and ask different things.

    Args:
        what: the two, in words.
        first: items of one run; second: items of another.

    Raises:
        KvmapError: says how many differ, and names one.
    """
    shared = [item for item in first if item in second]
    different = [item for item in shared if first[item].content != second[item].content]
    if different:
        task, name = different[0]
        raise KvmapError(
            f"{what}: {len(different)} of {len(shared)} items that share a task and an id ask different "
            f"things (the first: task {task!r}, id {name!r}), so there is nothing to pair: evaluate both on "
            "the same files, seeds and lengths"
        )


def text_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as they must be; the first to the left, numbers to the right."""
    lines = [list(columns), *(list(row) for row in rows)]
    widths = [max(len(line[place]) for line in lines) for place in range(len(columns))]
    left = [not any(_is_numeric(row[place]) for row in rows) for place in range(len(columns))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if to_left else cell.rjust(width)
            for cell, width, to_left in zip(line, widths, left, strict=True)
        ).rstrip()
        for line in lines
    )


def written(value: float) -> str:
    """Three decimals, or three digits where that would leave fewer."""
    if not math.isfinite(value):
        return "–"
    return f"{value:.3f}" if value == 0 or abs(value) >= 0.01 else f"{value:.2g}"


def interval(low: float, high: float) -> str:
    """`[low, high]`; a dash where there is none."""
    return f"[{written(low)}, {written(high)}]" if math.isfinite(low) and math.isfinite(high) else "–"


def _is_numeric(cell: str) -> bool:
    return cell[:1].isdigit() or cell[:1] in "[-–"


def rows_of(file: Path, column: str | None = None) -> list[dict[str, str]]:
    """Rows of a table; none where there is no such file, or where it lacks a column that is named."""
    if not file.is_file():
        return []
    with file.open(encoding="utf-8", newline="") as stream:
        reader = csv.DictReader(stream)
        return [] if column is not None and column not in (reader.fieldnames or ()) else list(reader)


def _number(text: str) -> float:
    named = {"True": 1.0, "False": 0.0}
    return named[text] if text in named else float(text)
