"""Figures of every run: R² of the map, accuracy and perplexity by arm, latency."""

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
    short_count,
    subplots,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LATENCY_STYLES = {
    "re_prefill": ("#0072B2", "s", "re-prefill"),
    "hand_off": ("#E69F00", "P", "hand-off"),
    "map": ("#D55E00", "o", "map"),
    "source_prefill": ("#56B4E9", "^", "source prefill"),
    "first_token": ("#999999", "D", "first token"),
    "transport": ("#CC79A7", "v", "transport"),
}


def r2_heat_map(rows: Rows) -> Figure:
    """R² of every layer and head: keys and values, on fit and held-out rows.

    Args:
        rows: `{layer, head, kind: key|value, split: fit|held_out, r2}`.
    """
    import matplotlib as mpl
    import numpy as np

    table = records(rows)
    n_layers = 1 + max(int(row["layer"]) for row in table)
    n_heads = 1 + max(int(row["head"]) for row in table)
    present = {(row["kind"], row["split"]) for row in table}
    wanted = [(kind, split) for kind in ("key", "value") for split in ("fit", "held_out")]
    panels = [panel for panel in wanted if panel in present]
    with mpl.rc_context({**STYLE, "axes.spines.top": True, "axes.spines.right": True}):
        height = min(max(0.11 * n_layers, 0.9), 5.0) + 0.85
        figure, axes = subplots(1, len(panels), (COLUMN_INCHES, height), sharey=True)
        lowest = math.inf
        for axis, (kind, split) in zip(axes, panels, strict=True):
            grid = np.full((n_layers, n_heads), np.nan)
            for row in table:
                if (row["kind"], row["split"]) == (kind, split):
                    grid[int(row["layer"]), int(row["head"])] = number(row["r2"])
            lowest = min(lowest, float(np.nanmin(grid)) if np.isfinite(grid).any() else math.inf)
            image = axis.imshow(grid, vmin=0, vmax=1, cmap="cividis", aspect="auto")
            mean = float(np.nanmean(grid)) if np.isfinite(grid).any() else math.nan
            axis.set_title(f"{kind}s\n{split.replace('_', '-')}\nmean {mean:.2f}", fontsize=6.5)
            axis.set_xlabel("head")
            axis.xaxis.get_major_locator().set_params(integer=True, nbins=4, min_n_ticks=1)
            axis.yaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
            if n_heads <= 2 and n_layers <= 12:
                _write_cells(axis, grid)
        axes[0].set_ylabel("target layer")
        extend = "min" if lowest < 0 else "neither"
        bar = figure.colorbar(
            image, ax=list(axes), extend=extend, extendfrac=0.02, pad=0.02, aspect=12 * height
        )
        bar.set_label("R²")
        bar.outline.set_linewidth(0.6)
    return figure


def _write_cells(axis: Axes, grid: Any) -> None:
    for (layer, head), value in ((place, grid[place]) for place in _places(grid.shape)):
        if math.isfinite(value):
            colour = "black" if value > 0.55 else "white"
            axis.text(head, layer, f"{value:.2f}", ha="center", va="center", fontsize=5, color=colour)


def _places(shape: tuple[int, int]) -> list[tuple[int, int]]:
    return [(layer, head) for layer in range(shape[0]) for head in range(shape[1])]


def accuracy_bars(rows: Rows, metric: str = "accuracy") -> Figure:
    """Accuracy of every arm, one panel a task, error bars of one standard error.

    Args:
        rows: `{task, arm, metric, value, n, standard_error}`; other metrics than `metric` are left out,
            except `chance`, drawn as a line.
        metric: Which one.
    """
    import matplotlib as mpl

    every = records(rows)
    table = [row for row in every if row["metric"] == metric]
    tasks = list(dict.fromkeys(row["task"] for row in table))
    n_columns = min(2, len(tasks))
    n_lines = math.ceil(len(tasks) / n_columns)
    with mpl.rc_context(STYLE):
        size = (COLUMN_INCHES, 1.3 * n_lines + 0.7)
        figure, axes = subplots(n_lines, n_columns, size, sharex=True, sharey=True)
        arms = arm_order(row["arm"] for row in table)
        for axis, task in zip(axes, tasks, strict=False):
            of_task = [row for row in table if row["task"] == task]
            _bars(axis, of_task, arms)
            for row in every:
                if row["task"] == task and row["metric"] == "chance":
                    axis.axhline(number(row["value"]), color="black", linewidth=0.6, linestyle=":")
            axis.set_title(f"{_shortened(task)}\n({_how_many(of_task, 'items')})")
        for axis in axes[len(tasks) :]:
            axis.remove()
        for index in range(len(tasks)):
            if index + n_columns >= len(tasks):  # nothing below it
                axes[index].tick_params(axis="x", labelbottom=True)
        axes[0].set_ylim(0, 1.05)
        figure.supylabel(f"{metric.replace('_', ' ')} (± 1 standard error)", fontsize=7)
    return figure


def perplexity_bars(rows: Rows, metric: str = "perplexity") -> Figure:
    """Perplexity of every arm, on a logarithmic axis where the arms lie far apart.

    Args:
        rows: As for `accuracy_bars`.
        metric: Which one.
    """
    import matplotlib as mpl

    table = [row for row in records(rows) if row["metric"] == metric]
    tasks = list(dict.fromkeys(row["task"] for row in table))
    arms = arm_order(row["arm"] for row in table)
    values = [number(row["value"]) for row in table if math.isfinite(number(row["value"]))]
    wide = bool(values) and max(values) > 10 * min(values)
    with mpl.rc_context(STYLE):
        figure, axes = subplots(len(tasks), 1, (COLUMN_INCHES, 1.45 * len(tasks) + 0.55), sharex=True)
        for axis, task in zip(axes, tasks, strict=True):
            of_task = [row for row in table if row["task"] == task]
            if wide:
                axis.set_yscale("log")
                axis.set_ylim(min(values) / 1.5, max(values) * 2.5)
            _bars(axis, of_task, arms, written=True)
            if not wide:
                axis.margins(y=0.15)
                axis.set_ylim(bottom=0)
            axis.set_ylabel("perplexity per token\n(± 1 standard error)")
            axis.set_title(f"{_shortened(task)} ({_how_many(of_task, 'sequences')}); lower is better")
    return figure


def _bars(axis: Axes, rows: Sequence[Mapping[str, Any]], arms: Sequence[str], written: bool = False) -> None:
    by_arm = {row["arm"]: row for row in rows}
    for place, arm in enumerate(arms):
        value = number(by_arm[arm]["value"]) if arm in by_arm else math.nan
        if not math.isfinite(value):
            axis.annotate("n/a", (place, 0.02), xycoords=("data", "axes fraction"), ha="center", fontsize=6)
            continue
        error = number(by_arm[arm].get("standard_error"))
        spread = error if math.isfinite(error) else 0.0
        colour = ARM_COLOURS.get(arm, OTHER_COLOURS[place % len(OTHER_COLOURS)])
        axis.bar(place, value, width=0.75, color=colour)
        if spread:
            axis.errorbar(place, value, yerr=spread, color="black", linewidth=0.8, capsize=2)
        if written:
            axis.annotate(
                f"{value:.3g}" if value < 1000 else f"{value:.1e}",
                (place, value + spread),
                xytext=(0, 2),
                textcoords="offset points",
                ha="center",
                fontsize=6,
            )
    axis.set_xticks(range(len(arms)), [arm.replace("_", " ") for arm in arms], rotation=40, ha="right")
    axis.tick_params(axis="x", length=0, pad=1)
    axis.set_xlim(-0.6, len(arms) - 0.4)


def latency_lines(rows: Rows) -> Figure:
    """Time against context length, both logarithmic: median line, 20th to 80th percentile band.

    Args:
        rows: `{length (tokens), arm, p20_ms, p50_ms, p80_ms}` and, where known, `n_repeats, device, dtype`.
    """
    import matplotlib as mpl
    from matplotlib.ticker import FuncFormatter, LogFormatter, NullFormatter

    table = sorted(records(rows), key=lambda row: int(row["length"]))
    present = list(dict.fromkeys(row["arm"] for row in table))
    arms = [arm for arm in LATENCY_STYLES if arm in present]
    arms += [arm for arm in present if arm not in LATENCY_STYLES]
    with mpl.rc_context(STYLE):
        figure, (axis,) = subplots(1, 1, (COLUMN_INCHES, 2.5))
        for place, arm in enumerate(arms):
            fallback = (OTHER_COLOURS[place % len(OTHER_COLOURS)], "v", arm.replace("_", " "))
            colour, marker, label = LATENCY_STYLES.get(arm, fallback)
            of_arm = [row for row in table if row["arm"] == arm]
            lengths = [int(row["length"]) for row in of_arm]
            low, middle, high = ([number(row[q]) for row in of_arm] for q in ("p20_ms", "p50_ms", "p80_ms"))
            axis.plot(lengths, middle, color=colour, marker=marker, markersize=3, linewidth=1, label=label)
            axis.fill_between(lengths, low, high, color=colour, alpha=0.25, linewidth=0)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.yaxis.set_major_formatter(LogFormatter())
        axis.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(1.2, 0.4)))
        axis.set_xticks(sorted({int(row["length"]) for row in table}))
        axis.xaxis.set_major_formatter(FuncFormatter(short_count))
        axis.xaxis.set_minor_formatter(NullFormatter())
        axis.set_xlabel("context length (tokens)")
        axis.set_ylabel("time (ms)\nmedian, 20th–80th percentile")
        axis.grid(True, which="major", linewidth=0.3, alpha=0.5)
        axis.set_title(_setting(table))
        figure.legend(loc="outside lower center", ncols=min(4, len(arms)), frameon=False, columnspacing=1.0)
    return figure


def _setting(rows: Sequence[Mapping[str, Any]]) -> str:
    facts = [str(rows[0][name]) for name in ("device", "dtype") if rows[0].get(name) not in (None, "")]
    if rows[0].get("n_repeats") not in (None, ""):
        facts.append(_how_many([{"n": row.get("n_repeats")} for row in rows], "repeats"))
    return ", ".join(facts)


def _how_many(rows: Sequence[Mapping[str, Any]], what: str) -> str:
    return f"n = {count_span(rows)} {what}"


def _shortened(task: str, width: int = 24) -> str:
    text = task.replace("_", " ")
    return text if len(text) <= width else text[: width - 1] + "…"
