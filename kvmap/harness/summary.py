"""What a task set comes to: every arm's metrics with their errors, paired with the target's by document."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np

from kvmap.evaluation import statistics
from kvmap.evaluation.arms import MAPPERLESS
from kvmap.evaluation.scores import CHANCE, Scores, arm_row, average, kept_of_target, scores_of
from kvmap.evaluation.statistics import Estimate, Floats
from kvmap.harness.catalogue import metric_name
from kvmap.harness.runner import Document, TaskResults, flat
from kvmap.metrics import Metric

Row: TypeAlias = dict[str, Any]

AVERAGE = "tasks_average"
ALL_ARMS = "all"
PREFERRED = ("acc_norm", "acc", "exact_match")
"""Which of a task's metrics is called its accuracy where the entry names none."""


@dataclass(frozen=True, eq=False)
class Measured:
    """One metric of the same documents under every arm.

    Attributes:
        task: what it is counted under.
        metric: lm-eval's name, with the filter after a comma where there is one.
        columns: arm to (n,) values; of multiple choice also `chance`, what guessing gets.
    """

    task: str
    metric: str
    columns: dict[str, Floats]

    @property
    def arms(self) -> list[str]:
        """All but the column of chance."""
        return [arm for arm in self.columns if arm != CHANCE]

    @property
    def is_binary(self) -> bool:
        """Whether every document is right or wrong, and nothing between."""
        return all(bool(np.isin(self.columns[arm], (0.0, 1.0)).all()) for arm in self.arms)


def summarise_tasks(
    results: Sequence[TaskResults],
    *,
    unavailable: Mapping[str, str] | None = None,
    n_resamples: int = statistics.N_RESAMPLES,
    seed: int = 0,
) -> tuple[dict[str, Metric], list[Row]]:
    """Every metric of every entry and arm, and what it retains of the target's.

    A metric that is the mean of its documents' values has the standard error of that mean; a group pools the
    documents of its tasks. Others, such as a perplexity, are given as lm-eval makes them, without an error;
    of a group, as its file says they are taken together, and left out where it does not say. The entry's own
    metric is given a second time as `accuracy`, and of it

    * retention, floor_retention (of multiple choice), gain_recovered: as for questions of kvmap's own, see
      `kvmap.evaluation.summary`
    * accuracy_minus_target, accuracy_minus_source: the plain differences, on the same documents
    * mcnemar_p, mcnemar_source_p: where every document is right or wrong; the note counts those on which the
      two differ

    Beside them stand n_truncated, the documents with a context that was cut, and for every arm with a mapper
    n_unmapped, the documents of which nothing was mapped: under these the arm is the target itself.

    All but the tests stand again for the average over entries (`tasks_average`), each counting the same, with
    `mean_retention`, the mean of the entries' retentions, beside the retention of their mean.

    Args:
        results: of `run_task`, one per entry.
        unavailable: arms that could not be run, with the reason; each gets a row without a number.
        n_resamples: bootstrap resamples.
        seed: of the bootstrap.

    Returns:
        Metrics by `evaluate/<task>/<arm>/<metric>`, and rows {task, arm, metric, value, n, standard_error,
        low, high, note}. Undefined numbers are nan, and the row's note says why.
    """
    rows: list[Row] = []
    scored: list[Scores] = []
    for result in results:
        measured = measures(result)
        for one in measured:
            rows += [
                arm_row(one.task, arm, flat(one.metric), statistics.mean(one.columns[arm]))
                for arm in one.arms
            ]
        rows += _of_all_documents(result, {one.metric for one in measured})
        if (chosen := accuracy_of(measured, result.task.spec.metric)) is not None:
            scores = scores_of(chosen.columns, n_resamples, seed)
            rows += [*_accuracy_rows(chosen.task, scores), *_tests(chosen)]
            scored.append(scores)
        elif result.task.spec.metric is not None:
            rows += _without_accuracy(result)
        rows += [_truncated(result), *_unmapped(result)]
        rows += [
            arm_row(
                result.task.spec.title, arm, "accuracy", Estimate(math.nan, 0, note=f"unavailable: {why}")
            )
            for arm, why in (unavailable or {}).items()
        ]
    if len(scored) > 1:
        rows += _average_rows(scored)
    return _metrics(rows), rows


def measures(result: TaskResults) -> list[Measured]:
    """The metrics of an entry that are means of its documents' values, its tasks' documents pooled."""
    of_arm: dict[str, list[Document]] = {}
    for document in result.documents():
        of_arm.setdefault(document.arm, []).append(document)
    first = next(iter(of_arm.values()))
    found = []
    for metric in dict.fromkeys(metric for document in first for metric in document.values):
        columns = {
            arm: np.array([one.values.get(metric, math.nan) for one in documents])
            for arm, documents in of_arm.items()
        }
        if not _is_mean(result, metric, columns):
            continue
        if all(document.logliks for document in first):
            columns[CHANCE] = np.array([1 / len(document.logliks or ()) for document in first])
        found.append(Measured(result.task.spec.title, metric, columns))
    return found


def accuracy_of(measured: Sequence[Measured], asked: str | None) -> Measured | None:
    """What is called accuracy: the metric asked for, else the first of `PREFERRED`; None if there is none.

    A name without a filter stands for the first that the metric has.
    """
    for name in PREFERRED if asked is None else (asked,):
        exact = [one for one in measured if one.metric == name]
        alike = [one for one in measured if one.metric.split(",")[0] == name]
        if exact or alike:
            return (exact or alike)[0]
    return None


def _is_mean(result: TaskResults, metric: str, columns: Mapping[str, Floats]) -> bool:
    """Whether lm-eval's own number of every task is the mean of that task's documents' values."""
    if any(np.isnan(column).any() for column in columns.values()):
        return False
    for arm, column in columns.items():
        start = 0
        for name, samples in result.by_arm[arm]["samples"].items():
            stop = start + len({sample["doc_id"] for sample in samples})
            theirs, mean = dict(_aggregated(result, arm, name)).get(metric), float(column[start:stop].mean())
            if theirs is None or not math.isclose(theirs, mean, rel_tol=1e-9, abs_tol=1e-12):
                return False
            start = stop
    return True


def _aggregated(result: TaskResults, arm: str, name: str) -> Iterable[tuple[str, float]]:
    """lm-eval's own numbers of a task or a group."""
    for key, value in result.by_arm[arm]["results"].get(name, {}).items():
        metric, comma, filter_name = key.partition(",")
        if comma and isinstance(value, int | float) and not metric.endswith("_stderr"):
            yield metric_name(metric, filter_name), float(value)


def _of_all_documents(result: TaskResults, done: Iterable[str]) -> list[Row]:
    """Metrics that lm-eval makes of all documents of a task together, or of the tasks of a group."""
    tasks = list(result.task.tasks)
    name = tasks[0] if len(tasks) == 1 else result.task.spec.name
    rows = []
    for arm, results in result.by_arm.items():
        n = sum(results["n-samples"][task]["effective"] for task in tasks)
        rows += [
            arm_row(result.task.spec.title, arm, flat(metric), Estimate(value, n))
            for metric, value in _aggregated(result, arm, name)
            if metric not in done
        ]
    return rows


def _without_accuracy(result: TaskResults) -> list[Row]:
    """Rows that say why there is no accuracy though a metric was asked for."""
    note = f"undefined: {result.task.spec.metric} is not the mean of its documents' values"
    return [
        arm_row(result.task.spec.title, arm, "accuracy", Estimate(math.nan, 0, note=note))
        for arm in result.by_arm
    ]


def _accuracy_rows(task: str, scores: Scores) -> list[Row]:
    """Accuracy under every arm, and how it stands to the target's and the source's."""
    rows = [arm_row(task, arm, "accuracy", scores.mean(arm)) for arm in scores.arms]
    for arm in scores.arms:
        if "target" in scores.arms and arm != "target":
            kept = kept_of_target(scores, arm, floor=CHANCE in scores.value)
            rows += [arm_row(task, arm, name, estimate) for name, estimate in kept]
        rows += [
            arm_row(task, arm, f"accuracy_minus_{other}", scores.difference(arm, other))
            for other in ("target", "source")
            if other in scores.arms and arm != other
        ]
    return rows


def _tests(measured: Measured) -> list[Row]:
    """McNemar's exact tests of every arm against the target and the source."""
    if not measured.is_binary:
        return []
    rows = []
    for other, name in (("target", "mcnemar_p"), ("source", "mcnemar_source_p")):
        for arm in measured.arms if other in measured.arms else ():
            if arm != other:
                rows.append(arm_row(measured.task, arm, name, _mcnemar(measured, arm, other)))
    return rows


def _mcnemar(measured: Measured, arm: str, other: str) -> Estimate:
    own, theirs = measured.columns[arm], measured.columns[other]
    only_arm, only_other = statistics.discordant(own, theirs)
    note = f"{only_arm} items right under this arm alone, {only_other} under the other alone"
    return Estimate(statistics.mcnemar(own, theirs), len(own), note=note)


def _average_rows(scored: Sequence[Scores]) -> list[Row]:
    """The mean over entries, each counting the same. Chance counts where every entry has it."""
    names = [name for name in scored[0].value if all(name in scores.value for scores in scored)]
    alike = [
        replace(
            scores,
            value={name: scores.value[name] for name in names},
            error={name: scores.error[name] for name in names},
            resampled={name: scores.resampled[name] for name in names},
        )
        for scores in scored
    ]
    rows = _accuracy_rows(AVERAGE, average(alike))
    for arm in alike[0].arms:
        if "target" in names and arm != "target":
            rows.append(arm_row(AVERAGE, arm, "mean_retention", _mean_retention(alike, arm)))
    return rows


def _mean_retention(scored: Sequence[Scores], arm: str) -> Estimate:
    """The mean of the entries' retentions, as [H] averages them."""
    n = sum(scores.n for scores in scored)
    if any(scores.value["target"] <= 0 for scores in scored):
        return Estimate(math.nan, n, note="undefined: the target's accuracy is 0 on one of the tasks")
    value = float(np.mean([scores.value[arm] / scores.value["target"] for scores in scored]))
    # Entries of one size draw the same documents from one seed; shuffled, their resamples are independent.
    random = np.random.default_rng(0)
    draws = np.zeros(len(scored[0].resampled[arm]))
    for scores in scored:
        order = random.permutation(len(draws))
        with np.errstate(divide="ignore", invalid="ignore"):
            draws += (scores.resampled[arm] / scores.resampled["target"])[order] / len(scored)
    draws = draws[np.isfinite(draws)]
    if len(draws) < 2:
        return Estimate(value, n)
    low, high = np.quantile(draws, [(1 - statistics.LEVEL) / 2, (1 + statistics.LEVEL) / 2])
    return Estimate(value, n, float(draws.std(ddof=1)), float(low), float(high))


def _truncated(result: TaskResults) -> Row:
    """Documents with a context that was cut; the same for every arm."""
    facts = next(iter(result.facts.values())).values()
    n_cut = sum(fact.n_truncated > 0 for fact in facts)
    return arm_row(result.task.spec.title, ALL_ARMS, "n_truncated", Estimate(float(n_cut), len(facts)))


def _unmapped(result: TaskResults) -> list[Row]:
    """Documents of which nothing was mapped, by arm with a mapper."""
    rows = []
    for arm, facts in result.facts.items():
        if arm not in MAPPERLESS:
            n_unmapped = sum(fact.n_mapped == 0 for fact in facts.values())
            estimate = Estimate(float(n_unmapped), len(facts))
            rows.append(arm_row(result.task.spec.title, arm, "n_unmapped", estimate))
    return rows


def _metrics(rows: Iterable[Row]) -> dict[str, Metric]:
    """Rows by their key; a standard error that is not a number is None."""
    metrics = {}
    for row in rows:
        error = row["standard_error"]
        key = f"evaluate/{row['task']}/{row['arm']}/{row['metric']}"
        metrics[key] = Metric(row["value"], row["n"], None if math.isnan(error) else error)
    return metrics
