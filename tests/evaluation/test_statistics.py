from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from kvmap.errors import KvmapError
from kvmap.evaluation import statistics
from tests.evaluation.plain_ratios import floor_retention, gain_recovered, retention

RANDOM = np.random.default_rng(5)
TARGET = RANDOM.random(400) < 0.8
ARM = np.where(RANDOM.random(400) < 0.85, TARGET, ~TARGET)
SOURCE = RANDOM.random(400) < 0.4
CHANCE = np.full(400, 0.25)


def test_the_mean_and_its_standard_error_are_scipys():
    values = RANDOM.normal(size=37)
    estimate = statistics.mean(values)
    assert estimate.value == pytest.approx(values.mean())
    assert estimate.standard_error == pytest.approx(stats.sem(values))
    low, high = stats.norm.interval(0.95, values.mean(), stats.sem(values))
    assert (estimate.low, estimate.high) == pytest.approx((low, high), abs=1e-6)


def test_one_value_has_no_standard_error_and_none_has_no_mean():
    assert statistics.mean([3.0]).value == 3.0
    assert math.isnan(statistics.mean([3.0]).standard_error)
    assert math.isnan(statistics.mean([]).value)
    assert statistics.mean([]).n == 0


@pytest.mark.parametrize(("b", "c"), [(0, 0), (1, 0), (5, 12), (30, 31), (0, 200), (700, 900)])
def test_mcnemar_is_the_exact_binomial_test(b, c):
    first = [1] * b + [0] * c + [1] * 9 + [0] * 4
    second = [0] * b + [1] * c + [1] * 9 + [0] * 4
    expected = stats.binomtest(b, b + c, 0.5).pvalue if b + c else 1.0
    assert statistics.mcnemar(first, second) == pytest.approx(expected, rel=1e-9)


def test_discordant_pairs_are_counted_by_side():
    assert statistics.discordant([1, 1, 0, 0, 1], [1, 0, 1, 0, 0]) == (2, 1)


def test_a_difference_and_its_interval_agree_with_scipys_paired_bootstrap():
    estimate = statistics.paired_difference(ARM, SOURCE, n_resamples=4000)
    gaps = ARM.astype(float) - SOURCE
    assert estimate.value == pytest.approx(gaps.mean())
    # In closed form, a mean's standard error; Monte Carlo knows it to about 1 %.
    assert estimate.standard_error == pytest.approx(stats.sem(gaps), rel=0.05)
    oracle = stats.bootstrap((gaps,), np.mean, n_resamples=4000, method="percentile", rng=1)
    width = oracle.confidence_interval.high - oracle.confidence_interval.low
    assert estimate.low == pytest.approx(oracle.confidence_interval.low, abs=0.12 * width)
    assert estimate.high == pytest.approx(oracle.confidence_interval.high, abs=0.12 * width)


def test_pairing_takes_what_two_arms_share_out_of_the_difference():
    shared = RANDOM.normal(size=300) * 10
    first, second = shared + RANDOM.normal(size=300), shared + RANDOM.normal(size=300)
    apart = math.hypot(stats.sem(first), stats.sem(second))
    assert statistics.paired_difference(first, second).standard_error < apart / 5


def test_a_difference_without_items_or_with_one_or_not_finite_has_no_interval():
    assert math.isnan(statistics.paired_difference([], []).value)
    one = statistics.paired_difference([3.0], [1.0])
    assert (one.value, math.isnan(one.low)) == (2.0, True)
    assert "not finite" in statistics.paired_difference([math.nan, 1.0], [1.0, 1.0]).note


@pytest.mark.parametrize(
    ("measure", "others", "value"),
    [
        (retention, (TARGET,), ARM.mean() / TARGET.mean()),
        (floor_retention, (TARGET, CHANCE), (ARM.mean() - 0.25) / (TARGET.mean() - 0.25)),
        (
            gain_recovered,
            (TARGET, SOURCE),
            (ARM.mean() - SOURCE.mean()) / (TARGET.mean() - SOURCE.mean()),
        ),
    ],
)
def test_ratios_and_their_intervals_agree_with_scipys_paired_bootstrap(measure, others, value):
    estimate = measure(ARM, *others, n_resamples=4000)
    assert estimate.value == pytest.approx(value)
    columns = (ARM.astype(float), *(other.astype(float) for other in others))

    def statistic(*samples, axis=-1):
        arm, target, *floor = (sample.mean(axis=axis) for sample in samples)
        low = floor[0] if floor else 0.0
        return (arm - low) / (target - low)

    oracle = stats.bootstrap(
        columns,
        statistic,
        paired=True,
        vectorized=True,
        n_resamples=4000,
        method="percentile",
        rng=np.random.default_rng(1),
    )
    # Both are Monte Carlo: at 4,000 resamples the ends wander by about 3 % of the interval's width.
    width = oracle.confidence_interval.high - oracle.confidence_interval.low
    assert estimate.low == pytest.approx(oracle.confidence_interval.low, abs=0.12 * width)
    assert estimate.high == pytest.approx(oracle.confidence_interval.high, abs=0.12 * width)
    assert estimate.standard_error == pytest.approx(oracle.standard_error, rel=0.1)


def test_an_arm_that_answers_as_the_target_does_retains_exactly_all():
    estimate = retention(TARGET, TARGET)
    assert (estimate.value, estimate.low, estimate.high, estimate.standard_error) == (1, 1, 1, 0)
    assert statistics.mcnemar(TARGET, TARGET) == 1.0


def test_intervals_are_seeded_and_do_not_depend_on_chunking(monkeypatch):
    first = statistics.bootstrap_means([ARM, TARGET], n_resamples=50, seed=3)
    assert np.array_equal(first, statistics.bootstrap_means([ARM, TARGET], n_resamples=50, seed=3))
    assert not np.array_equal(first, statistics.bootstrap_means([ARM, TARGET], n_resamples=50, seed=4))
    monkeypatch.setattr(statistics, "CHUNK_ELEMENTS", 7 * len(ARM))
    assert np.array_equal(first, statistics.bootstrap_means([ARM, TARGET], n_resamples=50, seed=3))


def test_a_resample_takes_the_same_items_of_every_arm():
    means = statistics.bootstrap_means([ARM, 1 - ARM.astype(float)], n_resamples=20)
    assert means.sum(axis=1) == pytest.approx(1)


@pytest.mark.parametrize(
    ("arm", "target", "source"),
    [
        ([1, 0, 1, 0], [1, 0, 1, 0], [1, 0, 1, 0]),
        ([1, 1, 1, 0], [0, 0, 1, 0], [1, 1, 1, 0]),
        ([1, 1, 0, 0] * 5, [1, 1, 0, 1] * 5, [1, 1, 1, 0] * 4 + [0, 1, 1, 0]),
    ],
)
def test_the_gain_is_undefined_where_the_target_does_not_lead_the_source(arm, target, source):
    estimate = gain_recovered(arm, target, source)
    assert math.isnan(estimate.value)
    assert math.isnan(estimate.low)
    assert "the target's lead over the source" in estimate.note


def test_retention_is_undefined_where_the_target_is_always_wrong():
    estimate = retention([0, 1, 0], [0, 0, 0])
    assert math.isnan(estimate.value)
    assert "not above 0" in estimate.note


def test_context_carried_by_hand():
    none, native = np.array([10.0, 12.0, 11.0]), np.array([6.0, 7.0, 5.0])
    assert statistics.context_carried(native, native, none).value == pytest.approx(1)
    assert statistics.context_carried(none, native, none).value == pytest.approx(0)
    assert statistics.context_carried(none + 15, native, none).value == pytest.approx(-3)
    half = statistics.context_carried((none + native) / 2, native, none)
    assert (half.value, half.low, half.high) == pytest.approx((0.5, 0.5, 0.5))


def test_context_carried_is_undefined_where_the_context_is_worth_nothing():
    native = np.array([6.0, 7.0, 5.0])
    estimate = statistics.context_carried(native + 1, native, native)
    assert math.isnan(estimate.value)
    assert "context is worth" in estimate.note


def test_a_score_that_is_not_finite_leaves_the_ratio_undefined():
    assert math.isnan(statistics.context_carried([math.nan, 1.0], [1.0, 1.0], [2.0, 2.0]).value)


def test_one_item_gives_a_value_without_an_interval():
    estimate = retention([1], [1])
    assert estimate.value == 1
    assert math.isnan(estimate.low)


def test_unpaired_columns_are_refused():
    with pytest.raises(KvmapError, match=r"lengths \[2, 3\]"):
        retention([1, 0], [1, 0, 1])
