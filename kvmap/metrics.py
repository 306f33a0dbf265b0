"""One measured number: what every stage hands to the run that records it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Metric:
    """A value with the evidence behind it.

    Attributes:
        value: The measurement, in the unit its key names (`latency_ms`, `kl_nats`; no suffix: no unit).
        n: How many observations it rests on (items, tokens, repeats), where that means something.
        standard_error: Standard error of `value`, in the same unit, where there is one.
    """

    value: float
    n: int | None = None
    standard_error: float | None = None
