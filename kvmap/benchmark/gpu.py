"""The latency study on a GPU, in one command and without a configuration.

    python -m kvmap.benchmark.gpu --output latency.json

checks every path against the reference on the device, measures its roofline, times mapping at Qwen3 14B→32B
shapes by path and length, then re-prefill by models of random weights, and prints what was asked against what
came out; the last line is one JSON object. It needs torch, triton, transformers and safetensors alone. After
every part the file is written again, so that an end before time costs what was not measured yet.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from kvmap.benchmark.gpu_checks import check_rows, dry_checks, gpu_checks
from kvmap.benchmark.gpu_mapping import mapping_rows, tuning_rows
from kvmap.benchmark.gpu_prefill import prefill_rows
from kvmap.benchmark.gpu_reach import reach_rows
from kvmap.benchmark.gpu_study import DRY, FULL, Record, Study
from kvmap.benchmark.roofline import measure_roofline
from kvmap.benchmark.timing import Row
from kvmap.files import json_text
from kvmap.kernels.settings import current

PARTS = ("checks", "mapping", "re_prefill", "tuning")
GPU_SECONDS = 450.0


def measure(study: Study, record: Record, parts: Sequence[str] = PARTS) -> dict[str, Any]:
    """Everything, part after part.

    Returns:
        {environment, study, checks, roofline, mapping, re_prefill, tuning, reach, skipped, seconds}; rows are
        described where they are made.
    """
    record.keep("environment", environment(study.device))
    record.keep("study", _described(study))
    if "checks" in parts:
        rows = list(check_rows(dry_checks() if study.dry else gpu_checks(), study.device))
        record.keep("checks", rows)
        failed = [row for row in rows if row["passed"] is False]
        record.say(f"checks: {len(rows)} cases and paths, {len(failed)} failed")
        for row in failed:
            record.say(f"  {row['path']} on {row['case']}: {row['note'] or row['error']}")
    roofline = (
        measure_roofline(study.device, study.dtype, matmul_size=64, copy_bytes=1 << 16)
        if study.dry
        else measure_roofline(study.device, study.dtype)
    )
    record.keep("roofline", asdict(roofline))
    record.say(f"roofline: {roofline.flops_per_s / 1e12:.4g} TFLOP/s, {roofline.bytes_per_s / 1e12:.4g} TB/s")
    if "mapping" in parts:
        rows = []
        for row in mapping_rows(study, roofline, record):
            rows.append(row)
            record.keep("mapping", rows)
    if "re_prefill" in parts:
        rows = []
        for row in prefill_rows(study, record):
            rows.append(row)
            record.keep("re_prefill", rows)
    if "tuning" in parts:
        record.keep("tuning", list(tuning_rows(study, record)))
    record.keep("reach", reach_rows(record.found))
    return record.found


def environment(device: torch.device) -> Row:
    """Versions, and the device by name."""
    found: Row = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "device": device.type,
        "threads": torch.get_num_threads(),
    }
    for name in ("triton", "transformers"):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {"device": properties.name, "memory_bytes": properties.total_memory}
    return found


def _described(study: Study) -> Row:
    shape = study.shape
    return {
        "caches": f"{shape.n_source} to {shape.n_target} layers, {shape.n_heads} heads of {shape.head_dim}",
        "top_k": study.top_k,
        "lengths": list(study.lengths),
        "source": study.source,
        "target": study.target,
        "dtype": str(study.dtype).removeprefix("torch."),
        "chunk_tokens": current().chunk_tokens,
        "dry_run": study.dry,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print what was asked against what came out, and last everything as one JSON object.

    Returns:
        0; 1 where there is no GPU, or a check has failed.
    """
    asked = _parser().parse_args(arguments)
    if asked.dry_run:
        os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are first imported, which is later
    elif not torch.cuda.is_available():
        print("error: torch finds no CUDA device here; --dry-run rehearses on the CPU", file=sys.stderr)
        return 1
    record = Record(asked.seconds, asked.output)
    found = measure(DRY if asked.dry_run else FULL, record, asked.parts)
    for row in found["reach"]:
        said = {True: "reached", False: "NOT reached", None: "not measured"}[row["reached"]]
        got = "-" if row["got"] is None else f"{row['got']:.4g}"
        print(f"{row['what']}: asked {row['asked']}, got {got} {row['unit']} ({said}) {row['by'] or ''}")
    print(json_text(found))
    return 1 if any(row["passed"] is False for row in found.get("checks", [])) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m kvmap.benchmark.gpu",
        description="Check and time every path of map_cache at Qwen3 14B to 32B shapes on a CUDA device, and "
        "re-prefill by models of random weights, within a budget of seconds.",
    )
    parser.add_argument("--output", type=Path, help="file that is written after every part, as JSON")
    parser.add_argument("--seconds", type=float, default=GPU_SECONDS, help=f"default {GPU_SECONDS:g}")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="default: all")
    parser.add_argument(
        "--dry-run", action="store_true", help="rehearse, tiny, on the CPU, kernels interpreted"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
