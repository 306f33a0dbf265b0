"""Tables of an analysis of costs: every way of serving, and where a hand-off pays."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvmap.figures.economics import POLICY_STYLES
from kvmap.figures.style import number
from kvmap.report.measures import NOTHING
from kvmap.report.page import Grid
from kvmap.report.reading import Row, read_table

_COLUMNS = {
    "TTFT mean, ms": "ttft_mean_ms",
    "p50": "ttft_p50_ms",
    "p95": "ttft_p95_ms",
    "takeover": "takeover_mean_ms",
    "cost": "cost",
    "of always large": "cost_over_always_large",
    "accuracy": "accuracy",
    "cost a right answer": "cost_per_correct",
}
_WHAT = {
    "length": "context length, tokens",
    "gbit_per_s": "bandwidth, Gb/s",
    "escalation_rate": "escalation rate",
    "price_ratio": "price, target / source",
    "cached_share": "cached share of the context",
}


def economics_grids(directory: Path, facts: Mapping[str, Any]) -> list[Grid]:
    """The tables of a run whose stages named `economics`; none of any other.

    Args:
        directory: of the run.
        facts: that its `run.json` notes.
    """
    noted = facts.get("economics") or {}
    grids = [
        policies_grid(read_table(directory, "economics"), noted),
        break_even_grid(read_table(directory, "economics_break_even")),
    ]
    return [grid for grid in grids if grid is not None]


def policies_grid(rows: Sequence[Row], noted: Mapping[str, Any]) -> Grid | None:
    """One line for each way of serving, over all contexts."""
    if not rows:
        return None
    used = {title: key for title, key in _COLUMNS.items() if any(row.get(key) is not None for row in rows)}
    lines = [[_name(row["policy"]), *(_cell(row.get(key)) for key in used.values())] for row in rows]
    said = [str(noted[key]) for key in ("latencies", "contexts") if noted.get(key)]
    note = ". ".join([*said, *map(str, noted.get("notes") or ()), "docs/economics.md has the equations"])
    return Grid("A request, by the way it is served", ["", *used], lines, note=f"{note}.")


def break_even_grid(rows: Sequence[Row]) -> Grid | None:
    """One line for each break-even."""
    if not rows:
        return None
    lines = [
        [
            _WHAT.get(row["what"], str(row["what"])),
            _name(row["policy"]),
            _name(row["against"]),
            "faster" if row["by"] == "time" else "cheaper",
            str(row["better"]),
            _cell(row["value"]),
        ]
        for row in rows
    ]
    columns = ["", "policy", "against", "is", "", "value"]
    breaks = [place for place in range(1, len(rows)) if rows[place]["what"] != rows[place - 1]["what"]]
    return Grid("Where it pays", columns, lines, n_left=5, breaks=breaks)


def _name(policy: str) -> str:
    return POLICY_STYLES[policy][3] if policy in POLICY_STYLES else str(policy)


def _cell(value: Any) -> str:
    amount = number(value)
    if not math.isfinite(amount):
        return NOTHING
    return f"{amount:,.0f}" if abs(amount) >= 1000 else f"{amount:.4g}"
