"""Gather the sweep of run.sh into results.csv and figure.png. Reads run directories only.

python experiments/supports/analyse.py SWEEP_DIRECTORY [SWEEP_DIRECTORY ...]
"""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib

matplotlib.use("Agg")
import numpy as np
import pandas as pd
from matplotlib import pyplot as plt
from omegaconf import OmegaConf

from kvmap.evaluation.statistics import bootstrap_means, context_carried, mean, paired_ratio
from kvmap.files import read_json
from kvmap.report import read_table

HERE = Path(__file__).resolve().parent
N_RESAMPLES = 2000
PAIRS = ("tiny", "tiny_medium_large", "tiny_unmatched")
MAPPERS = ("head_local", "linear", "banded", "tuned", "weighted", "native_features", "mlp", "residual")
LABELS = {"linear": "full-head", "native_features": "head-local + layer 0", "residual": "ridge + MLP"}


def correct(job: Path, arm: str) -> dict[tuple[str, str], float]:
    """Right (1) or wrong (0) by task and item of one run."""
    rows = [row for row in read_table(job, "items") if row["arm"] == arm]
    return {(row["task"], str(row["id"])): float(row["correct"] in (True, "True")) for row in rows}


def sequences(job: Path, arm: str) -> list[dict[str, Any]]:
    """Sums over each scored sequence of one run."""
    return [row for row in read_table(job, "sequences") if row["arm"] == arm]


def result(jobs: list[Path]) -> dict[str, Any]:
    """One map on one pair, all seeds together: intervals are over items and sequences of all of them."""
    target, mapped, source = ([] for _ in range(3))
    for job in jobs:
        answers = {arm: correct(job, arm) for arm in ("target", "mapped", "source")}
        for item in sorted(answers["target"]):
            target.append(answers["target"][item])
            mapped.append(answers["mapped"][item])
            source.append(answers["source"][item])
    retention = paired_ratio([mapped, target], (0,), (1,), "target accuracy", N_RESAMPLES, 0)
    nll = {
        arm: [row["nll_nats"] for job in jobs for row in sequences(job, arm)]
        for arm in ("mapped", "target", "no_context")
    }
    carried = context_carried(nll["mapped"], nll["target"], nll["no_context"], n_resamples=N_RESAMPLES)
    kl = [row["kl_nats"] / row["n_tokens"] for job in jobs for row in sequences(job, "mapped")]
    low, high = np.quantile(bootstrap_means([kl], n_resamples=N_RESAMPLES)[:, 0], (0.025, 0.975))
    metrics = [read_json(job / "metrics.json") for job in jobs]

    def each(key: str) -> list[float]:
        return [found[key]["value"] for found in metrics]

    cosines = each("diagnose/held_out/mapped/attention_cosine")
    seconds = [read_json(job / "run.json")["stages"]["fit"]["seconds"] for job in jobs]
    gained = mean(np.asarray(mapped) - np.asarray(source))
    return {
        "n_seeds": len(jobs),
        "n_items": len(target),
        "accuracy_target": fmean(target),
        "accuracy_source": fmean(source),
        "accuracy": fmean(mapped),
        "retention": retention.value,
        "retention_low": retention.low,
        "retention_high": retention.high,
        "over_source": gained.value,
        "over_source_low": gained.low,
        "over_source_high": gained.high,
        "carried": carried.value,
        "carried_low": carried.low,
        "carried_high": carried.high,
        "kl_nats": fmean(kl),
        "kl_low": low,
        "kl_high": high,
        "cosine": fmean(cosines),
        "cosine_lowest_seed": min(cosines),
        "cosine_highest_seed": max(cosines),
        "r2_key": fmean(each("diagnose/held_out/mapped/r2_key")),
        "r2_value": fmean(each("diagnose/held_out/mapped/r2_value")),
        "weights_bytes": fmean(each("fit/mapper/all/weights_bytes")),
        "fit_seconds": fmean(seconds),
    }


def draw(table: pd.DataFrame) -> None:
    """Retention and KL of every map, one column of points for each pair, with 95 % intervals."""
    figure, axes = plt.subplots(1, 2, figsize=(8.2, 3.4), layout="constrained", sharey=True)
    marks = dict(zip(PAIRS, ("o", "s", "D"), strict=True))
    colours = dict(zip(PAIRS, ("#0072B2", "#D55E00", "#009E73"), strict=True))
    rows = {mapper: place for place, mapper in enumerate(reversed(MAPPERS))}
    for offset, pair in zip((0.22, 0.0, -0.22), PAIRS, strict=True):
        points = table[table.pair == pair]
        heights = [rows[mapper] + offset for mapper in points.mapper]
        for axis, name, low, high in (
            (axes[0], "retention", "retention_low", "retention_high"),
            (axes[1], "kl_nats", "kl_low", "kl_high"),
        ):
            value = points[name]
            errors = [value - points[low], points[high] - value]
            axis.errorbar(
                value,
                heights,
                xerr=errors,
                fmt=marks[pair],
                color=colours[pair],
                capsize=2,
                markersize=4,
                label=pair,
            )
    axes[0].set_yticks(list(rows.values()), [LABELS.get(m, m.replace("_", "-")) for m in rows])
    axes[0].set_xlabel("accuracy retained (95 % interval)")
    axes[1].set_xlabel("KL from native, nats a token (95 % interval)")
    figure.legend(*axes[1].get_legend_handles_labels(), loc="outside upper center", ncols=3, frameon=False)
    for axis in axes:
        axis.grid(axis="x", color="0.9")
    figure.savefig(HERE / "figure.png", dpi=200)


def main() -> None:
    """Entry point."""
    groups: dict[tuple[str, str], list[Path]] = defaultdict(list)
    for root in sys.argv[1:]:
        for record in sorted(Path(root).glob("*/run.json")):
            run = read_json(record)
            if run["status"] == "done" and run["config"]["direction"] == "up":  # PAIRS are ordered
                choices = OmegaConf.load(record.parent / ".hydra" / "hydra.yaml").hydra.runtime.choices
                groups[choices["pair"], choices["mapper"]].append(record.parent)
    if not groups:
        sys.exit(__doc__)
    rows = [
        {"pair": pair, "mapper": mapper, **result(groups[pair, mapper])}
        for pair in PAIRS
        for mapper in MAPPERS
        if (pair, mapper) in groups
    ]
    table = pd.DataFrame(rows)
    table.to_csv(HERE / "results.csv", index=False, float_format="%.5g")
    draw(table)
    print(table.to_string())


if __name__ == "__main__":
    main()
