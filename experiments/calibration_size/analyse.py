"""Gather the sweep of run.sh into results.csv, effects.csv and figure.png. Reads run directories only.

python experiments/calibration_size/analyse.py SWEEP_DIRECTORY [SWEEP_DIRECTORY ...]
"""

from __future__ import annotations

from pathlib import Path

from kvmap.studies.one_setting import analyse, directories
from kvmap.studies.summary import CARRIED, R2_KEY, R2_VALUE, RETENTION

FITTED = ("diagnose/fit/mapped/r2_key", "diagnose/fit/mapped/r2_value")

if __name__ == "__main__":
    analyse(
        Path(__file__).resolve().parent,
        directories(__doc__),
        "calibration.n_sequences",
        240,
        (RETENTION, CARRIED, R2_VALUE),
        "sequences of 256 tokens, a fifth held out",
        measures=(R2_KEY, R2_VALUE, *FITTED),
    )
