"""The two files a study freezes: means by setting, and what each setting changes beyond a baseline."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from kvmap.studies.effects import Setting, effect

ACCURACY = "evaluate/average/mapped/accuracy"
RETENTION = "evaluate/average/mapped/retention"
CARRIED = "evaluate/perplexity/mapped/context_carried"
KL = "evaluate/perplexity/mapped/kl_nats"
R2_KEY = "diagnose/held_out/mapped/r2_key"
R2_VALUE = "diagnose/held_out/mapped/r2_value"
OUTCOMES = (ACCURACY, RETENTION, CARRIED, KL)
"""What became of the hand-off: of questions, and of text."""

SEED = "calibration.data.seed"
"""What the studies of `conf/experiment/` call a seed; all others follow it."""

TITLES = {
    ACCURACY: "accuracy, questions",
    RETENTION: "accuracy retained",
    CARRIED: "context carried",
    KL: "KL from native, nats a token",
    R2_KEY: "held-out R², keys",
    R2_VALUE: "held-out R², values",
}
"""What an axis or a column of a table calls each."""


def settings_of_table(table: pd.DataFrame, settings: Sequence[str]) -> list[Setting]:
    """Every combination of the settings that some run has, in order of first appearance."""
    return [dict(row) for row in table[list(settings)].drop_duplicates().to_dict("records")]


def effects(
    table: pd.DataFrame,
    settings: Iterable[Setting],
    baseline: Setting,
    metrics: Sequence[str] = OUTCOMES,
    *,
    matched: Sequence[str] = (SEED,),
) -> pd.DataFrame:
    """`effect` of every setting but the baseline itself on every metric, one row each.

    Args:
        table: of `runs_table`.
        settings: what to hold against the baseline; each names the same keys as it.
        baseline: settings with their values.
        metrics: their keys.
        matched: columns in which the two runs of a difference agree, besides the ordered pair.

    Returns:
        Columns: the settings, `metric`, then those of `effect`.

    Raises:
        KvmapError: see `effect`.
    """
    rows: list[dict[str, Any]] = []
    for setting in settings:
        if all(str(setting[name]) == str(value) for name, value in baseline.items()):
            continue
        for metric in metrics:
            found = effect(table, metric, setting, baseline, matched=matched)
            rows.append({**setting, "metric": metric, **found})
    return pd.DataFrame(rows)


def freeze(folder: Path, **tables: pd.DataFrame) -> None:
    """Writes each table to `<name>.csv` of a study's folder, five digits a number, and prints it."""
    for name, table in tables.items():
        table.to_csv(folder / f"{name}.csv", index=False, float_format="%.5g")
        print(f"{name}:\n{table.to_string(float_format=lambda value: f'{value:.3f}')}\n")
