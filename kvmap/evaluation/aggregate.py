"""Runs that differ in nothing but seeds, taken together: mean, spread between seeds, hierarchical intervals.

    python -m kvmap.evaluation.aggregate SWEEP_DIRECTORY | RUN_DIRECTORY ... [--over seed]

A mapper's, a split's or a text's seed are draws from what could have been as much as the items are.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from kvmap.errors import KvmapError
from kvmap.evaluation import statistics
from kvmap.evaluation.run_groups import Group, find_runs, finished, group_runs
from kvmap.evaluation.run_tables import (
    AVERAGES,
    MEASURES,
    ItemId,
    ItemMeasure,
    Scored,
    add_measure_arguments,
    interval,
    measures_asked,
    read_scores,
    text_table,
    written,
)
from kvmap.evaluation.scores import CHANCE, Scores, kept_of_target
from kvmap.evaluation.statistics import Estimate, Floats
from kvmap.files import write_csv

Row: TypeAlias = dict[str, Any]
Table: TypeAlias = dict[str, dict[ItemId, Scored]]


def aggregate(
    runs: Sequence[Path],
    *,
    measures: Sequence[ItemMeasure] = MEASURES,
    n_resamples: int = statistics.N_RESAMPLES,
    seed: int = 0,
) -> list[Row]:
    """Every measure over the runs of one configuration, by task and arm.

    * value: of the mean over runs, each counting the same; a ratio is that of such means
    * seed_sd: standard deviation (n − 1) of the runs' own values; nan for one run
    * low, high: 95 % of resamples that draw runs first and then items, see
      `statistics.hierarchical_means`. With few runs it is too narrow, by about √((n − 1)/n) in what the runs
      differ by: look at `seed_sd` too

    Only items that every arm of a run answered count, and arms that every run has.

    Returns:
        Rows {task, arm, metric, value, seed_sd, standard_error, low, high, n_seeds, n_items, items_shared,
        note}; n_items is of one run, the fewest where runs differ.

    Raises:
        KvmapError: no run has any of the measures.
    """
    rows: list[Row] = []
    for measure in measures:
        tables = [table for run in runs if (table := read_scores(run, measure))]
        if tables:
            rows += _measure_rows(measure, tables, n_resamples, seed)
    if not rows:
        names = ", ".join(dict.fromkeys(f"tables/{measure.table}.csv" for measure in measures))
        raise KvmapError(f"{', '.join(map(str, runs))}: no answers in {names}; the runs evaluated nothing")
    return rows


def _measure_rows(
    measure: ItemMeasure, tables: Sequence[Table], n_resamples: int, seed: int
) -> Iterator[Row]:
    arms = [arm for arm in tables[0] if all(arm in table for table in tables)]
    answered = [_answered_by_all(table, arms) for table in tables]
    first = dict.fromkeys(task for task, _ in answered[0])
    tasks = [task for task in first if all(any(item[0] == task for item in items) for items in answered)]
    random = np.random.default_rng(seed)
    drawn = random.integers(0, len(tables), size=(n_resamples, len(tables)))
    together: list[Scores] = []
    apart: list[list[Scores]] = []
    shared_by_all = True
    for task in tasks:
        items = [{item: content for item, content in own.items() if item[0] == task} for own in answered]
        shared = all(own == items[0] for own in items)
        # Items that all runs have stand in one order in all of them.
        order = [items[0] if shared else own for own in items]
        columns = [_columns(table, arms, own) for table, own in zip(tables, order, strict=True)]
        shared_by_all = shared_by_all and shared
        stacked = [np.stack(list(of_run.values()), axis=1) for of_run in columns]
        resampled = statistics.hierarchical_means(stacked, drawn, random, shared=shared)
        together.append(_scores(stacked, list(columns[0]), resampled))
        apart.append([_scores([run], list(columns[0]), None) for run in stacked])
        yield from _rows(measure, task, together[-1], apart[-1], shared)
    if len(tasks) > 1:
        of_runs = [_average([of_task[run] for of_task in apart]) for run in range(len(tables))]
        yield from _rows(measure, measure.average, _average(together), of_runs, shared_by_all)


def _answered_by_all(table: Table, arms: Sequence[str]) -> dict[ItemId, str]:
    """Items that every arm answered, with what they asked."""
    if not arms:
        return {}
    first = table[arms[0]]
    return {item: first[item].content for item in first if all(item in table[arm] for arm in arms)}


def _columns(table: Table, arms: Sequence[str], items: Iterable[ItemId]) -> dict[str, Floats]:
    """Arm to its values, and chance where the table says what guessing gets."""
    items = list(items)
    columns = {arm: np.array([table[arm][item].value for item in items]) for arm in arms}
    chance = np.array([table[arms[0]][item].chance for item in items])
    return columns | ({} if np.isnan(chance).any() else {CHANCE: chance})


def _scores(stacked: Sequence[Floats], arms: Sequence[str], resampled: Floats | None) -> Scores:
    """Means over runs, each counting the same; without resamples, the values alone."""
    means = np.mean([of_run.mean(axis=0) for of_run in stacked], axis=0)
    draws = means[None].repeat(2, axis=0) if resampled is None else resampled
    return Scores(
        value=dict(zip(arms, map(float, means), strict=True)),
        error={arm: float(draws[:, place].std(ddof=1)) for place, arm in enumerate(arms)},
        resampled={arm: draws[:, place] for place, arm in enumerate(arms)},
        n=min(len(of_run) for of_run in stacked),
    )


def _average(scored: Sequence[Scores]) -> Scores:
    """Tasks weigh the same; resamples go together, for they took the same runs."""
    arms = [arm for arm in scored[0].value if all(arm in scores.value for scores in scored)]
    resampled = {arm: np.mean([scores.resampled[arm] for scores in scored], axis=0) for arm in arms}
    return Scores(
        value={arm: float(np.mean([scores.value[arm] for scores in scored])) for arm in arms},
        error={arm: float(draws.std(ddof=1)) for arm, draws in resampled.items()},
        resampled=resampled,
        n=sum(scores.n for scores in scored),
    )


def _rows(
    measure: ItemMeasure, task: str, together: Scores, apart: Sequence[Scores], shared: bool
) -> Iterator[Row]:
    of_runs = [{(arm, metric): e.value for arm, metric, e in _estimates(measure, s)} for s in apart]
    for arm, metric, estimate in _estimates(measure, together):
        values = np.array([of_run[arm, metric] for of_run in of_runs])
        yield {
            "task": task,
            "arm": arm,
            "metric": metric,
            "value": estimate.value,
            "seed_sd": float(values.std(ddof=1)) if len(values) > 1 else math.nan,
            "standard_error": estimate.standard_error,
            "low": estimate.low,
            "high": estimate.high,
            "n_seeds": len(apart),
            "n_items": together.n,
            "items_shared": shared,
            "note": estimate.note,
        }


def _estimates(measure: ItemMeasure, scores: Scores) -> Iterator[tuple[str, str, Estimate]]:
    """Arm, metric, estimate: the mean, differences to target and source, and the ratios of the measure."""
    for arm in scores.arms:
        low, high = (float(end) for end in np.quantile(scores.resampled[arm], (0.025, 0.975)))
        yield arm, measure.name, Estimate(scores.value[arm], scores.n, scores.error[arm], low, high)
        if measure.name == "accuracy_norm":
            continue
        for other in ("target", "source"):
            if other in scores.arms and arm != other:
                yield arm, f"{measure.name}_minus_{other}", scores.difference(arm, other)
        if "target" not in scores.arms or arm == "target":
            continue
        if measure.name == "nll_nats" and arm != "no_context" and "no_context" in scores.arms:
            what = "what the context is worth to the target"
            yield arm, "context_carried", scores.ratio(("no_context", arm), ("no_context", "target"), what)
        if measure.accuracy:
            prefix = "generated_" if measure.name == "generated_accuracy" else ""
            floor = not prefix and CHANCE in scores.value
            for name, estimate in kept_of_target(scores, arm, floor=floor):
                yield arm, f"{prefix}{name}", estimate


def report(group: Group, rows: Sequence[Row]) -> str:
    """A group's rows as a table for people: the mapped arm by task, every arm on average over tasks."""
    averages = {"average", *AVERAGES.values()}
    averaged = {row["metric"] for row in rows if row["task"] in averages}
    shown = [
        row
        for row in rows
        if row["task"] in averages or row["arm"] == "mapped" or row["metric"] not in averaged
    ]
    columns = ["metric", "task", "arm", "mean", "SD of seeds", "95 % interval", "seeds", "items"]
    cells = [
        [
            row["metric"],
            row["task"],
            row["arm"],
            written(row["value"]),
            written(row["seed_sd"]),
            interval(row["low"], row["high"]),
            str(row["n_seeds"]),
            str(row["n_items"]),
        ]
        for row in shown
    ]
    return f"{group.describe()}\n{text_table(columns, cells)}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of `python -m kvmap.evaluation.aggregate`."""
    parser = argparse.ArgumentParser(
        prog="python -m kvmap.evaluation.aggregate",
        description="Take runs together that differ in seeds alone: mean, spread between seeds, intervals.",
    )
    parser.add_argument("directories", type=Path, nargs="+", help="runs, or a sweep with runs in it")
    parser.add_argument(
        "--over",
        default="seed",
        help="settings to take together, by commas: full keys (mapper.seed) or a last part (default: seed, "
        "which is all that end in .seed or _seed, but for those that change no result)",
    )
    parser.add_argument("--resamples", type=int, default=statistics.N_RESAMPLES, help="of the bootstrap")
    parser.add_argument("--seed", type=int, default=0, help="of the bootstrap")
    parser.add_argument("--csv", type=Path, help="where to write all rows; a sweep's go to its aggregate.csv")
    add_measure_arguments(parser)
    given = parser.parse_args(arguments)
    try:
        measures = measures_asked(given)
        found = find_runs(given.directories)
        runs = finished(found)
        if len(runs) < len(found):
            print(f"left out: {len(found) - len(runs)} runs that are not finished")
        groups = group_runs(runs, given.over.split(","))
        if repeated := len(runs) - sum(len(group.runs) for group in groups):
            print(
                f"left out: {repeated} runs that are no draw of their own: a later run has their settings "
                "and seeds, or their mapper and items"
            )
        everything: list[Row] = []
        for group in groups:
            rows = aggregate(group.runs, measures=measures, n_resamples=given.resamples, seed=given.seed)
            everything += [group.settings | row for row in rows]
            print(report(group, rows), end="\n\n")
        file = given.csv or _sweep_file(given.directories)
        if file is not None:
            write_csv(file, everything)
            print(f"rows: {file}")
    except KvmapError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _sweep_file(directories: Sequence[Path]) -> Path | None:
    sweeps = [path for path in directories if not (path / "run.json").is_file()]
    return sweeps[0] / "aggregate.csv" if len(sweeps) == 1 == len(directories) else None


if __name__ == "__main__":
    sys.exit(main())
