"""Gather the sweep of run.sh into CSV files and figure.png. Reads run directories only.

python experiments/fleet/analyse.py SWEEP_DIRECTORY [SWEEP_DIRECTORY ...]
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from kvmap.figures.fleet import fleet_heat_maps
from kvmap.report.reading import read_run, read_table, runs_below
from kvmap.studies.one_setting import directories
from kvmap.studies.summary import freeze

HERE = Path(__file__).resolve().parent
MEASURES = ["kl_nats", "top1_agreement", "context_carried", "key_r2", "value_r2"]
ENDS = ["mapper", "source", "target"]


def main() -> None:
    """Entry point."""
    routes, hubs = gathered("fleet_routes"), gathered("fleet_hubs")
    routes["via"], hubs["hub"] = routes["via"].fillna(""), hubs["hub"].fillna("")
    of_seeds = routes.groupby([*ENDS, "via"], sort=False)[[*MEASURES, "folded_bytes"]].mean().reset_index()
    direct = of_seeds[of_seeds["via"] == ""].drop(columns=["via", "folded_bytes"])
    relays = of_seeds[of_seeds["via"] != ""]
    best = relays.loc[relays.groupby(ENDS, sort=False)["kl_nats"].idxmin()]
    results = direct.merge(best, on=ENDS, suffixes=("", "_relay"))
    numbers = hubs.drop(columns=["seed", "worst_source", "worst_target"])
    by_hub = numbers.groupby(["mapper", "hub"], sort=False).mean().reset_index()
    freeze(HERE, results=results, routes=of_seeds, hubs=by_hub, overall=overall(routes))
    shown = results[results["mapper"] == results["mapper"].iloc[0]]
    relayed = shown.rename(columns={"context_carried_relay": "relay_context_carried"})
    figure = fleet_heat_maps(shown.drop(columns="via"), relayed)
    figure.savefig(HERE / "figure.png", dpi=200)


def gathered(table: str) -> pd.DataFrame:
    """A table of all finished runs, with the mapper and the seed of each."""
    found = []
    for root in directories(__doc__ or ""):
        for directory in runs_below(root):
            run = read_run(directory)
            if run["status"] != "done":
                continue
            config = run["config"]
            who = {"mapper": config["mapper"]["support"], "seed": config["calibration"]["data"]["seed"]}
            found += [who | row for row in read_table(directory, table)]
    return pd.DataFrame(found)


def overall(routes: pd.DataFrame) -> pd.DataFrame:
    """Means over ordered pairs and seeds: direct, the best relay of each, all relays; and who wins."""
    rows = []
    for mapper, part in routes.groupby("mapper", sort=False):
        direct = part[part["via"] == ""].set_index(["seed", "source", "target"])
        relays = part[part["via"] != ""]
        best = relays.loc[relays.groupby(["seed", "source", "target"])["kl_nats"].idxmin()]
        best = best.set_index(["seed", "source", "target"]).reindex(direct.index)
        n_better = int((best["kl_nats"] < direct["kl_nats"]).sum())
        for name, table in (("direct", direct), ("best relay", best), ("any relay", relays)):
            rows.append(
                {"mapper": mapper, "route": name}
                | {measure: table[measure].mean() for measure in MEASURES}
                | {"n": len(table), "n_better_than_direct": n_better if name == "best relay" else ""}
            )
    return pd.DataFrame(rows)


if __name__ == "__main__":
    main()
