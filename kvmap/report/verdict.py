"""What a run found, in words: the mapped cache against the target, the source alone, no context."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from kvmap.figures.style import count_span, number, spoken
from kvmap.report.measures import AVERAGES, NOTHING, fraction, three_digits, with_error, with_interval
from kvmap.report.page import Card, Grid
from kvmap.report.reading import Row

BETTER, WORSE, OPEN = "better", "worse", "not told apart"
REFERENCES = {"target": "the target's own cache", "source": "the source alone", "no_context": "no context"}


class Found:
    """Rows of the table `arms`, by task, arm and metric."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = {(str(row["task"]), str(row["arm"]), str(row["metric"])): row for row in rows}

    def row(self, task: str, arm: str, metric: str) -> Row | None:
        """The row, where it has a value."""
        row = self._rows.get((task, arm, metric))
        return row if row is not None and math.isfinite(number(row["value"])) else None

    def tasks(self, metric: str, arm: str = "mapped") -> list[str]:
        """Averages over tasks, where there are any; else every task that has the metric."""
        present = [task for task, of_arm, of_metric in self._rows if (of_arm, of_metric) == (arm, metric)]
        present = [task for task in present if self.row(task, arm, metric) is not None]
        averages = [task for task in present if task in AVERAGES]
        lone = [task for task in present if task not in AVERAGES]
        return averages or lone

    def counted(self, task: str, metric: str) -> str:
        """`120`: of how many the mapped arm's value is."""
        row = self.row(task, "mapped", metric)
        return count_span([row]) if row else "?"


def judged(low: float, high: float, *, more_is_better: bool) -> str:
    """What an interval of `mapped minus reference` says."""
    if not (math.isfinite(low) and math.isfinite(high)):
        return NOTHING
    if low > 0 or high < 0:
        return BETTER if (low > 0) == more_is_better else WORSE
    return OPEN


def verdict_lines(rows: Sequence[Row]) -> list[str]:
    """The short answer first, then one line for each kind of task.

    Words follow the 95 % intervals: `better` and `worse` where the interval of the paired difference leaves
    out zero, else `not told apart`.
    """
    found = Found(rows)
    lines = [
        *(_accuracy_line(found, task) for task in found.tasks("accuracy")[:3]),
        *(_language_line(found, task) for task in found.tasks("nll_nats")[:1]),
        *(_conversation_line(found, task) for task in found.tasks("f1")[:1]),
    ]
    short = "; ".join(_short(found))
    return [*([f"The mapped cache: {short}."] if short else []), *lines]


def _short(found: Found) -> Iterator[str]:
    for task in found.tasks("accuracy")[:1]:
        against = [(arm, _accuracy_verdict(found, task, arm)) for arm in REFERENCES]
        yield from _said("answers questions", against)
    for task in found.tasks("nll_nats")[:1]:
        against = [(arm, _language_verdict(found, task, arm)) for arm in REFERENCES]
        yield from _said("predicts text", against)


def _said(what: str, against: Sequence[tuple[str, str]]) -> Iterator[str]:
    told = [(REFERENCES[arm], verdict) for arm, verdict in against if verdict != NOTHING]
    if told:
        parts = [
            f"{verdict} from {name}" if verdict == OPEN else f"{verdict} than {name}"
            for name, verdict in told
        ]
        yield f"{what} {', '.join(parts)}"


def _accuracy_verdict(found: Found, task: str, arm: str) -> str:
    difference = found.row(task, "mapped", f"accuracy_minus_{arm}")
    if difference is not None:
        return judged(number(difference.get("low")), number(difference.get("high")), more_is_better=True)
    # Without a paired difference, intervals that lie apart; which asks for more than the difference would.
    mine, other = (found.row(task, of_arm, "accuracy") for of_arm in ("mapped", arm))
    if mine is None or other is None or arm != "no_context":
        return NOTHING
    low = number(mine.get("low")) - number(other.get("high"))
    high = number(mine.get("high")) - number(other.get("low"))
    return judged(low, high, more_is_better=True)


def _language_verdict(found: Found, task: str, arm: str) -> str:
    if arm == "no_context":
        carried = found.row(task, "mapped", "context_carried")
        return (
            NOTHING
            if carried is None
            else judged(number(carried.get("low")), number(carried.get("high")), more_is_better=True)
        )
    difference = found.row(task, "mapped", f"nll_minus_{arm}_nats")
    if difference is None:
        return NOTHING
    return judged(number(difference.get("low")), number(difference.get("high")), more_is_better=False)


def _beside_references(found: Found, task: str, metric: str, label: str) -> str:
    """What the metric is of the mapped cache, and of each reference."""
    write = fraction if metric != "perplexity" else three_digits
    parts = [
        f"{name} {with_error(row, write)}"
        for arm, name in REFERENCES.items()
        if (row := found.row(task, arm, metric)) is not None
    ]
    said = f"{label}: mapped {with_error(found.row(task, 'mapped', metric), write)}"
    return f"{said}; {', '.join(parts)}" if parts else said


def _accuracy_line(found: Found, task: str) -> str:
    label = f"Accuracy, {spoken(task)} (n = {found.counted(task, 'accuracy')})"
    said = _beside_references(found, task, "accuracy", label)
    if kept := found.row(task, "mapped", "retention"):
        said += f". It keeps {with_interval(kept, fraction)} of the target's accuracy"
    if lead := found.row(task, "mapped", "accuracy_minus_source"):
        said += f"; against the source alone {with_interval(lead, fraction)}"
        if p := found.row(task, "mapped", "mcnemar_source_p"):
            said += f", McNemar p = {three_digits(number(p['value']))}"
    return f"{said}."


def _language_line(found: Found, task: str) -> str:
    label = f"Perplexity (n = {found.counted(task, 'nll_nats')} sequences)"
    said = _beside_references(found, task, "perplexity", label)
    if carried := found.row(task, "mapped", "context_carried"):
        said += f". It carries {with_interval(carried, fraction)} of what the context is worth"
    if lead := found.row(task, "mapped", "nll_minus_source_nats"):
        said += f"; against the source alone {with_interval(lead, fraction)} nats a token, less is better"
    return f"{said}."


def _conversation_line(found: Found, task: str) -> str:
    label = f"F1, {spoken(task)} (n = {found.counted(task, 'f1')})"
    said = _beside_references(found, task, "f1", label)
    if slope := found.row(task, "mapped", "drift_slope_points_per_turn"):
        said += f". It falls behind by {with_interval(slope, three_digits)} points a turn"
    return f"{said}."


def verdict_grid(rows: Sequence[Row]) -> Grid | None:
    """The mapped cache against each reference: differences, and what their intervals say."""
    found = Found(rows)
    tasks = [*found.tasks("accuracy")[:1], *found.tasks("nll_nats")[:1]]
    if not tasks:
        return None
    asked, read = found.tasks("accuracy")[:1], found.tasks("nll_nats")[:1]
    columns = ["the mapped cache against"]
    columns += ["in accuracy", "mapped − it", "its accuracy"] if asked else []
    columns += ["in NLL", "mapped − it, nats", "its NLL, nats"] if read else []
    lines = []
    for arm, name in REFERENCES.items():
        line = [name]
        for task in asked:
            difference = found.row(task, "mapped", f"accuracy_minus_{arm}")
            line += [_accuracy_verdict(found, task, arm), with_interval(difference, fraction)]
            line += [with_error(found.row(task, arm, "accuracy"), fraction)]
        for task in read:
            difference = found.row(task, "mapped", f"nll_minus_{arm}_nats")
            line += [_language_verdict(found, task, arm), with_interval(difference, fraction)]
            line += [with_error(found.row(task, arm, "nll_nats"), fraction)]
        if any(cell != NOTHING for cell in line[1:]):
            lines.append(line)
    asked = [f"{spoken(task)} over tasks" if task in AVERAGES else spoken(task) for task in asked]
    what = " and ".join([*asked, *map(spoken, read)])
    note = (
        "Judged by the 95 % interval of the paired difference. Against no context: by whether the intervals "
        "of both accuracies lie apart, and by that of the context carried."
    )
    return (
        Grid(f"On {what} (± 1 standard error, [95 % interval])", columns, lines, note=note) if lines else None
    )


def cards(rows: Sequence[Row]) -> list[Card]:
    """The headline numbers of a run's evaluation."""
    found = Found(rows)
    dealt: list[Card] = []
    wanted = (
        ("retention", "accuracy kept", "of the target's"),
        ("gain_recovered", "gain recovered", "of target over source"),
        ("context_carried", "context carried", "1: as the target's own cache"),
    )
    for metric, label, what in wanted:
        for task in found.tasks(metric)[:1]:
            row = found.row(task, "mapped", metric)
            interval = with_interval(row, fraction).partition(" ")[2]
            dealt.append(
                Card(label, fraction(number(row["value"])) if row else NOTHING, f"{interval} {what}")
            )
    for task in found.tasks("accuracy")[:1]:
        row = found.row(task, "mapped", "accuracy")
        target = found.row(task, "target", "accuracy")
        detail = f"target {with_error(target, fraction)}, n = {found.counted(task, 'accuracy')}"
        dealt.append(Card("accuracy, mapped", with_error(row, fraction), detail))
    for task in found.tasks("perplexity")[:1]:
        row, target = (found.row(task, arm, "perplexity") for arm in ("mapped", "target"))
        detail = f"target {with_error(target, three_digits)}, n = {found.counted(task, 'perplexity')}"
        dealt.append(Card("perplexity, mapped", with_error(row, three_digits), detail))
    return dealt
