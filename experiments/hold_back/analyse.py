"""Gather the sweep of run.sh into results.csv, effects.csv and figure.png. Reads run directories only.

python experiments/hold_back/analyse.py SWEEP_DIRECTORY [SWEEP_DIRECTORY ...]
"""

from __future__ import annotations

from pathlib import Path

from kvmap.studies.one_setting import analyse, directories
from kvmap.studies.summary import CARRIED, RETENTION

if __name__ == "__main__":
    analyse(
        Path(__file__).resolve().parent,
        directories(__doc__),
        "transfer.hold_back",
        1,
        (RETENTION, CARRIED),
        "last tokens that the target reads itself",
    )
