"""Gather the sweep of run.sh into results.csv, effects.csv and figure.png. Reads run directories only.

python experiments/hold_back/analyse.py SWEEP_DIRECTORY [SWEEP_DIRECTORY ...]
"""

from __future__ import annotations

import sys
from pathlib import Path

from kvmap.studies.effects import pooled
from kvmap.studies.plots import panels
from kvmap.studies.runs import runs_table
from kvmap.studies.summary import CARRIED, OUTCOMES, RETENTION, effects, freeze, settings_of_table

HERE = Path(__file__).resolve().parent
SETTINGS = ("transfer.hold_back",)
BASELINE = {"transfer.hold_back": 1}
METRICS = OUTCOMES


def main() -> None:
    """Entry point."""
    if not sys.argv[1:]:
        sys.exit(__doc__)
    table = runs_table(map(Path, sys.argv[1:]))
    freeze(
        HERE,
        results=pooled(table, SETTINGS, METRICS),
        effects=effects(table, settings_of_table(table, SETTINGS), BASELINE, METRICS),
    )
    panels(
        table,
        "transfer.hold_back",
        (RETENTION, CARRIED),
        HERE / "figure.png",
        label="last tokens that the target reads itself",
    )


if __name__ == "__main__":
    main()
