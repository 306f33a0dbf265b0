"""Tables of a fleet: what each ordered pair carries and weighs, the best way round, and what a hub saves."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvmap.figures.style import number
from kvmap.report.measures import NOTHING, fraction
from kvmap.report.page import Grid
from kvmap.report.reading import Row, read_table


def fleet_grids(directory: Path) -> list[Grid]:
    """The tables of a run whose stages named `fleet`; none of any other."""
    grids = [
        pairs_grid(read_table(directory, "fleet_routes"), read_table(directory, "fleet_mappers")),
        relays_grid(read_table(directory, "fleet_best_relays")),
        hubs_grid(read_table(directory, "fleet_hubs")),
    ]
    return [grid for grid in grids if grid is not None]


def pairs_grid(routes: Sequence[Row], mappers: Sequence[Row]) -> Grid | None:
    """One line an ordered pair, by its own mapper."""
    sizes = {(row["source"], row["target"]): number(row["weights_bytes"]) for row in mappers}
    direct = [row for row in routes if not row.get("via")]
    if not direct:
        return None
    lines = [
        [
            f"{row['source']} → {row['target']}",
            _bytes(sizes.get((row["source"], row["target"]), math.nan)),
            *(_cell(row, name) for name in ("key_r2", "value_r2", "kl_nats", "top1_agreement")),
            _interval(row, "context_carried"),
        ]
        for row in direct
    ]
    columns = ["pair", "MB", "R² keys", "R² values", "KL, nats", "top-1", "carried [95 % interval]"]
    note = f"{_bytes(sum(sizes.values()))} MB of mappers in all. Held-out text, {direct[0]['n']} sequences."
    return Grid("Every ordered pair, by its own mapper", columns, lines, note=note)


def relays_grid(rows: Sequence[Row]) -> Grid | None:
    """One line an ordered pair: its own mapper beside the best way round."""
    if not rows:
        return None
    lines = [
        [
            f"{row['source']} → {row['target']}",
            str(row["via"]),
            *(
                _cell(row, f"{way}_{name}")
                for name in ("kl_nats", "context_carried")
                for way in ("direct", "relay")
            ),
        ]
        for row in rows
    ]
    columns = ["pair", "by way of", "KL direct", "KL relay", "carried direct", "carried relay"]
    note = "Of all ways by one other model, that of the least KL on the sequences it is judged by."
    return Grid("The best way round", columns, lines, n_left=2, note=note)


def hubs_grid(rows: Sequence[Row]) -> Grid | None:
    """One line a hub, under a mapper for every pair."""
    if len(rows) < 2:
        return None
    lines = [
        [
            str(row.get("hub") or "none: every pair has its own"),
            str(row["n_mappers"]),
            _bytes(number(row["weights_bytes"])),
            *(_cell(row, name) for name in ("kl_nats", "context_carried", "worst_context_carried")),
            f"{row['worst_source']} → {row['worst_target']}",
        ]
        for row in rows
    ]
    columns = ["hub", "mappers", "MB", "KL, nats", "carried", "worst", "of"]
    note = "Means over all ordered pairs. With a hub, pairs that it is not one of go by way of it."
    return Grid("All through one model", columns, lines, n_left=1, note=note)


def _bytes(value: float) -> str:
    return f"{value / 1e6:,.2f}" if math.isfinite(value) else NOTHING


def _cell(row: Mapping[str, Any], name: str) -> str:
    value = number(row.get(name))
    return fraction(value) if math.isfinite(value) else NOTHING


def _interval(row: Mapping[str, Any], name: str) -> str:
    low, high = (number(row.get(f"{name}_{end}")) for end in ("low", "high"))
    known = math.isfinite(low) and math.isfinite(high)
    return f"{_cell(row, name)} [{fraction(low)}, {fraction(high)}]" if known else _cell(row, name)
