"""The analysis of a study that changes one setting: two tables and a figure."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvmap.studies.effects import pooled
from kvmap.studies.plots import panels
from kvmap.studies.runs import runs_table
from kvmap.studies.summary import OUTCOMES, effects, freeze, settings_of_table


def directories(usage: str) -> list[Path]:
    """The sweep directories of the command line; without any, the program says `usage` and ends."""
    if not sys.argv[1:]:
        sys.exit(usage)
    return [Path(argument) for argument in sys.argv[1:]]


def analyse(
    folder: Path,
    sweeps: Sequence[Path],
    setting: str,
    baseline: Any,
    shown: Sequence[str],
    label: str,
    *,
    measures: Sequence[str] = (),
    names: Mapping[str, str] | None = None,
) -> None:
    """Writes `results.csv`, `effects.csv` and `figure.png` of a study.

    Args:
        folder: the study's.
        sweeps: directories of its runs.
        setting: its key.
        baseline: the value that every other is held against.
        shown: metrics of the figure, from top to bottom.
        label: what the setting is called there.
        measures: metrics of the tables besides `OUTCOMES`.
        names: what a value of the setting, or a metric, is called in the figure.

    Raises:
        KvmapError: directories without runs, or runs without the setting or a metric.
    """
    table = runs_table(sweeps)
    metrics = (*OUTCOMES, *measures)
    freeze(
        folder,
        results=pooled(table, [setting], metrics),
        effects=effects(table, settings_of_table(table, [setting]), {setting: baseline}, metrics),
    )
    panels(table, setting, shown, folder / "figure.png", label=label, names=names)
