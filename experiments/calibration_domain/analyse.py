"""Gather the sweep of run.sh into results.csv, effects.csv and figure.png. Reads run directories only.

python experiments/calibration_domain/analyse.py SWEEP_DIRECTORY [SWEEP_DIRECTORY ...]
"""

from __future__ import annotations

import sys
from pathlib import Path

from kvmap.studies.effects import pooled
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
SETTINGS = ("calibration.data.where.domain",)
BASELINE = {"calibration.data.where.domain": "world"}
"""Text of the kind that the hand-off carries."""
METRICS = (*OUTCOMES, R2_KEY, R2_VALUE)


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
        "calibration.data.where.domain",
        (RETENTION, CARRIED, R2_VALUE),
        HERE / "figure.png",
        label="calibration text",
    )


if __name__ == "__main__":
    main()
