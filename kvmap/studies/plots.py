"""How a study draws a metric against a setting: each ordered pair thin, their mean with its interval."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from kvmap.studies.effects import pooled
from kvmap.studies.runs import PAIR
from kvmap.studies.summary import TITLES

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLUMN_WIDTH_INCHES = 3.4
LEGEND_CHARACTERS = 56
"""About what fits side by side; a line's mark takes the room of five."""
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Okabe and Ito's, told apart by eyes that do not see red from green."""

STYLE: dict[Any, Any] = {
    "font.size": 7,
    "axes.labelsize": 7,
    "xtick.labelsize": 6.5,
    "ytick.labelsize": 6.5,
    "legend.fontsize": 6.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
}


def in_order(values: Iterable[Any]) -> list[str]:
    """Values of a setting as text, each once: numbers ascending and then the rest, as they come."""
    named = list(dict.fromkeys(str(value) for value in values))
    numbers = [name for name in named if re.fullmatch(r"[-+0-9.e]+", name)]
    return sorted(numbers, key=float) + [name for name in named if name not in numbers]


def metric_by_setting(
    axis: Axes,
    table: pd.DataFrame,
    setting: str,
    metric: str,
    *,
    label: str | None = None,
    colour: str = COLOURS[0],
    order: Sequence[str] | None = None,
    pairs: bool = True,
    shift: float = 0.0,
) -> None:
    """One line over the values of a setting, at equal steps: the mean over ordered pairs with 95 % intervals.

    Args:
        axis: where.
        table: of `runs_table`.
        setting: along x; metric: along y.
        label: in the legend.
        colour: of the mean.
        order: the setting's values as text, from left to right; None: `in_order`.
        pairs: draw every pair as a thin line too.
        shift: to the right, so that intervals of several lines stand side by side.
    """
    found = pooled(table, [setting], [metric])
    names = list(order) if order is not None else in_order(found[setting])
    found = found.set_index(found[setting].astype(str))
    present = [name for name in names if name in found.index]
    places = [names.index(name) + shift for name in present]
    if pairs:
        for _, runs in table.groupby(PAIR, sort=False):
            means = runs.groupby(runs[setting].astype(str))[metric].mean()
            own = [name for name in present if name in means.index]
            axis.plot(
                [names.index(name) + shift for name in own],
                means[own],
                color=colour,
                alpha=0.22,
                linewidth=0.6,
            )
    rows = found.loc[present]
    errors = [rows["value"] - rows["low"], rows["high"] - rows["value"]]
    axis.errorbar(
        places,
        rows["value"],
        yerr=errors,
        color=colour,
        marker="o",
        markersize=3.5,
        capsize=2,
        linewidth=1.4,
        label=label,
    )
    axis.set_xticks(range(len(names)), names)
    axis.grid(axis="y", color="0.92")


def panels(
    table: pd.DataFrame,
    setting: str,
    metrics: Sequence[str],
    file: Path,
    *,
    label: str,
    by: str | None = None,
    names: Mapping[str, str] | None = None,
    order: Sequence[str] | None = None,
    references: Mapping[str, float] | None = None,
) -> None:
    """One panel a metric, one above the other, a line for each value of `by`, to a picture one column wide.

    Args:
        table: of `runs_table`.
        setting: along x, said in words by `label`.
        metrics: their keys, from top to bottom; `TITLES` names the axes.
        file: where the picture goes.
        label: of the setting.
        by: a setting with a line for each of its values; None: one line, and every pair thin behind it.
        names: what a value of `by` or of `setting`, or a metric, is called; others as they are written.
        order: values of the setting as text, from left to right; None: `in_order`.
        references: metric to the height of a dotted line.
    """
    from matplotlib import pyplot as plt

    called = dict(names or {})
    order = in_order(table[setting]) if order is None else order
    lines = [None] if by is None else list(dict.fromkeys(table[by].astype(str)))
    size = COLUMN_WIDTH_INCHES, 0.6 + 1.5 * len(metrics)
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(
            len(metrics), 1, figsize=size, layout="constrained", sharex=True, squeeze=False
        )
        for axis, metric in zip(axes[:, 0], metrics, strict=True):
            for place, value in enumerate(lines):
                metric_by_setting(
                    axis,
                    table if value is None else table[table[by].astype(str) == value],
                    setting,
                    metric,
                    label=None if value is None else called.get(value, value),
                    colour=COLOURS[place % len(COLOURS)],
                    order=order,
                    pairs=value is None,
                    shift=0.1 * (place - (len(lines) - 1) / 2),
                )
            if metric in (references or {}):
                axis.axhline((references or {})[metric], color="0.4", linewidth=0.7, linestyle=":")
            title = TITLES.get(metric, metric.rsplit("/", 1)[-1].replace("_", " "))
            axis.set_ylabel(called.get(metric, title))
        ticks = [text.get_text() for text in axes[-1, 0].get_xticklabels()]
        axes[-1, 0].set_xticks(range(len(ticks)), [called.get(tick, tick) for tick in ticks])
        n_pairs = table[PAIR].nunique()
        axes[-1, 0].set_xlabel(f"{label}\nmean and 95 % interval over {n_pairs} ordered pairs")
        if by is not None:
            handles, labels = axes[0, 0].get_legend_handles_labels()
            widths = [len(name) + 5 for name in labels]
            columns = len(labels) if sum(widths) <= LEGEND_CHARACTERS else LEGEND_CHARACTERS // max(widths)
            figure.legend(handles, labels, loc="outside upper center", frameon=False, ncols=max(columns, 1))
        figure.savefig(file, dpi=300)
        plt.close(figure)
