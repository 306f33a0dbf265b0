"""Gather the JSON files of run.sh into results.csv and figure.png, and print them as tables.

python experiments/latency/analyse.py FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import pandas as pd

from kvmap.figures.latency import cost_panels
from kvmap.files import read_json

HERE = Path(__file__).resolve().parent
DRAWN = "full_head_8"
COLUMNS = ("p20_ms", "p50_ms", "p80_ms", "roofline_share", "peak_bytes", "flops", "bytes_moved")


def gathered(folder: Path) -> list[dict[str, Any]]:
    """One row a map, length and arm, and one a map, length and path of mapping alone."""
    rows = []
    for path in sorted(folder.glob("*.json")):
        found = read_json(path)
        about = {"map": found["mapper"].removeprefix("random, "), "n_weights": found["n_weights"]}
        for row in found["latency"]:
            rows.append(about | _row(row, "arm", row["arm"]))
        for row in found["paths"]:
            extra = {"times_per_head": row.get("times_per_head")}
            rows.append(about | _row(row, "path", row["path"]) | extra)
    if not rows:
        raise SystemExit(f"{folder}: no JSON file of run.sh there")
    return rows


def _row(row: dict[str, Any], what: str, name: str) -> dict[str, Any]:
    setting = {key: row[key] for key in ("n_repeats", "device", "dtype", "threads")}
    return {"length": row["length"], "what": what, "name": name} | {k: row.get(k) for k in COLUMNS} | setting


def table(rows: pd.DataFrame) -> str:
    """Medians by map and length, and what comes of them, as Markdown."""
    lines = [
        "| map | tokens | source prefill, ms | map | hand-off | re-prefill | re-prefill / map | warm | "
        "cold | per head / batched | stripped once / batched | share of roofline |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for (name, length), part in rows.groupby(["map", "length"], sort=True):
        p50 = part.set_index("name")["p50_ms"]
        again = p50["re_prefill"]
        cold = p50["source_prefill"] + p50["hand_off"]
        share = part.set_index("name")["roofline_share"]["batched"]
        per_head, stripped = (p50[loop] / p50["batched"] for loop in ("per_head", "per_head_stripped"))
        lines.append(
            f"| {name} | {length:,} | {p50['source_prefill']:,.0f} | {p50['map']:,.0f} | "
            f"{p50['hand_off']:,.0f} | {again:,.0f} | {again / p50['map']:.1f} | "
            f"{again / p50['hand_off']:.1f} | {again / cold:.1f} | {per_head:.2f} | "
            f"{stripped:.2f} | {share:.2f} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Read, write, print."""
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    folder = Path(sys.argv[1])
    rows = pd.DataFrame(gathered(folder))
    rows.to_csv(HERE / "results.csv", index=False, float_format="%.6g")
    shown = folder / f"{DRAWN}.json"
    figure = cost_panels(read_json(shown)["latency"])
    figure.savefig(HERE / "figure.png", dpi=200)
    print(table(rows))


if __name__ == "__main__":
    main()
