"""What all figures share: one print column wide, and safe for colour-blind readers.

They are drawn from plain rows, lists of dicts or pandas data frames, read no files, and keep no global state.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Rows = Iterable[Mapping[str, Any]]

COLUMN_INCHES = 3.3

# Okabe and Ito's palette, and grey for what was given nothing.
ARM_COLOURS = {
    "target": "#0072B2",
    "source": "#56B4E9",
    "mapped": "#D55E00",
    "bias_only": "#E69F00",
    "raw": "#CC79A7",
    "random": "#009E73",
    "own_keys": "#F0E442",
    "own_values": "#000000",
    "no_context": "#999999",
}
ARMS = tuple(ARM_COLOURS)  # the order of every table and figure
KINDS = {"key": ("#0072B2", "o", "keys"), "value": ("#D55E00", "s", "values")}  # colour, marker, name
OTHER_COLOURS = ("#009E73", "#CC79A7", "#E69F00", "#000000")

STYLE: dict[Any, Any] = {
    "font.size": 7,
    "axes.titlesize": 7,
    "axes.labelsize": 7,
    "xtick.labelsize": 6.5,
    "ytick.labelsize": 6.5,
    "legend.fontsize": 6.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
}


def records(rows: Any) -> list[dict[str, Any]]:
    """Rows as a list of dicts, from a data frame or any iterable of mappings."""
    if hasattr(rows, "to_dict"):
        return list(rows.to_dict("records"))
    return [dict(row) for row in rows]


def number(value: Any) -> float:
    """A cell as a float; NaN where it is empty."""
    return math.nan if value in (None, "") else float(value)


def finite(values: Iterable[float]) -> list[float]:
    """Those that are neither NaN nor infinite."""
    return [value for value in values if math.isfinite(value)]


def texts_of(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Values of the column `text` as they come; one empty name where there is no such column."""
    return list(dict.fromkeys(str(row.get("text") or "") for row in rows))


def spoken(name: str) -> str:
    """`held_out` as people write it: `held-out`; other names with spaces for underscores."""
    return name.replace("held_out", "held-out").replace("_", " ")


def arm_order(arms: Iterable[str]) -> list[str]:
    """The known arms in their fixed order, then unknown ones as they came."""
    present = list(dict.fromkeys(arms))
    return [arm for arm in ARMS if arm in present] + [arm for arm in present if arm not in ARMS]


def short_count(value: float, _: object = None) -> str:
    whole = round(value)
    return f"{whole // 1024}k" if whole >= 1024 and whole % 1024 == 0 else str(whole)


def count_span(rows: Iterable[Mapping[str, Any]]) -> str:
    """`120`, `100–120` or `?`: the counts `n` of the rows that have a value."""
    valued = [number(row.get("n")) for row in rows if math.isfinite(number(row.get("value", 0)))]
    counts = sorted({int(count) for count in valued if math.isfinite(count)})
    return "–".join(str(count) for count in dict.fromkeys([counts[0], counts[-1]])) if counts else "?"


def subplots(
    n_lines: int, n_columns: int, size: tuple[float, float], **options: Any
) -> tuple[Figure, list[Any]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(n_lines, n_columns, squeeze=False, **options)
    return figure, list(axes.flat)
