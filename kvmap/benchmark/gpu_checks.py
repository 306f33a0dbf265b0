"""Whether every path maps as the reference does on this device, before any of them is timed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvmap.benchmark.gpu_cases import GpuCase, PairShape, in_fp8
from kvmap.benchmark.timing import Row
from kvmap.errors import KvmapError
from kvmap.kernels.map_cache import KINDS, CacheMap, Columns, Inputs, Output, Pages, map_cache

PATHS = ("batched", "triton")
TOLERANCE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 2e-2}
"""Of the largest number of the reference: two roundings of the output's dtype in float16 and bfloat16."""
_BLOCK_SIZE = 16


@dataclass(frozen=True)
class Check:
    """One case.

    Attributes:
        shape: of the caches.
        support, top_k: of the map.
        n_tokens, batch_size: of the caches.
        dtype: of caches and weights.
        fp8: whether the weights are float8.
        keep: whether every third column is to be zeros.
        paged: whether the output is in blocks, in an order of their own.
    """

    shape: PairShape
    support: str
    top_k: int
    n_tokens: int
    batch_size: int = 1
    dtype: torch.dtype = torch.bfloat16
    fp8: bool = False
    keep: bool = False
    paged: bool = False

    @property
    def name(self) -> str:
        """The case in words."""
        marks = [name for name in ("fp8", "keep", "paged") if getattr(self, name)]
        return (
            f"{self.support} k={self.top_k} heads={self.shape.n_heads}x{self.shape.head_dim} "
            f"tokens={self.batch_size}x{self.n_tokens} {str(self.dtype).removeprefix('torch.')} "
            f"{' '.join(marks)}"
        ).strip()


def gpu_checks() -> list[Check]:
    """Every head dim, support and dtype, one token, odd counts, float8 weights, masks and pages."""
    wide = PairShape(6, 4, 8, 128)
    found = [Check(wide, support, 3, 777) for support in ("full_head", "head_local")]
    found += [Check(wide, support, 3, 1) for support in ("full_head", "head_local")]
    found += [Check(wide, "full_head", 3, 333, 3, dtype) for dtype in (torch.float16, torch.float32)]
    found += [Check(wide, support, 3, 2500, fp8=True) for support in ("full_head", "head_local")]
    found += [Check(wide, "full_head", 3, 100, 2, keep=True)]
    found += [Check(wide, support, 2, 100, 2, paged=True) for support in ("full_head", "head_local")]
    found += [
        Check(PairShape(3, 2, 4, dim), support, 2, 130)
        for dim in (64, 80, 96, 112, 256)
        for support in ("full_head", "head_local")
    ]
    return found


def dry_checks() -> list[Check]:
    """A few tiny ones, for the interpreter."""
    small = PairShape(3, 2, 2, 16)
    return [
        Check(small, "full_head", 2, 5, dtype=torch.float32),
        Check(small, "head_local", 2, 3, 2, dtype=torch.float32, keep=True),
        Check(small, "head_local", 2, 3, 2, dtype=torch.float32, paged=True),
    ]


def check_rows(checks: Sequence[Check], device: torch.device) -> Iterator[Row]:
    """Every path on every case.

    Yields:
        Rows {case, path, error, tolerance, passed, note}: the largest absolute difference from the reference
        over its largest number. A path that cannot serve a case has a note and neither passed nor failed.
    """
    for check in checks:
        cache_map, inputs, output = _prepared(check, device)
        wanted, _ = _written(cache_map, inputs, output, "reference")
        for path in PATHS:
            row: Row = {"case": check.name, "path": path, "tolerance": TOLERANCE[check.dtype]}
            try:
                got, counts = _written(cache_map, inputs, output, path)
            except KvmapError as error:
                yield row | {"error": None, "passed": None, "note": str(error)}
                continue
            except Exception as error:  # a path that breaks is a finding, and the others are still to be seen
                yield row | {"error": None, "passed": False, "note": f"{type(error).__name__}: {error}"}
                continue
            off = max(
                float((a.float() - b.float()).abs().max() / b.float().abs().max().clamp(min=1e-6))
                for a, b in zip(got, wanted, strict=True)
            )
            passed = off <= row["tolerance"] and not bool(counts.any())
            yield row | {"error": off, "passed": passed, "note": None}


def _prepared(check: Check, device: torch.device) -> tuple[CacheMap, Inputs, Output]:
    cache_map = check.shape.cache_map(check.support, check.top_k, check.dtype, device)
    if check.fp8:
        cache_map = in_fp8(cache_map)
    case = GpuCase.prepare(
        check.shape, {"": cache_map}, check.n_tokens, check.dtype, device, batch_size=check.batch_size
    )
    inputs, output = case.inputs, case.output
    if check.keep:
        inputs = replace(inputs, keep=inputs.positions % 3 > 0)
    return cache_map, inputs, _paged(check, output, device) if check.paged else output


def _paged(check: Check, output: Columns, device: torch.device) -> Pages:
    """Blocks in an order of their own, each row beginning at another place of its first block."""
    per_row = (check.n_tokens + check.batch_size) // _BLOCK_SIZE + 1
    n_blocks = per_row * check.batch_size
    order = torch.randperm(n_blocks, generator=torch.Generator().manual_seed(0)).to(device, torch.int32)
    size = (n_blocks, _BLOCK_SIZE, check.shape.n_heads, check.shape.head_dim)
    keys, values = (
        {layer: torch.zeros(size, dtype=check.dtype, device=device) for layer in tensors}
        for tensors in (output.keys, output.values)
    )
    first = torch.arange(check.batch_size, device=device)
    return Pages(keys, values, order.view(check.batch_size, per_row), first, output.rotations)


def _written(cache_map: CacheMap, inputs: Inputs, output: Output, path: str) -> tuple[list[Tensor], Tensor]:
    """What a path writes into an output of the same layout, zero before, and its counts."""
    keys, values = (
        {layer: torch.zeros_like(tensor) for layer, tensor in tensors.items()}
        for tensors in (output.keys, output.values)
    )
    fresh = replace(output, keys=keys, values=values)
    counts = map_cache(cache_map, inputs, fresh, path=path)
    return [fresh.tensor(kind, layer) for kind in KINDS for layer in cache_map.layers], counts
