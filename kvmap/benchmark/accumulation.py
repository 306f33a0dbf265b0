"""Accumulating moments: its rate against a matmul, and its peak memory against the planner's figure."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import torch

from kvmap.benchmark.latency import time_interleaved
from kvmap.benchmark.sweep import Row, empty_recipe, layout_of
from kvmap.errors import KvmapError
from kvmap.fit.calibrate import CalibrationOptions, accumulate_moments
from kvmap.fit.captures import ROLES, Captures
from kvmap.fit.features import CacheShape, Layout, both, shape_from_json
from kvmap.fit.moments import PRODUCT_DTYPES
from kvmap.fit.pair_moments import (
    PairMoments,
    TableSpec,
    calibration_rows,
    full_tables,
    head_local_tables,
    selected_tables,
)
from kvmap.fit.planner import plan_moments
from kvmap.fit.tuning import recipe_for
from kvmap.fit.view import calibration_view
from kvmap.models.storage import load_kv
from kvmap.progress import track

GROWTH = 8
"""How many times more tokens the larger of two memory cases reads."""

RATE_MODES: dict[str, Callable[[Layout], list[TableSpec]]] = {
    "full": full_tables,
    "head_local": head_local_tables,
}

_MATMUL_SIZE = 3072


def accumulation_rows(captures: Captures, repeats: int = 3) -> list[Row]:
    """Rate at which a captured batch is added to moments, against a square matmul in the products' dtype.

    The work is that which the moments need: n p² for the half of XᵀX that is not mirrored, 2 n p q for XᵀY,
    summed over the tables; taking features from caches, centring and adding up is overhead.

    Returns:
        Rows {mode, dtype, n_rows, n_tables, n_features, n_targets, flops, seconds, gflop_per_s,
        matmul_gflop_per_s, matmul_size, share, threads, n_repeats}; sizes are those of the first table, and
        seconds the median of `repeats` turns.
    """
    layout, (start, _) = layout_of(captures), captures.batches[0]
    source, target = (load_kv(captures.path(start, role)) for role in ROLES)
    source, target = calibration_view(source, target)
    rows = calibration_rows(source.mask, native_head=1)
    found = []
    for mode, name in product(RATE_MODES, PRODUCT_DTYPES):
        specs, dtype = RATE_MODES[mode](layout), PRODUCT_DTYPES[name]
        moments = PairMoments.zeros(layout, specs, product_dtype=dtype)
        square = torch.ones(_MATMUL_SIZE, _MATMUL_SIZE, dtype=dtype)
        calls: dict[str, Callable[[], object]] = {
            "update": partial(moments.update, "fit", source, target, rows),
            "matmul": partial(torch.mm, square, square),
        }
        seconds = {side: float(np.median(s)) for side, s in time_interleaved(calls, repeats, 1).items()}
        found.append(_rate_row(mode, name, specs, int(rows.sum()), seconds) | {"n_repeats": repeats})
    return found


def _rate_row(mode: str, dtype: str, specs: list[TableSpec], n: int, seconds: dict[str, float]) -> Row:
    sizes = [(len(spec.features), len(spec.targets)) for spec in specs]
    flops = sum(n * p * (p + 2 * q) for p, q in sizes)
    rate, matmul = flops / seconds["update"], 2 * _MATMUL_SIZE**3 / seconds["matmul"]
    return {
        "mode": mode,
        "dtype": dtype,
        "n_rows": n,
        "n_tables": len(specs),
        "n_features": sizes[0][0],
        "n_targets": sizes[0][1],
        "flops": flops,
        "seconds": seconds["update"],
        "gflop_per_s": rate / 1e9,
        "matmul_gflop_per_s": matmul / 1e9,
        "matmul_size": _MATMUL_SIZE,
        "share": rate / matmul,
        "threads": torch.get_num_threads(),
    }


def memory_rows(captures: Captures, top_k: int = 8, product_dtype: str = "float64") -> list[Row]:
    """Peak memory of a pass, against what the planner says of it, at N tokens and at `GROWTH` times N.

    Each case is a process of its own: what it holds at most while it accumulates, less what it held before,
    imports and an open folder. With "selected" moments each target layer reads `top_k` layers of its own, as
    the planner takes it; for layers that choose alike less is held.

    Returns:
        Rows {mode, support, top_k, dtype, n_tokens, batch_tokens, table_bytes, planned_bytes, peak_bytes,
        share, threads}; share is peak over planned.

    Raises:
        KvmapError: fewer than two batches were captured, or a process failed.
    """
    n_batches = len(captures.batches)
    if n_batches < 2:
        raise KvmapError(
            f"{captures.folder} holds {n_batches} batch: expected 2 or more, one of them held out; capture "
            f"more sequences, or fewer at a time (calibration.batch_size)"
        )
    layout = layout_of(captures)
    top_k = min(top_k, len(layout.source_shape))
    shorter = max(2, n_batches // GROWTH)
    lengths = sorted({shorter, min(GROWTH * shorter, n_batches)})
    modes = [("full", "full_head"), ("head_local", "head_local"), ("selected", "full_head")]
    cases = [
        MemoryCase(
            str(captures.folder),
            layout.source_shape,
            layout.target_shape,
            mode,
            support,
            top_k,
            length,
            product_dtype,
        )
        for (mode, support), length in product(modes, lengths)
    ]
    return [_in_own_process(case) for case in track(cases, len(cases), "benchmark: memory")]


@dataclass(frozen=True)
class MemoryCase:
    """One pass whose memory is measured.

    Attributes:
        folder: of the captures.
        source_shape, target_shape: `(n_kv_heads, head_dim)` of each layer; told, so that no cache is read
            before the pass.
        mode, support, top_k: see `kvmap.fit.planner.plan_moments`.
        n_batches: captured batches that are read; one in five, and at least one, is held out.
        product_dtype: see `kvmap.fit.calibrate.CalibrationOptions`.
    """

    folder: str
    source_shape: CacheShape
    target_shape: CacheShape
    mode: str
    support: str
    top_k: int
    n_batches: int
    product_dtype: str

    def measure(self) -> Row:
        """Run the pass in this process, which should have done nothing before."""
        captures = Captures.open(Path(self.folder))
        layout = Layout(shape_from_json(self.source_shape), shape_from_json(self.target_shape))
        read = captures.batches[: self.n_batches]
        n_held_out = max(1, round(0.2 * len(read)))
        splits = {
            "fit": [number for batch in read[:-n_held_out] for number in range(*batch)],
            "held_out": [number for batch in read[-n_held_out:] for number in range(*batch)],
        }
        length = captures.mask(read[0][0]).shape[1]
        batch_tokens = max(stop - start for start, stop in read) * length
        plan = plan_moments(
            layout,
            support=self.support,
            regressors="own_kind",
            top_k=self.top_k,
            batch_tokens=batch_tokens,
            mode=self.mode,
            budget_bytes=sys.maxsize,
        )
        options = CalibrationOptions(product_dtype=self.product_dtype)
        tables = self._tables(layout)
        _multiply_once()
        before = _reset_peak()
        accumulate_moments(captures.stream(splits), layout, tables, options)
        peak = _status("VmHWM") - before
        return {
            "mode": self.mode,
            "support": self.support,
            "top_k": self.top_k if self.mode == "selected" else None,
            "dtype": self.product_dtype,
            "n_tokens": sum(stop - start for start, stop in read) * length,
            "batch_tokens": batch_tokens,
            "table_bytes": sum(table.nbytes for table in tables),
            "planned_bytes": plan.peak_bytes,
            "peak_bytes": peak,
            "share": peak / plan.peak_bytes,
            "threads": torch.get_num_threads(),
        }

    def _tables(self, layout: Layout) -> list[TableSpec]:
        if self.mode == "full":
            return full_tables(layout)
        if self.mode == "head_local":
            return head_local_tables(layout)
        draw = random.Random(0)
        layers = range(len(layout.source_shape))
        ranked = both(tuple(tuple(draw.sample(layers, self.top_k)) for _ in layout.target_shape))
        return selected_tables(recipe_for(empty_recipe(layout, self.support), ranked, self.top_k))


def _multiply_once() -> None:
    """Have the libraries allocate what they keep."""
    for dtype in PRODUCT_DTYPES.values():
        torch.ones(256, 256, dtype=dtype) @ torch.ones(256, 256, dtype=dtype)


def _status(name: str) -> int:
    """A figure of this process from Linux's /proc/self/status, bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise KvmapError(f"/proc/self/status says nothing of {name}: memory is measured on Linux only")


def _reset_peak() -> int:
    """Start the peak anew where the system lets us, and say what is held: bytes."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _in_own_process(case: MemoryCase) -> Row:
    program = (
        "import json, sys, torch; torch.set_num_threads(int(sys.argv[2]))\n"
        "from kvmap.benchmark.accumulation import MemoryCase\n"
        "print(json.dumps(MemoryCase(**json.loads(sys.argv[1])).measure()))"
    )
    arguments = [json.dumps(asdict(case)), str(torch.get_num_threads())]
    found = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True)
    if found.returncode:
        raise KvmapError(f"the memory of {case} could not be measured:\n{found.stderr.strip()}")
    row: Row = json.loads(found.stdout.splitlines()[-1])
    return row
