"""A small predictor of what becomes of a hand-off, judged on pairs that it has not seen."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kvmap.errors import KvmapError, UnknownName
from kvmap.prediction.columns import ARM, diagnostics_of, outcomes_of, short_name, with_ratios
from kvmap.prediction.configurations import PAIR, configurations
from kvmap.prediction.resampling import Floats, Labels, interval_ends
from kvmap.prediction.scores import correlations, midranks

if TYPE_CHECKING:
    import pandas as pd

MIN_PAIRS = 5
PENALTIES: Floats = np.logspace(-3, 2, 11)
RIDGE, MEAN = "ridge", "mean of other pairs"
N_RESAMPLES = 2000

_TEXTS = ("questions", "evaluation", "held_out")
_HELD_OUT = ("r2_key", "r2_value")
_STREAMED = ("attention_cosine", "concentration_key", "concentration_value", "kl_nats")


@dataclass(frozen=True, eq=False)
class LeaveOnePairOut:
    """What each predictor makes of pairs that it has not seen.

    Attributes:
        scores: rows {predictor, r2, r2_low, r2_high, mean_absolute_error, rank_correlation,
            rank_within_pairs, penalty, n_configurations, n_pairs, note}.
        predictions: one row a configuration: its pair, what came of it (`true`), and a column a predictor.
    """

    scores: pd.DataFrame
    predictions: pd.DataFrame


def default_predictors(table: pd.DataFrame) -> list[str]:
    """The handful that is known before any question is answered, as far as the runs have them.

    Held-out R² of keys and of values; attention-output cosine, concentration of key and of value errors and
    next-token KL on the first text that has them of questions, evaluation text and held-out sequences.
    """
    wanted = [f"diagnose/held_out/{ARM}/{name}" for name in _HELD_OUT]
    for name in _STREAMED:
        there = [f"diagnose/{text}/{ARM}/{name}" for text in _TEXTS]
        wanted += [column for column in there if column in table][:1]
    return [column for column in wanted if column in table]


def leave_one_pair_out(
    table: pd.DataFrame,
    outcome: str = "average/retention",
    *,
    predictors: Sequence[str] | None = None,
    group: str = PAIR,
    n_resamples: int = N_RESAMPLES,
    seed: int = 0,
) -> LeaveOnePairOut:
    """Predict an outcome of each pair from diagnostics, with what the other pairs teach.

    `ŷ = ȳ + Σ_j β_j (x_j − x̄_j)/s_j`, `β = (Z'WZ + λI)⁻¹ Z'W(y − ȳ)`: ridge on columns standardised over the
    other pairs, in which every pair weighs the same and the weights add up to 1. λ is the one of `PENALTIES`
    that predicts best when each of these other pairs is left out in turn. Beside it: the mean of the other
    pairs, and the same ridge on each diagnostic alone.

    Args:
        table: one row a run, see `kvmap.studies.runs.runs_table`; runs that differ in seeds are averaged.
        outcome: task and metric.
        predictors: columns; None: `default_predictors`.
        group: column that says which pair a run is of.
        n_resamples: of the bootstrap over pairs, predictions as they are; seed: its seed.

    Returns:
        Scores, every pair weighing the same: `r2 = 1 − Σ(y − ŷ)² / Σ(y − ȳ_others)²`, the share of squared
        error of the mean of other pairs that a predictor takes away, below 0 where it adds; mean absolute
        error in the outcome's unit; Spearman's ρ of all predictions with the truth, and the mean over pairs
        of ρ within each. Fewer than `MIN_PAIRS` pairs: nan, and the note `too few pairs`. Configurations
        without the outcome or any predictor are left out, and the note says how many lack which column.

    Raises:
        KvmapError: no diagnostic, or an outcome of several tasks.
        UnknownName: an outcome or a predictor that no run has.
    """
    import pandas as pd

    table = configurations(with_ratios(table), group)
    column = _one_column(table, outcome)
    names = _predictors(table, predictors)
    numbers = table[[*names, column]].apply(pd.to_numeric, errors="coerce")
    complete = np.isfinite(numbers.to_numpy(dtype=np.float64)).all(axis=1)
    note = _missing_note(numbers)
    kept, used = numbers[complete], table[complete]
    pairs, labels = np.unique(used[group].astype(str).to_numpy(), return_inverse=True)
    x, y = kept[names].to_numpy(dtype=np.float64), kept[column].to_numpy(dtype=np.float64)
    if len(pairs) < MIN_PAIRS:
        note = "; ".join([f"too few pairs ({len(pairs)})", *([note] if note else [])])
        empty = [_empty(name, len(y), len(pairs), note) for name in (RIDGE, MEAN, *map(short_name, names))]
        return LeaveOnePairOut(pd.DataFrame(empty), pd.DataFrame({group: used[group], "true": y}))
    found = {RIDGE: out_of_pair(x, y, labels), MEAN: out_of_pair(x[:, :0], y, labels)}
    found |= {short_name(name): out_of_pair(x[:, [n]], y, labels) for n, name in enumerate(names)}
    draws = _draws(len(pairs), n_resamples, seed)
    base = found[MEAN][0]
    scores = [
        {"predictor": name, **_score(y, guess, base, labels, draws), "penalty": penalty}
        | {"n_configurations": len(y), "n_pairs": len(pairs), "note": note}
        for name, (guess, penalty) in found.items()
    ]
    said = {name: guess for name, (guess, _) in found.items()}
    predictions = pd.DataFrame({group: used[group].to_numpy(), "true": y, **said})
    return LeaveOnePairOut(pd.DataFrame(scores), predictions)


def _one_column(table: pd.DataFrame, outcome: str) -> str:
    found = outcomes_of(table, [outcome])
    if len(found) > 1:
        tasks = ", ".join(f"{o.task}/{o.metric}" for o in found)
        raise KvmapError(f"outcome={outcome!r} is of several tasks: give one of {tasks}")
    return found[0].column


def _predictors(table: pd.DataFrame, names: Sequence[str] | None) -> list[str]:
    if names is None:
        names = default_predictors(table)
    for name in names:
        if name not in table:
            raise UnknownName("diagnostic", name, diagnostics_of(table))
    if not names:
        raise KvmapError(
            f"the runs have none of diagnose/held_out/{ARM}/{{{','.join(_HELD_OUT)}}} and of "
            f"diagnose/<text>/{ARM}/{{{','.join(_STREAMED)}}}: run the stage diagnose, or name columns"
        )
    return list(dict.fromkeys(names))


def _missing_note(numbers: pd.DataFrame) -> str:
    lacking = {name: int((~np.isfinite(column)).sum()) for name, column in numbers.items()}
    return "; ".join(f"no {name} in {n} of {len(numbers)} configurations" for name, n in lacking.items() if n)


def _empty(name: str, n: int, n_pairs: int, note: str) -> dict[str, Any]:
    measured = ("r2", "r2_low", "r2_high", "mean_absolute_error", "rank_correlation", "rank_within_pairs")
    nothing = dict.fromkeys([*measured, "penalty"], math.nan)
    return {"predictor": name, **nothing, "n_configurations": n, "n_pairs": n_pairs, "note": note}


def pair_weights(labels: Labels) -> Floats:
    """(n,) weights that add up to 1 and give each pair the same."""
    counts = np.bincount(labels)
    return 1 / (counts[labels] * (counts > 0).sum())


def ridge_guesses(x: Floats, y: Floats, weights: Floats, new: Floats) -> Floats:
    """Predictions of new rows for each of `PENALTIES`: (n_penalties, n_new); see `leave_one_pair_out`.

    A column that does not vary among the rows given says nothing.
    """
    mean, level = weights @ x, weights @ y
    spread = np.sqrt(weights @ (x - mean) ** 2)
    constant = spread <= 1e-12 * np.abs(x).max(axis=0, initial=0.0)
    scale = np.where(constant, np.inf, spread)
    z, z_new = (x - mean) / scale, (new - mean) / scale
    values, vectors = np.linalg.eigh(z.T @ (weights[:, None] * z))
    along = vectors.T @ (z.T @ (weights * (y - level)))
    shrunk = along / (np.maximum(values, 0.0) + PENALTIES[:, None])
    guesses: Floats = level + (shrunk @ vectors.T) @ z_new.T
    return guesses


def out_of_pair(x: Floats, y: Floats, labels: Labels) -> tuple[Floats, float]:
    """Out-of-pair predictions (n,), and the median of the penalties that folds chose (nan: no columns)."""
    guess = np.empty_like(y)
    chosen = []
    for pair in np.unique(labels):
        out = labels == pair
        penalty = chosen_penalty(x[~out], y[~out], labels[~out]) if x.shape[1] else 0
        chosen.append(PENALTIES[penalty])
        guess[out] = ridge_guesses(x[~out], y[~out], pair_weights(labels[~out]), x[out])[penalty]
    return guess, float(np.median(chosen)) if x.shape[1] else math.nan


def chosen_penalty(x: Floats, y: Floats, labels: Labels) -> int:
    """Index of the penalty of least squared error when each pair is left out; of equals the largest."""
    error = np.zeros(len(PENALTIES))
    for pair in np.unique(labels):
        out = labels == pair
        guesses = ridge_guesses(x[~out], y[~out], pair_weights(labels[~out]), x[out])
        error += ((guesses - y[out]) ** 2).mean(axis=1)
    return int(len(error) - 1 - np.argmin(error[::-1]))


def _draws(n_pairs: int, n_resamples: int, seed: int) -> Floats:
    random = np.random.default_rng(seed)
    return random.multinomial(n_pairs, np.full(n_pairs, 1 / n_pairs), size=n_resamples).astype(np.float64)


def _score(y: Floats, guess: Floats, base: Floats, labels: Labels, draws: Floats) -> dict[str, float]:
    weights = pair_weights(labels)

    def of_pairs(error: Floats) -> Floats:
        """(J,) sums of squared errors, each pair weighing the same."""
        return np.bincount(labels, weights=weights * error**2).astype(np.float64)

    own, mean = of_pairs(y - guess), of_pairs(y - base)
    # below that it is rounding, and the outcome is one number
    defined = mean.sum() > (1e-12 * np.abs(y).max()) ** 2
    r2 = float(1 - own.sum() / mean.sum()) if defined else math.nan
    low, high = (math.nan, math.nan)
    if defined and not np.array_equal(guess, base):
        bottom = draws @ mean
        resampled = np.where(bottom > 0, 1 - (draws @ own) / np.where(bottom > 0, bottom, 1.0), np.nan)
        low, high = (float(end) for end in interval_ends(resampled, draws.shape[1]))
    within = [_spearman(guess[labels == pair], y[labels == pair]) for pair in np.unique(labels)]
    varied = [rho for rho in within if math.isfinite(rho)]
    return {
        "r2": r2,
        "r2_low": low,
        "r2_high": high,
        "mean_absolute_error": float(weights @ np.abs(y - guess)),
        "rank_correlation": _spearman(guess, y),
        "rank_within_pairs": float(np.mean(varied)) if varied else math.nan,
    }


def _spearman(a: Floats, b: Floats) -> float:
    """Nan for fewer than three values, or where one does not vary."""
    if len(a) < 3:
        return math.nan
    ones = np.ones((1, len(a)))
    # predictions of one fold that differ by rounding are equal
    x, y = (midranks(np.round(values, 12)[None], ones) for values in (a, b))
    return round(float(correlations(x, y, ones)[0, 0, 0]), 12)
