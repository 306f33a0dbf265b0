"""The runs of a sweep or a study: read, sorted into configurations, seeds of each taken together."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvmap.errors import KvmapError
from kvmap.figures.style import number
from kvmap.progress import track
from kvmap.report.measures import AVERAGES, fraction, mean, three_digits, with_interval
from kvmap.report.reading import Row, read_run, runs_below
from kvmap.report.settings import written
from kvmap.report.sweep import leaves

if TYPE_CHECKING:
    import pandas as pd

    from kvmap.evaluation.run_groups import Group

MAPPED = "mapped"
HOW = (
    "calibration.batch_size",
    "calibration.keep_captures",
    "calibration.memory_budget_gib",
    "calibration.mode",
    "calibration.native_layers",
    "calibration.regressors",
    "calibration.sequential",
    "evaluation.arms",
    "evaluation.batch_size",
    "evaluation.sequential",
)
"""Settings of how a result is come by: named where nothing else tells two configurations apart."""


@dataclass(frozen=True)
class Column:
    """A measure of a configuration.

    Attributes:
        metric: as in the rows of `kvmap.evaluation.aggregate`, or, where `keys` are given, in words.
        title: of the column.
        arm: whose.
        keys: metrics of the runs, the first that any of them has; their mean over runs is shown.
        digits: three significant digits instead of three decimals.
        drawn: in the figure of the study too.
    """

    metric: str
    title: str
    arm: str = MAPPED
    keys: Sequence[str] = ()
    digits: bool = False
    drawn: bool = False


COLUMNS = (
    Column("accuracy", "accuracy, mapped"),
    Column("accuracy", "target", "target"),
    Column("accuracy", "source", "source"),
    Column("tasks_accuracy", "tasks, mapped"),
    Column("tasks_accuracy", "target", "target"),
    Column("retention", "accuracy kept", drawn=True),
    Column("floor_retention", "kept over chance"),
    Column("gain_recovered", "gain recovered"),
    Column("context_carried", "context carried", drawn=True),
    Column("perplexity", "perplexity", keys=("evaluate/perplexity/mapped/perplexity",), digits=True),
    Column("kl_nats", "KL, nats", keys=("evaluate/perplexity/mapped/kl_nats",)),
    Column("r2_key", "R² keys", keys=("diagnose/held_out/mapped/r2_key",)),
    Column("r2_value", "R² values", keys=("diagnose/held_out/mapped/r2_value",)),
    Column(
        "cosine",
        "cosine",
        keys=(
            "diagnose/questions/mapped/attention_cosine",
            "diagnose/evaluation/mapped/attention_cosine",
            "diagnose/held_out/mapped/attention_cosine",
            "diagnose/attention_output/mapped/cosine",
        ),
    ),
)


@dataclass(frozen=True)
class Configuration:
    """Finished runs that differ in seeds alone.

    Attributes:
        number: by which tables and figures call it.
        settings: what sets it apart, as text.
        group: its runs.
        rows: of `kvmap.evaluation.aggregate`.
        metrics: of its runs, mean over them; those of evaluation serve where there are no rows.
        note: why there are none, though something was evaluated.
    """

    number: int
    settings: dict[str, str]
    group: Group
    rows: Sequence[Row]
    metrics: Mapping[str, float]
    note: str = ""

    @property
    def label(self) -> str:
        """`#3 top_k=8, direction=up`."""
        said = ", ".join(f"{name}={value}" for name, value in self.named.items())
        return f"#{self.number} {said}".strip()

    @property
    def named(self) -> dict[str, str]:
        """What sets it apart, keys by their last part where that is the only one so called.

        What only says how a result was come by, and from which file, is left to the table.
        """
        shown = [name for name in self.settings if name not in HOW and not name.endswith("path")]
        last = [name.rsplit(".", 1)[-1] for name in shown]
        names = [short if last.count(short) == 1 else name for short, name in zip(last, shown, strict=True)]
        return {name: self.settings[key] for name, key in zip(names, shown, strict=True)}

    def estimate(self, column: Column) -> Row | None:
        """{value, low, high} of a measure: of the average over tasks, of the only task, or a mean of runs."""
        for key in column.keys:
            if math.isfinite(number(self.metrics.get(key))):
                return {"value": self.metrics[key]}
        of_metric = [r for r in self.rows if (r["metric"], r["arm"]) == (column.metric, column.arm)]
        if not self.rows:
            of_metric = list(self._own(column))
        tasks = [str(row["task"]) for row in of_metric]
        chosen = next((task for task in AVERAGES if task in tasks), tasks[0] if len(tasks) == 1 else None)
        row = next((row for row in of_metric if row["task"] == chosen), None)
        return row if row is not None and math.isfinite(number(row["value"])) else None

    def _own(self, column: Column) -> Iterator[Row]:
        """Means over runs of what each of them measured."""
        for key, value in self.metrics.items():
            stage, task, arm, metric = [*key.split("/"), "", "", ""][:4]
            if (stage, arm, metric) == ("evaluate", column.arm, column.metric):
                yield {"task": task, "value": value}

    def cell(self, column: Column) -> str:
        return with_interval(self.estimate(column), three_digits if column.digits else fraction)

    @property
    def counts(self) -> str:
        """`24 × 3`: items, and runs that answered them; sequences where there were no questions."""
        items = [int(row["n_items"]) for row in self.rows if row["task"] in AVERAGES]
        items = items or [int(row["n_items"]) for row in self.rows]
        return f"{max(items)} × {len(self.group.runs)}" if items else f"– × {len(self.group.runs)}"


@dataclass(frozen=True)
class Study:
    """What the folder of a sweep or study holds.

    Attributes:
        root: the folder.
        records: `run.json` of every run below it, by directory.
        configurations: of the finished ones.
        table: settings and metrics of the finished ones, see `kvmap.studies.runs`; None where none is.
        varied: settings in which they differ, seeds left out.
    """

    root: Path
    records: dict[Path, Row]
    configurations: list[Configuration]
    table: pd.DataFrame | None
    varied: list[str]

    @classmethod
    def read(cls, root: Path) -> Study:
        """Reads every run below a folder, and takes seeds together.

        Raises:
            KvmapError: there is no run, or the tables of some cannot be taken together.
        """
        from kvmap.evaluation.run_groups import group_runs
        from kvmap.studies.runs import runs_table, varied

        records = {run: read_run(run) for run in runs_below(root)}
        done = [run for run, record in records.items() if record["status"] == "done"]
        if not done:
            return cls(root, records, [], None, [])
        table = runs_table(done).set_index("run", drop=False)
        place = {run: number for number, run in enumerate(done)}
        groups = sorted(group_runs(done), key=lambda group: min(map(place.__getitem__, group.runs)))
        settings = {run: _settings(records[run], table.loc[str(run)]) for run in done}
        names = [name for name in varied(table) if name not in HOW and _differ(name, settings.values())]
        labels = _labels(groups, names, settings)
        configurations = [
            _configuration(number, group, labels[number - 1], table)
            for number, group in track(list(enumerate(groups, start=1)), description="configurations")
        ]
        return cls(root, records, configurations, table, names)

    @property
    def unfinished(self) -> list[Path]:
        return [run for run, record in self.records.items() if record["status"] != "done"]

    @property
    def columns(self) -> list[Column]:
        """Measures that any configuration has."""
        return [column for column in COLUMNS if any(each.estimate(column) for each in self.configurations)]

    @property
    def names(self) -> list[str]:
        """Settings by which its configurations are told apart."""
        return list(dict.fromkeys(name for each in self.configurations for name in each.settings))


def _configuration(n: int, group: Group, settings: dict[str, str], table: pd.DataFrame) -> Configuration:
    from kvmap.evaluation.aggregate import aggregate

    rows: list[Row] = []
    note = ""
    try:
        rows = aggregate(group.runs)
    except KvmapError as error:  # runs that evaluated nothing still have metrics of their map
        if any((run / "tables" / "arms.csv").is_file() for run in group.runs):
            note = str(error).removeprefix(f"{group.runs[0]}: ")
    of_group = table.loc[[str(run) for run in group.runs]].dropna(axis="columns", how="all")
    metrics = {
        key: mean(number(value) for value in of_group[key])
        for key in of_group
        if key.startswith(("evaluate/", "diagnose/")) and ":" not in key
    }
    return Configuration(n, settings, group, rows, metrics, note)


def _settings(record: Row, row: pd.Series[Any]) -> dict[str, Any]:
    """A run's settings by flat key; `pair` and `mapper` by the names of their files."""
    return {**dict(leaves(record["config"])), **{name: row[name] for name in ("pair", "mapper")}}


def _differ(name: str, settings: Iterable[Mapping[str, Any]]) -> bool:
    """Whether runs that know a setting differ in it; those of an older version may not know it."""
    return len({written(each[name]) for each in settings if name in each}) > 1


def _labels(
    groups: Sequence[Group], names: Sequence[str], settings: Mapping[Path, Mapping[str, Any]]
) -> list[dict[str, str]]:
    """What sets each configuration apart: settings that vary, and more where two would be called the same."""
    labels = [{name: written(settings[group.runs[0]].get(name)) for name in names} for group in groups]
    for _ in range(len(groups)):
        clashes = [place for place, label in enumerate(labels) if labels.count(label) > 1]
        more = _telling([groups[place].settings for place in clashes], names)
        if more is None:
            break
        for group, label in zip(groups, labels, strict=True):
            label[more] = written(group.settings.get(more))
        names = [*names, more]
    return labels


def _telling(settings: Sequence[Mapping[str, Any]], known: Iterable[str]) -> str | None:
    """The first setting in which these differ and that is not known yet."""
    for name in dict.fromkeys(name for each in settings for name in each):
        if name not in known and len({written(each.get(name)) for each in settings}) > 1:
            return name
    return None
