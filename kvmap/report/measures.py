"""Which measures stand in tables, what they are called there, and how their numbers are written."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvmap.figures.style import number

Write = Callable[[float], str]
NOTHING = "–"
AVERAGE = "average"  # the task name under which means over tasks stand
AVERAGES = (AVERAGE, "tasks_average")


@dataclass(frozen=True)
class Measure:
    """A line of the summary: metric name, what the table calls it, how its numbers are written."""

    metric: str
    title: str
    write: Write


def three_digits(value: float) -> str:
    """Three significant digits; whole numbers from a thousand on, powers of ten beyond a million."""
    if value == 0 or 0.001 <= abs(value) < 999.5:
        return f"{value:.3g}"
    return f"{value:,.0f}" if 1 < abs(value) < 1e6 else f"{value:.2e}"


def fraction(value: float) -> str:
    return f"{value:.3f}"


MEASURES = (
    Measure("accuracy", "accuracy", fraction),
    Measure("generated_accuracy", "generated", fraction),
    Measure("f1", "F1", fraction),
    Measure("drift_points", "drift, points", three_digits),
    Measure("drift_slope_points_per_turn", "drift a turn, points", three_digits),
    Measure("perplexity", "perplexity", three_digits),
    Measure("context_carried", "carried", fraction),
    Measure("kl_nats", "KL, nats", fraction),
    Measure("top1_agreement", "top-1 same", fraction),
)
RATIOS = (
    Measure("retention", "retention", fraction),
    Measure("floor_retention", "floor retention", fraction),
    Measure("gain_recovered", "gain recovered", fraction),
    Measure("mcnemar_p", "McNemar p", three_digits),
)
LEADS = (
    Measure("accuracy_minus_source", "accuracy", fraction),
    Measure("mcnemar_source_p", "McNemar p", three_digits),
    Measure("nll_minus_source_nats", "NLL, nats a token", fraction),
)


def with_error(row: Mapping[str, Any] | None, write: Write) -> str:
    """`0.520 ±.045`: value and standard error, where there is one."""
    value = math.nan if row is None else number(row["value"])
    if row is None or not math.isfinite(value):
        return NOTHING
    error = number(row.get("standard_error"))
    return f"{write(value)} ±{write(error).removeprefix('0')}" if math.isfinite(error) else write(value)


def with_interval(row: Mapping[str, Any] | None, write: Write) -> str:
    """`0.712 [0.610, 0.815]`; with the standard error where there is no interval."""
    value = math.nan if row is None else number(row["value"])
    if row is None or not math.isfinite(value):
        return NOTHING
    low, high = number(row.get("low")), number(row.get("high"))
    known = math.isfinite(low) and math.isfinite(high)
    return f"{write(value)} [{write(low)}, {write(high)}]" if known else with_error(row, write)


def mean_and_worst(values: Iterable[float], worst: Callable[[Sequence[float]], float]) -> str:
    """`0.783 (0.658)`: the mean of what is finite, and the worst of it."""
    finite = [value for value in values if math.isfinite(value)]
    return f"{mean(finite):.3f} ({worst(finite):.3f})" if finite else NOTHING


def mean(values: Iterable[float]) -> float:
    """Of what is finite; nan where nothing is."""
    finite = [value for value in values if math.isfinite(value)]
    return sum(finite) / len(finite) if finite else math.nan
