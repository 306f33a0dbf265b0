"""Finished runs as a table: one row a run, its settings and its metrics as columns."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from kvmap.errors import KvmapError
from kvmap.evaluation.run_groups import NO_RESULT, NO_RESULT_GROUPS, find_runs, finished
from kvmap.evaluation.run_tables import run_record, settings_of
from kvmap.tracking import read_metrics

IDENTITY = ("run", "study", "pair", "mapper", "direction")
"""Columns that are neither a setting by its flat key nor a metric."""

PAIR = "ordered_pair"
"""Column of `source → target`: which models, whatever pair file and direction name them."""


def runs_table(paths: Iterable[Path]) -> pd.DataFrame:
    """Settings and metrics of finished runs.

    Args:
        paths: directories of runs, or of sweeps with runs in them.

    Returns:
        One row a run, in the order given. Columns: `run` (its directory), `study`, `pair` and `mapper` (names
        of the chosen files of `conf/`), `direction`, `ordered_pair`; every setting by its flat key
        (`mapper.top_k`), lists as text; every metric by its key (`evaluate/average/mapped/retention`), with
        `<metric>:n` and `<metric>:standard_error`. What a run lacks is nan.

    Raises:
        KvmapError: a directory without runs, or none that is finished.
    """
    runs = finished(find_runs(Path(path) for path in paths))
    return pd.DataFrame([_row(run) for run in runs])


def _row(run: Path) -> dict[str, Any]:
    record = run_record(run)
    settings = {key: _cell(value) for key, value in settings_of(record).items()}
    chosen = _choices(run)
    names = [record["config"]["pair"][role]["id"] for role in ("source", "target")]
    if settings["direction"] == "down":
        names.reverse()
    metrics: dict[str, Any] = {}
    for key, metric in read_metrics(run).items():
        metrics[key] = metric.value
        metrics[f"{key}:n"] = metric.n
        metrics[f"{key}:standard_error"] = metric.standard_error
    return {
        **settings,
        "run": str(run),
        "study": record["study"],
        "pair": chosen.get("pair") or settings.get("pair.name"),
        "mapper": chosen.get("mapper") or settings.get("mapper.kind"),
        "direction": settings["direction"],
        PAIR: " → ".join(name.rsplit("/", 1)[-1].removeprefix("zoo:") for name in names),
        **metrics,
    }


def _choices(run: Path) -> dict[str, str]:
    """Which file of each group of `conf/` the run was composed of."""
    file = run / ".hydra" / "hydra.yaml"
    if not file.is_file():
        return {}
    return dict(yaml.safe_load(file.read_text(encoding="utf-8"))["hydra"]["runtime"]["choices"])


def _cell(value: Any) -> Any:
    return str(value) if isinstance(value, list | dict) else value


def metrics_of(table: pd.DataFrame, prefix: str = "") -> list[str]:
    """Columns that are metrics whose key begins so."""
    return [name for name in table if "/" in name and ":" not in name and name.startswith(prefix)]


def varied(table: pd.DataFrame) -> list[str]:
    """Settings in which the rows differ: without seeds, paths, what changes no result, and the pair's parts.

    `pair`, `mapper` and `direction` stand for what their files hold; a setting of the mapper's file that
    differs only with it is left out.
    """
    candidates = [
        name
        for name in table
        if "/" not in name
        and name not in ("run", "study", PAIR, *NO_RESULT)
        and not name.startswith(("pair.", *NO_RESULT_GROUPS))
        and not re.search(r"(^|[._])(seed|path)$", name)
    ]
    found = [name for name in candidates if table[name].astype(str).nunique() > 1]
    return [name for name in found if name == "mapper" or not _follows_mapper(table, name)]


def _follows_mapper(table: pd.DataFrame, name: str) -> bool:
    return name.startswith("mapper.") and bool(
        table.groupby("mapper", dropna=False)[name].agg(lambda column: column.astype(str).nunique()).max()
        == 1
    )


def require(table: pd.DataFrame, columns: Iterable[str]) -> None:
    """Refuses a table without some of the columns.

    Raises:
        KvmapError: names those that are missing, and what there is of their kind.
    """
    missing = [name for name in columns if name not in table]
    if missing:
        near = [
            name for name in metrics_of(table) if name.rsplit("/", 1)[-1] == missing[0].rsplit("/", 1)[-1]
        ]
        raise KvmapError(
            f"the runs have no {', '.join(missing)}; of that kind they have {', '.join(near) or 'nothing'}: "
            "run the stage that writes it"
        )
