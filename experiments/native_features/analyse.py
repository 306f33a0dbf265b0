"""Gather the sweep of run.sh into CSV files and figure.png. Reads run directories only.

python experiments/native_features/analyse.py SWEEP_DIRECTORY [SWEEP_DIRECTORY ...]
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from kvmap.report import read_table
from kvmap.studies.effects import pooled
from kvmap.studies.one_setting import directories
from kvmap.studies.plots import panels
from kvmap.studies.runs import PAIR, runs_table
from kvmap.studies.summary import ACCURACY, CARRIED, OUTCOMES, R2_KEY, R2_VALUE, SEED, effects, freeze

HERE = Path(__file__).resolve().parent
LAYERS = "mapper.native_layers"
SETTINGS = ("mapper", LAYERS)
COST = "evaluate/hand_back_1024/mapped/flop_share"
CONTROL = ("evaluate/average/bias_only/accuracy", "evaluate/perplexity/bias_only/context_carried")
METRICS = (*OUTCOMES, *CONTROL, R2_KEY, R2_VALUE, COST)


def by_layer(table: pd.DataFrame) -> pd.DataFrame:
    """Held-out R² of each mapped target layer and kind: means over heads, seeds and pairs of that target."""
    rows = []
    for _, run in table.iterrows():
        found = pd.DataFrame(
            [row for row in read_table(Path(run["run"]), "r2") if row["split"] == "held_out"]
        )
        means = found.groupby(["layer", "kind"], as_index=False)["r2"].mean()
        target = run[PAIR].split(" → ")[1]
        rows.append(means.assign(mapper=run["mapper"], target=target, **{LAYERS: run[LAYERS]}))
    keys = ["target", "mapper", LAYERS, "layer", "kind"]
    return pd.concat(rows).groupby(keys, as_index=False)["r2"].mean()


def main() -> None:
    """Entry point."""
    table = runs_table(directories(__doc__))
    pairs = table.groupby(PAIR)[LAYERS].max()
    deep = table[table[PAIR].isin(pairs[pairs > 2].index)]
    layers = [{LAYERS: count} for count in sorted(table[LAYERS].unique())]
    freeze(
        HERE,
        results=pooled(table, SETTINGS, METRICS),
        effects=effects(table, layers, {LAYERS: 0}, METRICS, matched=[SEED, "mapper"]),
        layers=by_layer(table),
    )
    panels(
        table if deep.empty else deep,
        LAYERS,
        (ACCURACY, CARRIED, COST),
        HERE / "figure.png",
        label="first layers that the target computes itself",
        by="mapper",
        names={"linear": "full head", "head_local": "head-local", COST: "FLOPs, of re-prefill's"},
    )


if __name__ == "__main__":
    main()
