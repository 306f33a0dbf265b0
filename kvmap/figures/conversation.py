"""The figure of conversations: F1 by turn, and by how much a mapped cache falls behind the target's own."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvmap.figures.style import (
    ARM_COLOURS,
    COLUMN_INCHES,
    OTHER_COLOURS,
    STYLE,
    Rows,
    arm_order,
    count_span,
    number,
    records,
    subplots,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def conversation_lines(rows: Rows, slopes: Rows = (), first_turn: int = 1) -> Figure:
    """F1 of every arm by turn, and the drift of those on a mapped cache with its 95 % interval.

    Args:
        rows: of one task, `{arm, turn, n, f1, f1_standard_error, drift_points, drift_low, drift_high}`.
        slopes: `{arm, metric, value, low, high}`; the mapped arm's `drift_slope_points_per_turn` is written.
        first_turn: of the hand-off; a line marks it where there are turns before it.
    """
    import matplotlib as mpl

    table = sorted(records(rows), key=lambda row: int(row["turn"]))
    arms = arm_order(row["arm"] for row in table)
    with mpl.rc_context(STYLE):
        figure, (above, below) = subplots(
            2, 1, (COLUMN_INCHES, 3.6), sharex=True, gridspec_kw={"height_ratios": [3, 2]}
        )
        for place, arm in enumerate(arms):
            colour = ARM_COLOURS.get(arm, OTHER_COLOURS[place % len(OTHER_COLOURS)])
            of_arm = [row for row in table if row["arm"] == arm]
            _line(above, of_arm, colour, arm.replace("_", " "))
            if arm == "mapped" or arm not in ARM_COLOURS:
                _band(below, [row for row in of_arm if int(row["turn"]) >= first_turn], colour)
        if any(int(row["turn"]) < first_turn for row in table):
            for axis in (above, below):
                axis.axvline(first_turn - 0.5, color="black", linewidth=0.6, linestyle=":")
        above.set_ylim(0, 1.02)
        above.set_ylabel("F1 (± 1 standard error)")
        counted = count_span({"n": row["n"], "value": row["f1"]} for row in table)
        above.set_title(f"n = {counted} conversations")
        below.axhline(0, color="black", linewidth=0.6)
        below.set_ylabel("drift (points)\n95 % interval")
        below.set_xlabel("turn")
        below.xaxis.get_major_locator().set_params(integer=True)
        below.set_title(_slope(records(slopes)))
        figure.legend(loc="outside lower center", ncols=min(4, len(arms)), frameon=False, columnspacing=1.0)
    return figure


def _line(axis: Axes, rows: Sequence[Mapping[str, Any]], colour: str, label: str) -> None:
    turns = [int(row["turn"]) for row in rows]
    values = [number(row["f1"]) for row in rows]
    errors = [number(row.get("f1_standard_error")) for row in rows]
    axis.plot(turns, values, color=colour, marker="o", markersize=2.5, linewidth=1, label=label)
    low, high = (
        [value + sign * error for value, error in zip(values, errors, strict=True)] for sign in (-1, 1)
    )
    axis.fill_between(turns, low, high, color=colour, alpha=0.15, linewidth=0)


def _band(axis: Axes, rows: Sequence[Mapping[str, Any]], colour: str) -> None:
    turns = [int(row["turn"]) for row in rows]
    names = ("drift_points", "drift_low", "drift_high")
    middle, low, high = ([number(row.get(name)) for row in rows] for name in names)
    axis.plot(turns, middle, color=colour, marker="o", markersize=2.5, linewidth=1)
    axis.fill_between(turns, low, high, color=colour, alpha=0.25, linewidth=0)


def _slope(rows: Sequence[Mapping[str, Any]]) -> str:
    for row in rows:
        if (row["arm"], row["metric"]) == ("mapped", "drift_slope_points_per_turn"):
            value, low, high = (number(row[name]) for name in ("value", "low", "high"))
            if math.isfinite(value):
                return f"mapped: {value:+.2f} [{low:+.2f}, {high:+.2f}] points a turn"
    return "target − arm"
