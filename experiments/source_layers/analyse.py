"""Gather the sweep of run.sh into results.csv, effects.csv and figure.png. Reads run directories only.

python experiments/source_layers/analyse.py SWEEP_DIRECTORY [SWEEP_DIRECTORY ...]
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from kvmap.studies.effects import pooled
from kvmap.studies.one_setting import directories
from kvmap.studies.plots import panels
from kvmap.studies.runs import runs_table
from kvmap.studies.summary import (
    CARRIED,
    OUTCOMES,
    R2_KEY,
    R2_VALUE,
    RETENTION,
    effects,
    freeze,
    settings_of_table,
)

HERE = Path(__file__).resolve().parent
RULE, K = "selection.rule", "mapper.top_k"
SETTINGS = (RULE, K)
ALL_LAYERS = {RULE: "r2", K: "all"}
"""Nothing is left to choose, so every rule gives this map."""
METRICS = (*OUTCOMES, R2_KEY, R2_VALUE)


def rules(table: pd.DataFrame, k: int) -> pd.DataFrame:
    """Every other rule beyond R² of single layers, at the same number of layers."""
    others = [{RULE: rule, K: k} for rule in table[RULE].unique()]
    return effects(table, others, {RULE: "r2", K: k}, METRICS).assign(beyond=f"r2, k = {k}")


def main() -> None:
    """Entry point."""
    table = runs_table(directories(__doc__))
    freeze(
        HERE,
        results=pooled(table, SETTINGS, METRICS),
        effects=pd.concat(
            [
                effects(table, settings_of_table(table, SETTINGS), ALL_LAYERS, METRICS).assign(
                    beyond="all layers"
                ),
                *(rules(table, k) for k in (1, 2)),
            ]
        ),
    )
    panels(
        table,
        "mapper.top_k",
        (RETENTION, CARRIED, R2_VALUE),
        HERE / "figure.png",
        label="source layers that inform a target layer",
        by="selection.rule",
    )


if __name__ == "__main__":
    main()
