"""Tables of what a run measured: by task and arm, against target and source, latency, the plan."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from kvmap.figures import run as figures
from kvmap.figures.style import arm_order, count_span, number, spoken
from kvmap.report.measures import (
    AVERAGE,
    AVERAGES,
    LEADS,
    MEASURES,
    NOTHING,
    RATIOS,
    Measure,
    three_digits,
    with_error,
    with_interval,
)
from kvmap.report.page import Grid
from kvmap.report.reading import Row


def measures_grid(rows: Sequence[Row]) -> Grid | None:
    """One line a measure and task, one column an arm."""
    known = {measure.metric for measure in MEASURES}
    arms = arm_order(row["arm"] for row in rows if row["metric"] in known)
    lines = list(_measure_lines(rows, arms))
    if not lines:
        return None
    breaks = [place + 1 for place, line in enumerate(lines[:-1]) if line[1] == AVERAGE]
    columns = ["", "task", "n", *map(spoken, arms)]
    return Grid("Results (± 1 standard error)", columns, lines, n_left=2, breaks=breaks)


def _measure_lines(rows: Sequence[Row], arms: Sequence[str]) -> Iterable[list[str]]:
    """Measure, task, count, and a cell for each arm."""
    for measure in MEASURES:
        of_measure = [row for row in rows if row["metric"] == measure.metric]
        for task in dict.fromkeys(str(row["task"]) for row in of_measure):
            by_arm = {row["arm"]: row for row in of_measure if str(row["task"]) == task}
            cells = [with_error(by_arm.get(arm), measure.write) for arm in arms]
            yield [measure.title, task, count_span(by_arm.values()), *cells]


def against_target_grid(rows: Sequence[Row]) -> Grid | None:
    """Ratios to the target's accuracy: the mapped arm by task, every arm on average."""
    return _against("Against the native target [95 % interval]", rows, RATIOS)


def against_source_grid(rows: Sequence[Row]) -> Grid | None:
    """Differences to the source alone: the mapped arm by task, every arm on average."""
    return _against("Difference to the source alone [95 % interval]", rows, LEADS)


def _against(title: str, rows: Sequence[Row], measures: Sequence[Measure]) -> Grid | None:
    wanted = {measure.metric for measure in measures}
    shown = [row for row in rows if row["metric"] in wanted]
    if any(row["task"] == AVERAGE for row in shown):
        shown = [row for row in shown if row["task"] == AVERAGE or row["arm"] == "mapped"]
    return _by_task_and_arm(title, shown, measures)


def paper_grids(rows: Sequence[Row]) -> list[Grid]:
    """Every measure by task and arm, for a paper: of answers in one table, of language in another."""
    accuracy = Measure("accuracy", "accuracy", MEASURES[0].write)
    answered = (accuracy, *(m for m in MEASURES if m.metric in ("generated_accuracy", "f1")), *RATIOS)
    read = tuple(
        measure
        for measure in MEASURES
        if measure.metric in ("perplexity", "context_carried", "kl_nats", "top1_agreement")
    )
    titles = ("Questions", "Language modelling")
    grids = [
        _by_task_and_arm(f"{title}: ± 1 standard error or [95 % interval]", rows, measures, counted=True)
        for title, measures in zip(titles, (answered, read), strict=True)
    ]
    return [grid for grid in grids if grid is not None]


def _by_task_and_arm(
    title: str, rows: Sequence[Row], measures: Sequence[Measure], counted: bool = False
) -> Grid | None:
    """One line a task and arm, one column a measure that any of them has; averages below a rule."""
    wanted = {measure.metric for measure in measures}
    shown = [row for row in rows if row["metric"] in wanted]
    present = [measure for measure in measures if any(row["metric"] == measure.metric for row in shown)]
    if not present:
        return None
    lines: list[list[str]] = []
    breaks = []
    for task in dict.fromkeys(row["task"] for row in shown):
        if task in AVERAGES and lines:
            breaks.append(len(lines))
        for arm in arm_order(row["arm"] for row in shown if row["task"] == task):
            found = {row["metric"]: row for row in shown if row["task"] == task and row["arm"] == arm}
            cells = [_estimate(found.get(measure.metric), measure) for measure in present]
            count = [count_span([found[present[0].metric]] if present[0].metric in found else found.values())]
            lines.append([str(task), spoken(str(arm)), *(count if counted else []), *cells])
    columns = ["task", "arm", *(["n"] if counted else []), *(measure.title for measure in present)]
    return Grid(title, columns, lines, n_left=2, breaks=breaks)


PLAIN = {measure.metric for measure in MEASURES} - {"context_carried"}


def _estimate(row: Row | None, measure: Measure) -> str:
    """Means with their standard error, ratios and differences with their interval."""
    return (with_error if measure.metric in PLAIN else with_interval)(row, measure.write)


def plan_grid(rows: Sequence[Row], *, folded: bool = False) -> Grid | None:
    """What the run would hold and cost."""
    if not rows:
        return None
    lines: list[list[str]] = []
    breaks = []
    for part in dict.fromkeys(row["part"] for row in rows):
        breaks.append(len(lines))
        for row in rows:
            if row["part"] == part:
                value = row["value"]
                text = f"{value:,}" if isinstance(value, int) else three_digits(number(value))
                lines.append([str(part), spoken(str(row["quantity"])), text])
    return Grid("Plan", ["part", "quantity", "value"], lines, n_left=2, breaks=breaks[1:], folded=folded)


def plan_work_grid(rows: Sequence[Row]) -> Grid | None:
    """FLOPs and seconds of the stages that were planned, each stage's parts together."""
    if not rows:
        return None
    lines = []
    for stage in dict.fromkeys(str(row["stage"]) for row in rows):
        parts = [row for row in rows if row["stage"] == stage]
        flops, seconds = (sum(number(row[key]) for row in parts) for key in ("tflop", "seconds"))
        lines.append([spoken(stage), three_digits(flops), three_digits(seconds)])
    return Grid("Work, about", ["stage", "TFLOP", "seconds"], lines, n_left=1)


def plan_memory_grid(rows: Sequence[Row], *, folded: bool = False) -> Grid | None:
    """Bytes that each stage would hold where, its largest part, and whether they fit."""
    lines = []
    for row in rows:
        if row["what"] != "all":
            continue
        parts = [r for r in rows if (r["stage"], r["place"]) == (row["stage"], row["place"]) and r is not row]
        largest = max(parts, key=lambda part: number(part["n_bytes"]))
        sizes = [f"{number(row[key]) / 2**30:.2f}" for key in ("n_bytes", "capacity")]
        fits = "yes" if str(row["fits"]) == "True" else "no"
        cells = [spoken(str(row["stage"])), str(row["place"]), *sizes, fits, str(largest["what"])]
        lines.append(cells)
    if not lines:
        return None
    columns = ["stage", "place", "GiB", "there are", "fits", "most of it"]
    return Grid("Memory, about", columns, lines, n_left=2, folded=folded)


def plan_settings_grid(rows: Sequence[Row]) -> Grid | None:
    """Overrides that make the run fit, or spare it passes over the text."""
    if not rows:
        return None
    lines = [[str(row["override"]), str(row["why"])] for row in rows]
    return Grid("Settings to paste", ["override", "what it does"], lines, n_left=2)


def latency_grid(rows: Sequence[Row]) -> Grid | None:
    """Median and percentiles by length, and how often a hand-off goes into the time of a re-prefill.

    Warm: the source's cache is there. Cold: the source reads the context first.
    """
    if not rows:
        return None
    present = list(dict.fromkeys(row["arm"] for row in rows))
    arms = [arm for arm in figures.LATENCY_STYLES if arm in present]
    arms += [arm for arm in present if arm not in arms]
    names = (figures.LATENCY_STYLES[arm][2] if arm in figures.LATENCY_STYLES else arm for arm in arms)
    lines = []
    for length in sorted({int(row["length"]) for row in rows}):
        found = {row["arm"]: row for row in rows if int(row["length"]) == length}
        cells = [_percentiles(found.get(arm)) for arm in arms]
        gains = latency_gains(found)
        lines.append([str(length), *cells, *(f"{gain:.1f}×" if gain == gain else NOTHING for gain in gains)])
    columns = ["tokens", *names, "gain, warm", "gain, cold"]
    return Grid("Latency in ms: median [20th, 80th percentile]", columns, lines, n_left=0)


def _percentiles(row: Row | None) -> str:
    if row is None:
        return NOTHING
    return with_interval({"value": row["p50_ms"], "low": row["p20_ms"], "high": row["p80_ms"]}, three_digits)


def latency_gains(found: Mapping[str, Row]) -> tuple[float, float]:
    """Median time of a re-prefill over that of a warm, and a cold, hand-off; nan where one is not timed."""
    medians = {arm: number(row["p50_ms"]) for arm, row in found.items()}
    again, warm = medians.get("re_prefill", math.nan), medians.get("hand_off", medians.get("map", math.nan))
    return again / warm, again / (warm + medians.get("source_prefill", math.nan))


def missing_reason(row: Row) -> str | None:
    """Why an arm has no number, where its row says so."""
    if row.get("note") and row["metric"] in ("accuracy", "perplexity") and math.isnan(number(row["value"])):
        return f"{spoken(str(row['arm']))}: {row['note']}"
    return None
