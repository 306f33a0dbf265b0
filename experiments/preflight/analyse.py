"""Gather the runs of run.sh and run_qwen.sh into the shipped table, CSV files and a figure.

python experiments/preflight/analyse.py SWEEP_DIRECTORY [SWEEP_DIRECTORY ...]

Any part of the runs will do; reads their directories only. Writes the shipped table too,
kvmap/preflight/evidence.csv.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib

matplotlib.use("Agg")
import numpy as np
import pandas as pd
from matplotlib import pyplot as plt

from kvmap.preflight.evidence import SHIPPED, Evidence, cases_of, read_evidence, write_cases
from kvmap.preflight.rates import left_out, measures_of, rates
from kvmap.preflight.rules import CHEAPEST_FIRST, Rules, by_prompts
from kvmap.studies.one_setting import directories
from kvmap.studies.plots import COLOURS, COLUMN_WIDTH_INCHES, STYLE
from kvmap.studies.summary import freeze

if TYPE_CHECKING:
    from matplotlib.axes import Axes

HERE = Path(__file__).resolve().parent
THRESHOLDS = (0.4, 0.5, 0.6, 0.8, 0.9, 0.95)
CONFIDENCES = (0.8, 0.9)
JUDGES = ("own", "any", "prompts", "own and prompts")
SHIPPED_FAMILY = "tiny"


def main() -> None:
    """Entry point."""
    write_cases(SHIPPED, cases_of(directories(__doc__ or "")))
    evidence = read_evidence()
    judged = {
        (judges, confidence, threshold): _judged(evidence, judges, Rules(threshold, confidence))
        for judges, confidence, threshold in product(JUDGES, CONFIDENCES, THRESHOLDS)
    }
    found = [
        {"cases": cases, "judged_by": judges, "confidence": confidence, "min_retention": threshold, **row}
        for (judges, confidence, threshold), of_one in judged.items()
        for cases, part in (("shipped", of_one[_shipped(of_one)]), ("all", of_one))
        for row in rates(part, threshold).rows()
    ]
    usual = {judges: judged[judges, Rules().confidence, Rules().min_retention] for judges in JUDGES}
    table = pd.concat([usual[judges].assign(judged_by=judges) for judges in JUDGES])
    prompts = _by_prompts(evidence)
    freeze(
        HERE,
        results=_by_mapper(evidence),
        judged=table.drop(columns="reason"),
        rates=pd.DataFrame(found),
        prompts=prompts,
        agreement=_agreement(prompts),
    )
    elsewhere = usual["any"][~_shipped(usual["any"])]
    _figure(usual["own"], elsewhere, prompts, HERE / "figure.png")


def _shipped(table: pd.DataFrame) -> pd.Series[bool]:
    return table["pair"].str.startswith(SHIPPED_FAMILY)


def _judged(evidence: Evidence, judges: str, rules: Rules) -> pd.DataFrame:
    """By cases of the own family or of any, by prompts alone, or by the own family's and prompts."""
    if judges == "prompts":
        # no mapper has cases of so many pairs
        return left_out(evidence, replace(rules, min_pairs=len(evidence.pairs) + 1))
    if judges == "own and prompts":
        return left_out(evidence, rules)
    read = [name for name in evidence.table if "/prompts_" in name]
    return left_out(Evidence(evidence.table.drop(columns=read)), rules, judges)


def _by_prompts(evidence: Evidence) -> pd.DataFrame:
    """Of each case whose map has read prompts: what these tell, beside what it kept."""
    rows = []
    for case in evidence.table.to_dict("records"):
        own = measures_of(case, evidence.probes).get(case["mapper"])
        found = None if own is None else by_prompts(own, Rules())
        if found is not None:
            bounds = {"agreement": found.value, "low": found.low, "high": found.high}
            rows.append({name: case[name] for name in ("pair", "seed", "mapper", "true")} | bounds)
    return pd.DataFrame(rows)


def _agreement(prompts: pd.DataFrame) -> pd.DataFrame:
    """How far the agreement of the shipped cases lies from what was kept, by map; r over pairs and maps."""
    own = prompts[_shipped(prompts)]
    error = own["agreement"] - own["true"]
    by_map = pd.DataFrame({"mean_difference": error, "mean_error": error.abs()}).groupby(own["mapper"]).mean()
    means = own.groupby(["pair", "mapper"])[["agreement", "true"]].mean()
    return by_map.assign(r_over_pairs_and_maps=means["agreement"].corr(means["true"])).reset_index()


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


def _figure(judged: pd.DataFrame, elsewhere: pd.DataFrame, prompts: pd.DataFrame, file: Path) -> None:
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(
            1, 2, figsize=(2 * COLUMN_WIDTH_INCHES, COLUMN_WIDTH_INCHES), layout="constrained", sharey=True
        )
        shipped = _shipped(prompts)
        _panel(axes[0], judged, elsewhere, "predicted")
        _panel(axes[1], prompts[shipped], prompts[~shipped], "agreement")
        axes[0].set_title("by recorded cases of other pairs of the family")
        axes[0].set_ylabel("predicted, with its bounds")
        axes[1].set_title("by 48 prompts without answers, no case")
        axes[0].legend(frameon=False, fontsize=5)
        figure.savefig(file, dpi=300)


def _panel(axis: Axes, shipped: pd.DataFrame, elsewhere: pd.DataFrame, told: str) -> None:
    for place, name in enumerate(CHEAPEST_FIRST):
        of_one = shipped[(shipped["mapper"] == name) & shipped[told].notna()]
        if of_one.empty:
            continue
        value = of_one[told].to_numpy(dtype=np.float64)
        room = [
            (value - of_one["low"].to_numpy(dtype=np.float64)).clip(min=0),
            (of_one["high"].to_numpy(dtype=np.float64) - value).clip(min=0),
        ]
        style: dict[str, Any] = {"color": COLOURS[place % len(COLOURS)], "label": name.replace("_", " ")}
        axis.errorbar(
            of_one["true"], value, yerr=room, fmt="o", markersize=2, elinewidth=0.4, alpha=0.6, **style
        )
    if len(elsewhere):
        axis.plot(elsewhere["true"], elsewhere[told], "x", markersize=4, color="black", label="Qwen2.5-Coder")
    axis.plot([0, 1.05], [0, 1.05], color="0.6", linewidth=0.6)
    axis.axhline(Rules().min_retention, color="0.6", linewidth=0.6, linestyle=":")
    axis.set_xlabel("accuracy retained, calibrated in full")


if __name__ == "__main__":
    main()
