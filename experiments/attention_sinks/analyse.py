"""Gather the sweep of run.sh into CSV files and two figures. Reads run directories only.

python experiments/attention_sinks/analyse.py SWEEP_DIRECTORY [SWEEP_DIRECTORY ...]
"""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import numpy as np
import pandas as pd
from matplotlib import pyplot as plt

from kvmap.prediction import correlate
from kvmap.report import read_table
from kvmap.studies.effects import pooled
from kvmap.studies.one_setting import directories
from kvmap.studies.plots import COLUMN_WIDTH_INCHES, STYLE, panels
from kvmap.studies.runs import PAIR, runs_table
from kvmap.studies.summary import ACCURACY, CARRIED, OUTCOMES, R2_KEY, R2_VALUE, SEED, effects, freeze

HERE = Path(__file__).resolve().parent
HEAD, ROWS, SUPPORT, K = "transfer.native_head", "sink rows", "mapper", "mapper.top_k"
KEPT, DROPPED = "fitted too", "left out"
TEXTS = ("evaluation", "questions")
STREAMED = ("attention_cosine", "concentration_key", "concentration_value", "sink_mass", "sink_mass_mapped")
DIAGNOSTICS = (R2_KEY, R2_VALUE, *(f"diagnose/{text}/mapped/{name}" for text in TEXTS for name in STREAMED))
ORACLES = tuple(
    f"evaluate/{task}/{arm}/{metric}"
    for task, metric in (("average", "accuracy"), ("perplexity", "context_carried"))
    for arm in ("own_keys", "own_values")
)


def with_rows(table: pd.DataFrame) -> pd.DataFrame:
    """Says whether the first rows were fitted; runs of one setting with different arms become one row."""
    kept = (table["calibration.native_head"] == 0) | (table[HEAD] == 0)
    table = table.assign(**{ROWS: np.where(kept, KEPT, DROPPED)})
    return table.groupby([PAIR, SEED, HEAD, ROWS, SUPPORT, K], sort=False).first().copy().reset_index()


def sweeps_effects(table: pd.DataFrame) -> pd.DataFrame:
    """What an exact head changes beyond none, more of it beyond one token, and fitting its rows too."""
    same = [SEED, SUPPORT, K]
    metrics = [*OUTCOMES, R2_KEY, R2_VALUE]
    heads = [{HEAD: head, ROWS: DROPPED} for head in (1, 4, 16)]
    parts = [
        effects(table, heads, {HEAD: 0, ROWS: KEPT}, metrics, matched=same).assign(beyond="native_head=0"),
        effects(table, heads[1:], heads[0], metrics, matched=same).assign(beyond="native_head=1"),
        effects(table, [{HEAD: 1, ROWS: KEPT}], heads[0], metrics, matched=same).assign(
            beyond="rows left out"
        ),
    ]
    return pd.concat(parts, ignore_index=True)


def prediction(table: pd.DataFrame) -> pd.DataFrame:
    """Does R², or cosine, order maps of different support and k? By who owns the first token."""
    parts = []
    for head, rows in ((0, KEPT), (1, DROPPED)):
        runs = table[(table[HEAD] == head) & (table[ROWS] == rows)]
        found = correlate(
            runs, ["average/accuracy", "perplexity/context_carried"], diagnostics=DIAGNOSTICS, group=PAIR
        )
        parts.append(found[found.scope != "between"].assign(**{HEAD: head}))
    columns = [
        HEAD,
        "task",
        "diagnostic",
        "scope",
        "method",
        "value",
        "low",
        "high",
        "n_configurations",
        "n_pairs",
    ]
    return pd.concat(parts, ignore_index=True)[columns]


def sink_mass(table: pd.DataFrame) -> pd.DataFrame:
    """Attention on the first token by ordered pair, layer and head, natively and on the mapped cache."""
    runs = table[
        (table[HEAD] == 1) & (table[ROWS] == DROPPED) & (table[SUPPORT] == "linear") & (table[K] == "all")
    ]
    rows = [
        {PAIR: run[PAIR], "layer": row["layer"], "head": row["head"], "sink_mass": row["sink_mass"]}
        for _, run in runs.iterrows()
        for row in read_table(Path(run["run"]), "attention_output")
        if row["text"] == "evaluation"
    ]
    table = pd.DataFrame(rows)
    table["target"] = table[PAIR].str.split(" → ").str[1]
    return table.groupby(["target", "layer", "head"], as_index=False)["sink_mass"].mean()


def draw_mass(mass: pd.DataFrame) -> None:
    """A layer × head map for each target."""
    targets = list(mass["target"].unique())
    with plt.rc_context(STYLE):
        size = COLUMN_WIDTH_INCHES, 2.1
        figure, axes = plt.subplots(1, len(targets), figsize=size, layout="constrained", squeeze=False)
        for axis, target in zip(axes[0], targets, strict=True):
            grid = mass[mass["target"] == target].pivot(index="layer", columns="head", values="sink_mass")
            image = axis.imshow(grid, vmin=0, vmax=1, cmap="viridis", aspect="auto")
            axis.set_title(target, fontsize=7)
            axis.set_xlabel("query head")
            axis.set_yticks(range(len(grid)))
            axis.set_xticks(range(0, len(grid.columns), 2))
        axes[0, 0].set_ylabel("layer")
        figure.colorbar(image, ax=axes[0].tolist(), label="attention on the first token")
        figure.savefig(HERE / "sink_mass.png", dpi=300)


def main() -> None:
    """Entry point."""
    table = with_rows(runs_table(directories(__doc__)))
    mass = sink_mass(table)
    freeze(
        HERE,
        results=pooled(table, (HEAD, ROWS, SUPPORT, K), [*OUTCOMES, *ORACLES, *DIAGNOSTICS]),
        effects=sweeps_effects(table),
        prediction=prediction(table),
        sink_mass=mass,
    )
    draw_mass(mass)
    shown = table[(table[ROWS] == DROPPED) | (table[HEAD] == 0)]
    shown = shown.assign(
        map=shown[SUPPORT].str.replace("linear", "full head") + ", k = " + shown[K].astype(str)
    )
    panels(
        shown,
        HEAD,
        (ACCURACY, CARRIED),
        HERE / "figure.png",
        label="first tokens that the target computes itself",
        by="map",
        order=["0", "1", "4", "16"],
        names={"head_local, k = 1": "head-local, k = 1", "head_local, k = all": "head-local, k = all"},
    )


if __name__ == "__main__":
    main()
