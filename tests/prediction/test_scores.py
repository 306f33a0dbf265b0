from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from kvmap.prediction.scores import centred_by_pair, correlations, midranks, pair_means, scored, unit_scale

RANDOM = np.random.default_rng(0)
LABELS = np.repeat([0, 1, 2], [4, 5, 6])
X = RANDOM.normal(size=(2, 15))
# ties, as whole numbers have them
Y = RANDOM.integers(0, 4, size=(3, 15)).astype(float)
COUNTS = RANDOM.multinomial(15, np.full(15, 1 / 15), size=5).astype(float)


def repeated(values, counts):
    return np.repeat(values, counts.astype(int))


@pytest.mark.parametrize(("method", "of_scipy"), [("pearson", stats.pearsonr), ("spearman", stats.spearmanr)])
def test_counts_stand_for_values_that_often(method, of_scipy):
    given = [scored(columns, method, COUNTS, None) for columns in (X, Y)]
    found = correlations(*given, COUNTS)
    for draw, counts in enumerate(COUNTS):
        for d, x in enumerate(X):
            for o, y in enumerate(Y):
                expected = of_scipy(repeated(x, counts), repeated(y, counts)).statistic
                # float64 sums of 15 products
                assert found[draw, d, o] == pytest.approx(expected, abs=1e-12)


def test_within_pairs_pearson_is_that_of_residuals():
    given = [scored(columns, "pearson", COUNTS, LABELS) for columns in (X, Y)]
    found = correlations(*given, COUNTS)
    for draw, counts in enumerate(COUNTS):
        labels = repeated(LABELS, counts)
        for d, o in ((0, 0), (1, 2)):
            x, y = (repeated(values, counts) for values in (X[d], Y[o]))
            for values in (x, y):
                for pair in set(labels):
                    values[labels == pair] -= values[labels == pair].mean()
            assert found[draw, d, o] == pytest.approx(stats.pearsonr(x, y).statistic, abs=1e-12)


def test_within_pairs_spearman_of_equally_many_is_the_mean_over_pairs():
    labels = np.repeat(np.arange(4), 6)
    x, y = RANDOM.normal(size=(2, 24))
    ones = np.ones((1, 24))
    given = [scored(values[None], "spearman", ones, labels) for values in (x, y)]
    expected = np.mean([stats.spearmanr(x[labels == g], y[labels == g]).statistic for g in range(4)])
    assert correlations(*given, ones)[0, 0, 0] == pytest.approx(expected, abs=1e-12)


def test_within_pairs_spearman_knows_neither_level_nor_scale_of_a_pair():
    ones = np.ones((1, 15))
    moved = X * np.array([1.0, 10.0, 0.1])[LABELS] + np.array([0.0, 100.0, -7.0])[LABELS]
    assert scored(moved, "spearman", ones, LABELS) == pytest.approx(scored(X, "spearman", ones, LABELS))


def test_midranks_order_as_scipys_do():
    ranks = midranks(Y, np.ones((1, 15)))[0]
    for own, column in zip(ranks, Y, strict=True):
        assert own * 15 + 0.5 == pytest.approx(stats.rankdata(column))


def test_what_does_not_vary_has_no_correlation():
    flat = np.full((1, 15), 0.1)
    found = correlations(unit_scale(flat)[None], unit_scale(X)[None], np.ones((1, 15)))
    assert np.isnan(found).all()
    # 0.1 + 0.2 is not 0.3: rounding is no spread either
    rounded = np.array([[0.3, 0.1 + 0.2] * 7 + [0.3]])
    assert not unit_scale(rounded).any()


def test_means_and_centring_of_pairs():
    ones = np.ones((1, 15))
    expected = np.stack([X[:, pair == LABELS].mean(axis=1) for pair in range(3)], axis=1)
    assert pair_means(X, LABELS) == pytest.approx(expected)
    assert pair_means(centred_by_pair(X[None], ones, LABELS)[0], LABELS) == pytest.approx(0, abs=1e-14)
