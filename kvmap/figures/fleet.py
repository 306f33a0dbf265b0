"""What every ordered pair of a fleet carries: by its own mapper, and by the best way round."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from kvmap.figures.style import COLUMN_INCHES, STYLE, Rows, number, records, subplots

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_NAMED = 4
"""Models up to which a cell has room for the name of one; of more, for its number."""


def fleet_heat_maps(routes: Rows, relays: Rows = ()) -> Figure:
    """Context carried by source and target: direct, and by the best relay with the model in its middle.

    Args:
        routes: `{source, via, target, context_carried}` of table `fleet_routes`; direct ones are drawn.
        relays: `{source, target, via, relay_context_carried}` of table `fleet_best_relays`; none: no panel.
    """
    import matplotlib as mpl

    direct = [row for row in records(routes) if not row.get("via")]
    round_about = records(relays)
    names = list(dict.fromkeys(str(row[end]) for row in direct for end in ("source", "target")))
    panels: list[tuple[str, list[dict[str, Any]], str]] = [("direct", direct, "context_carried")]
    if round_about:
        panels.append(("best relay (by way of)", round_about, "relay_context_carried"))
    with mpl.rc_context({**STYLE, "axes.spines.top": True, "axes.spines.right": True}):
        height = min(max(0.32 * len(names), 0.9), 2.6) + 0.75
        figure, axes = subplots(len(panels), 1, (COLUMN_INCHES, height * len(panels)), sharex=True)
        lowest = math.inf
        for axis, (title, rows, column) in zip(axes, panels, strict=True):
            image, low = _panel(axis, names, rows, column)
            lowest = min(lowest, low)
            axis.set_title(title)
            axis.set_ylabel("source")
        axes[-1].set_xlabel("target")
        axes[-1].set_xticks(range(len(names)), names, rotation=40, ha="right", rotation_mode="anchor")
        bar = figure.colorbar(
            image, ax=list(axes), extend="min" if lowest < 0 else "neither", pad=0.02, aspect=30
        )
        bar.set_label("context carried")
        bar.outline.set_linewidth(0.6)
    return figure


def _panel(axis: Axes, names: list[str], rows: list[dict[str, Any]], column: str) -> tuple[Any, float]:
    """One grid of sources by targets; its image and its lowest value."""
    import numpy as np

    grid = np.full((len(names), len(names)), np.nan)
    for row in rows:
        place = names.index(str(row["source"])), names.index(str(row["target"]))
        grid[place] = value = number(row.get(column))
        if math.isfinite(value):
            via = str(row.get("via") or "")
            if via and len(names) > MOST_NAMED:
                via = f"({1 + names.index(via)})"
            text = f"{value:.2f}\n{via}" if via else f"{value:.2f}"
            colour = "black" if value > 0.6 else "white"
            size = 5 if len(names) <= MOST_NAMED else 4
            axis.text(place[1], place[0], text, ha="center", va="center", fontsize=size, color=colour)
    image = axis.imshow(grid, vmin=0, vmax=1, cmap="cividis", aspect="auto")
    numbered = [f"({1 + number}) {name}" for number, name in enumerate(names)]
    axis.set_yticks(range(len(names)), numbered if len(names) > MOST_NAMED else names)
    return image, float(np.nanmin(grid)) if np.isfinite(grid).any() else math.inf
