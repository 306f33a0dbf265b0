"""Gather the sweep of run.sh into results.csv, effects.csv and figure.png. Reads run directories only.

python experiments/rope_strategy/analyse.py SWEEP_DIRECTORY [SWEEP_DIRECTORY ...]
"""

from __future__ import annotations

from pathlib import Path

from kvmap.studies.one_setting import analyse, directories
from kvmap.studies.summary import R2_KEY, RETENTION

LENGTHS = (128, 512)
"""Tokens handed over: of the calibration's length, and of four times it."""
BY_LENGTH = tuple(f"evaluate/long_context/mapped/length_context_carried_at_{length}" for length in LENGTHS)

if __name__ == "__main__":
    analyse(
        Path(__file__).resolve().parent,
        directories(__doc__),
        "rope.strategy",
        "strip",
        (RETENTION, *BY_LENGTH),
        "keys: rotated for the target, rotated to rotated, or unrotated",
        measures=(*BY_LENGTH, R2_KEY),
        names=dict(zip(BY_LENGTH, ("carried, 128 tokens", "carried, 512 tokens"), strict=True)),
    )
