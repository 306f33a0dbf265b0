"""How sure a number is: standard errors, paired bootstrap intervals, McNemar's test, and ratios of arms.

All intervals are percentile bootstrap intervals over items (or sequences), paired: one resample takes the
same items of every arm. They are seeded and do not depend on the machine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvmap.errors import KvmapError

Floats: TypeAlias = NDArray[np.float64]
Values: TypeAlias = Sequence[float] | NDArray[np.generic]

LEVEL = 0.95
N_RESAMPLES = 2000
CHUNK_ELEMENTS = 4_000_000  # indices drawn at once: bounds memory, not the result's distribution


@dataclass(frozen=True)
class Estimate:
    """A number with its interval.

    Attributes:
        value: the number; nan where it is undefined.
        n: items or sequences behind it.
        standard_error: of the value (the spread of its resamples where it is a ratio); nan for n < 2.
        low: lower end of the 95 % interval.
        high: upper end of the 95 % interval.
        note: why the value is undefined; empty where it is defined.
    """

    value: float
    n: int
    standard_error: float = math.nan
    low: float = math.nan
    high: float = math.nan
    note: str = ""


def mean(values: Values) -> Estimate:
    """Mean with standard error s/√n (s with n − 1) and the normal 95 % interval, value ± 1.96 errors."""
    array = _columns([values])[:, 0]
    n = len(array)
    if n == 0:
        return Estimate(math.nan, 0, note="no items")
    value = float(array.mean())
    if n == 1:
        return Estimate(value, 1)
    error = float(array.std(ddof=1) / math.sqrt(n))
    return Estimate(value, n, error, value - 1.959964 * error, value + 1.959964 * error)


def bootstrap_means(columns: Sequence[Values], *, n_resamples: int = N_RESAMPLES, seed: int = 0) -> Floats:
    """Means of every column in every resample; a resample draws the same rows of all columns.

    Args:
        columns: c columns of n paired values.
        n_resamples: number of resamples.
        seed: of the draw; equal seeds and n give equal resamples whatever the values are.

    Returns:
        (n_resamples, c) float64.
    """
    table = _columns(columns)
    n = len(table)
    if n == 0:
        raise KvmapError("bootstrap of 0 items: expected at least 1")
    if n_resamples < 1:
        raise KvmapError(f"n_resamples={n_resamples}: expected at least 1")
    return _resampled_means(table, n_resamples, np.random.default_rng(seed))


def hierarchical_means(
    tables: Sequence[Floats], runs: NDArray[np.int64], random: np.random.Generator, *, shared: bool
) -> Floats:
    """Means over runs and items in every resample of runs, then of items.

    A resample takes as many runs as there are, with replacement, and of each as many items as it has. Runs
    that share their items are given the same ones: how hard an item is, it is in all of them, so that drawing
    anew for each run would count one item's luck as many.

    Args:
        tables: of each run (n_items, c) values in one order of columns, and of items if they are shared.
        runs: (n_resamples, n_runs) numbers of the runs that each resample takes; given, so that several tasks
            can take the same.
        random: draws the items.
        shared: the runs have the same items.

    Returns:
        (n_resamples, c) float64, each run counting the same.
    """
    n_resamples, n_runs = runs.shape
    if not shared:
        means = np.zeros((n_resamples, tables[0].shape[1]))
        for slot in runs.T:
            for run in np.unique(slot):
                rows = np.flatnonzero(slot == run)
                means[rows] += _resampled_means(tables[run], len(rows), random) / n_runs
        return means
    stacked = np.stack(tables)
    n = stacked.shape[1]
    taken = np.stack([(runs == run).sum(axis=1) for run in range(len(tables))], axis=1) / n_runs
    chunk = max(1, CHUNK_ELEMENTS // n)
    parts = []
    for start in range(0, n_resamples, chunk):
        of_runs = taken[start : start + chunk]
        of_items = random.multinomial(n, np.full(n, 1 / n), size=len(of_runs)) / n
        parts.append(
            np.stack(
                [((of_runs @ column) * of_items).sum(axis=1) for column in np.moveaxis(stacked, 2, 0)], 1
            )
        )
    return np.concatenate(parts)


def _resampled_means(table: Floats, n_resamples: int, random: np.random.Generator) -> Floats:
    """Means of (n, c) values in every resample of the rows, (n_resamples, c)."""
    n = len(table)
    chunk = max(1, CHUNK_ELEMENTS // n)
    means = []
    for start in range(0, n_resamples, chunk):
        rows = random.integers(0, n, size=(min(chunk, n_resamples - start), n))
        means.append(np.stack([column[rows].mean(axis=1) for column in table.T], axis=1))
    return np.concatenate(means)


def difference(value: float, resampled: Floats, *, n: int) -> Estimate:
    """A difference of paired means with the interval of its resamples; undefined where it is not finite.

    Args:
        value: on all items.
        resampled: (n_resamples,) the same on each resample.
        n: items; below 2 there is no interval.
    """
    if not math.isfinite(value):
        return Estimate(math.nan, n, note="a score that is not finite")
    if n < 2:
        return Estimate(value, n)
    low, high = _ends(resampled)
    return Estimate(value, n, float(resampled.std(ddof=1)), low, high)


def paired_difference(
    first: Values, second: Values, *, n_resamples: int = N_RESAMPLES, seed: int = 0
) -> Estimate:
    """mean(first − second) over paired items, with its bootstrap interval."""
    table = _columns([first, second])
    if len(table) == 0:
        return Estimate(math.nan, 0, note="no items")
    gaps = table[:, 0] - table[:, 1]
    resampled = bootstrap_means([gaps], n_resamples=n_resamples, seed=seed)[:, 0]
    return difference(float(gaps.mean()), resampled, n=len(gaps))


def ratio(
    numerator: float, denominator: float, numerators: Floats, denominators: Floats, *, n: int, what: str
) -> Estimate:
    """A ratio of two means with its bootstrap interval, or undefined with the reason.

    Undefined where the denominator is not above zero, or where its own interval reaches zero: then the
    ratio's sign is a matter of chance. With one item there are no intervals, and only the first rule holds.

    Args:
        numerator: value on all items.
        denominator: value on all items.
        numerators: (n_resamples,) the same on each resample.
        denominators: (n_resamples,) the same on each resample.
        n: items.
        what: the denominator in words, for the note.
    """
    if not math.isfinite(numerator) or not math.isfinite(denominator):
        return Estimate(math.nan, n, note="a score that is not finite")
    if denominator <= 0:
        return Estimate(math.nan, n, note=f"undefined: {what} is {denominator:.4g}, not above 0")
    if n < 2:
        return Estimate(numerator / denominator, n)
    low, _ = _ends(denominators)
    if low <= 0:
        return Estimate(
            math.nan, n, note=f"undefined: {what} is {denominator:.4g}, its 95 % interval starts at {low:.4g}"
        )
    kept = denominators > 0
    resampled = numerators[kept] / denominators[kept]
    low, high = _ends(resampled)
    return Estimate(numerator / denominator, n, float(resampled.std(ddof=1)), low, high)


def context_carried(
    arm: Values, target: Values, no_context: Values, *, n_resamples: int = N_RESAMPLES, seed: int = 0
) -> Estimate:
    """(NLL_none − NLL_arm) / (NLL_none − NLL_native) on the same tokens, one NLL sum per sequence.

    1: as good as the target's own cache; 0: as good as no context; negative: the transfer harms.
    """
    what = "what the context is worth to the target (nats per sequence)"
    return paired_ratio([no_context, arm, target], (0, 1), (0, 2), what, n_resamples, seed)


def discordant(first: Values, second: Values) -> tuple[int, int]:
    """Of paired right/wrong answers: how many only the first got right, and how many only the second."""
    table = _columns([first, second]) != 0
    return int((table[:, 0] & ~table[:, 1]).sum()), int((~table[:, 0] & table[:, 1]).sum())


def mcnemar(first: Values, second: Values) -> float:
    """Exact two-sided p of McNemar's test on paired right/wrong answers.

    With b items that only the first got right and c that only the second got right,
    p = min(1, 2·P(X ≤ min(b, c))), X ~ Binomial(b + c, 1/2). No difference on any item: p = 1. Exact for few
    discordant pairs and for many: no approximation by χ² is needed.
    """
    b, c = discordant(first, second)
    n = b + c
    term = total = 1
    for k in range(min(b, c)):
        term = term * (n - k) // (k + 1)
        total += term
    return min(1.0, 2 * total / 2**n)


def paired_ratio(
    columns: Sequence[Values],
    top: tuple[int, ...],
    bottom: tuple[int, ...],
    what: str,
    n_resamples: int,
    seed: int,
) -> Estimate:
    """A ratio of means of paired columns with its bootstrap interval; see `ratio`.

    Args:
        columns: paired values of the same items.
        top: column whose mean is the numerator, and, where there are two, the one whose mean is subtracted.
        bottom: the same of the denominator.
        what: the denominator in words, for the note where it is undefined.
        n_resamples: bootstrap resamples.
        seed: of the bootstrap.
    """
    table = _columns(columns)
    if len(table) == 0:
        return Estimate(math.nan, 0, note="no items")

    def side(means: Floats, picks: tuple[int, ...]) -> Floats:
        return means[..., picks[0]] - (means[..., picks[1]] if len(picks) > 1 else 0.0)

    full = table.mean(axis=0)
    resampled = bootstrap_means(columns, n_resamples=n_resamples, seed=seed)
    return ratio(
        float(side(full, top)),
        float(side(full, bottom)),
        side(resampled, top),
        side(resampled, bottom),
        n=len(table),
        what=what,
    )


def _columns(columns: Sequence[Values]) -> Floats:
    """Paired columns as one (n, c) float64 table."""
    arrays = [np.asarray(column, dtype=np.float64).reshape(-1) for column in columns]
    sizes = {len(array) for array in arrays}
    if len(sizes) != 1:
        raise KvmapError(f"paired columns of lengths {sorted(sizes)}: expected the same items in every arm")
    return np.stack(arrays, axis=1)


def _ends(samples: Floats) -> tuple[float, float]:
    low, high = np.quantile(samples, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)
