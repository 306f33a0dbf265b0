"""The correlations of one outcome as a forest of intervals, one print column wide."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from kvmap.figures.style import COLUMN_INCHES, STYLE, subplots
from kvmap.prediction.columns import short_name
from kvmap.prediction.tables import counted

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_ROWS = 20
# Two of Okabe and Ito's colours, and two markers, so that neither is needed alone.
_SCOPES = (("pooled", "#0072B2", "o", -0.16), ("within", "#D55E00", "s", 0.16))
_LABELS = {"pooled": "all configurations", "within": "within pairs"}
_SYMBOLS = {"pearson": "Pearson's r", "spearman": "Spearman's ρ"}


def forest(rows: pd.DataFrame, task: str, outcome: str, *, method: str = "spearman") -> Figure:
    """Correlation of each diagnostic with one outcome: pooled and within pairs, 95 % intervals.

    The diagnostics of the largest pooled correlation come first; at most `MOST_ROWS` are drawn. Those that
    have no correlation are left out.

    Args:
        rows: of `kvmap.prediction.correlate`.
        task: of the outcome; outcome: its metric.
        method: `pearson` or `spearman`.
    """
    import matplotlib as mpl

    mine = (rows["task"] == task) & (rows["outcome"] == outcome) & (rows["method"] == method)
    own = rows[mine & rows["value"].notna() & rows["scope"].isin([scope for scope, *_ in _SCOPES])]
    largest = own.assign(size=own["value"].abs() * (own["scope"] == "pooled"))
    order = list(largest.groupby("diagnostic")["size"].max().sort_values(ascending=False).index)[:MOST_ROWS]
    with mpl.rc_context(STYLE):
        figure, (axis,) = subplots(1, 1, (COLUMN_INCHES, 0.19 * max(len(order), 3) + 1.0))
        axis.axvline(0, color="#999999", linewidth=0.6)
        for scope, colour, marker, shift in _SCOPES:
            of_scope = own[own["scope"] == scope].set_index("diagnostic")
            there = [place for place, name in enumerate(order) if name in of_scope.index]
            points = [(place + shift, of_scope.loc[order[place]]) for place in there]
            _draw(axis, points, colour, marker, _LABELS[scope])
        axis.set_yticks(range(len(order)), [_label(name) for name in order])
        axis.set_ylim(max(len(order), 1) - 0.5, -0.5)
        axis.set_xlim(-1.05, 1.05)
        axis.tick_params(axis="y", length=0)
        axis.set_xticks([-1, -0.5, 0, 0.5, 1], ["−1", "−½", "0", "½", "1"])
        axis.set_xlabel(f"{_SYMBOLS[method]}, 95 % interval")
        title = f"{task.replace('_', ' ')} {outcome.replace('_', ' ')}"
        figure.suptitle(f"{title}: {_count(own)}", fontsize=7)
        if order:
            figure.legend(loc="outside lower center", ncols=2, frameon=False, handletextpad=0.3)
    return figure


def _label(column: str) -> str:
    name = short_name(column).replace("_", " ")
    return name.replace("r2 ", "R², ").replace("kl nats", "KL, nats")


def _draw(axis: Axes, points: list[tuple[float, Any]], colour: str, marker: str, label: str) -> None:
    if not points:
        return
    heights = [height for height, _ in points]
    values = [row["value"] for _, row in points]
    style: dict[str, Any] = {"color": colour, "linewidth": 0.9}
    for height, row in points:
        if math.isfinite(row["low"]):
            axis.plot([row["low"], row["high"]], [height, height], **style)
    axis.plot(values, heights, linestyle="none", marker=marker, markersize=3, color=colour, label=label)


def _count(rows: pd.DataFrame) -> str:
    if rows.empty:
        return "no correlation is defined"
    named = (("n_configurations", "configuration"), ("n_pairs", "pair"))
    return ", ".join(counted(rows[column], what) for column, what in named)
