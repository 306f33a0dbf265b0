"""The report of a sweep or study: configurations side by side, what differs between runs, and the runs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvmap.figures.style import number
from kvmap.report.console import fitting, print_grid, summary_console
from kvmap.report.measures import AVERAGES, NOTHING, fraction, three_digits, with_error, with_interval
from kvmap.report.origin import commands_grid, several_grid, versions_grid
from kvmap.report.page import Card, Cell, Grid, Link, Page, Section
from kvmap.report.pictures import pictures_of, save
from kvmap.report.reading import Row
from kvmap.report.settings import changed_grid, settings_grid, shared, written
from kvmap.report.study import COLUMNS, Configuration, Study
from kvmap.report.sweep import leaves

OF_RUNS = (
    ("evaluate", "accuracy", "accuracy, mapped"),
    ("evaluate", "retention", "accuracy kept"),
    ("evaluate", "context_carried", "context carried"),
    ("evaluate", "perplexity", "perplexity"),
    ("diagnose/held_out", "r2_key", "R² keys"),
    ("diagnose/held_out", "r2_value", "R² values"),
)
"""Beginning of the key of a run's metric, its end, and what the column is called."""
MOST_VALUES = 12  # of a setting that are listed


def study_page(study: Study, folder: Path, defaults: Mapping[str, Any] | None = None) -> Page:
    """What a folder of runs says; figures are those in `folder`/figures."""
    records = list(study.records.values())
    settings = [dict(leaves(record["config"])) for record in records]
    common = shared(settings)
    usual = dict(leaves(defaults)) if defaults is not None else None
    known = {name: value for name, value in (usual or {}).items() if name in common}
    changed = changed_grid(common, known) if usual is not None else None
    configurations = configurations_grid(study)
    by_task = tasks_grid(study)
    sections = [
        Section("Configurations", _notes(study), _there(configurations), pictures_of(folder)),
        Section("By task", [], _there(by_task)),
        Section("Runs", [], [runs_grid(study)]),
        Section("Settings", [], _there(_differences(study, settings), changed, _all_shared(common))),
        Section("Origin", [], _there(several_grid(records), commands_grid(records), versions_grid(records))),
    ]
    return Page(
        title=f"Study {study.root.resolve().name}",
        lead=_lead(study),
        asked=_asked(study),
        verdict=study_verdict(study),
        cards=_cards(study),
        sections=[section for section in sections if section],
        paper=_there(configurations, by_task),
    )


def _there(*grids: Grid | None) -> list[Grid]:
    return [grid for grid in grids if grid is not None]


def _notes(study: Study) -> list[str]:
    """Why the seeds of some configurations could not be taken together."""
    by_note: dict[str, list[str]] = {}
    for each in study.configurations:
        if each.note:
            by_note.setdefault(each.note, []).append(f"#{each.number}")
    return [
        f"{', '.join(numbers)}: means over runs, without intervals: {note}"
        for note, numbers in by_note.items()
    ]


def _all_shared(common: Mapping[str, Any]) -> Grid:
    return settings_grid("Settings that all runs share", common)


def _lead(study: Study) -> str:
    n_done = len(study.records) - len(study.unfinished)
    n_draws = sum(len(each.group.runs) for each in study.configurations)
    parts = [f"{len(study.records)} runs, {n_done} of them finished"]
    parts += [f"{len(study.configurations)} configurations"] if study.configurations else []
    if n_draws < n_done:
        parts += [
            f"{n_done - n_draws} runs left out that repeat another one's settings and seeds, or its draw"
        ]
    return "; ".join(parts)


def _asked(study: Study) -> list[str]:
    if not study.varied:
        return ["The finished runs differ in seeds and paths alone."] if study.configurations else []
    lines = []
    for name in study.varied:
        values = dict.fromkeys(each.settings[name] for each in study.configurations)
        shown = ", ".join(list(values)[:MOST_VALUES]) + (", …" if len(values) > MOST_VALUES else "")
        lines.append(f"{name}: {shown}")
    return lines


def study_verdict(study: Study) -> list[str]:
    """Which configurations came out lowest and highest, by each measure that is drawn."""
    lines = []
    for column in (column for column in study.columns if column.drawn):
        found = [(each, row) for each in study.configurations if (row := each.estimate(column)) is not None]
        found.sort(key=lambda entry: number(entry[1]["value"]))
        if len(found) == 1:
            lines.append(f"{column.title.capitalize()}: {with_interval(found[0][1], fraction)}.")
            continue
        (lowest, low), (highest, high) = found[0], found[-1]
        lines.append(
            f"{column.title.capitalize()}: lowest {with_interval(low, fraction)} ({lowest.label}), highest "
            f"{with_interval(high, fraction)} ({highest.label}){_apart(low, high)}."
        )
    if study.unfinished:
        lines.append(f"Not finished: {len(study.unfinished)} of {len(study.records)} runs.")
    return lines


def _apart(low: Row, high: Row) -> str:
    """Whether the intervals of the lowest and the highest overlap; nothing where one has none."""
    top, bottom = number(low.get("high")), number(high.get("low"))
    if not (math.isfinite(top) and math.isfinite(bottom)):
        return ""
    return f"; their intervals {'lie apart' if bottom > top else 'overlap'}"


def _cards(study: Study) -> list[Card]:
    dealt = [Card("configurations", str(len(study.configurations)), f"{len(study.records)} runs")]
    for column in (column for column in study.columns if column.drawn):
        found = [
            (number(row["value"]), each) for each in study.configurations if (row := each.estimate(column))
        ]
        value, best = max(found, key=lambda entry: entry[0])
        dealt.append(Card(f"most {column.title}", fraction(value), best.label))
    return dealt


def configurations_grid(study: Study) -> Grid | None:
    """One row a configuration, seeds taken together."""
    if not study.configurations:
        return None
    columns, names = study.columns, study.names
    lines = [
        [
            f"#{each.number}",
            *(each.settings.get(name, "") for name in names),
            each.counts,
            *(each.cell(column) for column in columns),
        ]
        for each in study.configurations
    ]
    return Grid(
        "Configurations, seeds taken together [95 % interval]",
        ["#", *names, "items × runs", *(column.title for column in columns)],
        lines,
        n_left=1 + len(names),
        note="Intervals draw runs first, then items; with few runs they are too narrow in what seeds change. "
        "Perplexity, KL, R² and cosine are means over runs.",
    )


def tasks_grid(study: Study) -> Grid | None:
    """One row a configuration and task: accuracy of the mapped cache, target and source, and what is kept."""
    wanted = [column for column in COLUMNS if not column.keys and column.metric != "context_carried"]
    lines: list[list[str]] = []
    breaks = []
    for each in study.configurations:
        breaks.append(len(lines))
        tasks = dict.fromkeys(str(row["task"]) for row in each.rows if row["metric"] == "retention")
        for task in (task for task in tasks if task not in AVERAGES):
            found = {(row["metric"], row["arm"]): row for row in each.rows if row["task"] == task}
            cells = [with_interval(found.get((c.metric, c.arm)), fraction) for c in wanted]
            count = found["retention", "mapped"]["n_items"] if ("retention", "mapped") in found else NOTHING
            lines.append([each.label, task, str(count), *cells])
    kept = [3 + place for place in range(len(wanted)) if any(line[3 + place] != NOTHING for line in lines)]
    if len({line[1] for line in lines}) < 2:
        return None
    return Grid(
        "By configuration and task [95 % interval]",
        ["configuration", "task", "items", *(wanted[place - 3].title for place in kept)],
        [[*line[:3], *(line[place] for place in kept)] for line in lines],
        n_left=2,
        breaks=breaks[1:],
        folded=True,
    )


def runs_grid(study: Study, *, linked: bool = True) -> Grid:
    """One row a run: how it ended, of which configuration it is, its seeds, its own measures."""
    seeds = _seeds(study)
    known = {run: each for each in study.configurations for run in each.group.runs}
    measured = {run: _measures(study, run) for run in study.records}
    titles = [title for _, _, title in OF_RUNS if any(title in cells for cells in measured.values())]
    lines: list[list[Cell]] = []
    for run, record in study.records.items():
        settings = dict(leaves(record["config"]))
        label = run.relative_to(study.root).as_posix()
        page = run / "report.html" if (run / "report.html").is_file() else run / "run.json"
        ended = f"{record['status']}: {record['error']}" if record.get("error") else str(record["status"])
        lines.append(
            [
                Link(label, page) if linked else label,
                ended,
                f"#{known[run].number}" if run in known else NOTHING,
                *(written(settings.get(name)) for name in seeds),
                *(measured[run].get(title, NOTHING) for title in titles),
            ]
        )
    columns = ["run", "status", "#", *seeds, *titles]
    return Grid("Runs (± 1 standard error)", columns, lines, n_left=2)


def _measures(study: Study, run: Path) -> dict[str, str]:
    """What a run itself measured, by the title of the column."""
    if study.table is None or str(run) not in study.table.index:
        return {}
    row = study.table.loc[str(run)]
    found = {}
    for prefix, metric, title in OF_RUNS:
        keys = [
            key
            for key in study.table
            if key.startswith(f"{prefix}/")
            and key.endswith(f"/mapped/{metric}")
            and not math.isnan(number(row[key]))
        ]
        averages = [key for key in keys if key.split("/")[1] in AVERAGES]
        if chosen := averages or keys[: len(keys) == 1]:
            write = three_digits if metric == "perplexity" else fraction
            error = row.get(f"{chosen[0]}:standard_error")
            found[title] = with_error({"value": row[chosen[0]], "standard_error": error}, write)
    return found


def _seeds(study: Study) -> list[str]:
    """Seeds in which runs of one configuration differ."""
    found: dict[str, None] = {}
    for each in study.configurations:
        for name in each.group.seeds[0]:
            if len({str(seeds.get(name)) for seeds in each.group.seeds}) > 1:
                found[name] = None
    return list(found)


def _differences(study: Study, settings: list[dict[str, Any]]) -> Grid | None:
    """Every setting in which any two runs differ, seeds and paths too, with all its values.

    A setting that some runs do not know, for they are of another version, differs where it has two values.
    """
    names = dict.fromkeys(name for each in settings for name in each)
    lines = []
    for name in names:
        values = dict.fromkeys(written(each[name]) for each in settings if name in each)
        if len(values) > 1:
            lines.append([name, ", ".join(values)])
    return (
        Grid("Settings that differ between the runs", ["setting", "values"], lines, n_left=2)
        if lines
        else None
    )


def draw_study(study: Study, folder: Path) -> list[Path]:
    """Draws figures/study.png into a folder, where there is more than one configuration to compare."""
    from kvmap.figures.study import configuration_dots

    rows = list(_drawn(study.configurations, study))
    if len({row["configuration"] for row in rows}) < 2:
        return []
    shown = dict.fromkeys(name for each in study.configurations for name in each.named)
    return [save(configuration_dots(rows, list(shown)), folder, "study")]


def _drawn(configurations: list[Configuration], study: Study) -> list[Row]:
    return [
        {
            "configuration": f"#{each.number} {', '.join(each.named.values())}",
            "measure": column.title,
            "n_runs": len(each.group.runs),
            **{end: row.get(end) for end in ("value", "low", "high")},
        }
        for column in (column for column in study.columns if column.drawn)
        for each in configurations
        if (row := each.estimate(column)) is not None
    ]


def print_study(study: Study) -> None:
    """Prints the runs of a study, and its configurations, in tables as narrow as the terminal."""
    console = summary_console()
    for grid in fitting(runs_grid(study, linked=False), console.width, n_labels=1):
        print_grid(grid, console)
    configurations = configurations_grid(study)
    if configurations is not None:
        for grid in fitting(configurations, console.width, n_labels=1):
            print_grid(grid, console)
    for line in [_lead(study), *study_verdict(study)]:
        console.print(line, markup=False, highlight=False)
