"""What devices can do: a table of published rates, or this machine's as measured."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from kvmap.errors import UnknownName
from kvmap.fit.planner import machine_bytes

EFFICIENCY = 0.5
"""Of a device's peak, what large products reach through transformers and torch, about."""
USABLE = 0.92
"""Of a GPU's memory, what is left beside its context and what the allocator cannot use, about."""
DISK_BYTES_PER_S = 1e9
"""Reading and hashing weights, about."""

_T, _G = 1e12, 1e9


@dataclass(frozen=True)
class Device:
    """Where models compute.

    Attributes:
        name: of the table.
        flops_per_s: by dtype, dense peak.
        bytes_per_s: of its memory.
        memory_bytes: of its own; None where it has the host's.
        fp8: whether it computes with fp8 weights.
        efficiency: share of the peak that is reached.
    """

    name: str
    flops_per_s: Mapping[str, float]
    bytes_per_s: float
    memory_bytes: int | None
    fp8: bool = False
    efficiency: float = EFFICIENCY

    @property
    def usable_bytes(self) -> int | None:
        """Of its own memory, what tensors can take."""
        return None if self.memory_bytes is None else int(USABLE * self.memory_bytes)

    def seconds(self, flops: float, dtype: str, n_bytes: float = 0.0) -> float:
        """The time of some products: `max(FLOPs / (share · peak), bytes / bandwidth)`."""
        return max(flops / (self.efficiency * self.flops_per_s[dtype]), n_bytes / self.bytes_per_s)


def _gpu(
    name: str, bf16: float, fp32: float, fp64: float, bandwidth: float, memory: float, *, fp8: bool = False
) -> Device:
    rates = {"bfloat16": bf16 * _T, "float16": bf16 * _T, "float32": fp32 * _T, "float64": fp64 * _T}
    return Device(name, rates, bandwidth * _T, int(memory * _G), fp8)


# Dense peaks in TFLOP/s of bfloat16, float32 and float64 (with tensor cores where the device has them for
# it), bandwidth in TB/s and memory in GB, as the makers publish them for the SXM form where there is one.
DEVICES: Mapping[str, Device] = {
    device.name: device
    for device in (
        _gpu("b200", 2250, 75, 37, 7.7, 180, fp8=True),
        _gpu("h200", 989, 67, 67, 4.8, 141, fp8=True),
        _gpu("h100", 989, 67, 67, 3.35, 80, fp8=True),
        _gpu("a100", 312, 19.5, 19.5, 2.04, 80),
        _gpu("l40s", 362, 91.6, 1.4, 0.864, 48, fp8=True),
        _gpu("l4", 121, 30.3, 0.47, 0.3, 24, fp8=True),
        _gpu("a10", 125, 31.2, 0.98, 0.6, 24),
        _gpu("rtx4090", 165, 82.6, 1.3, 1.0, 24, fp8=True),
    )
}

# Of one core with vector units of 256 bits; bandwidth is the machine's.
_CORE = {"bfloat16": 60 * _G, "float16": 60 * _G, "float32": 60 * _G, "float64": 30 * _G}
_HOST_BYTES_PER_S = 25 * _G
NAMES = ("auto", "measured", "cpu", *DEVICES)


def host_device(threads: int | None = None) -> Device:
    """The processor, by its cores alone.

    Args:
        threads: that torch is to use; None: as many as it would.
    """
    import torch

    n = threads or torch.get_num_threads()
    return Device("cpu", {dtype: n * rate for dtype, rate in _CORE.items()}, _HOST_BYTES_PER_S, None)


def find_device(name: str, *, threads: int | None = None) -> Device | None:
    """A device of the table; None where it has to be measured.

    Args:
        name: of `NAMES`. "auto" is this machine's GPU, else its processor; "measured" asks for a measurement.
        threads: of the processor.

    Raises:
        UnknownName: another name.
    """
    if name not in NAMES:
        raise UnknownName("device", name, NAMES)
    if name == "measured":
        return None
    if name == "cpu":
        return host_device(threads)
    if name != "auto":
        return DEVICES[name]
    import torch

    if not torch.cuda.is_available():
        return host_device(threads)
    found = torch.cuda.get_device_properties(0)
    known = known_gpu(found.name)
    return None if known is None else replace(known, memory_bytes=found.total_memory)


def known_gpu(name: str) -> Device | None:
    """The device of the table that a driver calls so; None: none of them."""
    words = re.split(r"[^a-z0-9]+", name.lower().replace("rtx ", "rtx"))
    return next((DEVICES[word] for word in words if word in DEVICES), None)


def host_bytes() -> int:
    """Memory of this machine, bytes."""
    return machine_bytes()
