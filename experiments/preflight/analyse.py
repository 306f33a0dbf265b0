"""Gather the runs of run.sh and run_qwen.sh into the shipped table, CSV files and a figure.

python experiments/preflight/analyse.py SWEEP_DIRECTORY [SWEEP_DIRECTORY ...]

Any part of the runs will do; reads their directories only. Writes the shipped table too,
kvmap/preflight/evidence.csv.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import numpy as np
import pandas as pd
from matplotlib import pyplot as plt

from kvmap.config.schema import PREFLIGHT_FAMILIES
from kvmap.preflight.evidence import SHIPPED, Evidence, cases_of, read_evidence, write_cases
from kvmap.preflight.rates import left_out, rates
from kvmap.preflight.rules import CHEAPEST_FIRST, Rules
from kvmap.studies.one_setting import directories
from kvmap.studies.plots import COLOURS, COLUMN_WIDTH_INCHES, STYLE
from kvmap.studies.summary import freeze

HERE = Path(__file__).resolve().parent
THRESHOLDS = (0.4, 0.5, 0.6, 0.8, 0.9, 0.95)
CONFIDENCES = (0.8, 0.9)
SHIPPED_FAMILY = "tiny"


def main() -> None:
    """Entry point."""
    cases = cases_of(directories(__doc__ or ""))
    write_cases(SHIPPED, cases)
    evidence = read_evidence()
    judged = {
        (judges, confidence): left_out(evidence, Rules(confidence=confidence), judges)
        for judges in PREFLIGHT_FAMILIES
        for confidence in CONFIDENCES
    }
    found = [
        {"judged_by": judges, "confidence": confidence, "min_retention": threshold, **row}
        for (judges, confidence), of_one in judged.items()
        for threshold in THRESHOLDS
        for row in rates(_judged_at(of_one, threshold), threshold).rows()
    ]
    usual = {judges: judged[judges, Rules().confidence] for judges in PREFLIGHT_FAMILIES}
    table = pd.concat([usual[judges].assign(judged_by=judges) for judges in usual])
    freeze(HERE, results=_by_mapper(evidence), judged=table.drop(columns="reason"), rates=pd.DataFrame(found))
    elsewhere = usual["any"][~usual["any"]["pair"].str.startswith(SHIPPED_FAMILY)]
    _figure(usual["own"], elsewhere, HERE / "figure.png")


def _judged_at(judged: pd.DataFrame, threshold: float) -> pd.DataFrame:
    """Predictions do not depend on what is asked for; only what passes does."""
    if threshold == Rules().min_retention:
        return judged
    known = judged["low"].notna() & (judged["decision"] != "unknown")
    passed = np.where(judged["low"] >= threshold, "pass", "fail")
    return judged.assign(decision=np.where(known, passed, judged["decision"]))


def _by_mapper(evidence: Evidence) -> pd.DataFrame:
    rows = []
    family = evidence.table["pair"].str.split("-").str[0]
    for name, mapper in product(sorted(set(family), reverse=True), sorted(evidence.mappers, key=_cost)):
        cases = evidence.of(mapper)[family == name]
        true = cases.groupby("pair")[["true", "context_carried", "kl_nats"]].mean()
        if true.empty:
            continue
        rows.append(
            {"family": name, "mapper": mapper, "n_pairs": len(true), "n_cases": len(cases)}
            | {"retention": true["true"].mean(), "least": true["true"].min(), "most": true["true"].max()}
            | {"context_carried": true["context_carried"].mean(), "kl_nats": true["kl_nats"].mean()}
        )
    return pd.DataFrame(rows)


def _cost(mapper: str) -> int:
    return CHEAPEST_FIRST.index(mapper)


def _figure(judged: pd.DataFrame, elsewhere: pd.DataFrame, file: Path) -> None:
    with plt.rc_context(STYLE):
        figure, axis = plt.subplots(figsize=(COLUMN_WIDTH_INCHES, COLUMN_WIDTH_INCHES), layout="constrained")
        names = [name for name in CHEAPEST_FIRST if name in set(judged["mapper"])]
        for place, name in enumerate(names):
            of_one = judged[(judged["mapper"] == name) & judged["predicted"].notna()]
            below, above = (
                (of_one["predicted"] - of_one["low"]).clip(lower=0),
                (of_one["high"] - of_one["predicted"]).clip(lower=0),
            )
            axis.errorbar(
                of_one["true"],
                of_one["predicted"].to_numpy(),
                yerr=[below, above],
                fmt="o",
                markersize=2,
                elinewidth=0.4,
                alpha=0.6,
                color=COLOURS[place % len(COLOURS)],
                label=name.replace("_", " "),
            )
        axis.plot(
            elsewhere["true"],
            elsewhere["predicted"],
            "x",
            markersize=4,
            color="black",
            label="Qwen2.5-Coder, by these",
        )
        axis.plot([0, 1.05], [0, 1.05], color="0.6", linewidth=0.6)
        axis.axhline(Rules().min_retention, color="0.6", linewidth=0.6, linestyle=":")
        axis.set_xlabel("accuracy retained, calibrated in full")
        axis.set_ylabel("predicted by other pairs, with its bounds")
        axis.legend(frameon=False, fontsize=5)
        figure.savefig(file, dpi=300)


if __name__ == "__main__":
    main()
