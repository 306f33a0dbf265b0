"""Gather the sweep of run.sh into results.csv, effects.csv and figure.png. Reads run directories only.

python experiments/rope_strategy/analyse.py SWEEP_DIRECTORY [SWEEP_DIRECTORY ...]
"""

from __future__ import annotations

import sys
from pathlib import Path

from kvmap.studies.effects import pooled
from kvmap.studies.plots import panels
from kvmap.studies.runs import runs_table
from kvmap.studies.summary import OUTCOMES, R2_KEY, RETENTION, effects, freeze, settings_of_table

HERE = Path(__file__).resolve().parent
SETTINGS = ("rope.strategy",)
BASELINE = {"rope.strategy": "strip"}
LENGTHS = (128, 512)
"""Tokens handed over: of the calibration's length, and of four times it."""
BY_LENGTH = tuple(f"evaluate/long_context/mapped/length_context_carried_at_{length}" for length in LENGTHS)
METRICS = (*OUTCOMES, *BY_LENGTH, R2_KEY)


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
        "rope.strategy",
        (RETENTION, *BY_LENGTH),
        HERE / "figure.png",
        names=dict(zip(BY_LENGTH, ("carried, 128 tokens", "carried, 512 tokens"), strict=True)),
        label="keys: rotated for the target, rotated to rotated, or unrotated",
    )


if __name__ == "__main__":
    main()
