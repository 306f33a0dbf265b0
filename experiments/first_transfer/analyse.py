"""Gather the sweeps of run.sh into results.csv and figure.png. Reads run directories only.

python experiments/first_transfer/analyse.py SWEEP_DIRECTORY [SWEEP_DIRECTORY ...]
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import pandas as pd
from matplotlib import pyplot as plt

from kvmap.files import read_json
from kvmap.report import read_table

HERE = Path(__file__).resolve().parent
METRICS = ("perplexity", "context_carried", "kl_nats", "top1_agreement", "accuracy")
COLOURS = {"head_local": "#0072B2", "full_head": "#D55E00"}


def job_rows(job: Path) -> list[dict[str, Any]]:
    """Every measure of one run, with the settings that made it."""
    config = read_json(job / "run.json")["config"]
    r2 = pd.DataFrame(read_table(job, "r2"))
    held_out = r2[r2.split == "held_out"].groupby("kind").r2.mean()
    settings = {
        "study": config["study"],
        "direction": config["direction"],
        "native_head": config["transfer"]["native_head"],
        "support": config["mapper"]["support"],
        "top_k": config["mapper"]["top_k"],
        "r2_key": round(held_out["key"], 4),
        "r2_value": round(held_out["value"], 4),
    }
    columns = ("task", "arm", "metric", "value", "n", "standard_error", "low", "high")
    return [
        {**settings, **{column: row[column] for column in columns}}
        for row in read_table(job, "arms")
        if row["metric"] in METRICS
    ]


def draw(results: pd.DataFrame) -> None:
    """Context carried against held-out R² of values: what is mapped well, and what that is worth."""
    carried = results[(results.metric == "context_carried") & (results.arm == "mapped")]
    carried = carried[(carried.study == "first_transfer") & (carried.direction == "up")]
    figure, axes = plt.subplots(1, 2, figsize=(7, 2.8), layout="constrained")
    for axis, native_head in zip(axes, (0, 1), strict=True):
        chosen = carried[carried.native_head == native_head]
        for support, points in chosen.groupby("support"):
            points = points.sort_values("r2_value")
            errors = [points.value - points.low, points.high - points.value]
            label = support.replace("_", "-")
            axis.errorbar(
                points.r2_value,
                points.value,
                errors,
                fmt="o-",
                capsize=2,
                color=COLOURS[support],
                label=label,
            )
            left = support == "head_local"
            place, align = ((-4, 5), "right") if left else ((4, -11), "left")
            for point in points.itertuples():
                axis.annotate(
                    point.top_k,
                    (point.r2_value, point.value),
                    place,
                    textcoords="offset points",
                    ha=align,
                    fontsize=8,
                    color=COLOURS[support],
                )
        axis.margins(x=0.1)
        axis.axhline(0, color="0.6", linewidth=0.8)
        owner = "mapped (published)" if native_head == 0 else "the target's own"
        axis.set(title=f"first token {owner}", xlabel="held-out R² of values (labels: k)")
    n = int(carried.n.max())
    axes[0].set_ylabel(f"context carried\n(95 % interval, n = {n} sequences)")
    axes[0].legend(frameon=False)
    figure.savefig(HERE / "figure.png", dpi=200)


def main() -> None:
    """Entry point."""
    records = [record for root in sys.argv[1:] for record in sorted(Path(root).glob("*/run.json"))]
    jobs = [record.parent for record in records if read_json(record)["status"] == "done"]
    if not jobs:
        sys.exit(__doc__)
    results = pd.DataFrame([row for job in jobs for row in job_rows(job)])
    results.to_csv(HERE / "results.csv", index=False, float_format="%.5g")
    draw(results)
    carried = results[results.arm == "mapped"]
    print(
        carried.pivot_table(
            "value", ["study", "native_head", "support", "top_k"], ["task", "metric"]
        ).to_string()
    )


if __name__ == "__main__":
    main()
