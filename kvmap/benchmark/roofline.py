"""What this machine can do at best, by a matmul and a copy, and what share of it something reached."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from kvmap.benchmark.timing import Call

_MATMUL_SIZE = {"cpu": 1536, "cuda": 8192}
_COPY_BYTES = {"cpu": 128 * 2**20, "cuda": 2**31}


@dataclass(frozen=True)
class Roofline:
    """The two rates that bound every operation.

    Attributes:
        flops_per_s: of a large square matmul.
        bytes_per_s: of a large copy, bytes read and bytes written counted.
    """

    flops_per_s: float
    bytes_per_s: float

    @property
    def rates(self) -> dict[str, float]:
        """In 10⁹ a second: {gflop_per_s, gb_per_s}."""
        return {"gflop_per_s": self.flops_per_s / 1e9, "gb_per_s": self.bytes_per_s / 1e9}

    def seconds(self, flops: float, n_bytes: float) -> float:
        """The least time: ``max(FLOPs / flops_per_s, bytes / bytes_per_s)``."""
        return max(flops / self.flops_per_s, n_bytes / self.bytes_per_s)

    def share(self, flops: float, n_bytes: float, seconds: float) -> float:
        """The least time over the time it took: 1 is the roof."""
        return self.seconds(flops, n_bytes) / seconds


def measure_roofline(
    device: torch.device,
    dtype: torch.dtype,
    *,
    repeats: int = 4,
    matmul_size: int | None = None,
    copy_bytes: int | None = None,
) -> Roofline:
    """Time a matmul and a copy with the threads torch has; the fastest of `repeats` turns counts.

    Args:
        device: where.
        dtype: of the matmul's factors.
        repeats: timed turns of each, after one that is not timed.
        matmul_size: rows and columns of the square; None: what suits the device.
        copy_bytes: of what is copied; None: likewise, many times what its caches hold.
    """
    kind = "cuda" if device.type == "cuda" else "cpu"
    size, n_bytes = matmul_size or _MATMUL_SIZE[kind], copy_bytes or _COPY_BYTES[kind]
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    product = torch.empty_like(left)
    multiply = _fastest(lambda: torch.mm(left, right, out=product), device, repeats)
    origin = torch.ones(n_bytes, dtype=torch.uint8, device=device)
    copied = torch.empty_like(origin)
    copy = _fastest(lambda: copied.copy_(origin), device, repeats)
    return Roofline(2 * size**3 / multiply, 2 * n_bytes / copy)


def _fastest(call: Call, device: torch.device, repeats: int) -> float:
    found = []
    for _ in range(repeats + 1):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        found.append(time.perf_counter() - start)
    return min(found[1:])
