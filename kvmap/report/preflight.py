"""What a preflight said, as lines and tables; None where a run has had none."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from kvmap.figures.style import number
from kvmap.report.measures import NOTHING, fraction
from kvmap.report.page import Grid
from kvmap.report.reading import Row


def preflight_lines(run: Row) -> list[str]:
    """The verdict of the pair, and the reason, in one line."""
    found: dict[str, Any] = run.get("facts", {}).get("preflight", {})
    return [str(line) for line in found.get("lines", [])[:1]]


def preflight_grid(rows: Sequence[Row]) -> Grid | None:
    """One line a mapper: predicted retention, decision, and why."""
    if not rows:
        return None
    lines = [
        [
            str(row["mapper"]),
            str(row["decision"]),
            _interval(row),
            str(row["n_pairs"] or NOTHING),
            str(row["reason"]),
        ]
        for row in rows
    ]
    note = (
        "Predicted from the preflight's diagnostics and recorded cases of other pairs; each bound by itself "
        "has the confidence asked for. The control bias_only, the mean cache, was measured beside."
    )
    columns = ["mapper", "decision", "retention [bounds]", "pairs", "why"]
    return Grid("Preflight, the cheapest mapper first", columns, lines, n_left=2, note=note)


def preflight_rates_grid(rows: Sequence[Row]) -> Grid | None:
    """How often the rule is wrong on the cases, each pair judged by the others."""
    if not rows:
        return None
    lines = [
        [
            str(row["rate"]),
            NOTHING if row["value"] is None else fraction(number(row["value"])),
            f"{row['wrong']} of {row['n']}",
        ]
        for row in rows
    ]
    title = f"The rule on the recorded cases, each of {rows[0]['pairs']} pairs judged by the others"
    return Grid(title, ["rate", "share", "cases"], lines)


def _interval(row: Row) -> str:
    value = number(row["predicted"])
    if not math.isfinite(value):
        return NOTHING
    return f"{fraction(value)} [{fraction(number(row['low']))}, {fraction(number(row['high']))}]"
