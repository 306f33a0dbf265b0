"""Maps of a mapper over layers and heads: probes, attention-output cosine, concentration."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvmap.figures.style import (
    COLUMN_INCHES,
    KINDS,
    STYLE,
    Rows,
    finite,
    number,
    records,
    spoken,
    subplots,
    texts_of,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FRAMED = {**STYLE, "axes.spines.top": True, "axes.spines.right": True}
TALLEST_INCHES = 8.0


def probe_heat_maps(rows: Rows) -> Figure:
    """R² of one source layer alone for one target layer, keys beside values; the best of each row is marked.

    Args:
        rows: `{source_layer, target_layer, kind: key|value, r2}` of table `probes`.
    """
    import matplotlib as mpl
    import numpy as np

    table = records(rows)
    kinds = [kind for kind in KINDS if any(row["kind"] == kind for row in table)]
    shape = tuple(1 + max(int(row[name]) for row in table) for name in ("target_layer", "source_layer"))
    with mpl.rc_context(FRAMED):
        height = min(max(0.085 * shape[0], 1.1), 4.0) + 0.7
        figure, axes = subplots(1, len(kinds), (COLUMN_INCHES, height), sharey=True)
        lowest = 0.0
        for axis, kind in zip(axes, kinds, strict=True):
            grid = np.full(shape, np.nan)
            for row in table:
                if row["kind"] == kind:
                    grid[int(row["target_layer"]), int(row["source_layer"])] = number(row["r2"])
            lowest = min(lowest, _least(grid.flat))
            image = axis.imshow(grid, vmin=0, vmax=1, cmap="viridis", aspect="auto", origin="lower")
            for layer, of_layer in enumerate(grid):
                if np.isfinite(of_layer).any():
                    axis.plot(np.nanargmax(of_layer), layer, ".", color="#D55E00", markersize=2.5)
            axis.set_title(f"{KINDS[kind][2]} (mean {np.nanmean(grid):.2f})")
            axis.set_xlabel("source layer")
            _whole_numbers(axis)
        axes[0].set_ylabel("target layer")
        _bar(figure, image, axes, "R² of one source layer\n(dot: the best)", lowest < 0)
    return figure


def attention_heat_maps(rows: Rows) -> Figure:
    """Attention-output cosine and concentration by target layer and query head, one line of panels a text.

    Concentration is drawn on a diverging scale of powers of two: 1, the middle, is error that lies no more
    where attention reads than elsewhere.

    Args:
        rows: `{text, layer, head, cosine, concentration_key, concentration_value, n}` of table
            `attention_output`; `text` and concentrations may be missing.
    """
    import matplotlib as mpl

    table = records(rows)
    texts = texts_of(table)
    wanted = {"cosine": "cosine", "concentration_key": "C of keys", "concentration_value": "C of values"}
    names = [name for name in wanted if any(math.isfinite(number(row.get(name))) for row in table)]
    n_layers, n_heads = (1 + max(int(row[name]) for row in table) for name in ("layer", "head"))
    spread = _log2_spread(number(row.get(name)) for row in table for name in names[1:])
    with mpl.rc_context(FRAMED):
        height = min(len(texts) * (min(max(0.07 * n_layers, 0.8), 3.0) + 0.25) + 0.75, TALLEST_INCHES)
        figure, axes = subplots(len(texts), len(names), (COLUMN_INCHES, height), sharex=True, sharey=True)
        images = {}
        for place, axis in enumerate(axes):
            text, name = texts[place // len(names)], names[place % len(names)]
            of_text = [row for row in table if str(row.get("text") or "") == text]
            grid = _layer_head_grid(of_text, name, (n_layers, n_heads))
            images[name] = _heat(axis, grid, name, spread)
            axis.set_title(wanted[name] if place < len(names) else "")
            if place % len(names) == 0:
                axis.set_ylabel(f"{spoken(text)}\ntarget layer" if text else "target layer")
            if place >= len(names) * (len(texts) - 1):
                axis.set_xlabel("query head")
            _whole_numbers(axis)
        _attention_bars(figure, axes, images, names, spread)
    return figure


def _heat(axis: Axes, grid: Any, name: str, spread: float) -> Any:
    import numpy as np

    if name == "cosine":
        return axis.imshow(grid, vmin=0, vmax=1, cmap="cividis", aspect="auto", origin="lower")
    with np.errstate(divide="ignore", invalid="ignore"):
        powers = np.log2(grid)
    return axis.imshow(powers, vmin=-spread, vmax=spread, cmap="PuOr_r", aspect="auto", origin="lower")


def _attention_bars(
    figure: Figure, axes: Sequence[Any], images: Mapping[str, Any], names: Sequence[str], spread: float
) -> None:
    """One colour bar below the cosines, one for both concentrations."""
    across = len(names)
    bar = figure.colorbar(images["cosine"], ax=list(axes[::across]), location="bottom", aspect=14, pad=0.03)
    bar.set_label("cosine")
    bars = [bar]
    if across > 1:
        rest = [axis for place, axis in enumerate(axes) if place % across]
        bar = figure.colorbar(
            images[names[1]], ax=rest, location="bottom", aspect=14 * (across - 1), pad=0.03
        )
        ticks = [-spread, -spread / 2, 0, spread / 2, spread]
        bar.set_ticks(ticks, labels=[f"{2**tick:.2g}" for tick in ticks])
        bar.set_label("concentration (1: evenly spread)")
        bars.append(bar)
    for bar in bars:
        bar.outline.set_linewidth(0.6)


def _log2_spread(values: Iterable[float]) -> float:
    """How far from 1, in powers of two, nearly all values lie: at least 1, at most 6, in whole powers."""
    powers = sorted(abs(math.log2(value)) for value in values if math.isfinite(value) and value > 0)
    reach = powers[min(int(0.98 * len(powers)), len(powers) - 1)] if powers else 1
    return float(min(max(math.ceil(reach), 1), 6))


def _layer_head_grid(rows: Sequence[Mapping[str, Any]], name: str, shape: tuple[int, int]) -> Any:
    import numpy as np

    grid = np.full(shape, np.nan)
    for row in rows:
        grid[int(row["layer"]), int(row["head"])] = number(row.get(name))
    return grid


def _bar(figure: Figure, image: Any, axes: Sequence[Any], label: str, below: bool) -> None:
    bar = figure.colorbar(
        image, ax=list(axes), extend="min" if below else "neither", extendfrac=0.03, pad=0.02
    )
    bar.set_label(label)
    bar.outline.set_linewidth(0.6)


def _whole_numbers(axis: Any) -> None:
    axis.xaxis.get_major_locator().set_params(integer=True, nbins=4, min_n_ticks=1)
    axis.yaxis.get_major_locator().set_params(integer=True, nbins=6, min_n_ticks=1)


def _least(values: Iterable[float]) -> float:
    return min(finite(values), default=math.inf)
