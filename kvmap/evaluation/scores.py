"""Means of several arms over the same items, with resamples that stay paired, for one task and on average."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvmap.evaluation import statistics
from kvmap.evaluation.statistics import Estimate, Floats

CHANCE = "chance"
"""The column of what guessing gets right, which stands beside the arms."""


@dataclass(frozen=True, eq=False)
class Scores:
    """Means of several arms over the same items, with the same resamples.

    Attributes:
        value: arm to its mean.
        error: arm to the standard error of that mean.
        resampled: arm to its means over resamples, (n_resamples,).
        n: items.
    """

    value: dict[str, float]
    error: dict[str, float]
    resampled: dict[str, Floats]
    n: int

    @property
    def arms(self) -> list[str]:
        """All but the column of chance."""
        return [arm for arm in self.value if arm != CHANCE]

    def mean(self, arm: str) -> Estimate:
        """The arm's mean with its normal 95 % interval."""
        value, error = self.value[arm], self.error[arm]
        return Estimate(value, self.n, error, value - 1.959964 * error, value + 1.959964 * error)

    def difference(self, arm: str, other: str) -> Estimate:
        """The arm's mean less another's, with its paired bootstrap interval."""
        return statistics.difference(
            self.value[arm] - self.value[other], self.resampled[arm] - self.resampled[other], n=self.n
        )

    def ratio(self, top: tuple[str, str | None], bottom: tuple[str, str | None], what: str) -> Estimate:
        """(a − b) / (c − d), where b and d may be None for zero."""

        def less(first: str, second: str | None) -> tuple[float, Floats]:
            if second is None:
                return self.value[first], self.resampled[first]
            return self.value[first] - self.value[second], self.resampled[first] - self.resampled[second]

        (numerator, numerators), (denominator, denominators) = less(*top), less(*bottom)
        return statistics.ratio(numerator, denominator, numerators, denominators, n=self.n, what=what)


def scores_of(columns: Mapping[str, Floats], n_resamples: int, seed: int) -> Scores:
    """Of paired columns: arm to its value for each item, in one order of the items."""
    resampled = statistics.bootstrap_means(list(columns.values()), n_resamples=n_resamples, seed=seed)
    means = {arm: statistics.mean(column) for arm, column in columns.items()}
    return Scores(
        value={arm: estimate.value for arm, estimate in means.items()},
        error={arm: estimate.standard_error for arm, estimate in means.items()},
        resampled={arm: resampled[:, number] for number, arm in enumerate(columns)},
        n=len(next(iter(columns.values()))),
    )


def average(scored: Sequence[Scores]) -> Scores:
    """Tasks weigh the same; they are independent, so errors add in squares and resamples add one to one."""
    arms = list(scored[0].value)
    # Tasks of one size draw the same rows from one seed; shuffled, their resamples are independent.
    random = np.random.default_rng(0)
    shuffled = [random.permutation(len(scores.resampled[arms[0]])) for scores in scored]
    return Scores(
        value={arm: float(np.mean([scores.value[arm] for scores in scored])) for arm in arms},
        error={arm: math.hypot(*(scores.error[arm] for scores in scored)) / len(scored) for arm in arms},
        resampled={
            arm: np.mean([s.resampled[arm][o] for s, o in zip(scored, shuffled, strict=True)], axis=0)
            for arm in arms
        },
        n=sum(scores.n for scores in scored),
    )


def kept_of_target(scores: Scores, arm: str, *, floor: bool) -> Iterator[tuple[str, Estimate]]:
    """What an arm keeps of the target's accuracy, and of its lead over chance and over the source."""
    yield "retention", scores.ratio((arm, None), ("target", None), "the target's accuracy")
    if floor:
        what = "the target's lead over chance"
        yield "floor_retention", scores.ratio((arm, CHANCE), ("target", CHANCE), what)
    if "source" in scores.arms and arm != "source":
        what = "the target's lead over the source"
        yield "gain_recovered", scores.ratio((arm, "source"), ("target", "source"), what)


def arm_row(task: str, arm: str, metric: str, estimate: Estimate) -> dict[str, Any]:
    """One row of table `arms`."""
    return {
        "task": task,
        "arm": arm,
        "metric": metric,
        "value": estimate.value,
        "n": estimate.n,
        "standard_error": estimate.standard_error,
        "low": estimate.low,
        "high": estimate.high,
        "note": estimate.note,
    }
