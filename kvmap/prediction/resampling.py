"""Clustered resampling: pairs first and then runs within them, as runs of one pair are not independent."""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float64]
Labels: TypeAlias = NDArray[np.int64]

LEVEL = 0.95


def bootstrap_weights(
    labels: Labels, n_resamples: int, random: np.random.Generator, *, draw_pairs: bool = True
) -> Floats:
    """How often each run is in each resample.

    A resample draws as many pairs as there are, with replacement, and for each of them as many of its runs as
    it has, with replacement.

    Args:
        labels: (n,) the pair of each run, 0 to J − 1.
        n_resamples: B.
        random: draws.
        draw_pairs: False keeps every pair and draws its runs alone: what is then estimated is of these
            pairs.

    Returns:
        (B, n) float64 counts.
    """
    n_pairs = int(labels.max()) + 1
    pairs = np.ones((n_resamples, n_pairs), dtype=np.int64)
    if draw_pairs:
        pairs = random.multinomial(n_pairs, np.full(n_pairs, 1 / n_pairs), size=n_resamples)
    counts = np.zeros((n_resamples, len(labels)))
    for pair in range(n_pairs):
        runs = np.flatnonzero(labels == pair)
        counts[:, runs] = random.multinomial(pairs[:, pair] * len(runs), np.full(len(runs), 1 / len(runs)))
    return counts


def permutations_within(labels: Labels, n_permutations: int, random: np.random.Generator) -> Labels:
    """(B, n) indices that exchange runs of one pair with each other, every order alike."""
    order = np.tile(np.arange(len(labels)), (n_permutations, 1))
    for pair in np.unique(labels):
        runs = np.flatnonzero(labels == pair)
        order[:, runs] = random.permuted(np.tile(runs, (n_permutations, 1)), axis=1)
    return order


def interval_ends(resampled: Floats, n_units: int | None = None) -> tuple[Floats, Floats]:
    """Ends of the 95 % percentile interval, of the resamples where the number exists.

    With one run a pair the percentiles are too near for few pairs, as resamples of J units have a spread too
    small by √((J − 1)/J) and no allowance for not knowing it. Then the expanded percentiles of Hesterberg
    (The American Statistician 69, 2015, section 5) are taken, `α' = Φ(−√(J/(J − 1)) · t_{J−1})`: as wide as a
    t interval would be.

    Args:
        resampled: (B, ...) float64.
        n_units: J; None: plain percentiles.

    Returns:
        (...) each; nan where fewer than half of the resamples have the number.
    """
    tail = (1 - LEVEL) / 2
    if n_units is not None:
        wider = math.sqrt(n_units / (n_units - 1)) * student_quantile(1 - tail, n_units - 1)
        tail = NormalDist().cdf(-wider)
    enough = np.isfinite(resampled).mean(axis=0) >= 0.5
    low, high = np.nanquantile(np.where(enough, resampled, 0.0), [tail, 1 - tail], axis=0)
    return np.where(enough, low, np.nan), np.where(enough, high, np.nan)


def student_quantile(share: float, freedom: int) -> float:
    """Quantile of Student's t of whole degrees of freedom, for shares of ½ or more, to 1e-12."""
    low, high = 0.0, 1.0
    while _student_cdf(high, freedom) < share:
        high *= 2
    while high - low > 1e-13 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if _student_cdf(middle, freedom) < share else (low, middle)
        if middle in (low, high) and (low + high) / 2 in (low, high):
            break
    return (low + high) / 2


def _student_cdf(t: float, freedom: int) -> float:
    """Abramowitz and Stegun 26.7.3 and 26.7.4, finite sums; t ≥ 0."""
    angle = math.atan(t / math.sqrt(freedom))
    square = math.cos(angle) ** 2
    odd = freedom % 2 == 1
    term = math.cos(angle) if odd else 1.0
    total = term if freedom > 1 or not odd else 0.0
    for k in range(3 if odd else 2, freedom - 1, 2):
        term *= square * (k - 1) / k
        total += term
    covered = (2 / math.pi) * (angle + math.sin(angle) * total) if odd else math.sin(angle) * total
    return 0.5 + covered / 2
