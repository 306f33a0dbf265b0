"""The benchmark's latency table as curves."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvmap.economics.curves import SIZES, Latencies
from kvmap.economics.errors import EconomicsError

NEEDED = ("source_prefill", "re_prefill", "hand_off", "first_token")
"""Arms of the benchmark without which nothing can be said."""
_WHERE = "expected the table latency.csv of stage benchmark (tables/ of a run's directory)"


def latencies_of_table(
    rows: Sequence[Mapping[str, Any]],
    *,
    origin: str,
    beyond: str = "refuse",
    source_token_ms: float | None = None,
    target_token_ms: float | None = None,
) -> Latencies:
    """Curves through the medians of a benchmark.

    A token of the target over a context is the arm `first_token`. The benchmark times none of the source:
    unless it is given, it is taken to be `first_token · source_prefill / re_prefill` at each length, as if
    both models' times were in one proportion.

    Args:
        rows: `{length, arm, whole_p50_ms or p50_ms, source_bytes, mapped_bytes, batch_size}`.
        origin: of them, in words.
        beyond: see `Latencies`.
        source_token_ms, target_token_ms: of one more token at any length, in place of what the table says.

    Raises:
        EconomicsError: no rows, a column or an arm that is missing at a length, or rows of two batch sizes.
    """
    if not rows:
        raise EconomicsError(f"{origin}: no rows; {_WHERE}")
    by_length: dict[float, dict[str, float]] = {}
    sizes: dict[float, dict[str, float]] = {}
    batches, how = set(), set()
    for place, row in enumerate(rows, start=2):
        length = _number(row, "length", origin, place)
        arm = row.get("arm")
        if not arm:
            raise EconomicsError(f"{origin}, line {place}: no arm; {_WHERE}")
        column = "whole_p50_ms" if row.get("whole_p50_ms") not in (None, "") else "p50_ms"
        ms = _number(row, column, origin, place)
        if arm in by_length.setdefault(length, {}):
            raise EconomicsError(
                f"{origin}, line {place}: {arm} at {length:g} tokens stands twice; give the table of one run"
            )
        by_length[length][str(arm)] = ms
        sizes[length] = {name: _number(row, name, origin, place) for name in SIZES}
        batches.add(int(_number(row, "batch_size", origin, place)) if row.get("batch_size") else 1)
        if "scaled" in str(row.get("how") or ""):
            how.add("times of shortened models, scaled to all layers")
    if len(batches) > 1:
        raise EconomicsError(f"{origin}: batch sizes {sorted(batches)}; give the table of one run")
    _check_arms(by_length, origin)
    lengths = np.array(sorted(by_length))
    arms = {arm: np.array([by_length[length][arm] for length in lengths]) for arm in NEEDED}
    token = arms.pop("first_token")
    notes = sorted(how)
    arms["target_token"] = token if target_token_ms is None else np.full_like(token, target_token_ms)
    if source_token_ms is None:
        arms["source_token"] = arms["target_token"] * arms["source_prefill"] / arms["re_prefill"]
        notes.append("a token of the source: the target's, in proportion to their prefills")
    else:
        arms["source_token"] = np.full_like(token, source_token_ms)
    n_bytes = {name: np.array([sizes[length][name] for length in lengths]) for name in SIZES}
    return Latencies(lengths, arms, n_bytes, batches.pop(), origin, tuple(notes), beyond)


def read_latencies(path: Path, **options: Any) -> Latencies:
    """Curves of a file of the benchmark.

    Args:
        path: of `latency.csv`, or a run's directory.
        **options: of `latencies_of_table`.

    Raises:
        EconomicsError: no such file, or another table.
    """
    path = Path(path).expanduser()
    file = path / "tables" / "latency.csv" if path.is_dir() else path
    try:
        with open(file, encoding="utf-8", newline="") as stream:
            rows = list(csv.DictReader(stream))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise EconomicsError(f"{file}: cannot be read ({error}); {_WHERE}") from error
    return latencies_of_table(rows, origin=str(options.pop("origin", file)), **options)


def _number(row: Mapping[str, Any], column: str, origin: str, place: int) -> float:
    try:
        value = float(row[column])
    except (KeyError, TypeError, ValueError) as error:
        raise EconomicsError(
            f"{origin}, line {place}: {column}={row.get(column)!r}, no number; {_WHERE}"
        ) from error
    if not (math.isfinite(value) and value > 0):
        raise EconomicsError(f"{origin}, line {place}: {column}={value:g}; expected a finite number above 0")
    return value


def _check_arms(by_length: Mapping[float, Mapping[str, float]], origin: str) -> None:
    missing = [
        f"{arm} at {length:g} tokens"
        for length, arms in by_length.items()
        for arm in NEEDED
        if arm not in arms
    ]
    if missing:
        raise EconomicsError(f"{origin}: no {', '.join(missing[:6])}; {_WHERE}, with {', '.join(NEEDED)}")
