"""Gather the runs of run.sh into results.csv and figure.png. Reads run directories only.

python experiments/real_pair/analyse.py RUN_DIRECTORY [RUN_DIRECTORY ...]
"""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib

matplotlib.use("Agg")
import pandas as pd
from matplotlib import pyplot as plt
from omegaconf import OmegaConf

from kvmap.evaluation.statistics import context_carried, mcnemar, mean, paired_difference
from kvmap.files import read_json
from kvmap.report import read_table

HERE = Path(__file__).resolve().parent
N_RESAMPLES = 2000
AVERAGE = "all questions"
DIRECTIONS = {"up": "0.5B to 1.5B", "down": "1.5B to 0.5B"}
ARMS = ("target", "source", "no_context", "bias_only", "mapped")
COLOURS = dict(zip(ARMS, ("#000000", "#0072B2", "#999999", "#CC79A7", "#D55E00"), strict=True))

Answers = dict[str, dict[str, float]]
"""arm to item to score"""


def questions(run: Path) -> dict[str, Answers]:
    """Right (1) or wrong (0) by task, arm and item; MMLU's items among them."""
    found: dict[str, Answers] = defaultdict(lambda: defaultdict(dict))
    for row in read_table(run, "items"):
        found[row["task"]][row["arm"]][str(row["id"])] = float(str(row["correct"]) == "True")
    for row in read_table(run, "tasks_items"):
        found[row["task"]][row["arm"]][str(row["id"])] = float(row["accuracy"])
    pooled: Answers = defaultdict(dict)
    for task, arms in found.items():
        for arm, items in arms.items():
            pooled[arm] |= {f"{task}/{item}": score for item, score in items.items()}
    return {**found, AVERAGE: pooled}


def conversations(run: Path) -> Answers:
    """Mean F1 by arm and conversation: a conversation's turns hang together, so it counts once."""
    turns: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in read_table(run, "conversations"):
        turns[row["arm"]][str(row["id"])].append(float(row["f1"]))
    return {arm: {name: fmean(scores) for name, scores in found.items()} for arm, found in turns.items()}


def compared(answers: Answers, task: str) -> list[dict[str, Any]]:
    """Each arm's score, and what it is beyond the source alone and beyond no context, paired."""
    rows = []
    for arm in ARMS:
        items = sorted(answers["target"])
        own = [answers[arm][item] for item in items]
        score = mean(own)
        row: dict[str, Any] = {
            "task": task,
            "arm": arm,
            "n": len(own),
            "score": score.value,
            "standard_error": score.standard_error,
        }
        for other in ("source", "no_context", "target"):
            theirs = [answers[other][item] for item in items]
            gap = paired_difference(own, theirs, n_resamples=N_RESAMPLES)
            row |= {f"over_{other}": gap.value, f"over_{other}_low": gap.low, f"over_{other}_high": gap.high}
        if set(own) <= {0.0, 1.0}:
            row["mcnemar_target_p"] = mcnemar(own, [answers["target"][item] for item in items])
        rows.append(row)
    return rows


def text(run: Path) -> list[dict[str, Any]]:
    """Perplexity's side: context carried and KL of every arm."""
    by_arm: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in read_table(run, "sequences"):
        by_arm[row["arm"]].append(row)
    nll = {arm: [float(row["nll_nats"]) for row in rows] for arm, rows in by_arm.items()}
    rows = []
    for arm in ("mapped", "bias_only"):
        carried = context_carried(nll[arm], nll["target"], nll["no_context"], n_resamples=N_RESAMPLES)
        kl = mean([float(row["kl_nats"]) / float(row["n_tokens"]) for row in by_arm[arm]])
        for task, found in (("context carried", carried), ("KL, nats a token", kl)):
            rows.append(
                {
                    "task": task,
                    "arm": arm,
                    "n": found.n,
                    "score": found.value,
                    "standard_error": found.standard_error,
                }
            )
    return rows


def label(run: Path) -> tuple[str, str]:
    """Direction and mapper of a run."""
    config = OmegaConf.load(run / ".hydra" / "config.yaml")
    mapper = "ridge + MLP on values" if config.mapper.kind == "mlp" else "ridge"
    prose = Path(config.calibration.data.path).stem == "text"
    return config.direction, mapper if prose else f"{mapper}, questions in calibration"


def draw(table: pd.DataFrame) -> None:
    """Accuracy on all questions and F1 of conversations, a row for each arm and mapper, by direction."""
    figure, axes = plt.subplots(1, 2, figsize=(8.6, 3.2), layout="constrained", sharey=True)
    names: list[str] = []
    for axis, task, title in (
        (axes[0], AVERAGE, "accuracy, all questions"),
        (axes[1], "coqa", "F1, conversations"),
    ):
        for direction, mark, shift in (("up", "o", 0.12), ("down", "s", -0.12)):
            points = table[(table.task == task) & (table.direction == direction)]
            # native arms and controls are the same whatever the mapper
            shared = points[points.arm != "mapped"].drop_duplicates("arm")
            for _, point in pd.concat([shared, points[points.arm == "mapped"]]).iterrows():
                name = point.mapper if point.arm == "mapped" else point.arm.replace("_", " ")
                if name not in names:
                    names.append(name)
                axis.errorbar(
                    point.score,
                    -names.index(name) + shift,
                    xerr=1.96 * point.standard_error,
                    fmt=mark,
                    color=COLOURS[point.arm],
                    markersize=4,
                    capsize=2,
                )
            axis.plot([], [], mark, color="0.4", label=DIRECTIONS[direction])
        axis.set_xlabel(f"{title} (95 % interval)")
        axis.grid(axis="x", color="0.9")
    axes[0].set_yticks([-place for place in range(len(names))], names)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=2, frameon=False)
    figure.savefig(HERE / "figure.png", dpi=200)


def main() -> None:
    """Entry point."""
    runs = [Path(name) for name in sys.argv[1:]]
    runs = [run for run in runs if read_json(run / "run.json")["status"] == "done"]
    if not runs:
        sys.exit(__doc__)
    rows = []
    for run in runs:
        direction, mapper = label(run)
        found = [row for task, answers in questions(run).items() for row in compared(answers, task)]
        found += [*compared(conversations(run), "coqa"), *text(run)]
        rows += [{"direction": direction, "mapper": mapper, **row} for row in found]
    table = pd.DataFrame(rows)
    table.to_csv(HERE / "results.csv", index=False, float_format="%.5g")
    draw(table)
    shown = table[table.task.isin([AVERAGE, "coqa", "context carried", "KL, nats a token"])]
    print(shown.to_string())


if __name__ == "__main__":
    main()
