"""Gather the sweep of run.sh into CSV files and figures. Reads run directories only.

python experiments/predicting_retention/analyse.py SWEEP_DIRECTORY [SWEEP_DIRECTORY ...]
"""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from kvmap.prediction import correlate, leave_one_pair_out
from kvmap.studies.effects import pooled
from kvmap.studies.one_setting import directories
from kvmap.studies.plots import COLOURS, COLUMN_WIDTH_INCHES, STYLE
from kvmap.studies.runs import PAIR, runs_table
from kvmap.studies.summary import CARRIED, R2_KEY, R2_VALUE, RETENTION, freeze

HERE = Path(__file__).resolve().parent
OUTCOMES = ["average/retention", "perplexity/context_carried"]
COSINE = "diagnose/evaluation/mapped/attention_cosine"
SETTINGS = ("transfer.native_head", "mapper", "mapper.top_k")
LABELS = {R2_KEY: "held-out R², keys", R2_VALUE: "held-out R², values", COSINE: "attention-output cosine"}


def main() -> None:
    """Entry point."""
    table = runs_table(directories(__doc__))
    correlations = correlate(table, OUTCOMES, group=PAIR)
    predicted = {name: leave_one_pair_out(table, name, group=PAIR) for name in OUTCOMES}
    freeze(HERE, correlations=correlations, results=pooled(table, SETTINGS, [RETENTION, CARRIED, *LABELS]))
    for name, found in predicted.items():
        freeze(HERE, **{f"predictor_{name.rsplit('/', 1)[-1]}": found.scores})
    with plt.rc_context(STYLE):
        size = COLUMN_WIDTH_INCHES, 5.2
        figure, axes = plt.subplots(3, 1, figsize=size, layout="constrained")
        for axis, (name, label) in zip(axes, LABELS.items(), strict=True):
            for place, (head, mark) in enumerate(((0, "o"), (1, "s"))):
                runs = table[table["transfer.native_head"] == head]
                said = "mapped" if head == 0 else "exact"
                axis.plot(
                    runs[name],
                    runs[RETENTION],
                    mark,
                    color=COLOURS[place],
                    markersize=2,
                    alpha=0.5,
                    label=f"first token {said}",
                )
            axis.set_xlabel(label)
            axis.set_ylabel("accuracy retained")
        axes[0].legend(frameon=False)
        figure.savefig(HERE / "figure.png", dpi=300)


if __name__ == "__main__":
    main()
