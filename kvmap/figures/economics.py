"""When a hand-off pays: time by length and bandwidth, cost by escalation rate and price."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvmap.figures.style import COLUMN_INCHES, STYLE, Rows, number, records, short_count, subplots

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

POLICY_STYLES = {
    "always_small": ("#56B4E9", "^", ":", "always small"),
    "always_large": ("#0072B2", "s", ":", "always large"),
    "re_prefill": ("#000000", "D", "-", "re-prefill"),
    "cached_re_prefill": ("#CC79A7", "v", "--", "cached re-prefill"),
    "hand_off_warm": ("#D55E00", "o", "-", "warm hand-off"),
    "hand_off_cold": ("#E69F00", "P", "--", "cold hand-off"),
}
"""Colour, marker, line and name of each."""
MANY_RATIOS = 32.0
"""Times faster or dearer at which a surface's colours end."""


def economics_panels(
    by_length: Rows, time_surface: Rows, cost_surface: Rows, break_even: Rows, facts: Mapping[str, Any]
) -> Figure:
    """Four panels: takeover by length, and over length × bandwidth; cost by escalation rate, and × price.

    Args:
        by_length: `{length (tokens), policy, takeover_ms}`.
        time_surface: `{length, gbit_per_s, warm_ratio}`.
        cost_surface: `{escalation_rate, price_ratio, <policy>_cost}`.
        break_even: `{what, policy, against, by, value}`; the length from which a warm hand-off is faster than
            re-prefill is marked.
        facts: `target_price`, `source_price`, `target_gpus`, `source_gpus`, `gbit_per_s` and
            `escalation_rate`, which the panels say and mark.
    """
    import matplotlib as mpl

    ratio = _price_ratio(facts)
    with mpl.rc_context(STYLE):
        figure, axes = subplots(2, 2, (2 * COLUMN_INCHES, 4.9))
        _takeovers(axes[0], records(by_length), records(break_even), facts)
        _times(axes[1], records(time_surface))
        _costs(axes[2], records(cost_surface), ratio)
        _prices(axes[3], records(cost_surface), facts, ratio)
        handles: dict[str, Any] = {}
        for axis in axes:
            for line, label in zip(*axis.get_legend_handles_labels(), strict=True):
                handles.setdefault(label, line)
        figure.legend(
            list(handles.values()), list(handles), loc="outside lower center", ncols=4, frameon=False
        )
    return figure


def _price_ratio(facts: Mapping[str, Any]) -> float:
    source = number(facts["source_price"]) * number(facts["source_gpus"])
    target = number(facts["target_price"]) * number(facts["target_gpus"])
    return target / (source or 1.0)


def _takeovers(axis: Axes, table: list[dict[str, Any]], marks: list[dict[str, Any]], facts: Any) -> None:
    from matplotlib.ticker import FuncFormatter

    for policy, (colour, marker, line, label) in POLICY_STYLES.items():
        points = [
            (number(row["length"]), number(row["takeover_ms"]))
            for row in table
            if row["policy"] == policy and math.isfinite(number(row["takeover_ms"]))
        ]
        if points:
            axis.plot(
                *zip(*points, strict=True),
                color=colour,
                marker=marker,
                linestyle=line,
                markersize=3,
                linewidth=1,
                label=label,
            )
    for row in marks:
        chosen = (row["what"], row["policy"], row["against"], row["by"])
        if chosen == ("length", "hand_off_warm", "re_prefill", "time") and math.isfinite(
            number(row["value"])
        ):
            axis.axvline(number(row["value"]), color="black", linewidth=0.6, linestyle=":")
    _lengths(axis, [number(row["length"]) for row in table])
    axis.set_yscale("log")
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axis.set_ylabel("takeover: escalation to the\ntarget's first token (ms)")
    axis.grid(True, which="major", linewidth=0.3, alpha=0.5)
    link = facts.get("gbit_per_s")
    axis.set_title("models share memory" if link in (None, "") else f"over {number(link):g} Gb/s")


def _times(axis: Axes, table: list[dict[str, Any]]) -> None:
    _surface(axis, table, ("length", "gbit_per_s"), [number(row["warm_ratio"]) for row in table])
    _lengths(axis, [number(row["length"]) for row in table])
    axis.set_yscale("log")
    axis.set_yticks(sorted({number(row["gbit_per_s"]) for row in table}))
    _plain(axis.yaxis)
    axis.set_ylabel("link (Gb/s)")
    axis.set_title("re-prefill time / warm hand-off's")


def _costs(axis: Axes, table: list[dict[str, Any]], ratio: float) -> None:
    near = _nearest(sorted({number(row["price_ratio"]) for row in table}), ratio)
    rows = sorted(
        (row for row in table if number(row["price_ratio"]) == near),
        key=lambda row: number(row["escalation_rate"]),
    )
    rates = [number(row["escalation_rate"]) for row in rows]
    for policy, (colour, _, line, label) in POLICY_STYLES.items():
        costs = [number(row[f"{policy}_cost"]) / number(row["always_large_cost"]) for row in rows]
        axis.plot(rates, costs, color=colour, linestyle=line, linewidth=1, label=label)
    axis.set_ylim(bottom=0)
    axis.set_xlabel("escalation rate")
    axis.set_ylabel("cost of a request\n(always large = 1)")
    axis.set_title(f"price of the target {near:g} × the source's")
    axis.grid(True, which="major", linewidth=0.3, alpha=0.5)


def _prices(axis: Axes, table: list[dict[str, Any]], facts: Mapping[str, Any], ratio: float) -> None:
    saved = [
        number(row["always_large_cost"]) / number(row["hand_off_warm_cost"])
        if number(row["hand_off_warm_cost"])
        else math.inf
        for row in table
    ]
    _surface(axis, table, ("escalation_rate", "price_ratio"), saved)
    prices = sorted({number(row["price_ratio"]) for row in table})
    axis.set_yscale("log")
    axis.set_yticks(prices)
    _plain(axis.yaxis)
    rate = number(facts["escalation_rate"])
    if prices[0] <= ratio <= prices[-1]:
        axis.plot(rate, ratio, marker="x", color="black", markersize=5, linestyle="none", label="as assumed")
    axis.set_xlabel("escalation rate")
    free = number(facts["source_price"]) == 0
    axis.set_ylabel("price of the target\n" + ("(the source is free)" if free else "(the source's = 1)"))
    axis.set_title("cost of always large / with warm hand-off")


def _surface(
    axis: Axes, table: list[dict[str, Any]], names: tuple[str, str], ratios: Sequence[float]
) -> None:
    """Ratios over two axes as colours about 1, with a line where they are 1."""
    import numpy as np
    from matplotlib.colors import LogNorm
    from matplotlib.ticker import FuncFormatter

    x, y = (sorted({number(row[name]) for row in table}) for name in names)
    grid = np.full((len(y), len(x)), math.nan)
    for row, value in zip(table, ratios, strict=True):
        grid[y.index(number(row[names[1]])), x.index(number(row[names[0]]))] = value
    most = max([1.5, *(max(value, 1 / value) for value in ratios if value > 0 and math.isfinite(value))])
    most = min(2 ** math.ceil(math.log2(most)), MANY_RATIOS)
    low, high = float(np.nanmin(grid)), float(np.nanmax(grid))
    extend = {(False, False): "neither", (True, False): "min", (False, True): "max"}.get(
        (low < 1 / most, high > most), "both"
    )
    norm = LogNorm(1 / most, most)
    image: Any
    if len(x) > 1 and len(y) > 1:
        image = axis.pcolormesh(x, y, grid.clip(1 / most, most), norm=norm, cmap="PuOr_r", shading="gouraud")
        if low < 1 < high:
            axis.contour(x, y, grid, levels=[1.0], colors="black", linewidths=0.8)
    else:
        image = axis.scatter(*np.meshgrid(x, y), c=grid.clip(1 / most, most), norm=norm, cmap="PuOr_r", s=12)
    figure = axis.get_figure()
    assert figure is not None  # axes of a figure
    bar = figure.colorbar(image, ax=axis, extend=extend, pad=0.02)
    powers = round(math.log2(most))
    step = max(1, powers // 2)
    ticks = [2.0**power for power in range(-powers, powers + 1) if power % step == 0]
    bar.set_ticks(ticks)
    bar.ax.yaxis.set_major_formatter(
        FuncFormatter(lambda value, _: f"{value:g}" if value >= 1 else f"1/{1 / value:g}")
    )
    bar.ax.minorticks_off()
    bar.outline.set_linewidth(0.6)


def _nearest(values: Sequence[float], wanted: float) -> float:
    return min(values, key=lambda value: abs(math.log(value / wanted)) if wanted > 0 else value)


def _plain(axis: Any) -> None:
    from matplotlib.ticker import FuncFormatter, NullLocator

    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_locator(NullLocator())


def _lengths(axis: Axes, lengths: Sequence[float]) -> None:
    """Powers of two, or those known where these are few."""
    from matplotlib.ticker import FuncFormatter, NullLocator

    axis.set_xscale("log", base=2)
    known = sorted(set(lengths))
    step = max(1, math.ceil(len(known) / 6))
    axis.set_xticks(known[::-1][::step])
    axis.xaxis.set_major_formatter(FuncFormatter(short_count))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.set_xlabel("context length (tokens)")
