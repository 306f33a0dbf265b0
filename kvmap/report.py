"""From run directories to tables and figures; reads only what a run wrote, so it can be done again any time.

    python -m kvmap.report RUN_DIRECTORY

The stages write these tables: `arms` `{task, arm, metric, value, n, standard_error, low, high}`,
`r2` `{layer, head, kind, split, r2}` and `latency` `{length, arm, p20_ms, p50_ms, p80_ms, ...}`.
"""

from __future__ import annotations

import argparse
import csv
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvmap.errors import KvmapError
from kvmap.figures import run as figures
from kvmap.figures.style import ARMS, arm_order, count_span, number
from kvmap.files import read_json, replacing, write_csv
from kvmap.tracking import FIGURE_DPI, read_metrics

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import Console
    from rich.table import Table

Row = dict[str, Any]
WIDTH_WITHOUT_TERMINAL = 128
AVERAGE = "average"  # the task name under which means over tasks stand


@dataclass(frozen=True)
class Measure:
    """A line of the summary: metric name, what the table calls it, how its numbers are written."""

    metric: str
    title: str
    write: Callable[[float], str]


def _three_digits(value: float) -> str:
    if value == 0 or 0.001 <= abs(value) < 999.5:
        return f"{value:.3g}"
    return f"{value:,.0f}" if abs(value) < 1e6 and abs(value) > 1 else f"{value:.2e}"


def _fraction(value: float) -> str:
    return f"{value:.3f}"


MEASURES = (
    Measure("accuracy", "accuracy", _fraction),
    Measure("generated_accuracy", "generated", _fraction),
    Measure("f1", "F1", _fraction),
    Measure("drift_points", "drift, points", _three_digits),
    Measure("drift_slope_points_per_turn", "drift a turn, points", _three_digits),
    Measure("perplexity", "perplexity", _three_digits),
    Measure("context_carried", "carried", _fraction),
    Measure("kl_nats", "KL, nats", _fraction),
    Measure("top1_agreement", "top-1 same", _fraction),
)
RATIOS = (
    Measure("retention", "retention", _fraction),
    Measure("floor_retention", "floor retention", _fraction),
    Measure("gain_recovered", "gain recovered", _fraction),
    Measure("mcnemar_p", "McNemar p", _three_digits),
)
LEADS = (
    Measure("accuracy_minus_source", "accuracy", _fraction),
    Measure("mcnemar_source_p", "McNemar p", _three_digits),
    Measure("nll_minus_source_nats", "NLL, nats a token", _fraction),
)


def read_table(directory: Path, name: str) -> list[Row]:
    """Rows of tables/<name>.csv, numbers as numbers, empty cells as None; [] without such a table."""
    path = Path(directory) / "tables" / f"{name}.csv"
    if not path.is_file():
        return []
    with open(path, encoding="utf-8", newline="") as stream:
        return [{column: _cell(text) for column, text in row.items()} for row in csv.DictReader(stream)]


def _cell(text: str | None) -> Any:
    if text is None or text == "":
        return None
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def read_arms(directory: Path) -> list[Row]:
    """Rows of the table `arms`; without one, those that the keys of metrics.json stand for."""
    rows = read_table(directory, "arms")
    if rows:
        return rows
    for key, metric in read_metrics(directory).items():
        parts = key.split("/")
        if len(parts) == 4 and parts[0] == "evaluate" and parts[2] in ARMS:
            facts = {"value": metric.value, "n": metric.n, "standard_error": metric.standard_error}
            rows.append({"task": parts[1], "arm": parts[2], "metric": parts[3], **facts})
    return rows


def print_summary(directory: Path, console: Console | None = None) -> None:
    """Prints what a run found: measures by arm, retention with intervals, R², latency, and how it ended.

    Raises:
        KvmapError: The directory holds no run.
    """
    directory = Path(directory)
    run = _read_run(directory)
    console = console or summary_console()
    arms = read_arms(directory)
    tables = [
        None if arms else _plan_table(read_table(directory, "plan")),
        *_measures_tables(arms, console.width),
        _against_table("Against the native target [95 % interval]", arms, RATIOS),
        _against_table("Difference to the source alone [95 % interval]", arms, LEADS),
        _r2_table(read_table(directory, "r2"), read_table(directory, "first_token")),
        _latency_table(read_table(directory, "latency")),
    ]
    for table in tables:
        if table is not None:
            console.print(table)
    for line in dict.fromkeys([*_map_lines(directory), *_reuse_lines(run), *(_missing(row) for row in arms)]):
        if line:
            console.print(line, markup=False, highlight=False)
    stages = ", ".join(f"{name} {_seconds(entry['seconds'])}" for name, entry in run["stages"].items())
    console.print(f"{run['study']}: {run['status']}{f' after {stages}' if stages else ''}", highlight=False)
    if run.get("error"):
        console.print(f"error: {run['error']}", style="bold red", markup=False, highlight=False)


def _reuse_lines(run: Row) -> Iterator[str]:
    """Of which answers the run had to ask nothing, part by part."""
    for part, by_arm in run.get("facts", {}).get("n_reused", {}).items():
        reused = ", ".join(f"{arm} {n}".replace("_", " ") for arm, n in by_arm.items() if n)
        if reused:
            yield f"{part.replace('_', ' ')}: answers kept from before: {reused}"


def _missing(row: Mapping[str, Any]) -> str | None:
    """Why an arm has no number, where its row says so."""
    if row.get("note") and row["metric"] in ("accuracy", "perplexity") and math.isnan(number(row["value"])):
        return f"{str(row['arm']).replace('_', ' ')}: {row['note']}"
    return None


def summary_console() -> Console:
    """A console on stdout, wide enough for every arm where the output goes to a file or pipe."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else WIDTH_WITHOUT_TERMINAL)


def _read_run(directory: Path) -> Row:
    if not (directory / "run.json").is_file():
        raise KvmapError(
            f"{directory} holds no run.json: give the directory of a run (its last line names it)"
        )
    record: Row = read_json(directory / "run.json")
    return record


def _seconds(value: float | None) -> str:
    return "?" if value is None else f"{value:.1f} s"


def _new_table(title: str, columns: Sequence[str], n_left: int = 1) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(
        title=title, title_justify="left", header_style="bold", box=SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    for place, column in enumerate(columns):
        table.add_column(column, justify="left" if place < n_left else "right", overflow="fold")
    return table


def _measures_tables(rows: Sequence[Row], width: int) -> list[Table]:
    """One line a measure and task, one column an arm; as many tables as keep every number whole."""
    known = {measure.metric for measure in MEASURES}
    arms = arm_order(row["arm"] for row in rows if row["metric"] in known)
    lines = list(_measure_lines(rows, arms))
    labels = [[line[place] for line in lines] for place in range(3)]
    edges = 4
    room = width - edges - sum(max(map(len, column), default=0) + 2 for column in labels)
    tables: list[Table] = []
    for group in _fitting(arms, [_column_width(lines, place) for place in range(len(arms))], room):
        title = "Results, continued" if tables else "Results (± 1 standard error)"
        headers = (arms[place].replace("_", " ") for place in group)
        table = _new_table(title, ["", "task", "n", *headers], n_left=2)
        for line in lines:
            table.add_row(*line[:3], *(line[3 + place] for place in group), end_section=line[1] == AVERAGE)
        tables.append(table)
    return tables


def _measure_lines(rows: Sequence[Row], arms: Sequence[str]) -> Iterable[list[str]]:
    """Measure, task, count, and a cell for each arm."""
    for measure in MEASURES:
        of_measure = [row for row in rows if row["metric"] == measure.metric]
        for task in dict.fromkeys(str(row["task"]) for row in of_measure):
            by_arm = {row["arm"]: row for row in of_measure if str(row["task"]) == task}
            cells = [_with_error(by_arm.get(arm), measure.write) for arm in arms]
            yield [measure.title, task, count_span(by_arm.values()), *cells]


def _column_width(lines: Sequence[Sequence[str]], place: int) -> int:
    # An arm's name may wrap between its words, a number may not.
    return max((len(line[3 + place]) for line in lines), default=0) + 2


def _fitting(arms: Sequence[str], widths: Sequence[int], room: int) -> list[list[int]]:
    """Places of the arms, in groups that fit the room; one arm a group where even that is too wide."""
    groups: list[list[int]] = []
    left = 0
    for place, (arm, width) in enumerate(zip(arms, widths, strict=True)):
        needed = max(width, *(len(word) + 2 for word in arm.split("_")))
        if not groups or needed > left:
            groups.append([])
            left = room
        groups[-1].append(place)
        left -= needed
    return groups


def _with_error(row: Mapping[str, Any] | None, write: Callable[[float], str]) -> str:
    value = math.nan if row is None else number(row["value"])
    if row is None or not math.isfinite(value):
        return "–"
    error = number(row.get("standard_error"))
    return f"{write(value)} ±{write(error).removeprefix('0')}" if math.isfinite(error) else write(value)


def _against_table(title: str, rows: Sequence[Row], measures: Sequence[Measure]) -> Table | None:
    """Measures that hold one arm against another, with intervals: mapped by task, every arm on average."""
    wanted = {measure.metric for measure in measures}
    shown = [row for row in rows if row["metric"] in wanted]
    if any(row["task"] == AVERAGE for row in shown):
        shown = [row for row in shown if row["task"] == AVERAGE or row["arm"] == "mapped"]
    present = [measure for measure in measures if any(row["metric"] == measure.metric for row in shown)]
    if not present:
        return None
    table = _new_table(title, ["task", "arm", *(measure.title for measure in present)], n_left=2)
    for task in dict.fromkeys(row["task"] for row in shown):
        if task == AVERAGE:
            table.add_section()
        for arm in arm_order(row["arm"] for row in shown if row["task"] == task):
            found = {row["metric"]: row for row in shown if row["task"] == task and row["arm"] == arm}
            cells = [_with_interval(found.get(measure.metric), measure.write) for measure in present]
            table.add_row(str(task), str(arm).replace("_", " "), *cells)
    return table


def _with_interval(row: Mapping[str, Any] | None, write: Callable[[float], str]) -> str:
    value = math.nan if row is None else number(row["value"])
    if row is None or not math.isfinite(value):
        return "–"
    low, high = number(row.get("low")), number(row.get("high"))
    known = math.isfinite(low) and math.isfinite(high)
    # The backslash keeps rich from reading the interval as markup.
    return rf"{write(value)} \[{write(low)}, {write(high)}]" if known else _with_error(row, write)


def _r2_table(rows: Sequence[Row], first_token: Sequence[Row]) -> Table | None:
    """Mean R² over layers and heads, on the rows fitted and on those held out; the first token apart."""
    if not rows:
        return None
    splits = [split for split in ("fit", "held_out") if any(row["split"] == split for row in rows)]
    columns = ["", *(f"R² {split.replace('_', '-')}" for split in splits)]
    columns += ["error at the first token"] if first_token else []
    table = _new_table("The map, mean over layers and heads (worst)", columns)
    for kind in dict.fromkeys(row["kind"] for row in rows):
        cells = []
        for split in splits:
            values = [number(row["r2"]) for row in rows if (row["kind"], row["split"]) == (kind, split)]
            cells.append(_mean_and_worst(values, min))
        if first_token:
            values = [number(row["relative_error"]) for row in first_token if row["kind"] == kind]
            cells.append(_mean_and_worst(values, max))
        table.add_row(f"{kind}s", *cells)
    return table


def _map_lines(directory: Path) -> Iterator[str]:
    """What the tables of the fit and of its diagnosis come to, one line each."""
    cosines = [number(row["cosine"]) for row in read_table(directory, "attention_output")]
    if cosines:
        yield f"attention-output cosine: {_mean_and_worst(cosines, min)}, mean over layers and heads (worst)"
    systems = read_table(directory, "conditioning")
    if systems:
        worst = max(number(row["condition_number"]) for row in systems)
        freedom = [number(row["degrees_of_freedom"]) for row in systems]
        yield (
            f"{len(systems)} systems: worst condition number {worst:.1e}, effective degrees of freedom "
            f"{min(freedom):,.0f} to {max(freedom):,.0f} of {max(row['n_features'] for row in systems):,}"
        )
    for row in read_table(directory, "compression")[1:]:
        verdict = "used" if row["passes"] in (True, "True") else f"not used: {row['reason']}"
        yield (
            f"compression {row['variant']}: {number(row['bytes_ratio']):.2f} of the bytes, KL "
            f"{number(row['kl_nats']):.4f} nats; {verdict}"
        )
    chosen = read_table(directory, "tuning_heads")
    if chosen:
        layers = sorted({row["top_k"] for row in chosen})
        lambdas = sorted({number(row["ridge_lambda"]) for row in chosen})
        yield f"chosen on held-out sequences: top_k {layers}, ridge_lambda {lambdas}, see the table tuning"


def _mean_and_worst(values: Iterable[float], worst: Callable[[Sequence[float]], float]) -> str:
    finite = [value for value in values if math.isfinite(value)]
    return f"{sum(finite) / len(finite):.3f} ({worst(finite):.3f})" if finite else "–"


def _plan_table(rows: Sequence[Row]) -> Table | None:
    """What the run would hold and cost."""
    if not rows:
        return None
    table = _new_table("Plan", ["part", "quantity", "value"], n_left=2)
    for part in dict.fromkeys(row["part"] for row in rows):
        for row in rows:
            if row["part"] == part:
                value = row["value"]
                text = f"{value:,}" if isinstance(value, int) else _three_digits(number(value))
                table.add_row(str(part), str(row["quantity"]).replace("_", " "), text)
        table.add_section()
    return table


def _latency_table(rows: Sequence[Row]) -> Table | None:
    """Median and percentiles by length, and how often a hand-off goes into the time of a re-prefill.

    Warm: the source's cache is there, the hand-off is the map. Cold: the source reads the context first.
    """
    if not rows:
        return None
    present = list(dict.fromkeys(row["arm"] for row in rows))
    arms = [arm for arm in figures.LATENCY_STYLES if arm in present]
    arms += [arm for arm in present if arm not in arms]
    title = "Latency in ms: median [20th, 80th percentile]"
    names = (figures.LATENCY_STYLES[arm][2] if arm in figures.LATENCY_STYLES else arm for arm in arms)
    columns = ["tokens", *names, "gain, warm", "gain, cold"]
    table = _new_table(title, columns, n_left=0)
    for length in sorted({int(row["length"]) for row in rows}):
        found = {row["arm"]: row for row in rows if int(row["length"]) == length}
        cells = [
            _with_interval(
                {"value": row["p50_ms"], "low": row["p20_ms"], "high": row["p80_ms"]}, _three_digits
            )
            if (row := found.get(arm))
            else "–"
            for arm in arms
        ]
        medians = {arm: number(row["p50_ms"]) for arm, row in found.items()}
        again, mapping = medians.get("re_prefill", math.nan), medians.get("map", math.nan)
        gains = again / mapping, again / (mapping + medians.get("source_prefill", math.nan))
        table.add_row(str(length), *cells, *(f"{gain:.1f}×" if gain == gain else "–" for gain in gains))
    return table


def draw_figures(directory: Path) -> dict[str, Figure]:
    """Every figure the run's tables allow, by name."""
    arms = read_arms(directory)
    metrics = {row["metric"] for row in arms if math.isfinite(number(row["value"]))}
    drawn: dict[str, Figure] = {}
    if r2 := read_table(directory, "r2"):
        drawn["r2"] = figures.r2_heat_map(r2)
    if "accuracy" in metrics:
        drawn["accuracy"] = figures.accuracy_bars(arms)
    if "perplexity" in metrics:
        drawn["perplexity"] = figures.perplexity_bars(arms)
    if latency := read_table(directory, "latency"):
        drawn["latency"] = figures.latency_lines(latency)
    return drawn


def save_figures(directory: Path) -> list[Path]:
    """Draws them to figures/<name>.png again."""
    paths = []
    for name, figure in draw_figures(directory).items():
        path = Path(directory) / "figures" / f"{name}.png"
        with replacing(path) as temporary:
            figure.savefig(temporary, dpi=FIGURE_DPI)
        paths.append(path)
    return paths


def write_sweep_summary(root: Path) -> Path:
    """Writes `<root>/summary.csv`: a line a job with status, the settings that differ and every metric."""
    root = Path(root)
    jobs = sorted((path.parent for path in root.glob("*/run.json")), key=_natural)
    if not jobs:
        raise KvmapError(f"{root} holds no jobs (no */run.json): give the directory of a sweep")
    records = [read_json(job / "run.json") for job in jobs]
    settings = [dict(_leaves(record["config"])) for record in records]
    names = list(dict.fromkeys(name for setting in settings for name in setting))
    varied = [name for name in names if len({repr(setting.get(name)) for setting in settings}) > 1]
    rows = []
    for job, record, setting in zip(jobs, records, settings, strict=True):
        row: Row = {"job": job.name, "status": record["status"], "seconds": record["seconds"]}
        row.update({name: setting.get(name) for name in varied})
        row.update({key: metric.value for key, metric in read_metrics(job).items()})
        rows.append(row)
    write_csv(root / "summary.csv", rows)
    return root / "summary.csv"


def _natural(path: Path) -> tuple[int, str]:
    return (int(path.name), "") if path.name.isdigit() else (sys.maxsize, path.name)


def _leaves(config: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of `python -m kvmap.report`."""
    parser = argparse.ArgumentParser(
        prog="python -m kvmap.report",
        description="Print the tables of a finished run and draw its figures again.",
    )
    parser.add_argument("run_directory", type=Path, help="what the run printed last, after `run:`")
    directory = parser.parse_args(arguments).run_directory
    try:
        print_summary(directory)
        for path in save_figures(directory):
            print(f"figure: {path}")
    except KvmapError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"run: {directory}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
