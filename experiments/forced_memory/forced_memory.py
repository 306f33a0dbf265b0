"""Calibrates a pair unforced and within a memory budget, and compares peaks, disk and moments.

    python forced_memory.py NAME FOLDER --budget 1.5 --forced OVERRIDE ... --both OVERRIDE ...

Each run is a process of its own. Its resident memory, mapped files included, is watched; the forced one is
killed as soon as it goes beyond the budget. The peak that counts is the kernel's own (VmHWM), which misses
nothing.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import re
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from kvmap.models.spec import ModelSpec, config_folder

POLL_SECONDS = 0.02
FIELDS = (
    "pair",
    "run",
    "budget_gib",
    "peak_gib",
    "weights_gib",
    "caches_mib",
    "sums_mib",
    "seconds",
    "same_bytes",
    "largest_difference",
)


def peak_bytes(pid: int) -> int:
    """The most memory that a process has held so far; 0 once it is gone."""
    try:
        found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return 1024 * int(found[1]) if found else 0


def spilled_bytes(outputs: Path) -> dict[str, int]:
    """Finished files that wait on disk at the moment: caches with hidden states, and the sums so far."""
    total = {"caches": 0, "sums": 0}
    for folder, _, names in os.walk(outputs / "artifacts" / "spill"):
        for name in (name for name in names if not name.startswith(".")):
            with suppress(FileNotFoundError):  # used, and gone
                what = "sums" if name.startswith("moments") else "caches"
                total[what] += (Path(folder) / name).stat().st_size
    return total


def run(outputs: Path, overrides: list[str], budget: int | None) -> dict[str, float]:
    """One calibration; ends the programme if it fails, or goes beyond its budget."""
    command = [
        sys.executable,
        "-m",
        "kvmap.run",
        f"outputs={outputs}",
        "stages=[calibrate]",
        "tracking=none",
        *overrides,
    ]
    start, peak, spilled = time.monotonic(), 0, {"caches": 0, "sums": 0}
    process = subprocess.Popen(command)
    while process.poll() is None:
        peak = max(peak, peak_bytes(process.pid))
        spilled = {what: max(spilled[what], size) for what, size in spilled_bytes(outputs).items()}
        if budget is not None and peak > budget:
            process.kill()
            sys.exit(f"killed: {peak / 2**30:.3f} GiB are more than the budget of {budget / 2**30:.3f}")
        time.sleep(POLL_SECONDS)
    if process.returncode:
        sys.exit(process.returncode)
    seconds = time.monotonic() - start
    directory = max(outputs.glob("*/*/metrics.json"), key=lambda path: path.stat().st_mtime).parent
    own = json.loads((directory / "metrics.json").read_text())["calibrate/process/all/peak_bytes"]["value"]
    return {"peak": max(peak, own), "seconds": seconds, **spilled}


def weights_bytes(outputs: Path) -> int:
    """Weights of both models as they compute, from their configs and dtypes."""
    record = json.loads(max(outputs.glob("*/*/run.json")).read_text())["config"]["pair"]
    total = 0
    for role in ("source", "target"):
        spec = ModelSpec(record[role]["id"])
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(config_folder(spec)))
        width = 2 if record[role]["dtype"] == "bfloat16" else 4
        total += width * sum(parameter.numel() for parameter in model.parameters())
    return total


def moments(outputs: Path) -> dict[str, torch.Tensor]:
    """All sums of the one calibration in an outputs folder."""
    (folder,) = (path.parent for path in outputs.glob("artifacts/moments/*/artifact.json"))
    return {
        f"{path.name}/{name}": t
        for path in folder.glob("*.safetensors")
        for name, t in load_file(path).items()
    }


def largest_difference(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """The largest distance of a sum from its like, over the largest of that table."""
    differences = [0.0]
    for name, wanted in expected.items():
        if wanted.is_floating_point() and wanted.numel():
            differences.append(
                float((found[name] - wanted).abs().max() / wanted.abs().max().clamp(min=1e-300))
            )
    return max(differences)


def main() -> None:
    """Both runs of a pair; appends their rows to `results.csv` in the folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--budget", type=float, required=True, help="GiB")
    parser.add_argument("--forced", nargs="+", default=[])
    parser.add_argument("--both", nargs="+", default=[])
    given = parser.parse_args()
    budget = int(given.budget * 2**30)
    places = {name: given.folder / given.name / name for name in ("unforced", "forced")}
    results = {
        "unforced": run(places["unforced"], given.both, None),
        "forced": run(places["forced"], [*given.both, *given.forced], budget),
    }
    sums = {name: moments(place) for name, place in places.items()}
    same = all(torch.equal(tensor, sums["forced"][name]) for name, tensor in sums["unforced"].items())
    difference = largest_difference(sums["forced"], sums["unforced"])
    weights = weights_bytes(places["unforced"])
    path = given.folder / "results.csv"
    is_new = not path.exists()
    with path.open("a", newline="") as file:
        rows = csv.DictWriter(file, FIELDS, lineterminator="\n")
        if is_new:
            rows.writeheader()
        for name, found in results.items():
            row = {
                "pair": given.name,
                "run": name,
                "budget_gib": given.budget if name == "forced" else "",
                "peak_gib": round(found["peak"] / 2**30, 3),
                "weights_gib": round(weights / 2**30, 3),
                "caches_mib": round(found["caches"] / 2**20, 1),
                "sums_mib": round(found["sums"] / 2**20, 1),
                "seconds": round(found["seconds"], 1),
            }
            if name == "forced":
                row |= {"same_bytes": same, "largest_difference": difference}
            rows.writerow(row)
            print(row)
    if results["forced"]["peak"] > budget:
        sys.exit("the forced run was over its budget")


if __name__ == "__main__":
    main()
