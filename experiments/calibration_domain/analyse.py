"""Gather the sweep of run.sh into results.csv, effects.csv and figure.png. Reads run directories only.

python experiments/calibration_domain/analyse.py SWEEP_DIRECTORY [SWEEP_DIRECTORY ...]
"""

from __future__ import annotations

from pathlib import Path

from kvmap.studies.one_setting import analyse, directories
from kvmap.studies.summary import CARRIED, R2_KEY, R2_VALUE, RETENTION

if __name__ == "__main__":
    analyse(
        Path(__file__).resolve().parent,
        directories(__doc__),
        "calibration.data.where.domain",
        "world",  # text of the kind that the hand-off carries
        (RETENTION, CARRIED, R2_VALUE),
        "calibration text",
        measures=(R2_KEY, R2_VALUE),
    )
