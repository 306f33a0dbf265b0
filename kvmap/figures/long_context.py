"""Figures of what happens beyond the calibration length."""

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
    number,
    records,
    short_count,
    subplots,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PANELS_ACROSS = 3
REFERENCES = ("target", "no_context")


def needle_heat_maps(rows: Rows) -> Figure:
    """Accuracy by context length and depth, one panel an arm; past the dashed line nothing was calibrated.

    Args:
        rows: `{n_tokens, multiple, depth, arm, metric, value, n, chance}` of table `needle`; other metrics
            than `accuracy`, and rows without a depth, are left out.
    """
    import matplotlib as mpl
    import numpy as np

    table = [row for row in records(rows) if row["metric"] == "accuracy" and not _empty(row.get("depth"))]
    arms = arm_order(row["arm"] for row in table)
    lengths = sorted({int(row["n_tokens"]) for row in table})
    depths = sorted({number(row["depth"]) for row in table})
    n_within = len({int(row["n_tokens"]) for row in table if number(row["multiple"]) <= 1})
    across = min(PANELS_ACROSS, len(arms))
    down = math.ceil(len(arms) / across)
    with mpl.rc_context({**STYLE, "axes.spines.top": True, "axes.spines.right": True}):
        height = down * (0.3 + 0.16 * len(depths)) + 1.1
        figure, axes = subplots(down, across, (COLUMN_INCHES, height), sharex=True, sharey=True)
        for axis, arm in zip(axes, arms, strict=False):
            grid = np.full((len(depths), len(lengths)), np.nan)
            for row in table:
                if row["arm"] == arm:
                    place = depths.index(number(row["depth"])), lengths.index(int(row["n_tokens"]))
                    grid[place] = number(row["value"])
            image = axis.imshow(grid, vmin=0, vmax=1, cmap="cividis", aspect="auto")
            _write_cells(axis, grid)
            axis.set_title(arm.replace("_", " "))
            if 0 < n_within < len(lengths):
                axis.axvline(n_within - 0.5, color="white", linewidth=1, linestyle="--")
            axis.set_xticks(range(len(lengths)), [short_count(length) for length in lengths], rotation=45)
            axis.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths])
        _below(axes, len(arms), across)
        chance = number(table[0].get("chance"))
        counts = sorted({int(row["n"]) for row in table})
        bar = figure.colorbar(
            image, ax=list(axes[: len(arms)]), location="bottom", fraction=0.03, pad=0.04, aspect=40
        )
        bar.set_label(f"accuracy (chance {chance:.2f}, n = {'–'.join(map(str, counts))} a cell)")
        bar.outline.set_linewidth(0.6)
        figure.supylabel("depth of the fact", fontsize=7)
        figure.suptitle("by tokens of context; dashed: the calibration length ends", fontsize=7)
    return figure


def length_lines(rows: Rows, calibration_tokens: int) -> Figure:
    """NLL and context carried against the length of the prefix, with 95 % intervals.

    Args:
        rows: `{n_tokens, arm, metric, value, low, high}` of table `length`.
        calibration_tokens: the length that the mapper was fitted at, drawn as a line.
    """
    import matplotlib as mpl
    from matplotlib.ticker import FuncFormatter, NullFormatter

    table = records(rows)
    arms = arm_order(row["arm"] for row in table)
    lengths = sorted({int(row["n_tokens"]) for row in table})
    with mpl.rc_context(STYLE):
        figure, axes = subplots(2, 1, (COLUMN_INCHES, 3.4), sharex=True)
        for axis, metric in zip(axes, ("nll_nats", "context_carried"), strict=True):
            for place, arm in enumerate(arms):
                # NLL differs more between texts than between arms: its intervals would hide the lines
                _line(axis, table, arm, metric, "n_tokens", place, band=metric != "nll_nats")
            axis.axvline(calibration_tokens, color="black", linewidth=0.6, linestyle=":")
        axes[0].set_ylabel("NLL of what follows\n(nats a token)")
        _clip(axes[0], table, "nll_nats")
        axes[1].set_ylabel("context carried")
        axes[1].axhline(1, color=ARM_COLOURS["target"], linewidth=0.6)
        axes[1].axhline(0, color=ARM_COLOURS["no_context"], linewidth=0.6)
        axes[1].set_ylim(_least(table, "context_carried", 0, -1) - 0.1, 1.1)
        axes[1].set_xscale("log", base=2)
        axes[1].set_xticks(lengths)
        axes[1].xaxis.set_major_formatter(FuncFormatter(short_count))
        axes[1].xaxis.set_minor_formatter(NullFormatter())
        axes[1].set_xlabel("tokens handed over (dotted: calibration length)")
        axes[0].set_title(f"n = {_counts(table)} sequences; bands: 95 % intervals")
        _legend(figure, axes[0], len(arms))
    return figure


def growth_lines(rows: Rows, prefix_tokens: int) -> Figure:
    """What an arm loses to native, and how far its own keys and values are off, by tokens added.

    Args:
        rows: `{window, start, stop, arm, metric, value, low, high}` of table `growth`; rows without a window
            are left out.
        prefix_tokens: of the prefix that was handed over once.
    """
    import matplotlib as mpl
    from matplotlib.lines import Line2D

    table = [row for row in records(rows) if not _empty(row.get("window"))]
    for row in table:
        row["middle"] = (number(row["start"]) + number(row["stop"])) / 2
    arms = [arm for arm in arm_order(row["arm"] for row in table) if arm != "target"]
    with mpl.rc_context(STYLE):
        figure, axes = subplots(2, 1, (COLUMN_INCHES, 3.4), sharex=True)
        for place, arm in enumerate(arms):
            _line(axes[0], table, arm, "nll_minus_target_nats", "middle", place)
            _line(axes[1], table, arm, "key_r2", "middle", place)
            _line(axes[1], table, arm, "value_r2", "middle", place, linestyle="--")
        axes[0].axhline(0, color=ARM_COLOURS["target"], linewidth=0.6)
        axes[0].set_ylabel("NLL over native\n(nats a token)")
        _clip(axes[0], table, "nll_minus_target_nats")
        axes[0].set_title(f"on {prefix_tokens} tokens handed over once; n = {_counts(table)} sequences")
        axes[1].axhline(1, color=ARM_COLOURS["target"], linewidth=0.6)
        lowest = min(_least(table, f"{kind}_r2", 0.9, -0.5) for kind in ("key", "value"))
        axes[1].set_ylim(lowest - 0.05, 1.02)
        axes[1].set_ylabel("R² of the added tokens'\nown keys and values")
        axes[1].set_xlabel("tokens the target has added itself")
        axes[1].set_xlim(left=0)
        kinds = [Line2D([], [], color="black", linewidth=1, linestyle=style) for style in ("-", "--")]
        axes[1].legend(kinds, ["keys", "values"], frameon=False, loc="lower right")
        _legend(figure, axes[0], len(arms))
    return figure


def _line(
    axis: Axes,
    table: Sequence[Mapping[str, Any]],
    arm: str,
    metric: str,
    against: str,
    place: int,
    linestyle: str = "-",
    band: bool = True,
) -> None:
    """One arm's values with the band of their intervals; nothing where it has none."""
    of_arm = [row for row in table if row["arm"] == arm and row["metric"] == metric]
    of_arm = [row for row in of_arm if math.isfinite(number(row["value"]))]
    if not of_arm:
        return
    of_arm.sort(key=lambda row: number(row[against]))
    colour = ARM_COLOURS.get(arm, OTHER_COLOURS[place % len(OTHER_COLOURS)])
    x = [number(row[against]) for row in of_arm]
    low, middle, high = ([number(row[name]) for row in of_arm] for name in ("low", "value", "high"))
    label = arm.replace("_", " ")
    axis.plot(
        x, middle, color=colour, marker="o", markersize=2.5, linewidth=1, label=label, linestyle=linestyle
    )
    if band:
        axis.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)


def _least(table: Sequence[Mapping[str, Any]], metric: str, most: float, least: float) -> float:
    """The smallest value of a metric, no more than `most` and no less than `least`."""
    values = [number(row["value"]) for row in table if row["metric"] == metric]
    return max(least, min([most, *(value for value in values if math.isfinite(value))]))


def _clip(axis: Axes, table: Sequence[Mapping[str, Any]], metric: str) -> None:
    """Leaves values that are far worse than no context's out of sight, and says whose."""
    values = {
        arm: [number(row["value"]) for row in table if row["metric"] == metric and row["arm"] == arm]
        for arm in dict.fromkeys(row["arm"] for row in table)
    }
    shown = [value for arm in ("no_context", "source", "mapped") for value in values.get(arm, [])]
    if not shown:
        return
    top = 1.25 * max(shown)
    beyond = [arm for arm, of_arm in values.items() if any(value > top for value in of_arm)]
    if beyond:
        axis.set_ylim(top=top)
        said = ", ".join(arm.replace("_", " ") for arm in arm_order(beyond))
        axis.annotate(
            f"above: {said}", (0.99, 0.97), xycoords="axes fraction", ha="right", va="top", fontsize=6
        )


def _write_cells(axis: Axes, grid: Any) -> None:
    for line, cells in enumerate(grid):
        for column, value in enumerate(cells):
            if math.isfinite(value):
                said = f"{value:.2f}".removeprefix("0") if value < 1 else "1"
                colour = "black" if value > 0.55 else "white"
                axis.text(column, line, said, ha="center", va="center", fontsize=5.5, color=colour)


def _below(axes: Sequence[Any], n_panels: int, across: int) -> None:
    """Takes empty panels away, and labels the lowest one of each column."""
    for axis in axes[n_panels:]:
        axis.remove()
    for index in range(n_panels):
        if index + across >= n_panels:
            axes[index].tick_params(axis="x", labelbottom=True)


def _legend(figure: Figure, axis: Axes, n_entries: int) -> None:
    handles, labels = axis.get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside lower center", ncols=min(4, n_entries), frameon=False, columnspacing=1.0
    )


def _counts(rows: Sequence[Mapping[str, Any]]) -> str:
    counts = sorted({int(number(row["n"])) for row in rows if not _empty(row.get("n"))})
    return "–".join(str(count) for count in dict.fromkeys([counts[0], counts[-1]])) if counts else "?"


def _empty(value: Any) -> bool:
    return value in (None, "") or (isinstance(value, float) and math.isnan(value))
