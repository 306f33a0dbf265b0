"""What an analysis of costs and times cannot be made of."""

from __future__ import annotations

import math
from collections.abc import Mapping

from kvmap.errors import KvmapError


class EconomicsError(KvmapError):
    """A latency table, a distribution or an assumption that no answer can be had from."""


def check_ranges(ranges: Mapping[str, tuple[float | None, float, float]]) -> None:
    """Refuse numbers that are out of range, all of them at once.

    Args:
        ranges: by name, the value got (None: not given, and right), the least and the most that it may be.

    Raises:
        EconomicsError: naming each.
    """
    wrong = [
        f"{name}={value:g}: expected {expected(low, high)}"
        for name, (value, low, high) in ranges.items()
        if value is not None and not (low <= value <= high and math.isfinite(value))
    ]
    if wrong:
        raise EconomicsError("; ".join(wrong))


def expected(low: float, high: float) -> str:
    """A range in words."""
    if math.isinf(high):
        return f"a finite number of at least {low:g}"
    return f"a number from {low:g} to {high:g}"
