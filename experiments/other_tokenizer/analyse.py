"""Gather the runs of run.sh and run_real.sh into results.csv and figure.png. Reads run directories only.

python experiments/other_tokenizer/analyse.py DIRECTORY [DIRECTORY ...]
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib

matplotlib.use("Agg")
import pandas as pd
from matplotlib import pyplot as plt

from kvmap.evaluation.run_groups import find_runs, finished
from kvmap.evaluation.statistics import Estimate, context_carried, mean, paired_difference
from kvmap.files import read_json
from kvmap.report import read_table

HERE = Path(__file__).resolve().parent
SAME = "one tokenizer"
KEYS = ("target", "native_layers", "source")
Scores = dict[tuple[str, ...], float]


def name_of(model: str) -> str:
    """What a model reads, whatever folder it lies in."""
    if model.startswith("zoo:"):
        return f"{model.removeprefix('zoo:tiny-')}, words"
    name = Path(model).name
    return f"{name}, pieces" if name in ("small", "medium") else name


def read_run(run: Path) -> dict[str, Any]:
    """Settings, R² and the scores of every arm of one run."""
    config = read_json(run / "run.json")["config"]
    pair, seed = config["pair"], str(config["calibration"]["data"]["seed"])
    ends = ("source", "target") if config["direction"] == "up" else ("target", "source")
    questions: dict[str, Scores] = {}
    for row in read_table(run, "items"):
        scores = questions.setdefault(row["arm"], {})
        scores[(seed, str(row["task"]), str(row["id"]))] = float(str(row["correct"]) == "True")
    losses: dict[str, Scores] = {}
    for row in read_table(run, "sequences"):
        losses.setdefault(row["arm"], {})[(seed, str(row["sequence"]))] = float(row["nll_nats"])
    r2 = pd.DataFrame(read_table(run, "r2"))
    held_out = r2[r2.split == "held_out"].groupby("kind").r2.mean()
    return {
        "target": name_of(pair[ends[1]]["id"]),
        "source": name_of(pair[ends[0]]["id"]),
        "rule": SAME if pair["alignment"] == "refuse" else pair["alignment_rule"],
        "native_layers": int(config["mapper"]["native_layers"]),
        "r2_key": float(held_out["key"]),
        "r2_value": float(held_out["value"]),
        "questions": questions,
        "losses": losses,
    }


def pooled(runs: list[dict[str, Any]], what: str, arm: str) -> Scores:
    """An arm's scores of all seeds."""
    return {key: score for run in runs for key, score in run[what][arm].items()}


def paired(first: Scores, second: Scores) -> tuple[list[float], list[float]]:
    keys = sorted(first.keys() & second.keys())
    return [first[key] for key in keys], [second[key] for key in keys]


def carried(runs: list[dict[str, Any]], arm: str) -> Estimate:
    sides = [pooled(runs, "losses", name) for name in (arm, "target", "no_context")]
    keys = sorted(sides[0])
    return context_carried(*([side[key] for key in keys] for side in sides))


def summarise(runs: list[dict[str, Any]]) -> pd.DataFrame:
    """One row a setting, over its seeds; accuracy also less that of the pair with one tokenizer."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for run in runs:
        groups.setdefault(tuple(run[key] for key in (*KEYS, "rule")), []).append(run)
    rows = []
    for (target, native_layers, source, rule), members in sorted(groups.items(), key=str):
        arms = {arm: pooled(members, "questions", arm) for arm in members[0]["questions"]}
        accuracy = mean(list(arms["mapped"].values()))
        share = carried(members, "mapped")
        row = {
            "target": target,
            "native_layers": native_layers,
            "source": source,
            "rule": rule,
            "seeds": len(members),
            "r2_key": fmean(run["r2_key"] for run in members),
            "r2_value": fmean(run["r2_value"] for run in members),
            "carried": share.value,
            "carried_low": share.low,
            "carried_high": share.high,
            "carried_bias_only": carried(members, "bias_only").value,
            "questions": accuracy.n,
            "accuracy": accuracy.value,
            "accuracy_error": accuracy.standard_error,
        }
        row |= {f"accuracy_{arm}": fmean(scores.values()) for arm, scores in arms.items() if arm != "mapped"}
        for other, prefix in (
            (arms["no_context"], "over_no_context"),
            (same(groups, target, native_layers), "over_same"),
        ):
            if other is not None and rule != (SAME if prefix == "over_same" else ""):
                gap = paired_difference(*paired(arms["mapped"], other))
                row |= {prefix: gap.value, f"{prefix}_low": gap.low, f"{prefix}_high": gap.high}
        rows.append(row)
    return pd.DataFrame(rows)


def same(
    groups: dict[tuple[Any, ...], list[dict[str, Any]]], target: str, native_layers: int
) -> Scores | None:
    """Scores of the mapped cache of the pair with one tokenizer; None where no such pair was run."""
    for key, members in groups.items():
        if key[:2] == (target, native_layers) and key[3] == SAME:
            return pooled(members, "questions", "mapped")
    return None


def draw(table: pd.DataFrame) -> None:
    """Context carried and accuracy of every setting, the pairs of one tokenizer in grey."""
    labels = [
        f"{row.source} → {row.target}\n{row.rule}, {row.native_layers} native" for row in table.itertuples()
    ]
    colours = ["0.6" if rule == SAME else "#0072B2" for rule in table.rule]
    places = range(len(table))
    figure, (left, right) = plt.subplots(
        1, 2, sharey=True, figsize=(9, 0.5 * len(table) + 1), layout="constrained"
    )
    reach = [table.carried - table.carried_low, table.carried_high - table.carried]
    left.barh(places, table.carried, xerr=reach, color=colours)
    left.set(xlabel="context carried (95 %)", xlim=(min(0.0, table.carried_low.min()), 1))
    right.barh(places, table.accuracy, xerr=1.959964 * table.accuracy_error, color=colours)
    right.plot(table.accuracy_target, places, "k|", markersize=12, label="target")
    right.plot(table.accuracy_no_context, places, "kx", markersize=5, label="no context")
    right.set(xlabel="accuracy (95 %)", xlim=(0, 1))
    right.legend(loc="lower right", fontsize=7)
    left.set_yticks(places, labels, fontsize=7)
    left.invert_yaxis()
    figure.savefig(HERE / "figure.png", dpi=150)


def main() -> None:
    runs = finished(find_runs(Path(path) for path in sys.argv[1:]))
    evaluated = [run for run in runs if (run / "tables" / "items.csv").is_file()]
    table = summarise([read_run(run) for run in evaluated])
    table.round(4).to_csv(HERE / "results.csv", index=False)
    draw(table)
    print(table.round(3).to_string(index=False))


if __name__ == "__main__":
    main()
