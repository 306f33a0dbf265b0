"""Conversations to numbers: F1 by arm and by turn, what it retains of the target's, and how it drifts.

All intervals are over conversations, whose turns hang together.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, TypeAlias

import numpy as np

from kvmap.evaluation import statistics
from kvmap.evaluation.conversation import TurnResult
from kvmap.evaluation.statistics import Estimate, Floats
from kvmap.metrics import Metric

Row: TypeAlias = dict[str, Any]
Scores: TypeAlias = dict[str, dict[str, dict[int, float]]]
"""Arm → conversation → turn → score, the same conversations and turns under every arm."""

POINTS = 100.0
"""F1 is in [0, 1]; drift and its slope are in points, hundredths of it."""


def summarise_conversations(
    results: Iterable[TurnResult],
    *,
    first_turn: int = 1,
    unavailable: Mapping[str, str] | None = None,
    n_resamples: int = statistics.N_RESAMPLES,
    seed: int = 0,
) -> tuple[dict[str, Metric], list[Row]]:
    """F1 and exact match of every arm over all turns, as CoQA's scorer averages them, and what they retain.

    * retention: F1(arm) / F1(target)
    * gain_recovered: (F1(arm) − F1(source)) / (F1(target) − F1(source))
    * drift_points: 100 · (F1(target) − F1(arm))
    * drift_slope_points_per_turn: see `drift_slope`

    Only conversations that every arm has held count.

    Args:
        results: of `evaluate_conversations`, all arms.
        first_turn: turns before it are left out: those before a hand-off say nothing of the map.
        unavailable: arms that could not be run, with the reason; each gets a row without a number.
        n_resamples: bootstrap resamples.
        seed: of the bootstrap.

    Returns:
        Metrics by `evaluate/<task>/<arm>/<metric>`, and rows {task, arm, metric, value, n, standard_error,
        low, high, note}; n counts conversations.
    """
    results = list(results)
    rows: list[Row] = []
    for task in dict.fromkeys(result.task for result in results):
        of_task = [result for result in results if result.task == task and result.turn >= first_turn]
        for metric in ("f1", "exact_match"):
            scores = _scores(of_task, metric)
            for arm in scores:
                rows.append(_row(task, arm, metric, _mean(scores[arm], n_resamples, seed)))
        scores = _scores(of_task, "f1")
        for arm in scores:
            if arm != "target" and "target" in scores:
                rows += _against_target(task, arm, scores, n_resamples, seed)
        firsts = {result.id: float(result.n_truncated > 0) for result in of_task}
        rows.append(_row(task, "all", "n_truncated", Estimate(sum(firsts.values()), len(firsts))))
        rows += [
            _row(task, arm, "f1", Estimate(math.nan, 0, note=f"unavailable: {reason}"))
            for arm, reason in (unavailable or {}).items()
        ]
    return _metrics(rows), rows


def drift_rows(results: Iterable[TurnResult]) -> list[Row]:
    """F1 and drift of every arm at every turn.

    ``drift(t) = F1(target, t) − F1(arm, t)``, over the conversations that have a turn t; both with normal
    95 % intervals over conversations, those of the drift from paired differences.

    Returns:
        Rows {task, arm, turn, n, f1, f1_standard_error, f1_low, f1_high, drift_points,
        drift_standard_error, drift_low, drift_high}; without the target there is no drift.
    """
    results = list(results)
    rows = []
    for task in dict.fromkeys(result.task for result in results):
        scores = _scores([result for result in results if result.task == task], "f1")
        for arm, of_arm in scores.items():
            for turn in sorted({turn for turns in of_arm.values() for turn in turns}):
                having = [name for name, turns in of_arm.items() if turn in turns]
                f1 = statistics.mean([of_arm[name][turn] for name in having])
                row = {"task": task, "arm": arm, "turn": turn, "n": f1.n, "f1": f1.value}
                row |= _interval("f1", f1)
                if "target" in scores and arm != "target":
                    gaps = [scores["target"][name][turn] - of_arm[name][turn] for name in having]
                    drift = statistics.mean([POINTS * gap for gap in gaps])
                    row |= {"drift_points": drift.value} | _interval("drift", drift)
                rows.append(row)
    return rows


def drift_slope(
    drifts: Sequence[Mapping[int, float]], *, n_resamples: int = statistics.N_RESAMPLES, seed: int = 0
) -> Estimate:
    """By how much the drift grows per turn: least squares within conversations.

    ``slope = Σ_c Σ_t (t − t̄_c)(d_ct − d̄_c) / Σ_c Σ_t (t − t̄_c)²``, the b of d_ct = a_c + b·t. Each
    conversation has a level of its own, so that longer ones, which alone have late turns, do not bend the
    line; where all are of one length this is the least-squares line through all points.

    Args:
        drifts: of each conversation, turn to drift; the slope has the drift's unit, per turn.
        n_resamples: bootstrap resamples, of whole conversations.
        seed: of the bootstrap.
    """
    products, squares = [], []
    for drift in drifts:
        turns = np.array(list(drift), dtype=np.float64)
        values = np.array(list(drift.values()), dtype=np.float64)
        away = turns - turns.mean() if len(turns) else turns
        products.append(float((away * values).sum()))
        squares.append(float((away**2).sum()))
    what = "the spread of turns within conversations"
    return statistics.paired_ratio([products, squares], (0,), (1,), what, n_resamples, seed)


def _against_target(task: str, arm: str, scores: Scores, n_resamples: int, seed: int) -> list[Row]:
    sums = {name: _sums(of_arm) for name, of_arm in scores.items()}
    n_turns = [float(len(turns)) for turns in scores["target"].values()]

    def ratio(
        columns: Sequence[Floats], top: tuple[int, ...], bottom: tuple[int, ...], what: str
    ) -> Estimate:
        return statistics.paired_ratio(columns, top, bottom, what, n_resamples, seed)

    kept = ratio([sums[arm], sums["target"]], (0,), (1,), "the target's F1")
    rows = [_row(task, arm, "retention", kept)]
    if "source" in scores and arm != "source":
        columns = [sums[arm], sums["source"], sums["target"]]
        gain = ratio(columns, (0, 1), (2, 1), "the target's lead over the source")
        rows.append(_row(task, arm, "gain_recovered", gain))
    columns = [POINTS * sums["target"], POINTS * sums[arm], np.array(n_turns)]
    rows.append(_row(task, arm, "drift_points", ratio(columns, (0, 1), (2,), "the number of turns")))
    drifts = [
        {turn: POINTS * (native[turn] - scores[arm][name][turn]) for turn in native}
        for name, native in scores["target"].items()
    ]
    slope = drift_slope(drifts, n_resamples=n_resamples, seed=seed)
    return [*rows, _row(task, arm, "drift_slope_points_per_turn", slope)]


def _scores(results: Iterable[TurnResult], field: str) -> Scores:
    """The scores of the conversations that every arm has held."""
    scores: Scores = {}
    for result in results:
        turns = scores.setdefault(result.arm, {}).setdefault(result.id, {})
        turns[result.turn] = float(getattr(result, field))
    shared = set.intersection(*(set(of_arm) for of_arm in scores.values())) if scores else set()
    return {
        arm: {name: dict(sorted(turns.items())) for name, turns in of_arm.items() if name in shared}
        for arm, of_arm in scores.items()
    }


def _sums(of_arm: Mapping[str, Mapping[int, float]]) -> Floats:
    return np.array([sum(turns.values()) for turns in of_arm.values()])


def _mean(of_arm: Mapping[str, Mapping[int, float]], n_resamples: int, seed: int) -> Estimate:
    """Over all turns alike; the interval over conversations."""
    n_turns = np.array([float(len(turns)) for turns in of_arm.values()])
    columns = [_sums(of_arm), n_turns]
    return statistics.paired_ratio(columns, (0,), (1,), "the number of turns", n_resamples, seed)


def _interval(name: str, estimate: Estimate) -> Row:
    found = asdict(estimate)
    return {f"{name}_{part}": found[part] for part in ("standard_error", "low", "high")}


def _row(task: str, arm: str, metric: str, estimate: Estimate) -> Row:
    return {"task": task, "arm": arm, "metric": metric, **asdict(estimate)}


def _metrics(rows: Iterable[Row]) -> dict[str, Metric]:
    return {
        f"evaluate/{row['task']}/{row['arm']}/{row['metric']}": Metric(
            row["value"], row["n"], None if math.isnan(row["standard_error"]) else row["standard_error"]
        )
        for row in rows
    }
