"""Gather the sweeps of run.sh (or run_qwen.sh) into results.csv and figure.png. Reads run directories only.

python experiments/frontier/analyse.py SWEEP_DIRECTORY [SWEEP_DIRECTORY ...]
"""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from pathlib import Path
from statistics import fmean

import matplotlib

matplotlib.use("Agg")
import pandas as pd
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from omegaconf import OmegaConf

from kvmap.evaluation.statistics import context_carried, mean, paired_ratio
from kvmap.files import read_json
from kvmap.report import read_table

HERE = Path(__file__).resolve().parent
N_RESAMPLES = 2000
CONTROL = "bias_only"
COST = ("flop_share", "layer_token_share", "time_share")
# Knob to its label and colour; the order is that of the table and the legend.
KNOBS = {
    "native_layers": ("native layers", "#0072B2"),
    "hold_back": ("held-back tokens", "#E69F00"),
    "attention": ("recompute: attention", "#D55E00"),
    "map_error": ("recompute: map error", "#009E73"),
    "random": ("recompute: random", "0.55"),
    "native_layers + attention": ("1 native layer + attention", "#CC79A7"),
    "native_layers + random": ("1 native layer + random", "0.75"),
    "native_layers + map_error": ("1 native layer + map error", "#F0E442"),
    "native_layers + hold_back": ("1 native layer + held-back tokens", "#8B4513"),
    "hold_back + attention": ("16 held back + attention", "#56B4E9"),
}

Setting = tuple[int, int, float, str]
"""Native layers, held-back tokens, share recomputed, rule (empty without a share)."""


def setting_of(job: Path) -> tuple[str, Setting]:
    """The pair of a run, a hand-off down it named as one of its own, and where its knobs stood."""
    pair = OmegaConf.load(job / ".hydra" / "hydra.yaml").hydra.runtime.choices.pair
    cfg = OmegaConf.load(job / ".hydra" / "config.yaml")
    share = float(cfg.transfer.recompute_share)
    rule = cfg.transfer.recompute_rule if share else ""
    pair = pair if cfg.direction == "up" else f"{pair}, {cfg.direction}"
    return pair, (int(cfg.mapper.native_layers), int(cfg.transfer.hold_back), share, rule)


def knob_of(setting: Setting) -> str:
    """Which knob was turned; empty where none was."""
    native_layers, hold_back, _, rule = setting
    turned = ["native_layers"] * (native_layers > 0) + ["hold_back"] * (hold_back > 1) + [rule] * bool(rule)
    return " + ".join(turned)


def correct(jobs: list[Path], arm: str) -> list[float]:
    """Right (1) or wrong (0), item by item, all seeds."""
    rows = [
        ((number, row["task"], str(row["id"])), row["correct"] in (True, "True"))
        for number, job in enumerate(jobs)
        for row in read_table(job, "items")
        if row["arm"] == arm
    ]
    return [float(right) for _, right in sorted(rows)]


def nll(jobs: list[Path], arm: str) -> list[float]:
    """Nats of each scored sequence, all seeds."""
    return [
        float(row["nll_nats"]) for job in jobs for row in read_table(job, "sequences") if row["arm"] == arm
    ]


def quality(jobs: list[Path], arm: str) -> dict[str, float]:
    """Accuracy and context carried of one arm, with intervals over items and sequences."""
    items, target = correct(jobs, arm), correct(jobs, "target")
    accuracy = mean(items)
    found = {"accuracy": accuracy.value, "accuracy_low": accuracy.low, "accuracy_high": accuracy.high}
    found["retention"] = paired_ratio([items, target], (0,), (1,), "target", N_RESAMPLES, 0).value
    scores = [nll(jobs, name) for name in (arm, "target", "no_context")]
    carried = context_carried(*scores, n_resamples=N_RESAMPLES)
    tokens = [float(row["n_tokens"]) for row in read_table(jobs[0], "sequences") if row["arm"] == arm]
    return found | {
        "carried": carried.value,
        "carried_low": carried.low,
        "carried_high": carried.high,
        "perplexity": math.exp(fmean(scores[0]) / fmean(tokens)),
    }


def cost(jobs: list[Path], length: float, name: str) -> dict[str, float]:
    """Shares of re-prefill at the costed length nearest to `length`, medians of all seeds' runs."""
    tables = [read_table(job, "hand_back") for job in jobs]
    nearest = min({int(row["length"]) for row in tables[0]}, key=lambda known: abs(known - length))
    rows = [row for table in tables for row in table if int(row["length"]) == nearest]
    return {
        f"{name}_{share}": float(pd.Series([float(row[share]) for row in rows]).median()) for share in COST
    }


def result(jobs: list[Path]) -> dict[str, float]:
    """Quality and cost of one setting of the knobs on one pair, all seeds together."""
    lengths = [float(row["n_context"]) for row in read_table(jobs[0], "items") if row["arm"] == "mapped"]
    prefix = float(OmegaConf.load(jobs[0] / ".hydra" / "config.yaml").evaluation.perplexity.prefix_tokens)
    longest = max(int(row["length"]) for row in read_table(jobs[0], "hand_back"))
    control = {}
    if correct(jobs, CONTROL):
        control = {f"{CONTROL}_{key}": value for key, value in quality(jobs, CONTROL).items()}
    return {
        "n_seeds": len(jobs),
        "n_items": len(correct(jobs, "mapped")),
        "question_tokens": fmean(lengths),
        **cost(jobs, fmean(lengths), "question"),
        **cost(jobs, prefix, "prefix"),
        **cost(jobs, longest, "long"),
        **quality(jobs, "mapped"),
        **control,
    }


def draw(table: pd.DataFrame, natives: dict[str, dict[str, dict[str, float]]]) -> None:
    """Context carried and accuracy against the FLOPs of the hand-off, one row of panels for each pair."""
    pairs = list(natives)
    figure, axes = plt.subplots(
        len(pairs), 2, figsize=(8.4, 3.0 * len(pairs)), layout="constrained", squeeze=False
    )
    for row, pair in enumerate(pairs):
        points = table[table.pair == pair]
        for axis, measure, at in (
            (axes[row][0], "carried", "prefix"),
            (axes[row][1], "accuracy", "question"),
        ):
            levels(axis, {arm: found[measure] for arm, found in natives[pair].items()})
            for knob in KNOBS:
                line(axis, points, knob, measure, f"{at}_flop_share")
            axis.set_xscale("log")
            axis.set_xticks([0.05, 0.1, 0.2, 0.5, 1.0], ["5 %", "10 %", "20 %", "50 %", "100 %"])
            axis.minorticks_off()
            axis.grid(color="0.93")
        axes[row][0].set_ylabel(f"{pair}\ncontext carried")
        axes[row][1].set_ylabel("accuracy on context questions")
    for axis in axes[-1]:
        axis.set_xlabel("FLOPs of the hand-off, share of re-prefill")
    handles = {
        label: handle
        for axis in axes.flat
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    figure.legend(
        handles.values(), handles.keys(), loc="outside upper center", ncols=4, frameon=False, fontsize=8
    )
    figure.savefig(HERE / "figure.png", dpi=180)


def levels(axis: Axes, values: dict[str, float]) -> None:
    """Ceiling, source and floor as horizontals."""
    for arm, value in values.items():
        source = arm == "source"
        axis.axhline(value, color="0.3", linewidth=0.8, linestyle="--" if source else "-")
        axis.annotate(
            arm.replace("_", " "),
            (0.99 if source else 0.01, value),
            xycoords=("axes fraction", "data"),
            fontsize=7,
            va="bottom",
            ha="right" if source else "left",
        )


def line(axis: Axes, points: pd.DataFrame, knob: str, measure: str, at: str) -> None:
    """One knob from where it is not turned; dotted, the mean cache under the same knob."""
    label, colour = KNOBS[knob]
    start = points.knob == ""
    if knob.startswith("native_layers + "):
        start = (points.knob == "native_layers") & (points.native_layers == 1)
    turned = points[(points.knob == knob) | start].sort_values(at)
    if len(turned) < 2:
        return
    errors = [turned[measure] - turned[f"{measure}_low"], turned[f"{measure}_high"] - turned[measure]]
    style = {"color": colour, "linewidth": 1.2, "label": label}
    axis.errorbar(turned[at], turned[measure], errors, marker="o", markersize=3, elinewidth=0.6, **style)
    if knob in ("attention", "native_layers", "hold_back") and turned[f"{CONTROL}_{measure}"].notna().all():
        axis.plot(turned[at], turned[f"{CONTROL}_{measure}"], ":", color=colour, label=f"{label}, bias only")


def main() -> None:
    """Entry point."""
    groups: dict[tuple[str, Setting], list[Path]] = defaultdict(list)
    for root in sys.argv[1:]:
        for record in sorted(Path(root).glob("*/run.json")):
            if read_json(record)["status"] == "done":
                groups[setting_of(record.parent)].append(record.parent)
    if not groups:
        sys.exit(__doc__)
    rows, natives = [], {}
    for (pair, setting), jobs in sorted(groups.items()):
        names = ("native_layers", "hold_back", "recompute_share", "recompute_rule")
        knobs = dict(zip(names, setting, strict=True))
        rows.append({"pair": pair, "knob": knob_of(setting), **knobs, **result(jobs)})
        if not knob_of(setting):
            natives[pair] = {arm: quality(jobs, arm) for arm in ("target", "source", "no_context")}
    table = pd.DataFrame(rows)
    order = {knob: number for number, knob in enumerate(["", *KNOBS])}
    table = table.sort_values(
        ["pair", "knob", "question_flop_share"], key=lambda c: c.map(order) if c.name == "knob" else c
    )
    table.to_csv(HERE / "results.csv", index=False, float_format="%.5g")
    draw(table, natives)
    cost_columns = [f"{at}_{share}" for at in ("question", "long") for share in ("flop_share", "time_share")]
    qualities = ["accuracy", "carried", "perplexity", f"{CONTROL}_accuracy", f"{CONTROL}_carried"]
    print(table[["pair", "knob", *names, *cost_columns, *qualities]].to_string())
    for pair, arms in natives.items():
        print(pair, pd.DataFrame(arms).T[["accuracy", "carried", "perplexity"]].to_string(), sep="\n")


if __name__ == "__main__":
    main()
