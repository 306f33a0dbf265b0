"""Results of items and sequences to the numbers of a run: one metric and one table row each."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from kvmap.evaluation import statistics
from kvmap.evaluation.arms import MAPPERLESS
from kvmap.evaluation.judging import ItemResult
from kvmap.evaluation.scores import CHANCE, Scores, arm_row, average, kept_of_target, scores_of
from kvmap.evaluation.sequence_scores import PerplexityResult
from kvmap.evaluation.statistics import Estimate, Floats
from kvmap.metrics import Metric

Row: TypeAlias = dict[str, Any]
Summary: TypeAlias = tuple[dict[str, Metric], list[Row]]

AVERAGE = "average"
ALL_ARMS = "all"


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
    * accuracy_minus_target, accuracy_minus_source: the plain differences, on the same items
    * n_truncated: items whose context was cut, the same for all arms
    * n_unmapped: items of which an arm that maps mapped nothing, since native tokens cover the context: there
      it is the target itself
    * mcnemar_p, mcnemar_source_p: McNemar's exact test against the target and against the source alone; the
      row's note counts the items that only one of the two got right. On average over tasks, of all items

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
            scores = scores_of(columns, n_resamples, seed)
            rows += _accuracy_rows(task, metric, scores, columns)
            scored.append(scores)
        if len(scored) > 1:
            columns = _columns(
                {(task, *key): row for task, table in tasks.items() for key, row in table.items()}, field
            )
            rows += _accuracy_rows(AVERAGE, metric, average(scored), columns)
    for task, table in tasks.items():
        truncated = [float(next(iter(row.values())).n_truncated > 0) for row in table.values()]
        rows.append(arm_row(task, ALL_ARMS, "n_truncated", Estimate(sum(truncated), len(truncated))))
        for arm in next(iter(table.values())):
            rows += _unmapped_rows(task, arm, [row[arm].n_mapped for row in table.values()])
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

    nll_minus_target_nats and nll_minus_source_nats are differences of NLL per token on the same sequences;
    n_unmapped is as in `summarise_items`.
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
        rows += _unmapped_rows(task, arm, result.n_mapped)
    settings = {"n_resamples": n_resamples, "seed": seed}
    for arm, result in results.items():
        for other in ("target", "source"):
            if other in results and arm != other:
                gap = statistics.paired_difference(_per_token(result), _per_token(results[other]), **settings)
                rows.append(arm_row(task, arm, f"nll_minus_{other}_nats", gap))
        if arm not in ("target", "no_context") and {"target", "no_context"} <= set(results):
            native, none = results["target"].nll, results["no_context"].nll
            carried = statistics.context_carried(result.nll, native, none, **settings)
            rows.append(arm_row(task, arm, "context_carried", carried))
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
    columns[CHANCE] = np.array([1 / len(next(iter(row.values())).logliks) for row in rows])
    return columns


def _accuracy_rows(task: str, metric: str, scores: Scores, columns: Mapping[str, Floats]) -> list[Row]:
    """One accuracy of every arm, and for the likeliest choice and generations how it stands to others'."""
    rows = [arm_row(task, arm, metric, scores.mean(arm)) for arm in scores.arms]
    if metric == "accuracy_norm":
        return rows
    prefix = "generated_" if metric == "generated_accuracy" else ""
    for arm in scores.arms:
        if "target" in scores.arms and arm != "target":
            ratios = kept_of_target(scores, arm, floor=not prefix)
            rows += [arm_row(task, arm, f"{prefix}{name}", estimate) for name, estimate in ratios]
        for other, name in (("target", "mcnemar_p"), ("source", "mcnemar_source_p")):
            if other in scores.arms and arm != other:
                rows.append(arm_row(task, arm, f"{metric}_minus_{other}", scores.difference(arm, other)))
                rows.append(arm_row(task, arm, f"{prefix}{name}", _mcnemar(columns[arm], columns[other])))
    return rows


def _mcnemar(arm: Floats, other: Floats) -> Estimate:
    only_arm, only_other = statistics.discordant(arm, other)
    note = f"{only_arm} items right under this arm alone, {only_other} under the other alone"
    return Estimate(statistics.mcnemar(arm, other), len(arm), note=note)


def _perplexity_rows(task: str, arm: str, result: PerplexityResult) -> list[Row]:
    counts = np.array(result.n_tokens, dtype=np.float64)
    nll = statistics.mean(_per_token(result))
    low, high = (_exponential(end) for end in (nll.low, nll.high))
    perplexity = Estimate(result.perplexity, nll.n, _exponential(nll.value) * nll.standard_error, low, high)
    kl = statistics.mean(np.array(result.kl) / counts)
    agreement = statistics.mean(np.array(result.agreement) / counts)
    return [
        arm_row(task, arm, "perplexity", perplexity),
        arm_row(task, arm, "nll_nats", nll),
        arm_row(task, arm, "kl_nats", kl),
        arm_row(task, arm, "top1_agreement", agreement),
    ]


def _per_token(result: PerplexityResult) -> Floats:
    """Mean NLL of each sequence, nats."""
    return np.array(result.nll) / np.array(result.n_tokens)


def _exponential(value: float) -> float:
    return math.nan if math.isnan(value) else math.exp(min(value, 700))


def _unmapped_rows(task: str, arm: str, n_mapped: Sequence[int]) -> list[Row]:
    """Of an arm that maps: of how many contexts it mapped nothing."""
    if arm in MAPPERLESS or not n_mapped:
        return []
    return [arm_row(task, arm, "n_unmapped", Estimate(float(sum(n == 0 for n in n_mapped)), len(n_mapped)))]


def _unavailable_rows(task: str, metric: str, reasons: Mapping[str, str] | None) -> list[Row]:
    return [
        arm_row(task, arm, metric, Estimate(math.nan, 0, note=f"unavailable: {reason}"))
        for arm, reason in (reasons or {}).items()
    ]


def _summary(rows: list[Row]) -> Summary:
    """Rows, and those of them that hold a number as metrics; a standard error that is not one is None."""
    metrics = {}
    for row in rows:
        error = row["standard_error"]
        key = f"evaluate/{row['task']}/{row['arm']}/{row['metric']}"
        metrics[key] = Metric(row["value"], row["n"], None if math.isnan(error) else error)
    return metrics, rows
