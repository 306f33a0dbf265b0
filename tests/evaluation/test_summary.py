from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from kvmap.evaluation import statistics
from kvmap.evaluation.choices import ItemResult, evaluate_items
from kvmap.evaluation.perplexity import PerplexityResult
from kvmap.evaluation.summary import summarise_items, summarise_perplexity
from kvmap.transfer import TransferOptions
from tests.evaluation.plain_ratios import floor_retention, gain_recovered, retention
from tests.evaluation.test_choices import quiet

RANDOM = np.random.default_rng(3)
RIGHT = {"target": 0.9, "source": 0.4, "mapped": 0.8, "random": 0.25}
TASKS = {"easy": 60, "hard": 150}


def result(task, number, arm, correct, **changes):
    plain = ItemResult(
        task=task, id=str(number), arm=arm, answer=0, logliks=(0.0,) * 4, predicted=0, correct=bool(correct),
        predicted_norm=0, correct_norm=bool(correct), generated=None, generated_correct=None, n_context=9,
        n_truncated=0,
    )  # fmt: skip
    return dataclasses.replace(plain, **changes)


@pytest.fixture(scope="module")
def columns():
    return {
        (task, arm): RANDOM.random(n) < share for task, n in TASKS.items() for arm, share in RIGHT.items()
    }


@pytest.fixture(scope="module")
def results(columns):
    return [
        result(task, number, arm, correct)
        for (task, arm), column in columns.items()
        for number, correct in enumerate(column)
    ]


@pytest.fixture(scope="module")
def summary(results):
    metrics, rows = summarise_items(results)
    return metrics, {(row["task"], row["arm"], row["metric"]): row for row in rows}


@pytest.mark.parametrize("task", TASKS)
def test_every_number_of_a_task_is_that_of_the_plain_statistic(summary, columns, task):
    metrics, rows = summary
    mapped, target, source = (columns[task, arm] for arm in ("mapped", "target", "source"))
    chance = np.full(TASKS[task], 0.25)
    expected = {
        "accuracy": statistics.mean(mapped),
        "retention": retention(mapped, target),
        "floor_retention": floor_retention(mapped, target, chance),
        "gain_recovered": gain_recovered(mapped, target, source),
    }
    for metric, estimate in expected.items():
        row = rows[task, "mapped", metric]
        got = (row["value"], row["standard_error"], row["low"], row["high"])
        assert got == pytest.approx((estimate.value, estimate.standard_error, estimate.low, estimate.high)), (
            metric
        )
        assert row["n"] == TASKS[task]
        assert metrics[f"evaluate/{task}/mapped/{metric}"].value == row["value"]
    for other, column, metric in (("target", target, "mcnemar_p"), ("source", source, "mcnemar_source_p")):
        assert rows[task, "mapped", metric]["value"] == statistics.mcnemar(mapped, column)
        only_mapped, only_other = (mapped & ~column).sum(), (~mapped & column).sum()
        assert rows[task, "mapped", metric]["note"].startswith(f"{only_mapped} items right")
        assert f"{only_other} under the other alone" in rows[task, "mapped", metric]["note"]
        difference = rows[task, "mapped", f"accuracy_minus_{other}"]
        expected = statistics.paired_difference(mapped, column)
        got = (difference["value"], difference["low"], difference["high"], difference["standard_error"])
        assert got == pytest.approx((expected.value, expected.low, expected.high, expected.standard_error))


def test_the_target_is_held_against_the_source_too_and_no_arm_against_itself(summary, columns):
    _, rows = summary
    lead = rows["easy", "target", "accuracy_minus_source"]["value"]
    assert lead == pytest.approx(columns["easy", "target"].mean() - columns["easy", "source"].mean())
    assert rows["easy", "source", "accuracy_minus_target"]["value"] == pytest.approx(-lead)
    for arm in ("target", "source"):
        assert ("easy", arm, f"accuracy_minus_{arm}") not in rows
    assert ("easy", "mapped", "accuracy_norm_minus_source") not in rows


def test_differences_on_average_are_those_of_the_averages(summary, columns):
    _, rows = summary
    row = rows["average", "mapped", "accuracy_minus_source"]
    gaps = [columns[task, "mapped"].astype(float) - columns[task, "source"] for task in TASKS]
    assert row["value"] == pytest.approx(np.mean([gap.mean() for gap in gaps]))
    errors = [gap.std(ddof=1) / math.sqrt(len(gap)) for gap in gaps]
    assert row["standard_error"] == pytest.approx(math.hypot(*errors) / 2, rel=0.1)


def test_the_average_weighs_tasks_alike_and_its_error_adds_in_squares(summary, columns):
    _, rows = summary
    means = {arm: [columns[task, arm].mean() for task in TASKS] for arm in RIGHT}
    row = rows["average", "mapped", "accuracy"]
    assert row["value"] == pytest.approx(np.mean(means["mapped"]))
    errors = [columns[task, "mapped"].std(ddof=1) / math.sqrt(n) for task, n in TASKS.items()]
    assert row["standard_error"] == pytest.approx(math.hypot(*errors) / 2)
    kept = rows["average", "mapped", "retention"]
    assert kept["value"] == pytest.approx(np.mean(means["mapped"]) / np.mean(means["target"]))
    assert kept["low"] < kept["value"] < kept["high"]
    assert kept["n"] == sum(TASKS.values())


def test_controls_are_in_the_table_and_show_what_they_are(summary):
    _, rows = summary
    assert rows["average", "random", "gain_recovered"]["value"] < 0
    assert rows["average", "random", "mcnemar_p"]["value"] < 1e-6
    assert ("easy", "target", "retention") not in rows
    assert ("easy", "source", "gain_recovered") not in rows


def test_two_tasks_of_one_size_are_resampled_independently():
    half = [result(task, n, arm, n % 2) for task in "ab" for n in range(40) for arm in ("target", "mapped")]
    half += [result(task, n, "source", 0) for task in "ab" for n in range(40)]
    _, rows = summarise_items(half)
    errors = {
        row["task"]: row["standard_error"]
        for row in rows
        if (row["arm"], row["metric"]) == ("source", "retention")
    }
    assert errors["average"] == errors["a"] == 0
    _, rows = summarise_items([dataclasses.replace(r, correct=r.arm == "target" or r.correct) for r in half])
    errors = {
        row["task"]: row["standard_error"]
        for row in rows
        if (row["arm"], row["metric"]) == ("mapped", "retention")
    }
    assert errors["average"] == pytest.approx(errors["a"] / math.sqrt(2), rel=0.1)


def test_generated_answers_are_a_measure_of_their_own(columns):
    rows = [
        result("easy", n, arm, True, generated="x", generated_correct=bool(columns["easy", arm][n]))
        for arm in RIGHT
        for n in range(TASKS["easy"])
    ]
    metrics, _ = summarise_items(rows)
    assert metrics["evaluate/easy/mapped/accuracy"].value == 1
    assert metrics["evaluate/easy/mapped/generated_accuracy"].value == columns["easy", "mapped"].mean()
    assert metrics["evaluate/easy/mapped/generated_retention"].value == pytest.approx(
        columns["easy", "mapped"].mean() / columns["easy", "target"].mean()
    )


def test_an_undefined_ratio_is_nan_and_says_why():
    rows = [result("t", n, arm, n % 2) for n in range(20) for arm in ("target", "source", "mapped")]
    metrics, table = summarise_items(rows)
    assert math.isnan(metrics["evaluate/t/mapped/gain_recovered"].value)
    assert metrics["evaluate/t/mapped/gain_recovered"].standard_error is None
    note = next(row["note"] for row in table if row["metric"] == "gain_recovered")
    assert "lead over the source is 0" in note


def test_an_arm_that_could_not_be_run_has_a_row_with_the_reason(results):
    metrics, rows = summarise_items(results, unavailable={"raw": "other shapes"})
    named = [row for row in rows if row["arm"] == "raw"]
    assert {row["task"] for row in named} == set(TASKS)
    assert all(math.isnan(row["value"]) and row["note"] == "unavailable: other shapes" for row in named)
    assert math.isnan(metrics["evaluate/easy/raw/accuracy"].value)


def test_truncated_items_are_counted(results):
    cut = [dataclasses.replace(r, n_truncated=3) if r.id in ("1", "2") else r for r in results]
    metrics, _ = summarise_items(cut)
    assert metrics["evaluate/easy/all/n_truncated"].value == 2
    assert metrics["evaluate/easy/all/n_truncated"].n == 60


def test_items_of_which_nothing_was_mapped_are_counted_by_arm_that_maps(results):
    mapped = [dataclasses.replace(r, n_mapped=0 if r.id == "1" else 5) for r in results]
    metrics, rows = summarise_items(mapped)
    assert {row["arm"] for row in rows if row["metric"] == "n_unmapped"} == {"mapped", "random"}
    counted = metrics["evaluate/easy/mapped/n_unmapped"]
    assert (counted.value, counted.n) == (1, 60)


def test_an_interrupted_run_counts_only_items_that_every_arm_answered(results):
    partial = [r for r in results if not (r.arm == "mapped" and r.task == "hard" and int(r.id) >= 20)]
    metrics, _ = summarise_items(partial)
    assert metrics["evaluate/hard/target/accuracy"].n == 20


def test_nothing_gives_nothing():
    assert summarise_items([]) == ({}, [])


def test_the_identity_pair_retains_exactly_all(identity_pair, identity_arms, items):
    settings = {"options": TransferOptions(), "generate": False, "progress": quiet}
    native = evaluate_items(identity_pair, {"target": None}, items, **settings)
    answerable = [
        dataclasses.replace(item, answer=found.predicted) for item, found in zip(items, native, strict=True)
    ]
    metrics, rows = summarise_items(evaluate_items(identity_pair, identity_arms, answerable, **settings))
    kept = next(r for r in rows if (r["task"], r["arm"], r["metric"]) == ("average", "mapped", "retention"))
    assert (kept["value"], kept["low"], kept["high"]) == (1, 1, 1)
    assert metrics["evaluate/average/mapped/mcnemar_p"].value == 1


def perplexity(arm, nll, kl=0.0, agreement=8):
    n = len(nll)
    return PerplexityResult(arm, tuple(nll), (10,) * n, (kl,) * n, (agreement,) * n)


@pytest.fixture
def arms_of_text():
    native = [20.0, 24.0, 22.0, 26.0]
    return {
        "target": perplexity("target", native, agreement=10),
        "mapped": perplexity("mapped", [x + 1 for x in native], kl=0.5),
        "no_context": perplexity("no_context", [x + 4 for x in native], kl=2.0),
    }


def test_perplexity_by_hand(arms_of_text):
    metrics, _ = summarise_perplexity(arms_of_text)
    assert metrics["evaluate/perplexity/target/perplexity"].value == pytest.approx(math.exp(92 / 40))
    assert metrics["evaluate/perplexity/mapped/kl_nats"].value == pytest.approx(0.05)
    assert metrics["evaluate/perplexity/mapped/top1_agreement"].value == pytest.approx(0.8)
    carried = metrics["evaluate/perplexity/mapped/context_carried"]
    assert (carried.value, carried.n) == (pytest.approx(0.75), 4)
    error = np.std([2.0, 2.4, 2.2, 2.6], ddof=1) / 2
    assert metrics["evaluate/perplexity/target/nll_nats"].standard_error == pytest.approx(error)
    assert metrics["evaluate/perplexity/target/perplexity"].standard_error == pytest.approx(
        math.exp(2.3) * error
    )
    assert {row["task"] for row in summarise_perplexity(arms_of_text, task="wiki")[1]} == {"wiki"}


def test_sequences_of_which_nothing_was_mapped_are_counted(arms_of_text):
    known = {arm: dataclasses.replace(result, n_mapped=(0, 3, 0, 3)) for arm, result in arms_of_text.items()}
    metrics, rows = summarise_perplexity(known)
    assert {row["arm"] for row in rows if row["metric"] == "n_unmapped"} == {"mapped"}
    counted = metrics["evaluate/perplexity/mapped/n_unmapped"]
    assert (counted.value, counted.n) == (2, 4)


def test_differences_of_nll_are_per_token_and_paired(arms_of_text):
    arms_of_text["source"] = perplexity(
        "source", [x + y for x, y in zip([20, 24, 22, 26], [2, 3, 2, 3], strict=True)]
    )
    metrics, rows = summarise_perplexity(arms_of_text)
    found = {(row["arm"], row["metric"]): row for row in rows}
    row = found["mapped", "nll_minus_target_nats"]
    # A constant gap has no spread, however much the sequences differ.
    assert (row["value"], row["standard_error"]) == pytest.approx((0.1, 0.0), abs=1e-12)
    assert metrics["evaluate/perplexity/mapped/nll_minus_source_nats"].value == pytest.approx(-0.15)
    row = found["mapped", "nll_minus_source_nats"]
    assert -0.2 <= row["low"] <= row["value"] <= row["high"] <= -0.1
    assert ("source", "nll_minus_source_nats") not in found


def test_a_context_worth_nothing_leaves_context_carried_undefined(arms_of_text):
    arms_of_text["no_context"] = dataclasses.replace(arms_of_text["target"], arm="no_context")
    metrics, rows = summarise_perplexity(arms_of_text)
    assert math.isnan(metrics["evaluate/perplexity/mapped/context_carried"].value)
    assert any("not above 0" in row["note"] for row in rows)


def test_a_perplexity_arm_that_could_not_be_run_is_named(arms_of_text):
    _, rows = summarise_perplexity(arms_of_text, unavailable={"raw": "other shapes"})
    assert [row["note"] for row in rows if row["arm"] == "raw"] == ["unavailable: other shapes"]
