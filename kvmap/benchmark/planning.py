"""`python -m kvmap.benchmark.planning`: what stage `plan` says against what runs of their own then take."""

from __future__ import annotations

import argparse
import csv
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvmap.benchmark.fitting import as_text
from kvmap.errors import KvmapError
from kvmap.files import write_json

TOLERANCE = 0.1
_PROBE_TOKENS = 64

Row = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> int:
    """Plan and run each configuration, print the table, and keep it as `planning.json` in the folder.

    Returns:
        0; 1 for a run that failed; 2 where a plan is off by more than the tolerance.
    """
    asked = _parser().parse_args(arguments)
    try:
        rows = [row for overrides in asked.runs for row in compare(shlex.split(overrides), asked.folder)]
    except KvmapError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(as_text(rows))
    write_json(asked.folder / "planning.json", {"tolerance": asked.tolerance, "rows": rows})
    return 2 if any(abs(row["planned_over_measured"] - 1) > asked.tolerance for row in rows) else 0


def compare(overrides: Sequence[str], folder: Path) -> list[Row]:
    """Planned and measured bytes of one configuration: files, caches, weights, and peaks of processes.

    Calibration and fit are processes of their own, on the CPU and one thread, so that each peak is its own.

    Args:
        overrides: of `python -m kvmap.run`.
        folder: where outputs go; artifacts of the same content that lie there are not made again, and
            nothing would be measured, so take an empty one.

    Raises:
        KvmapError: a run that failed.
    """
    calibrate, fit = (_run([*overrides, f"stages=[plan,{stage}]"], folder) for stage in ("calibrate", "fit"))
    sizes = {(row["part"], row["quantity"]): float(row["value"]) for row in _table(fit, "plan")}
    mode = _record(fit)["facts"]["moments_mode"]
    name = _record(fit)["config"]["pair"]["name"]
    dtype = _record(fit)["config"]["mapper"]["dtype"]
    measured: dict[str, tuple[float, float]] = {
        "moments file": (
            sizes[f"moments_{mode}", "size_bytes"],
            _artifact_bytes(calibrate, folder, "moments"),
        ),
        "map file": (sizes["mapper", f"{dtype}_bytes"], _artifact_bytes(fit, folder, "mapper")),
        "peak of calibrate": (_planned_peak(calibrate, "calibrate"), _peak(calibrate)),
        "peak of fit": (_planned_peak(fit, "fit"), _peak(fit)),
    }
    measured |= dict(_of_models(_record(fit), sizes))
    return [
        {
            "run": name,
            "what": what,
            "planned_mb": planned / 1e6,
            "measured_mb": found / 1e6,
            "planned_over_measured": planned / found,
        }
        for what, (planned, found) in measured.items()
    ]


def _of_models(
    record: Mapping[str, Any], sizes: Mapping[tuple[str, str], float]
) -> Iterator[tuple[str, tuple[float, float]]]:
    """Weights and caches as they are in memory."""
    import torch

    from kvmap.models.capture import prefill
    from kvmap.models.load import load_model
    from kvmap.models.spec import ModelSpec

    for role in ("source", "target"):
        config = record["config"]["pair"][role]
        loaded = load_model(ModelSpec(config["id"], dtype=config["dtype"], device="cpu"))
        weights = sum(weight.numel() * weight.element_size() for weight in loaded.model.parameters())
        kv = prefill(loaded, torch.ones(1, _PROBE_TOKENS, dtype=torch.int64))
        cache = sum(tensor.numel() * tensor.element_size() for tensor in (*kv.keys, *kv.values))
        yield f"{role} weights", (sizes[role, "weights_bytes"], weights)
        yield f"{role} cache", (_PROBE_TOKENS * sizes[role, "kv_bytes_per_token"], cache)
        del loaded, kv


def _run(overrides: Sequence[str], folder: Path) -> Path:
    """The directory of a run that is over."""
    command = [sys.executable, "-m", "kvmap.run", "tracking=none", f"outputs={folder}", *overrides]
    command += [
        "pair.source.device=cpu",
        "pair.target.device=cpu",
        "calibration.device=cpu",
        "plan.device=cpu",
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    found = re.findall(r"^run: (.+)$", done.stdout, re.MULTILINE)
    if done.returncode or not found:
        lines = (done.stderr or done.stdout).strip().splitlines()
        raise KvmapError(f"{shlex.join(command)} failed: {lines[-1] if lines else 'it said nothing'}")
    return Path(found[-1])


def _record(run: Path) -> dict[str, Any]:
    return dict(json.loads((run / "run.json").read_text(encoding="utf-8")))


def _peak(run: Path) -> float:
    return float(_record(run)["usage"]["peak_memory_bytes"])


def _table(run: Path, name: str) -> list[dict[str, str]]:
    with open(run / "tables" / f"{name}.csv", newline="", encoding="utf-8") as stream:
        return list(csv.DictReader(stream))


def _planned_peak(run: Path, stage: str) -> float:
    rows = _table(run, "plan_memory")
    return sum(
        float(row["n_bytes"])
        for row in rows
        if row["stage"] == stage and row["place"] == "host" and row["what"] == "all"
    )


def _artifact_bytes(run: Path, folder: Path, kind: str) -> float:
    key = _record(run)["facts"]["artifacts"][kind]
    files = (folder / "artifacts" / kind / key).glob("*.safetensors")
    return float(sum(file.stat().st_size for file in files))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m kvmap.benchmark.planning",
        description="Compare stage plan with what runs take. Each RUN is the overrides of one, in quotes.",
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="such as 'pair=tiny'")
    parser.add_argument("--folder", type=Path, required=True, help="an empty folder for outputs")
    parser.add_argument("--tolerance", type=float, default=TOLERANCE, help="of planned over measured")
    return parser


if __name__ == "__main__":
    sys.exit(main())
