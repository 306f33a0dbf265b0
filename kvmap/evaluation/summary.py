"""Results of items and sequences to the numbers of a run: one metric and one table row each."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from kvmap.evaluation import statistics
from kvmap.evaluation.choices import ItemResult
from kvmap.evaluation.perplexity import PerplexityResult
from kvmap.evaluation.statistics import Estimate, Floats
from kvmap.metrics import Metric

Row: TypeAlias = dict[str, Any]
Summary: TypeAlias = tuple[dict[str, Metric], list[Row]]

AVERAGE = "average"
ALL_ARMS = "all"


@dataclass(frozen=True, eq=False)
class Scores:
    """Means of several arms over the same items, with the same resamples.

    Attributes:
        value: arm to its mean.
        error: arm to the standard error of that mean.
        resampled: arm to its means over resamples, (n_resamples,).
        n: items.
    """

    value: dict[str, float]
    error: dict[str, float]
    resampled: dict[str, Floats]
    n: int

    def mean(self, arm: str) -> Estimate:
        """The arm's mean with its normal 95 % interval."""
        value, error = self.value[arm], self.error[arm]
        return Estimate(value, self.n, error, value - 1.959964 * error, value + 1.959964 * error)

    def ratio(self, top: tuple[str, str | None], bottom: tuple[str, str | None], what: str) -> Estimate:
        """(a − b) / (c − d), where b and d may be None for zero."""

        def less(first: str, second: str | None) -> tuple[float, Floats]:
            if second is None:
                return self.value[first], self.resampled[first]
            return self.value[first] - self.value[second], self.resampled[first] - self.resampled[second]

        (numerator, numerators), (denominator, denominators) = less(*top), less(*bottom)
        return statistics.ratio(numerator, denominator, numerators, denominators, n=self.n, what=what)


def summarise_items(
    results: Iterable[ItemResult],
    *,
    unavailable: Mapping[str, str] | None = None,
    n_resamples: int = statistics.N_RESAMPLES,
    seed: int = 0,
) -> Summary:
    """Accuracies of every arm, and what they retain of the target's, per task and on average over tasks.

    * retention: acc(arm) / acc(target) ([H] §5)
    * floor_retention: (acc(arm) − chance) / (acc(target) − chance)
    * gain_recovered: (acc(arm) − acc(source)) / (acc(target) − acc(source))

    Chance is one over the number of choices of each item. The average is that of the tasks' means, each task
    counting the same; its resamples are drawn within tasks. Only items that every arm answered are counted,
    so that an interrupted run still compares like with like.

    Args:
        results: of `evaluate_items`, all arms.
        unavailable: arms that could not be run, with the reason; each gets a row without a number.
        n_resamples: bootstrap resamples.
        seed: of the bootstrap.

    Returns:
        Metrics by `evaluate/<task>/<arm>/<metric>`, and rows {task, arm, metric, value, n, standard_error,
        low, high, note}. Undefined numbers are nan, and the row's note says why.
    """
    tasks = _by_task(results)
    rows: list[Row] = []
    for field, metric in (
        ("correct", "accuracy"),
        ("correct_norm", "accuracy_norm"),
        ("generated_correct", "generated_accuracy"),
    ):
        scored: list[Scores] = []
        for task, table in tasks.items():
            if any(getattr(result, field) is None for row in table.values() for result in row.values()):
                continue
            columns = _columns(table, field)
            scores = _scores(columns, n_resamples, seed)
            rows += _accuracy_rows(task, metric, scores, _mcnemar(columns))
            scored.append(scores)
        if len(scored) > 1:
            columns = _columns(
                {(task, *key): row for task, table in tasks.items() for key, row in table.items()}, field
            )
            rows += _accuracy_rows(AVERAGE, metric, _average(scored), _mcnemar(columns))
    for task, table in tasks.items():
        truncated = [float(next(iter(row.values())).n_truncated > 0) for row in table.values()]
        rows.append(_row(task, ALL_ARMS, "n_truncated", Estimate(sum(truncated), len(truncated))))
        rows += _unavailable_rows(task, "accuracy", unavailable)
    return _summary(rows)


def summarise_perplexity(
    results: Mapping[str, PerplexityResult],
    *,
    task: str = "perplexity",
    unavailable: Mapping[str, str] | None = None,
    n_resamples: int = statistics.N_RESAMPLES,
    seed: int = 0,
) -> Summary:
    """Perplexity, context carried, KL from native and top-1 agreement of every arm.

    Intervals are over sequences. Perplexity's error is exp(mean)·(error of the mean), its interval the
    exponential of the mean's.

    Args:
        results: of `evaluate_perplexity`, by arm.
        task: what to count them under.
        unavailable: arms that could not be run, with the reason.
        n_resamples: bootstrap resamples.
        seed: of the bootstrap.

    Returns:
        As `summarise_items`.
    """
    rows: list[Row] = []
    for arm, result in results.items():
        rows += _perplexity_rows(task, arm, result)
    if {"target", "no_context"} <= set(results):
        for arm, result in results.items():
            if arm in ("target", "no_context"):
                continue
            carried = statistics.context_carried(
                result.nll,
                results["target"].nll,
                results["no_context"].nll,
                n_resamples=n_resamples,
                seed=seed,
            )
            rows.append(_row(task, arm, "context_carried", carried))
    return _summary(rows + _unavailable_rows(task, "perplexity", unavailable))


def _by_task(results: Iterable[ItemResult]) -> dict[str, dict[tuple[str, ...], dict[str, ItemResult]]]:
    """Tasks → (item id,) → arm → result, of the items that every arm answered."""
    tasks: dict[str, dict[tuple[str, ...], dict[str, ItemResult]]] = {}
    arms: dict[str, None] = {}
    for result in results:
        tasks.setdefault(result.task, {}).setdefault((result.id,), {})[result.arm] = result
        arms[result.arm] = None
    complete = {
        task: {key: row for key, row in table.items() if len(row) == len(arms)}
        for task, table in tasks.items()
    }
    return {task: table for task, table in complete.items() if table}


def _columns(table: Mapping[Any, Mapping[str, ItemResult]], field: str) -> dict[str, Floats]:
    """Arm to 0/1 per item, with chance per item as one column more."""
    rows = list(table.values())
    columns = {arm: np.array([float(getattr(row[arm], field)) for row in rows]) for arm in rows[0]}
    columns["chance"] = np.array([1 / len(next(iter(row.values())).logliks) for row in rows])
    return columns


def _scores(columns: Mapping[str, Floats], n_resamples: int, seed: int) -> Scores:
    resampled = statistics.bootstrap_means(list(columns.values()), n_resamples=n_resamples, seed=seed)
    means = {arm: statistics.mean(column) for arm, column in columns.items()}
    return Scores(
        value={arm: estimate.value for arm, estimate in means.items()},
        error={arm: estimate.standard_error for arm, estimate in means.items()},
        resampled={arm: resampled[:, number] for number, arm in enumerate(columns)},
        n=len(columns["chance"]),
    )


def _average(scored: Sequence[Scores]) -> Scores:
    """Tasks weigh the same; they are independent, so errors add in squares and resamples add one to one."""
    arms = list(scored[0].value)
    # Tasks of one size draw the same rows from one seed; shuffled, their resamples are independent.
    order = np.random.default_rng(0)
    shuffled = [order.permutation(len(scores.resampled["chance"])) for scores in scored]
    return Scores(
        value={arm: float(np.mean([scores.value[arm] for scores in scored])) for arm in arms},
        error={arm: math.hypot(*(scores.error[arm] for scores in scored)) / len(scored) for arm in arms},
        resampled={
            arm: np.mean([s.resampled[arm][o] for s, o in zip(scored, shuffled, strict=True)], axis=0)
            for arm in arms
        },
        n=sum(scores.n for scores in scored),
    )


def _mcnemar(columns: Mapping[str, Floats]) -> dict[str, float]:
    if "target" not in columns:
        return {}
    others = [arm for arm in columns if arm not in ("target", "chance")]
    return {arm: statistics.mcnemar(columns[arm], columns["target"]) for arm in others}


def _accuracy_rows(task: str, metric: str, scores: Scores, p_values: Mapping[str, float]) -> list[Row]:
    """One accuracy of every arm, and for the likeliest choice and generations what it retains."""
    arms = [arm for arm in scores.value if arm != "chance"]
    rows = [_row(task, arm, metric, scores.mean(arm)) for arm in arms]
    if metric == "accuracy_norm" or "target" not in arms:
        return rows
    prefix = "generated_" if metric == "generated_accuracy" else ""
    for arm in arms:
        if arm == "target":
            continue
        kept = scores.ratio((arm, None), ("target", None), "the target's accuracy")
        rows.append(_row(task, arm, f"{prefix}retention", kept))
        if not prefix:
            lead = scores.ratio((arm, "chance"), ("target", "chance"), "the target's lead over chance")
            rows.append(_row(task, arm, "floor_retention", lead))
        if "source" in arms and arm != "source":
            gain = scores.ratio((arm, "source"), ("target", "source"), "the target's lead over the source")
            rows.append(_row(task, arm, f"{prefix}gain_recovered", gain))
        rows.append(_row(task, arm, f"{prefix}mcnemar_p", Estimate(p_values[arm], scores.n)))
    return rows


def _perplexity_rows(task: str, arm: str, result: PerplexityResult) -> list[Row]:
    counts = np.array(result.n_tokens, dtype=np.float64)
    nll = statistics.mean(np.array(result.nll) / counts)
    low, high = (_exponential(end) for end in (nll.low, nll.high))
    perplexity = Estimate(result.perplexity, nll.n, _exponential(nll.value) * nll.standard_error, low, high)
    kl = statistics.mean(np.array(result.kl) / counts)
    agreement = statistics.mean(np.array(result.agreement) / counts)
    return [
        _row(task, arm, "perplexity", perplexity),
        _row(task, arm, "nll_nats", nll),
        _row(task, arm, "kl_nats", kl),
        _row(task, arm, "top1_agreement", agreement),
    ]


def _exponential(value: float) -> float:
    return math.nan if math.isnan(value) else math.exp(min(value, 700))


def _unavailable_rows(task: str, metric: str, reasons: Mapping[str, str] | None) -> list[Row]:
    return [
        _row(task, arm, metric, Estimate(math.nan, 0, note=f"unavailable: {reason}"))
        for arm, reason in (reasons or {}).items()
    ]


def _row(task: str, arm: str, metric: str, estimate: Estimate) -> Row:
    return {
        "task": task,
        "arm": arm,
        "metric": metric,
        "value": estimate.value,
        "n": estimate.n,
        "standard_error": estimate.standard_error,
        "low": estimate.low,
        "high": estimate.high,
        "note": estimate.note,
    }


def _summary(rows: list[Row]) -> Summary:
    """Rows, and those of them that hold a number as metrics; a standard error that is not one is None."""
    metrics = {}
    for row in rows:
        error = row["standard_error"]
        key = f"evaluate/{row['task']}/{row['arm']}/{row['metric']}"
        metrics[key] = Metric(row["value"], row["n"], None if math.isnan(error) else error)
    return metrics, rows
