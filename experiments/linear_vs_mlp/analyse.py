"""Gather the sweep of run.sh into results.csv, effects.csv and figure.png. Reads run directories only.

python experiments/linear_vs_mlp/analyse.py SWEEP_DIRECTORY [SWEEP_DIRECTORY ...]
"""

from __future__ import annotations

from pathlib import Path

from kvmap.studies.one_setting import analyse, directories
from kvmap.studies.summary import CARRIED, R2_KEY, R2_VALUE, RETENTION

if __name__ == "__main__":
    analyse(
        Path(__file__).resolve().parent,
        directories(__doc__),
        "mapper",
        "linear",
        (RETENTION, CARRIED, R2_VALUE),
        "mapper",
        measures=(R2_KEY, R2_VALUE),
        names={
            "linear": "ridge",
            "mlp_values": "ridge keys,\nMLP values",
            "mlp": "MLP",
            "residual": "ridge + MLP",
        },
    )
