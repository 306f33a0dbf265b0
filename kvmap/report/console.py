"""The tables of a report on a terminal, in a file or a pipe."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from kvmap.report.diagnosis import map_lines, r2_grid
from kvmap.report.economics import economics_grids
from kvmap.report.page import Cell, Grid, Link
from kvmap.report.preflight import preflight_grid, preflight_lines, preflight_rates_grid
from kvmap.report.reading import Row, read_arms, read_run, read_table
from kvmap.report.results import (
    against_source_grid,
    against_target_grid,
    latency_grid,
    measures_grid,
    missing_reason,
    plan_grid,
    plan_memory_grid,
    plan_settings_grid,
    plan_work_grid,
)

if TYPE_CHECKING:
    from rich.console import Console

WIDTH_WITHOUT_TERMINAL = 128
EDGES = 4  # columns that the box takes at both sides


def print_summary(directory: Path, console: Console | None = None) -> None:
    """Prints what a run found: measures by arm, retention with intervals, R², latency, and how it ended.

    Raises:
        KvmapError: The directory holds no run.
    """
    directory = Path(directory)
    run = read_run(directory)
    console = console or summary_console()
    arms = read_arms(directory)
    measures = measures_grid(arms)
    if not arms:
        print_grid(plan_grid(read_table(directory, "plan")), console)
        print_grid(plan_work_grid(read_table(directory, "plan_work")), console)
        print_grid(plan_memory_grid(read_table(directory, "plan_memory")), console)
    print_grid(plan_settings_grid(read_table(directory, "plan_settings")), console)
    print_grid(preflight_grid(read_table(directory, "preflight")), console)
    print_grid(preflight_rates_grid(read_table(directory, "preflight_rates")), console)
    if measures is not None:
        for grid in fitting(measures, console.width, n_labels=3):
            print_grid(grid, console)
    print_grid(against_target_grid(arms), console)
    print_grid(against_source_grid(arms), console)
    print_grid(r2_grid(read_table(directory, "r2"), read_table(directory, "first_token")), console)
    print_grid(latency_grid(read_table(directory, "latency")), console)
    for grid in economics_grids(directory, run.get("facts") or {}):
        print_grid(grid, console)
    for line in (*preflight_lines(run), *run_lines(directory, run, arms)):
        console.print(line, markup=False, highlight=False)
    console.print(f"{run['study']}: {ending(run)}", markup=False, highlight=False)
    if run.get("error"):
        console.print(f"error: {run['error']}", style="bold red", markup=False, highlight=False)


def run_lines(directory: Path, run: Mapping[str, object], arms: Sequence[Row]) -> list[str]:
    """What else is to be known: of the map, of answers kept from before, of arms that are not there."""
    lines = [*map_lines(directory), *plan_lines(run), *reuse_lines(run), *map(missing_reason, arms)]
    return [line for line in dict.fromkeys(lines) if line]


def plan_lines(run: Mapping[str, object]) -> Iterator[str]:
    """What a plan was made for, from what it was made, what it leaves out, and what would still not fit."""
    facts = run.get("facts", {})
    planned = facts.get("planned_for") if isinstance(facts, Mapping) else None
    if not isinstance(facts, Mapping) or not planned:
        return
    models = planned["models"].items()
    known = ", ".join(f"{role} {said['dtype']}, known from {said['known_from']}" for role, said in models)
    efficiency = f"{planned['efficiency']:.0%} of its peak"
    host = f"{planned['host_bytes'] / 2**30:.3g} GiB of host memory"
    yield f"plan: {planned['device']} at {efficiency}, {host}; {known}"
    if planned["not_counted"]:
        yield f"plan: not counted: {', '.join(planned['not_counted'])}"
    if left := facts.get("plan_left_over_bytes"):
        yield f"plan: {left / 2**30:.3g} GiB do not fit with any settings that are known here"


def ending(run: Row) -> str:
    """`done after calibrate 2.1 s, fit 0.2 s`: status, and the seconds of every stage."""
    stages = ", ".join(f"{name} {_seconds(entry['seconds'])}" for name, entry in run["stages"].items())
    return f"{run['status']}{f' after {stages}' if stages else ''}"


def _seconds(value: float | None) -> str:
    return "?" if value is None else f"{value:.1f} s"


def reuse_lines(run: Mapping[str, object]) -> Iterator[str]:
    """Of which answers the run had to ask nothing, part by part."""
    facts = run.get("facts", {})
    reused = facts.get("n_reused", {}) if isinstance(facts, Mapping) else {}
    for part, by_arm in reused.items():
        kept = ", ".join(f"{arm} {n}".replace("_", " ") for arm, n in by_arm.items() if n)
        if kept:
            yield f"{part.replace('_', ' ')}: answers kept from before: {kept}"


def summary_console() -> Console:
    """A console on stdout, wide enough for every arm where the output goes to a file or pipe."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else WIDTH_WITHOUT_TERMINAL)


def print_grid(grid: Grid | None, console: Console) -> None:
    """One table, its note below it; nothing for None."""
    if grid is None:
        return
    from rich.box import SIMPLE_HEAD
    from rich.markup import escape
    from rich.table import Table

    table = Table(
        title=escape(grid.title),
        title_justify="left",
        header_style="bold",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for place, column in enumerate(grid.columns):
        table.add_column(escape(column), justify="left" if place < grid.n_left else "right", overflow="fold")
    for place, row in enumerate(grid.rows):
        cells = (escape(text_of(cell)) for cell in row)
        table.add_row(*cells, end_section=place + 1 in grid.breaks)
    console.print(table)


def text_of(cell: Cell) -> str:
    return cell.label if isinstance(cell, Link) else cell


def fitting(grid: Grid, width: int, n_labels: int) -> list[Grid]:
    """As many tables as keep every number whole, each with the first `n_labels` columns.

    One column a table where even that is too wide.
    """
    widths = [max((len(text_of(row[place])) for row in grid.rows), default=0) for place in _places(grid)]
    room = width - EDGES - sum(widths[place] + 2 for place in range(n_labels))
    groups: list[list[int]] = []
    left = 0
    for place in range(n_labels, len(grid.columns)):
        # A header may wrap between its words, a number may not.
        needed = max(widths[place] + 2, *(len(word) + 2 for word in grid.columns[place].split(" ")))
        if not groups or needed > left:
            groups.append([])
            left = room
        groups[-1].append(place)
        left -= needed
    title = re.split(r" [(\[]|, seeds", grid.title)[0]
    return [
        replace(
            grid,
            title=f"{title}, continued" if number else grid.title,
            columns=[grid.columns[place] for place in (*range(n_labels), *group)],
            rows=[[row[place] for place in (*range(n_labels), *group)] for row in grid.rows],
        )
        for number, group in enumerate(groups)
    ]


def _places(grid: Grid) -> range:
    return range(len(grid.columns))
