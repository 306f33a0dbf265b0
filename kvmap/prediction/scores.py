"""Correlation of many columns with many, over many resamples at once: Pearson, Spearman, and within pairs."""

from __future__ import annotations

import numpy as np

from kvmap.prediction.resampling import Floats, Labels

_CONSTANT = 1e-9  # spread of a column of unit spread, below which rounding is all that is left


def unit_scale(columns: Floats) -> Floats:
    """Each column of (c, n) about its mean and over its spread; zeros where it does not vary.

    A spread of 1e-12 of the largest value is rounding and none.
    """
    if columns.shape[1] == 0:
        return columns
    centred = columns - columns.mean(axis=1, keepdims=True)
    spread = centred.std(axis=1, keepdims=True)
    constant = spread <= 1e-12 * np.abs(columns).max(axis=1, keepdims=True)
    return np.where(constant, 0.0, centred / np.where(constant, 1.0, spread))


def correlations(x: Floats, y: Floats, weights: Floats) -> Floats:
    """`r = Σ w(x − x̄)(y − ȳ) / √(Σ w(x − x̄)² · Σ w(y − ȳ)²)`, with weighted means; float64.

    Args:
        x: (B, d, n), or (1, d, n) for the same in all resamples; y: (B, o, n) or (1, o, n). Of about unit
            scale.
        weights: (B, n) or (1, n).

    Returns:
        (B, d, o); nan where a column does not vary.
    """
    share = (weights / weights.sum(-1, keepdims=True))[:, None]

    def normed(columns: Floats) -> Floats:
        centred = columns - (columns * share).sum(-1, keepdims=True)
        norm = np.sqrt((centred**2 * share).sum(-1, keepdims=True))
        varies = norm > _CONSTANT
        return np.where(varies, centred * np.sqrt(share) / np.where(varies, norm, 1.0), np.nan)

    return np.clip(normed(x) @ normed(y).swapaxes(-1, -2), -1.0, 1.0)


def midranks(columns: Floats, weights: Floats, labels: Labels | None = None) -> Floats:
    """Rank of each value in each resample, ties halved: `Σ_j w_j (1[v_j < v_i] + ½·1[v_j = v_i])`.

    Args:
        columns: (c, n).
        weights: (B, n) how often each value is there.
        labels: (n,) pairs, to rank within each alone, as a share of its values; None: among all.

    Returns:
        (B, c, n), of about unit scale.
    """
    same = np.ones((columns.shape[1],) * 2) if labels is None else (labels[:, None] == labels) * 1.0
    ranks = np.empty((len(weights), *columns.shape))
    for place, column in enumerate(columns):
        below = (column < column[:, None]) + 0.5 * (column == column[:, None])
        ranks[:, place] = weights @ (below * same).T
    counted = weights @ same
    return ranks / np.where(counted > 0, counted, 1.0)[:, None]


def centred_by_pair(columns: Floats, weights: Floats, labels: Labels) -> Floats:
    """Columns (B or 1, c, n) about the weighted mean of each pair; pairs drawn twice count as one."""
    hot = (labels[:, None] == np.arange(labels.max() + 1)) * 1.0
    counted = weights @ hot
    means = ((columns * weights[:, None]) @ hot) / np.where(counted > 0, counted, 1.0)[:, None]
    return columns - means[..., labels]


def pair_means(columns: Floats, labels: Labels) -> Floats:
    """(c, n) to (c, J): the plain mean of each pair's runs."""
    hot = (labels[:, None] == np.arange(labels.max() + 1)) * 1.0
    return (columns @ hot) / hot.sum(axis=0)


def scored(columns: Floats, method: str, weights: Floats, labels: Labels | None) -> Floats:
    """What `correlations` is to be given for a method: (B or 1, c, n).

    * pearson: the values; spearman: their midranks.
    * With `labels` (correlation within pairs): centred by pair; ranks are taken within each pair, as a share
      of its runs, so that neither the level nor the scale of a pair counts.
    """
    given = midranks(columns, weights, labels) if method == "spearman" else columns[None]
    return given if labels is None else centred_by_pair(given, weights, labels)
