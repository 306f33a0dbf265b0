"""Runs that differ in seeds alone as one row: draws of one configuration are no evidence of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvmap.errors import KvmapError
from kvmap.evaluation.run_groups import NO_RESULT, NO_RESULT_GROUPS

if TYPE_CHECKING:
    import pandas as pd

PAIR = "ordered_pair"
"""Default column of what counts as one pair: source → target, either direction by itself."""

N_RUNS = "n_runs"
"""Column that says how many runs a configuration has."""

_FACTS = ("run", "study", N_RUNS)


def configurations(table: pd.DataFrame, group: str = PAIR) -> pd.DataFrame:
    """One row a configuration: the mean of each metric over its runs.

    Runs are of one configuration if they agree in `group` and in every setting but seeds (those called
    `seed`, or ending in `.seed` or `_seed`) and what changes no result
    (`kvmap.evaluation.run_groups.NO_RESULT`). A metric that some of them lack is the mean of the others'. In
    a table without any column of seeds every row is a configuration.

    Args:
        table: one row a run, as `kvmap.studies.runs.runs_table` gives it. Columns with a slash are metrics.
        group: column of the pair.

    Returns:
        Settings, metrics and `n_runs`, in the order of first appearance. What is not a number is the first
        run's.

    Raises:
        KvmapError: no such column, or a run without a pair.
    """
    if group not in table:
        known = ", ".join(str(name) for name in table.columns if "/" not in str(name))
        raise KvmapError(f"group={group!r}: the runs have no such setting; they have {known}")
    if table[group].isna().any():
        raise KvmapError(f"group={group!r}: {int(table[group].isna().sum())} runs have none")
    names = [str(name) for name in table.columns]
    if not any(_is_seed(name) for name in names if "/" not in name):
        return table.assign(**{N_RUNS: 1}).reset_index(drop=True)
    keys = [name for name in names if name == group or _is_setting(name)]
    # as text: settings may be lists, missing, or numbers and words in one column
    labels = ["\x1f".join(map(str, row)) for row in table[keys].itertuples(index=False)]
    grouped = table.assign(**{N_RUNS: 1}).groupby(np.array(labels), sort=False)
    how = {name: "mean" if "/" in name and table[name].dtype.kind in "fiub" else _first_of for name in names}
    return grouped.agg({**how, N_RUNS: "sum"}).reset_index(drop=True)


def _first_of(column: pd.Series) -> object:
    return column.iloc[0]


def _is_setting(name: str) -> bool:
    return not (
        "/" in name or name in (*_FACTS, *NO_RESULT) or name.startswith(NO_RESULT_GROUPS) or _is_seed(name)
    )


def _is_seed(name: str) -> bool:
    last = name.rsplit(".", 1)[-1]
    return last == "seed" or last.endswith("_seed")
