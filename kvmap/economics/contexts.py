"""How long contexts are: counted lengths, a log-normal, or those of a file."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist

import numpy as np

from kvmap.economics.curves import Array, Latencies
from kvmap.economics.errors import EconomicsError, check_ranges

N_QUANTILES = 1000
"""Of a log-normal: so many lengths of equal weight stand for it."""


@dataclass(frozen=True)
class Contexts:
    """A distribution of context lengths.

    Attributes:
        lengths: T, tokens, rising.
        weights: of each, with sum 1.
        origin: in words.
    """

    lengths: Array
    weights: Array
    origin: str

    @property
    def mean(self) -> float:
        """E[T], tokens."""
        return float(self.weights @ self.lengths)


def counted(lengths: Sequence[float], weights: Sequence[float] | None = None, origin: str = "") -> Contexts:
    """Lengths with weights; equal ones are taken together.

    Args:
        lengths: tokens.
        weights: of any sum above 0; None: all alike.
        origin: in words.

    Raises:
        EconomicsError: no length, one that is not above 0, or weights that do not fit.
    """
    weights = [1.0] * len(lengths) if weights is None else weights
    if len(weights) != len(lengths):
        raise EconomicsError(
            f"{len(weights)} weights of {len(lengths)} lengths: expected one for each length"
        )
    sizes, shares = np.asarray(lengths, dtype=np.float64), np.asarray(weights, dtype=np.float64)
    if not len(sizes) or not (np.isfinite(sizes) & (sizes > 0)).all():
        raise EconomicsError(
            f"lengths={_some(sizes)}: expected at least one, each a number of tokens above 0"
        )
    if not (np.isfinite(shares) & (shares >= 0)).all() or not shares.sum() > 0:
        raise EconomicsError(f"weights={_some(shares)}: expected numbers of at least 0, and one above it")
    present = shares > 0
    unique, place = np.unique(sizes[present], return_inverse=True)
    summed = np.bincount(place, weights=shares[present])
    said = origin or f"{len(unique)} length{'s' if len(unique) > 1 else ''}"
    return Contexts(unique, summed / summed.sum(), said)


def log_normal(
    median: float, sigma: float, low: float = 1.0, high: float = math.inf, n: int = N_QUANTILES
) -> Contexts:
    """A log-normal, cut to a range: `log T ~ N(log median, sigma²)` given low ≤ T ≤ high.

    It is stood for by n lengths of equal weight, at the quantiles (i + ½)/n of what is left of it.

    Args:
        median: tokens, of the whole distribution.
        sigma: standard deviation of log T; 0: all contexts have the median.
        low: the shortest context, tokens.
        high: the longest.
        n: lengths.

    Raises:
        EconomicsError: a number out of range, or a range with nothing of the distribution in it.
    """
    check_ranges({"median": (median, 1, math.inf), "sigma": (sigma, 0, 10)})
    if sigma == 0:
        return counted([median], origin=f"{median:,.0f} tokens")
    normal = NormalDist(math.log(median), sigma)
    start, end = normal.cdf(math.log(max(low, 1e-9))), 1.0 if math.isinf(high) else normal.cdf(math.log(high))
    if not end - start > 1e-6:
        raise EconomicsError(
            f"median={median:g}, sigma={sigma:g}: nothing of it lies between {low:g} and {high:g} tokens; "
            f"give a median between them, or times of more lengths"
        )
    shares = start + (end - start) * (np.arange(n) + 0.5) / n
    lengths = [math.exp(normal.inv_cdf(share)) for share in shares]
    cut = f", cut to {low:,.0f} to {high:,.0f}: {end - start:.1%} of it" if end - start < 0.9995 else ""
    return counted(lengths, origin=f"log-normal, median {median:,.0f} tokens, sigma {sigma:g}{cut}")


def log_normal_within(median: float, sigma: float, latencies: Latencies) -> Contexts:
    """A log-normal, cut to the lengths that are known unless curves are extended beyond them."""
    if latencies.beyond == "extend":
        return log_normal(median, sigma)
    return log_normal(median, sigma, float(latencies.lengths[0]), float(latencies.lengths[-1]))


def read_lengths(path: Path) -> Contexts:
    """The lengths of a file: JSON lines, or a CSV with a header.

    Each line gives `length` (or `n_tokens`) and, where there is one, `weight`; a JSON line may be a number.

    Raises:
        EconomicsError: no such file, or a line without a number; naming it.
    """
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise EconomicsError(
            f"{path}: cannot be read ({error}); give a JSONL or CSV of context lengths"
        ) from error
    rows = list(_csv_rows(text) if Path(path).suffix.lower() == ".csv" else _json_rows(text, path))
    found = [_pair(row, path, place) for place, row in rows]
    if not found:
        raise EconomicsError(f"{path}: holds no lengths; expected one of `length` or `n_tokens` on each line")
    lengths, weights = zip(*found, strict=True)
    return counted(lengths, weights, origin=f"{len(found):,} lengths of {Path(path).name}")


def _csv_rows(text: str) -> Iterator[tuple[int, object]]:
    yield from ((place, row) for place, row in enumerate(csv.DictReader(text.splitlines()), start=2))


def _json_rows(text: str, path: Path) -> Iterator[tuple[int, object]]:
    for place, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            yield place, json.loads(line)
        except json.JSONDecodeError as error:
            raise EconomicsError(
                f'{path}, line {place}: no JSON ({error.msg}); expected {{"length": …}}'
            ) from error


def _pair(row: object, path: Path, place: int) -> tuple[float, float]:
    values = row if isinstance(row, dict) else {"length": row}
    name = next((name for name in ("length", "n_tokens") if name in values), None)
    try:
        if name is None:
            raise ValueError
        weight = values.get("weight")
        return _number(values[name]), 1.0 if weight in (None, "") else _number(weight)
    except (TypeError, ValueError) as error:
        raise EconomicsError(
            f"{path}, line {place}: {row!r} gives no length; expected a number as `length` or `n_tokens`, "
            f"and one as `weight` where it has one"
        ) from error


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError
    return float(value)


def _some(values: Array) -> str:
    shown = ", ".join(f"{value:g}" for value in values[:6])
    return f"[{shown}, … {len(values)} in all]" if len(values) > 6 else f"[{shown}]"
