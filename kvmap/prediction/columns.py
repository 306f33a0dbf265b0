"""Which columns of a table of runs are diagnostics of the mapped cache, and which are outcomes of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvmap.errors import KvmapError, UnknownName

if TYPE_CHECKING:
    import pandas as pd

ARM = "mapped"
FIT = (
    "plan/model/calibration/rows_per_feature",
    "plan/model/mapper/n_features",
    "plan/model/mapper/n_weights",
)
"""Facts of the fit that are held against outcomes as diagnostics are: N/p, p, and the number of weights."""

OUTCOMES = (
    "retention",
    "floor_retention",
    "gain_recovered",
    "context_carried",
    "accuracy",
    "perplexity_ratio",
)
"""What is looked at where nothing is asked for; `docs/evaluation.md` defines them."""

AVERAGES = ("average", "tasks_average", "perplexity")
"""Tasks that stand for all: averages over questions and over lm-eval's tasks, and the text of sequences."""


@dataclass(frozen=True)
class Outcome:
    """What became of a hand-off on one task.

    Attributes:
        task: as in the key of the metric.
        metric: `retention`, ...
        column: of the table.
    """

    task: str
    metric: str
    column: str


def with_ratios(table: pd.DataFrame) -> pd.DataFrame:
    """The table, and a column `evaluate/<task>/mapped/perplexity_ratio` for each task that has perplexities.

    `perplexity(mapped) / perplexity(target)`: 1 as good as the target's own cache.
    """
    ratios = {}
    for name in table.columns:
        parts = str(name).split("/")
        if parts[0] != "evaluate" or parts[2:] != [ARM, "perplexity"]:
            continue
        own = f"evaluate/{parts[1]}/target/perplexity"
        if own in table:
            ratios[f"evaluate/{parts[1]}/{ARM}/perplexity_ratio"] = table[name] / table[own]
    return table.assign(**ratios)


def diagnostics_of(table: pd.DataFrame) -> list[str]:
    """Metrics `diagnose/…/mapped/…` and `FIT` that the runs have."""
    found = [
        str(name)
        for name in table.columns
        if str(name).startswith("diagnose/") and f"/{ARM}/" in str(name) and ":" not in str(name)
    ]
    return found + [name for name in FIT if name in table]


def outcomes_of(table: pd.DataFrame, names: Sequence[str] | None = None) -> list[Outcome]:
    """Outcomes of the mapped arm.

    Args:
        table: of runs, `with_ratios`.
        names: metrics (`retention`: of every task) or tasks and metrics (`average/retention`); None: those
            of `OUTCOMES` that there are.

    Raises:
        UnknownName: a name that no run has.
        KvmapError: runs that evaluated nothing of it.
    """
    every = _every_outcome(table)
    if names is None:
        found = [outcome for metric in OUTCOMES for outcome in every if outcome.metric == metric]
        if not found:
            raise KvmapError(
                f"the runs have none of {', '.join(OUTCOMES)} of the arm {ARM!r}: give runs of the stage "
                "evaluate with that arm"
            )
        return found
    known = [name for o in every for name in (o.metric, f"{o.task}/{o.metric}")]
    for name in names:
        if name not in known:
            raise UnknownName("outcome", name, set(known))
    return [o for name in names for o in every if name in (o.metric, f"{o.task}/{o.metric}")]


def _every_outcome(table: pd.DataFrame) -> list[Outcome]:
    found = []
    for name in map(str, table.columns):
        parts = name.split("/")
        if len(parts) == 4 and parts[0] == "evaluate" and parts[2] == ARM and ":" not in name:
            found.append(Outcome(parts[1], parts[3], name))
    return found


def short_name(column: str) -> str:
    """A diagnostic as tables and figures call it: `held_out r2_key`, `mapper n_features`."""
    parts = column.split("/")
    if parts[0] == "plan":
        return f"{parts[2]} {parts[-1]}"
    return f"{parts[1]} {parts[-1]}" if len(parts) == 4 else column
