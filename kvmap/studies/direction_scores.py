"""What a hand-off is worth in one direction: runs that differ in seeds alone, as one row a task.

Questions, lm-eval's tasks and text are taken together by `kvmap.evaluation.aggregate`. Conversations are
taken together here: their items are whole conversations, and turns before the hand-off say nothing of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from kvmap.evaluation import statistics
from kvmap.evaluation.aggregate import aggregate
from kvmap.evaluation.run_tables import AVERAGES, MEASURES, read_scores, rows_of, run_record, settings_of
from kvmap.evaluation.scores import Scores, kept_of_target
from kvmap.evaluation.statistics import Estimate, Floats

Row: TypeAlias = dict[str, Any]
Found: TypeAlias = Mapping[tuple[str, str], Estimate]
"""Arm and metric to its estimate."""

ARMS = ("target", "source", "mapped", "re_prefill", "no_context")
COMPARED = ("retention", "floor_retention", "gain_recovered", "minus_source", "minus_re_prefill", "carried")
"""What a row says of the mapped arm, each with `_low` and `_high`."""

_METRICS = {"items": "accuracy", "tasks_items": "tasks_accuracy", "sequences": "nll_nats"}
_NAMES = {
    "minus_source": "{}_minus_source",
    "minus_re_prefill": "{}_minus_re_prefill",
    "carried": "context_carried",
}


def question_rows(
    runs: Sequence[Path], *, n_resamples: int = statistics.N_RESAMPLES, seed: int = 0
) -> list[Row]:
    """One row for questions, one for lm-eval's tasks and one for text, as far as the runs have them.

    With acc the accuracy, F1 or, of text, NLL in nats a token:

    * retention: acc(mapped) / acc(target)
    * floor_retention: (acc(mapped) − chance) / (acc(target) − chance)
    * gain_recovered: (acc(mapped) − acc(source)) / (acc(target) − acc(source))
    * minus_source, minus_re_prefill: acc(mapped) − acc(that arm)
    * carried: (NLL_none − NLL_mapped) / (NLL_none − NLL_target)

    Args:
        runs: finished, of one configuration but for seeds.
        n_resamples, seed: of the bootstrap, which draws runs first and then items.

    Returns:
        Rows {task, measure, n_seeds, n_items, `ARMS`, `COMPARED` with their ends, note}; several tasks stand
        as their average. What the runs have not, or what is undefined, is nan; the note says why the gain is.
    """
    found: list[Row] = []
    for measure in (measure for measure in MEASURES if _METRICS.get(measure.table) == measure.name):
        if not any(read_scores(run, measure) for run in runs):
            continue
        rows = aggregate(runs, measures=[measure], n_resamples=n_resamples, seed=seed)
        averages = {"average", *AVERAGES.values()} & {row["task"] for row in rows}
        for task in averages or dict.fromkeys(row["task"] for row in rows):
            of_task = [row for row in rows if row["task"] == task]
            estimates = {
                (row["arm"], row["metric"]): Estimate(
                    row["value"], row["n_items"], row["standard_error"], row["low"], row["high"], row["note"]
                )
                for row in of_task
            }
            found.append(_row(task, measure.name, estimates, of_task[0]["n_seeds"], of_task[0]["n_items"]))
    return found


def conversation_rows(
    runs: Sequence[Path], *, n_resamples: int = statistics.N_RESAMPLES, seed: int = 0
) -> list[Row]:
    """As `question_rows`, one row for each task of the conversations that the runs held."""
    tables = [table for run in runs if (table := _by_conversation(run))]
    rows = []
    for task in dict.fromkeys(task for table in tables for task in table):
        own = [table[task] for table in tables if task in table]
        arms = [arm for arm in own[0] if all(arm in table for table in own)]
        scores = _scores(own, arms, n_resamples, seed)
        estimates = {(arm, "f1"): scores.mean(arm) for arm in arms}
        if {"mapped", "target"} <= set(arms):
            kept = kept_of_target(scores, "mapped", floor=False)
            estimates |= {("mapped", name): estimate for name, estimate in kept}
        for other in {"source", "re_prefill"} & set(arms):
            if "mapped" in arms:
                estimates["mapped", f"f1_minus_{other}"] = scores.difference("mapped", other)
        rows.append(_row(task, "f1", estimates, len(own), scores.n))
    return rows


def _by_conversation(run: Path) -> dict[str, dict[str, dict[str, float]]]:
    """Task, arm, conversation (its id, and what its last turn asked) to its F1 from the hand-off on.

    It is the sum over turns by the mean number of turns of the task's conversations: so the mean over
    conversations is that over turns, which count alike, and a ratio of two arms is that of their sums.
    """
    settings = settings_of(run_record(run))
    at_turn = settings.get("evaluation.conversation.mode") == "at_turn"
    first = int(settings["evaluation.conversation.turn"]) if at_turn else 1
    sums: dict[str, dict[str, dict[str, list[float]]]] = {}
    asked: dict[tuple[str, str], str] = {}
    for row in rows_of(Path(run) / "tables" / "conversations.csv", "f1"):
        if int(row["turn"]) >= first:
            asked[row["task"], row["id"]] = row["content"]
            of_arm = sums.setdefault(row["task"], {}).setdefault(row["arm"], {})
            of_arm.setdefault(row["id"], []).append(float(row["f1"]))
    found: dict[str, dict[str, dict[str, float]]] = {}
    for task, arms in sums.items():
        shared = set.intersection(*(set(of_arm) for of_arm in arms.values()))
        if not shared:
            continue
        n_turns = float(np.mean([len(next(iter(arms.values()))[name]) for name in shared]))
        found[task] = {
            arm: {f"{name}/{asked[task, name]}": sum(of_arm[name]) / n_turns for name in sorted(shared)}
            for arm, of_arm in arms.items()
        }
    return found


def _scores(
    tables: Sequence[Mapping[str, Mapping[str, float]]], arms: Sequence[str], n_resamples: int, seed: int
) -> Scores:
    """Means over runs, each counting the same, with resamples of runs and then conversations."""
    names = [list(table[arms[0]]) for table in tables]
    stacked: list[Floats] = [
        np.array([[table[arm][name] for arm in arms] for name in own])
        for table, own in zip(tables, names, strict=True)
    ]
    random = np.random.default_rng(seed)
    drawn = random.integers(0, len(tables), size=(n_resamples, len(tables)))
    shared = all(own == names[0] for own in names)
    resampled = statistics.hierarchical_means(stacked, drawn, random, shared=shared)
    means = np.mean([of_run.mean(axis=0) for of_run in stacked], axis=0)
    return Scores(
        value=dict(zip(arms, map(float, means), strict=True)),
        error={arm: float(resampled[:, place].std(ddof=1)) for place, arm in enumerate(arms)},
        resampled={arm: resampled[:, place] for place, arm in enumerate(arms)},
        n=min(map(len, stacked)),
    )


def _row(task: str, measure: str, found: Found, n_seeds: int, n_items: int) -> Row:
    absent = Estimate(math.nan, 0)
    row: Row = {"task": task, "measure": measure, "n_seeds": n_seeds, "n_items": n_items}
    row |= {arm: found.get((arm, measure), absent).value for arm in ARMS}
    for name in COMPARED:
        estimate = found.get(("mapped", _NAMES.get(name, name).format(measure)), absent)
        row |= {name: estimate.value, f"{name}_low": estimate.low, f"{name}_high": estimate.high}
    return row | {"note": found.get(("mapped", "gain_recovered"), absent).note}
