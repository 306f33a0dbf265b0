"""Two runs held against each other on the items both have: paired differences, with how sure they are.

    python -m kvmap.evaluation.compare RUN_A RUN_B [--arm mapped] [--arm-b source]

The runs may differ in mapper, options, pair or anything else; what pairs them is that they asked the same.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from kvmap.errors import KvmapError
from kvmap.evaluation import statistics
from kvmap.evaluation.run_tables import (
    MEASURES,
    ItemId,
    ItemMeasure,
    Scored,
    add_measure_arguments,
    check_same_content,
    interval,
    is_binary,
    measures_asked,
    read_scores,
    run_record,
    settings_of,
    text_table,
    written,
)
from kvmap.evaluation.scores import Scores, average, scores_of
from kvmap.evaluation.statistics import Floats
from kvmap.files import write_csv

Row: TypeAlias = dict[str, Any]

NUMBERS = ("a", "b", "difference", "standard_error", "low", "high")
OF_ANSWERS = ("mcnemar_p", "only_a_right", "only_b_right")
_NOTHING: Row = dict.fromkeys(NUMBERS, math.nan) | dict.fromkeys(OF_ANSWERS)
SETTINGS_SHOWN = 12


def compare_runs(
    run_a: Path,
    run_b: Path,
    *,
    arm: str = "mapped",
    arm_b: str | None = None,
    measures: Sequence[ItemMeasure] = MEASURES,
    n_resamples: int = statistics.N_RESAMPLES,
    seed: int = 0,
) -> list[Row]:
    """Differences A − B of every measure and task that both runs have.

    Items are paired by task and id, and must agree in content. Each task's interval is that of a paired
    bootstrap over items. On average over tasks each task counts the same, and McNemar's test is of all items.

    Args:
        run_a: directory of a run.
        run_b: directory of another, or of the same.
        arm: whose answers in A.
        arm_b: whose answers in B; None: the same arm's.
        measures: columns of tables; those that a run does not have are left out.
        n_resamples: bootstrap resamples.
        seed: of the bootstrap.

    Returns:
        Rows {measure, task, a, b, difference, standard_error, low, high, mcnemar_p, only_a_right,
        only_b_right, n_pairs, n_only_a, n_only_b, n_cut_differently}; those about right and wrong answers are
        None where an item can be something between. A task that only one run has is a row without pairs.

    Raises:
        KvmapError: no such run or arm, items that differ in content, or nothing in common.
    """
    arm_b = arm if arm_b is None else arm_b
    rows: list[Row] = []
    for measure in measures:
        tables = read_scores(run_a, measure), read_scores(run_b, measure)
        if not all(tables):
            continue
        first, second = _of_arm(run_a, tables[0], arm), _of_arm(run_b, tables[1], arm_b)
        check_same_content(f"{run_a} and {run_b}", first, second)
        rows += _measure_rows(measure, first, second, n_resamples, seed)
    if not any(row["n_pairs"] for row in rows):
        names = ", ".join(dict.fromkeys(f"{measure.table}.csv" for measure in measures))
        raise KvmapError(
            f"{run_a} and {run_b} have no item in common in {names} under arms {arm!r} and {arm_b!r}: both "
            "must have evaluated the same questions or sequences"
        )
    return rows


def _of_arm(run: Path, table: Mapping[str, Mapping[ItemId, Scored]], arm: str) -> Mapping[ItemId, Scored]:
    if arm not in table:
        raise KvmapError(f"{run}: no arm {arm!r} in its answers; it has {', '.join(sorted(table))}")
    return table[arm]


def _measure_rows(
    measure: ItemMeasure,
    first: Mapping[ItemId, Scored],
    second: Mapping[ItemId, Scored],
    n_resamples: int,
    seed: int,
) -> Iterator[Row]:
    """One row a task, and one of their average where there are several."""
    scored: list[Scores] = []
    everything: list[dict[str, Floats]] = []
    rows: list[Row] = []
    for task in dict.fromkeys(task for task, _ in [*first, *second]):
        mine, theirs = (
            {item: score for item, score in table.items() if item[0] == task} for table in (first, second)
        )
        pairs = [item for item in mine if item in theirs]
        counts = {
            "n_pairs": len(pairs),
            "n_only_a": len(mine) - len(pairs),
            "n_only_b": len(theirs) - len(pairs),
            "n_cut_differently": sum(mine[p].n_truncated != theirs[p].n_truncated for p in pairs),
        }
        if not pairs:
            rows.append({"measure": measure.name, "task": task, **_NOTHING, **counts})
            continue
        columns = {
            "a": np.array([mine[item].value for item in pairs]),
            "b": np.array([theirs[item].value for item in pairs]),
        }
        scored.append(scores_of(columns, n_resamples, seed))
        everything.append(columns)
        rows.append(_row(measure, task, scored[-1], columns) | counts)
    yield from rows
    if len(scored) > 1:
        columns = {side: np.concatenate([column[side] for column in everything]) for side in ("a", "b")}
        counts = {name: sum(row[name] for row in rows) for name in counts}
        yield _row(measure, measure.average, average(scored), columns) | counts


def _row(measure: ItemMeasure, task: str, scores: Scores, columns: Mapping[str, Floats]) -> Row:
    gap = scores.difference("a", "b")
    row: Row = {"measure": measure.name, "task": task, **_NOTHING}
    row |= {"a": scores.value["a"], "b": scores.value["b"], "difference": gap.value}
    row |= {"standard_error": gap.standard_error, "low": gap.low, "high": gap.high}
    if measure.accuracy and is_binary(columns.values()):
        only_a, only_b = statistics.discordant(columns["a"], columns["b"])
        p = statistics.mcnemar(columns["a"], columns["b"])
        row |= {"mcnemar_p": p, "only_a_right": only_a, "only_b_right": only_b}
    return row


def what_differs(run_a: Path, run_b: Path) -> list[tuple[str, Any, Any]]:
    """Settings in which two runs differ, with both values."""
    first, second = settings_of(run_record(run_a)), settings_of(run_record(run_b))
    names = dict.fromkeys([*first, *second])
    return [(n, first.get(n), second.get(n)) for n in names if first.get(n) != second.get(n)]


def report(rows: Sequence[Row]) -> str:
    """The rows as a table for people."""
    columns = [
        "measure", "task", "A", "B", "A − B", "95 % interval", "McNemar p", "right in A, B alone", "pairs",
        "in A, B alone",
    ]  # fmt: skip
    cells = [
        [
            row["measure"],
            row["task"],
            written(row["a"]),
            written(row["b"]),
            written(row["difference"]),
            interval(row["low"], row["high"]),
            "–" if row["mcnemar_p"] is None else written(row["mcnemar_p"]),
            "–" if row["mcnemar_p"] is None else f"{row['only_a_right']}, {row['only_b_right']}",
            str(row["n_pairs"]),
            f"{row['n_only_a']}, {row['n_only_b']}",
        ]
        for row in rows
    ]
    text = text_table(columns, cells)
    cut = max((row["n_cut_differently"] for row in rows), default=0)
    if cut:
        text += (
            f"\nnote: of {cut} pairs the contexts were cut to different lengths (other limits or tokenizers)"
        )
    return text


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m kvmap.evaluation.compare",
        description="Pair two runs item by item: differences, paired bootstrap intervals, McNemar's test.",
    )
    parser.add_argument("run_a", type=Path, help="directory of a run: what it printed last, after `run:`")
    parser.add_argument("run_b", type=Path, help="directory of another run, or of the same")
    parser.add_argument("--arm", default="mapped", help="arm of A (default: mapped)")
    parser.add_argument("--arm-b", help="arm of B (default: the same)")
    parser.add_argument("--resamples", type=int, default=statistics.N_RESAMPLES, help="of the bootstrap")
    parser.add_argument("--seed", type=int, default=0, help="of the bootstrap")
    parser.add_argument("--csv", type=Path, help="also write the rows to this file")
    add_measure_arguments(parser)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of `python -m kvmap.evaluation.compare`."""
    given = _parser().parse_args(arguments)
    try:
        differences = what_differs(given.run_a, given.run_b)
        rows = compare_runs(
            given.run_a,
            given.run_b,
            arm=given.arm,
            arm_b=given.arm_b,
            measures=measures_asked(given),
            n_resamples=given.resamples,
            seed=given.seed,
        )
        for side, run, arm in (("A", given.run_a, given.arm), ("B", given.run_b, given.arm_b or given.arm)):
            print(f"{side}: {run}, arm {arm}, {run_record(run)['status']}")
        for name, first, second in differences[:SETTINGS_SHOWN]:
            print(f"   {name}: {first} | {second}")
        if len(differences) > SETTINGS_SHOWN:
            print(f"   and {len(differences) - SETTINGS_SHOWN} settings more")
        print(report(rows))
        if given.csv:
            write_csv(given.csv, rows)
    except KvmapError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
