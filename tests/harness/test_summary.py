"""Numbers of a task set against hand sums."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvmap.harness.catalogue import LoadedTask, TaskSpec
from kvmap.harness.facts import Facts
from kvmap.harness.runner import TaskResults
from kvmap.harness.summary import accuracy_of, measures, summarise_tasks

ACC = {
    "target": [1, 1, 1, 1, 1, 1, 0, 1, 0, 1] * 3,
    "source": [1, 0, 0, 1, 0, 0, 0, 1, 0, 1] * 3,
    "mapped": [1, 1, 0, 1, 1, 0, 1, 1, 0, 1] * 3,
}


def results(
    title: str, by_arm: dict[str, list[int]], *, output: str = "multiple_choice", metric: str | None = None
) -> TaskResults:
    """What lm-eval hands over for one task, of the values of each document under each arm."""
    generates = output == "generate_until"
    filters = ("strict-match", "flexible-extract") if generates else ("none",)

    def samples(values: list[int]) -> list[dict[str, Any]]:
        return [
            {
                "doc_id": number,
                "filter": name,
                "metrics": ["exact_match"] if generates else ["acc", "acc_norm"],
                "acc": float(value),
                "acc_norm": float(not value),
                "exact_match": float(value if name == "flexible-extract" else 0),
                "resps": [["so it is 4"]] if generates else [[(-1.0, False)]] * (2 + number % 3),
                "filtered_resps": ["4"] if generates else [(-1.0, False)] * (2 + number % 3),
                "target": "4",
                "doc_hash": f"d{number}",
                "prompt_hash": f"p{number}",
                "target_hash": "t",
            }
            for number, value in enumerate(values)
            for name in filters
        ]

    def aggregated(rows: list[dict[str, Any]]) -> dict[str, Any]:
        means: dict[str, Any] = {"alias": title, "sample_len": len(rows)}
        for name in filters:
            for metric_name in rows[0]["metrics"]:
                values = [row[metric_name] for row in rows if row["filter"] == name]
                means[f"{metric_name},{name}"] = sum(values) / len(values)
                means[f"{metric_name}_stderr,{name}"] = "N/A"
        return means

    task = SimpleNamespace(OUTPUT_TYPE=output)
    made = {
        arm: {
            "samples": {title: samples(values)},
            "results": {title: aggregated(samples(values))},
            "n-samples": {title: {"effective": len(values), "original": len(values)}},
        }
        for arm, values in by_arm.items()
    }
    facts = {
        arm: {(title, number): Facts(9, 2 * (number == 1), 7) for number in range(len(values))}
        for arm, values in by_arm.items()
    }
    return TaskResults(LoadedTask(TaskSpec(title, metric=metric), {"tasks": {title: task}}), made, facts)


def value(rows: list[dict[str, Any]], task: str, arm: str, metric: str) -> dict[str, Any]:
    (row,) = [r for r in rows if (r["task"], r["arm"], r["metric"]) == (task, arm, metric)]
    return row


def test_means_errors_and_ratios_by_hand() -> None:
    metrics, rows = summarise_tasks([results("quiz", ACC, metric="acc")], n_resamples=300)
    mapped = value(rows, "quiz", "mapped", "accuracy")
    assert mapped["value"] == pytest.approx(0.7)
    assert mapped["n"] == 30
    assert mapped["standard_error"] == pytest.approx(np.std(ACC["mapped"], ddof=1) / math.sqrt(30))
    assert value(rows, "quiz", "mapped", "acc")["value"] == mapped["value"]
    assert value(rows, "quiz", "mapped", "acc_norm")["value"] == pytest.approx(0.3)
    assert value(rows, "quiz", "mapped", "retention")["value"] == pytest.approx(0.7 / 0.8)
    chance = np.mean([1 / (2 + number % 3) for number in range(30)])
    floor = (0.7 - chance) / (0.8 - chance)
    assert value(rows, "quiz", "mapped", "floor_retention")["value"] == pytest.approx(floor)
    assert value(rows, "quiz", "mapped", "gain_recovered")["value"] == pytest.approx(0.3 / 0.4)
    assert value(rows, "quiz", "mapped", "accuracy_minus_source")["value"] == pytest.approx(0.3)
    assert value(rows, "quiz", "source", "accuracy_minus_target")["value"] == pytest.approx(-0.4)
    # 6 documents right under the target alone, 3 under the mapped arm alone
    p = 2 * sum(math.comb(9, k) for k in range(4)) / 2**9
    assert value(rows, "quiz", "mapped", "mcnemar_p")["value"] == pytest.approx(p)
    note = value(rows, "quiz", "mapped", "mcnemar_p")["note"]
    assert note == "3 items right under this arm alone, 6 under the other alone"
    assert value(rows, "quiz", "all", "n_truncated")["value"] == 1
    assert metrics["evaluate/quiz/mapped/retention"].value == pytest.approx(0.7 / 0.8)
    assert metrics["evaluate/quiz/mapped/mcnemar_p"].standard_error is None


@pytest.mark.parametrize(
    ("asked", "chosen"),
    [(None, "acc_norm"), ("acc", "acc"), ("nothing", None)],
)
def test_which_metric_is_called_accuracy(asked: str | None, chosen: str | None) -> None:
    found = accuracy_of(measures(results("quiz", ACC)), asked)
    assert (found and found.metric) == chosen


def test_filters_are_told_apart_and_one_may_be_chosen() -> None:
    result = results("sums", ACC, output="generate_until", metric="exact_match,flexible-extract")
    _, rows = summarise_tasks([result], n_resamples=50)
    assert value(rows, "sums", "mapped", "exact_match_strict_match")["value"] == 0
    assert value(rows, "sums", "mapped", "exact_match_flexible_extract")["value"] == pytest.approx(0.7)
    assert value(rows, "sums", "mapped", "accuracy")["value"] == pytest.approx(0.7)
    assert not [row for row in rows if row["metric"] == "floor_retention"]  # nobody knows what guessing gets
    strict = accuracy_of(measures(result), None)
    assert strict is not None
    assert strict.metric == "exact_match,strict-match"
    row = next(result.documents()).row("exact_match,flexible-extract")
    assert row["accuracy"] == row["exact_match_flexible_extract"] == 1.0
    assert (row["generated"], row["extracted_strict_match"]) == ("so it is 4", "4")


def test_a_metric_of_all_documents_together_has_no_error() -> None:
    result = results("texts", ACC)
    for arm, found in result.by_arm.items():
        found["results"]["texts"] |= {"f1,none": 0.25, "acc,none": 0.9}  # not the mean of the values
        assert arm in ACC
    _, rows = summarise_tasks([result], n_resamples=50)
    for metric, expected in (("f1", 0.25), ("acc", 0.9)):
        row = value(rows, "texts", "mapped", metric)
        assert (row["value"], row["n"]) == (expected, 30)
        assert math.isnan(row["standard_error"])
    assert value(rows, "texts", "mapped", "accuracy")["value"] == pytest.approx(0.3)  # acc_norm's


def test_the_average_counts_tasks_alike_and_has_both_retentions() -> None:
    short = {
        arm: [1 - v for v in values[:10]] if arm == "target" else values[:10] for arm, values in ACC.items()
    }
    both = [
        results("quiz", ACC, metric="acc"),
        results("sums", short, output="generate_until", metric="exact_match,flexible-extract"),
    ]
    _, rows = summarise_tasks(both, n_resamples=300)
    means = {"quiz": (0.7, 0.8), "sums": (0.7, 0.2)}
    assert value(rows, "tasks_average", "mapped", "accuracy")["value"] == pytest.approx(0.7)
    assert value(rows, "tasks_average", "mapped", "accuracy")["n"] == 40
    assert value(rows, "tasks_average", "mapped", "retention")["value"] == pytest.approx(0.7 / 0.5)
    mean = value(rows, "tasks_average", "mapped", "mean_retention")
    assert mean["value"] == pytest.approx(np.mean([a / b for a, b in means.values()]))
    assert mean["low"] < mean["value"] < mean["high"]
    assert not [r for r in rows if r["task"] == "tasks_average" and r["metric"] == "floor_retention"]


def test_an_arm_that_could_not_be_run_has_a_row_that_says_why() -> None:
    _, rows = summarise_tasks([results("quiz", ACC)], unavailable={"raw": "shapes differ"}, n_resamples=50)
    row = value(rows, "quiz", "raw", "accuracy")
    assert math.isnan(row["value"])
    assert row["note"] == "unavailable: shapes differ"


def test_documents_of_which_nothing_was_mapped_are_counted_by_arm_with_a_mapper() -> None:
    result = results("quiz", ACC)
    for number in (0, 4):
        result.facts["mapped"]["quiz", number].n_mapped = 0
    metrics, rows = summarise_tasks([result], n_resamples=50)
    assert [(r["arm"], r["value"], r["n"]) for r in rows if r["metric"] == "n_unmapped"] == [
        ("mapped", 2, 30)
    ]
    assert metrics["evaluate/quiz/mapped/n_unmapped"].value == 2


def together(first: TaskResults, second: TaskResults, own: dict[str, float]) -> TaskResults:
    """Two tasks as the group `both`, with the group's own numbers."""
    by_arm = {
        arm: {name: first.by_arm[arm][name] | second.by_arm[arm][name] for name in first.by_arm[arm]}
        for arm in first.by_arm
    }
    for found in by_arm.values():
        found["results"]["both"] = {"alias": "both", "sample_len": 60, **own}
    tasks = first.task.tasks | second.task.tasks
    facts = {arm: first.facts[arm] | second.facts[arm] for arm in first.facts}
    return TaskResults(LoadedTask(TaskSpec("both"), {"tasks": tasks}), by_arm, facts)


def perplexities(result: TaskResults) -> TaskResults:
    """As LAMBADA has it: a document's value is a log-likelihood, the task's is exp of minus their mean."""
    for found in result.by_arm.values():
        for title, samples in found["samples"].items():
            for number, sample in enumerate(samples):
                sample["metrics"].append("perplexity")
                sample["perplexity"] = -1.0 - number % 3
            found["results"][title]["perplexity,none"] = math.exp(2.0)
    return result


@pytest.mark.parametrize("own", [{}, {"perplexity,none": 7.5, "perplexity_stderr,none": "N/A"}])
def test_a_groups_perplexity_is_not_the_mean_of_its_documents_log_likelihoods(own: dict[str, Any]) -> None:
    """It is as lm-eval makes it of the tasks', where the group's file says how, and else there is none."""
    wrong = {arm: [1 - one for one in values] for arm, values in ACC.items()}
    both = together(perplexities(results("quiz", ACC)), perplexities(results("more", wrong)), own)
    _, rows = summarise_tasks([both], n_resamples=50)
    found = {r["arm"]: (r["value"], r["n"]) for r in rows if r["metric"] == "perplexity"}
    assert found == (dict.fromkeys(ACC, (7.5, 60)) if own else {})
    assert value(rows, "both", "mapped", "acc")["value"] == pytest.approx((0.7 + 0.3) / 2)


def test_a_metric_that_is_no_mean_gives_an_accuracy_without_a_number_and_says_why() -> None:
    result = perplexities(results("texts", ACC, metric="perplexity"))
    _, rows = summarise_tasks([result], n_resamples=50)
    row = value(rows, "texts", "mapped", "accuracy")
    assert math.isnan(row["value"])
    assert row["note"] == "undefined: perplexity is not the mean of its documents' values"
    assert value(rows, "texts", "mapped", "perplexity")["value"] == pytest.approx(math.exp(2.0))
