"""What a hand-off saves, and how far each part of it is from what the machine can do."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvmap.figures.run import LATENCY_STYLES
from kvmap.figures.style import COLUMN_INCHES, STYLE, Rows, number, records, short_count, subplots

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CASES = (
    ("map alone", "#D55E00", "o", ("map",)),
    ("warm: hand-off", "#E69F00", "P", ("hand_off",)),
    ("cold: source prefill + hand-off", "#56B4E9", "^", ("source_prefill", "hand_off")),
)
"""Name, colour, marker and arms of what re-prefill is held against."""
_WITHOUT_ROOF = ("transport",)


def cost_panels(rows: Rows) -> Figure:
    """Against context length: re-prefill over each way to a first token, and the roofline share of each arm.

    Args:
        rows: `{length (tokens), arm, whole_p50_ms}` and, where measured, `roofline_share`; the lower panel is
            left out where no row has one.
    """
    import matplotlib as mpl

    table = sorted(records(rows), key=lambda row: int(row["length"]))
    shares = [row for row in table if math.isfinite(number(row.get("roofline_share")))]
    n_panels = 2 if shares else 1
    with mpl.rc_context(STYLE):
        size = (COLUMN_INCHES, 1.9 * n_panels + 0.7)
        figure, axes = subplots(n_panels, 1, size, sharex=True)
        _ratios(axes[0], table)
        if shares:
            _roofline(axes[1], shares)
        for axis in axes:
            axis.grid(True, which="major", linewidth=0.3, alpha=0.5)
        _lengths(axes[-1], table)
        # one legend for both: colours of the upper panel are those of the arms in the lower
        handles = {
            label: line
            for axis in axes
            for line, label in zip(*axis.get_legend_handles_labels(), strict=True)
        }
        figure.legend(
            list(handles.values()), list(handles), loc="outside lower center", ncols=2, frameon=False
        )
    return figure


def _ratios(axis: Axes, table: Sequence[Mapping[str, Any]]) -> None:
    by_length: dict[int, dict[str, float]] = {}
    for row in table:
        by_length.setdefault(int(row["length"]), {})[row["arm"]] = number(row["whole_p50_ms"])
    for name, colour, marker, arms in CASES:
        found = [
            (length, times["re_prefill"] / sum(times[arm] for arm in arms))
            for length, times in by_length.items()
            if {"re_prefill", *arms} <= set(times)
        ]
        if found:
            axis.plot(*zip(*found, strict=True), color=colour, marker=marker, markersize=3, label=name)
    axis.axhline(1, color="black", linewidth=0.6, linestyle=":")
    axis.set_yscale("log")
    _plain_numbers(axis)
    axis.set_ylabel("re-prefill time over\nthat of the hand-off")


def _roofline(axis: Axes, shares: Sequence[Mapping[str, Any]]) -> None:
    present = {row["arm"] for row in shares}
    for arm, (colour, marker, label) in LATENCY_STYLES.items():
        if arm not in present or arm in _WITHOUT_ROOF:
            continue
        of_arm = [row for row in shares if row["arm"] == arm]
        axis.plot(
            [int(row["length"]) for row in of_arm],
            [number(row["roofline_share"]) for row in of_arm],
            color=colour,
            marker=marker,
            markersize=3,
            linewidth=0.8,
            linestyle="--",
            label=f"share: {label}",
        )
    axis.axhline(1, color="black", linewidth=0.6, linestyle=":")
    axis.set_ylim(bottom=0)
    axis.set_ylabel("share of the roofline")


def _plain_numbers(axis: Axes) -> None:
    from matplotlib.ticker import LogFormatter

    axis.yaxis.set_major_formatter(LogFormatter())
    axis.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(1.2, 0.4)))


def _lengths(axis: Axes, table: Sequence[Mapping[str, Any]]) -> None:
    from matplotlib.ticker import FuncFormatter, NullFormatter

    axis.set_xscale("log", base=2)
    axis.set_xticks(sorted({int(row["length"]) for row in table}))
    axis.xaxis.set_major_formatter(FuncFormatter(short_count))
    axis.xaxis.set_minor_formatter(NullFormatter())
    axis.set_xlabel("context length (tokens)")
