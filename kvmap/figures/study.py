"""The figure of a study: its configurations side by side, with their intervals."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvmap.figures.style import COLUMN_INCHES, STYLE, Rows, number, records, subplots

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7")
LONGEST_LABEL = 34
CHARACTERS_ACROSS = 62
MOST_CONFIGURATIONS = 60


def configuration_dots(rows: Rows, settings: Sequence[str] = ()) -> Figure:
    """One line a configuration, one panel a measure: the value and its 95 % interval.

    Args:
        rows: `{configuration, measure, value, low, high, n_runs}`; from above as they come, and no more than
            `MOST_CONFIGURATIONS` configurations.
        settings: whose values the names of configurations consist of.
    """
    import matplotlib as mpl

    table = records(rows)
    every = list(dict.fromkeys(str(row["configuration"]) for row in table))
    names = every[:MOST_CONFIGURATIONS]
    measures = list(dict.fromkeys(str(row["measure"]) for row in table))
    with mpl.rc_context(STYLE):
        # Long labels leave no room for panels side by side: those stand below each other.
        beside = max(map(len, names)) <= LONGEST_LABEL // 2
        shape = (1, len(measures)) if beside else (len(measures), 1)
        said = textwrap.wrap(", ".join(settings), CHARACTERS_ACROSS)
        height = (0.13 * len(names) + 0.35) * shape[0] + 0.45 + 0.12 * len(said)
        figure, axes = subplots(*shape, (COLUMN_INCHES, height), sharex=not beside, sharey=True)
        for place, (axis, measure) in enumerate(zip(axes, measures, strict=True)):
            of_measure = [row for row in table if row["measure"] == measure]
            _dots(axis, of_measure, names, COLOURS[place % len(COLOURS)])
            axis.set_title(measure)
            axis.set_yticks(range(len(names)), [_short(name) for name in names])
            axis.tick_params(axis="y", length=0)
        axes[0].set_ylim(len(names) - 0.5, -0.5)
        left_out = f"; first {len(names)} of {len(every)}" if len(every) > len(names) else ""
        figure.supxlabel(f"mean over n = {_runs(table)} runs, 95 % interval{left_out}", fontsize=7)
        if said:
            figure.suptitle("\n".join(said), fontsize=6.5)
    return figure


def _dots(axis: Axes, rows: Sequence[Mapping[str, Any]], names: Sequence[str], colour: str) -> None:
    by_name = {str(row["configuration"]): row for row in rows}
    for place, name in enumerate(names):
        value, low, high = (number(by_name.get(name, {}).get(end)) for end in ("value", "low", "high"))
        if math.isfinite(low) and math.isfinite(high):
            axis.plot([low, high], [place, place], color=colour, linewidth=0.9)
        axis.plot(value, place, "o", color=colour, markersize=3)
    for reference in (0, 1):
        low, high = axis.get_xlim()
        if low <= reference <= high:
            axis.axvline(reference, color="black", linewidth=0.6, linestyle=":")
    axis.grid(True, axis="y", linewidth=0.3, alpha=0.5)


def _runs(rows: Sequence[Mapping[str, Any]]) -> str:
    counts = sorted({int(number(row["n_runs"])) for row in rows})
    return "–".join(str(count) for count in dict.fromkeys([counts[0], counts[-1]]))


def _short(name: str) -> str:
    return name if len(name) <= LONGEST_LABEL else f"{name[: LONGEST_LABEL - 1]}…"
