from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from kvmap.prediction.resampling import (
    bootstrap_weights,
    interval_ends,
    permutations_within,
    student_quantile,
)

LABELS = np.array([0, 0, 0, 1, 1, 2, 2, 2, 2])


def slow_resample(random, draw_pairs):
    """One resample by plain loops: how often each run was taken."""
    counts = np.zeros(len(LABELS))
    pairs = random.integers(0, 3, 3) if draw_pairs else range(3)
    for pair in pairs:
        runs = np.flatnonzero(pair == LABELS)
        for run in random.choice(runs, len(runs)):
            counts[run] += 1
    return counts


@pytest.mark.parametrize("draw_pairs", [True, False])
def test_weights_are_distributed_as_those_of_plain_loops(draw_pairs):
    fast = bootstrap_weights(LABELS, 4000, np.random.default_rng(0), draw_pairs=draw_pairs)
    random = np.random.default_rng(1)
    slow = np.array([slow_resample(random, draw_pairs) for _ in range(4000)])
    # Monte Carlo: means of 4,000 counts of spread up to 1.6 have errors of 0.025, covariances of up to 0.06.
    assert fast.mean(axis=0) == pytest.approx(slow.mean(axis=0), abs=0.12)
    assert np.cov(fast.T) == pytest.approx(np.cov(slow.T), abs=0.3)
    assert fast.sum(axis=1).std() == pytest.approx(slow.sum(axis=1).std(), rel=0.1)


def test_pairs_that_are_kept_keep_their_number_of_runs():
    counts = bootstrap_weights(LABELS, 50, np.random.default_rng(0), draw_pairs=False)
    for pair, n in enumerate((3, 2, 4)):
        assert (counts[:, pair == LABELS].sum(axis=1) == n).all()


def test_permutations_stay_within_pairs_and_reach_every_order():
    order = permutations_within(LABELS, 600, np.random.default_rng(0))
    assert (LABELS[order] == LABELS).all()
    assert (np.sort(order, axis=1) == np.arange(9)).all()
    assert len({tuple(row[:3]) for row in order}) == 6


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 5, 8, 11, 30, 101])
@pytest.mark.parametrize("share", [0.6, 0.975, 0.999])
def test_student_quantiles_are_scipys(freedom, share):
    assert student_quantile(share, freedom) == pytest.approx(stats.t.ppf(share, freedom), rel=1e-9)


class TestEnds:
    def test_plain_ones_are_percentiles(self):
        draws = np.random.default_rng(0).normal(size=(1000, 2))
        low, high = interval_ends(draws)
        assert low == pytest.approx(np.quantile(draws, 0.025, axis=0))
        assert high == pytest.approx(np.quantile(draws, 0.975, axis=0))

    def test_expanded_ones_cover_the_mean_of_few_units_as_a_t_interval_does(self):
        """The case the correction is derived for: the mean of J normal values."""
        random = np.random.default_rng(0)
        n_units, hits, width = 8, 0, []
        for _ in range(400):
            values = random.normal(size=n_units)
            weights = random.multinomial(n_units, np.full(n_units, 1 / n_units), size=2000) / n_units
            low, high = interval_ends(weights @ values, n_units)
            hits += low <= 0 <= high
            width.append((high - low) / (2 * stats.t.ppf(0.975, 7) * values.std(ddof=1) / np.sqrt(8)))
        # standard error of the rate: 0.011
        assert hits / 400 == pytest.approx(0.95, abs=0.035)
        assert np.mean(width) == pytest.approx(1, abs=0.1)

    def test_numbers_that_most_resamples_lack_have_no_interval(self):
        draws = np.array([[1.0, 1.0], [2.0, np.nan], [3.0, np.nan], [np.nan, np.nan]])
        low, high = interval_ends(draws)
        assert np.isfinite(low[0])
        assert np.isfinite(high[0])
        assert np.isnan([low[1], high[1]]).all()
