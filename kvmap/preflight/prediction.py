"""What a mapper will retain on a pair without cases: ridge on few diagnostics, bounds from pairs left out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from kvmap.prediction.leave_out import chosen_penalty, out_of_pair, pair_weights, ridge_guesses
from kvmap.prediction.resampling import Floats, Labels

if TYPE_CHECKING:
    import pandas as pd

Measures: TypeAlias = Mapping[str, Mapping[str, float]]
"""Diagnostics by the mapper that showed them."""

FEATURES = {
    "r2_key": 1,
    "r2_value": 1,
    "attention_cosine": 1,
    "top1_agreement": 1,
    "kl_share": -1,
}
"""What is predicted from, and whether more of it is better (1) or worse (−1). `kl_share` is the KL over that
of the control, which knows the mean cache alone: pairs and tokenizers differ in what a nat is worth."""


@dataclass(frozen=True)
class Predicted:
    """A retention, foretold.

    Attributes:
        value: of the ridge.
        low, high: bounds, each of the confidence asked for; infinite where there are too few pairs for it.
        n_cases, n_pairs: it rests on.
        above, below: diagnostics that lie further on the better or the worse side of all cases than is
            allowed, each as `name = value, cases from … to …`.
    """

    value: float
    low: float
    high: float
    n_cases: int
    n_pairs: int
    above: tuple[str, ...] = ()
    below: tuple[str, ...] = ()


def usable(cases: pd.DataFrame, probe: str) -> pd.DataFrame:
    """Cases that have every feature of a probe, and an outcome."""
    columns = [f"{probe}/{name}" for name in FEATURES]
    if any(column not in cases for column in columns):
        return cases.iloc[:0]
    return cases[np.isfinite(cases[[*columns, "true"]].to_numpy(dtype=np.float64)).all(axis=1)]


@dataclass(frozen=True, eq=False)
class Reference:
    """Cases of one mapper, as a probe showed them, and what a predictor makes of them.

    Attributes:
        probe: whose diagnostics are read.
        x: (n, features); y: (n,) true retention; labels: (n,) pairs, 0 to J − 1.
        penalty: index of the ridge's λ.
        errors: (J,) y − ŷ of each pair when it is left out, the mean over its cases.
    """

    probe: str
    x: Floats
    y: Floats
    labels: Labels
    penalty: int
    errors: Floats

    @classmethod
    def of(cls, cases: pd.DataFrame, probe: str) -> Reference:
        """Args: cases of one mapper, of two pairs or more; the probe."""
        known = usable(cases, probe)
        x = known[[f"{probe}/{name}" for name in FEATURES]].to_numpy(dtype=np.float64)
        y = known["true"].to_numpy(dtype=np.float64)
        labels = np.unique(known["pair"].astype(str).to_numpy(), return_inverse=True)[1]
        errors = _pair_means(y - out_of_pair(x, y, labels)[0], labels)
        return cls(probe, x, y, labels, chosen_penalty(x, y, labels), errors)

    def predict(self, measured: Mapping[str, float], *, confidence: float, reach: float) -> Predicted:
        """Retention of the mapper on a new pair.

        `ŷ` as in `kvmap.prediction.leave_one_pair_out`: ridge on standardised columns, every pair weighing
        the same, λ that which predicts best with each pair left out. The interval is a conformal one of the
        leave-one-out kind, pairs being what is exchanged: of the J errors, sorted,
        `low = ŷ + e_(⌊(1 − c)(J + 1)⌋)` and `high = ŷ + e_(J + 1 − ⌊(1 − c)(J + 1)⌋)`. Each bound is of
        confidence c by itself.

        Args:
            measured: diagnostics of the probe on the new pair.
            confidence: c.
            reach: how far outside of the range of all cases a feature may lie, in widths of that range.
        """
        new = np.array([[float(measured[name]) for name in FEATURES]])
        guesses = ridge_guesses(self.x, self.y, pair_weights(self.labels), new)
        value = float(guesses[self.penalty, 0])
        low, high = bounds(self.errors, confidence)
        above, below = _outside(self.x, new[0], reach)
        n_pairs = len(self.errors)
        return Predicted(value, value + low, value + high, len(self.y), n_pairs, above, below)


def bounds(errors: Floats, confidence: float) -> tuple[float, float]:
    """The conformal bounds of an error: order statistics, infinite where errors are too few for them."""
    ordered, n = np.sort(errors), len(errors)
    rank = math.floor((1 - confidence) * (n + 1) + 1e-9)
    return (-math.inf, math.inf) if rank < 1 else (float(ordered[rank - 1]), float(ordered[n - rank]))


def _pair_means(errors: Floats, labels: Labels) -> Floats:
    sums = np.bincount(labels, weights=errors)
    means: Floats = sums / np.bincount(labels)
    return means


def _outside(x: Floats, new: Floats, reach: float) -> tuple[tuple[str, ...], tuple[str, ...]]:
    better: list[str] = []
    worse: list[str] = []
    for number, (name, sign) in enumerate(FEATURES.items()):
        least, most = float(x[:, number].min()), float(x[:, number].max())
        room = reach * (most - least)
        said = f"{name} = {new[number]:.3g}, cases from {least:.3g} to {most:.3g}"
        if new[number] > most + room:
            (better if sign > 0 else worse).append(said)
        elif new[number] < least - room:
            (worse if sign > 0 else better).append(said)
    return tuple(better), tuple(worse)


RICHEST_FIRST = ("banded", "linear", "head_local", "native_features_2", "native_features")
"""Whose diagnostics say most of a mapper that the preflight did not fit: who reads most of the source."""


def probe_for(mapper: str, measured: Measures, probes: Sequence[str]) -> str | None:
    """Whose diagnostics a mapper is judged by: its own, else those of the richest that the cases know too.

    Args:
        mapper: that is to be judged.
        measured: of this preflight.
        probes: that the cases have diagnostics of.
    """
    known = [name for name in (mapper, *RICHEST_FIRST) if name in measured and name in probes]
    return known[0] if known else None
