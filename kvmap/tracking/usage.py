"""What a run used: processor time, memory, GPU time, and energy where the device counts it."""

from __future__ import annotations

import re
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

_STATUS = Path("/proc/self/status")
_RESET_PEAK = "5"  # written to clear_refs


class Usage:
    """Counts from the moment it is made. A later job of the same process counts its own share alone."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._cpu = _cpu_seconds()
        self._energy = _energy_counters()
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text(_RESET_PEAK)

    def facts(self) -> dict[str, Any]:
        """Seconds, CPU seconds (with ended children), peak memory; GPUs once torch uses CUDA."""
        seconds = time.monotonic() - self._began
        facts: dict[str, Any] = {
            "seconds": round(seconds, 3),
            "cpu_seconds": round(_cpu_seconds() - self._cpu, 3),
            "peak_memory_bytes": _peak_memory(),
        }
        if (uuids := _cuda_devices()) is not None:
            facts["gpu"] = self._gpu(seconds, uuids)
        return facts

    def _gpu(self, seconds: float, uuids: list[str]) -> dict[str, Any]:
        torch = sys.modules["torch"]
        facts: dict[str, Any] = {
            "count": len(uuids),
            "seconds": round(seconds * len(uuids), 3),
            "peak_memory_bytes": [torch.cuda.max_memory_allocated(index) for index in range(len(uuids))],
            "energy_joules": None,
        }
        before, reason = self._energy
        after, later = _energy_counters()
        if missing := [uuid for uuid in uuids if uuid not in before or uuid not in after]:
            facts["energy_absent"] = reason or later or f"the driver counts none for {', '.join(missing)}"
        else:
            facts["energy_joules"] = round(sum(after[uuid] - before[uuid] for uuid in uuids) / 1000, 1)
        return facts


def numbers(facts: dict[str, Any]) -> dict[str, float]:
    """The facts that are one number, with those of the GPUs under `gpu_<name>`."""
    both = facts | {f"gpu_{name}": value for name, value in facts.get("gpu", {}).items()}
    return {name: value for name, value in both.items() if isinstance(value, int | float)}


def _cpu_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def _peak_memory() -> int:
    """Largest resident memory since the run began; since the process began, where that cannot be reset."""
    with suppress(OSError):
        if found := re.search(r"VmHWM:\s+(\d+) kB", _STATUS.read_text()):
            return int(found[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _cuda_devices() -> list[str] | None:
    """The ids of the GPUs that torch has begun to use; None: none."""
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "cuda") or not torch.cuda.is_initialized():
        return None
    devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return [f"GPU-{getattr(device, 'uuid', '?')}" for device in devices]


def _energy_counters() -> tuple[dict[str, int], str | None]:
    """Millijoules since the driver was loaded, by the GPU's id, all that runs there included; or why not."""
    counters: dict[str, int] = {}
    try:
        with _nvml() as nvml:
            for index in range(nvml.nvmlDeviceGetCount()):
                device = nvml.nvmlDeviceGetHandleByIndex(index)
                uuid = nvml.nvmlDeviceGetUUID(device)
                name = uuid.decode() if isinstance(uuid, bytes) else uuid
                with suppress(nvml.NVMLError):  # older than Volta, or not allowed
                    counters[name] = nvml.nvmlDeviceGetTotalEnergyConsumption(device)
    except ImportError:
        return {}, "nvidia-ml-py is not installed (pip install nvidia-ml-py)"
    except Exception as error:  # no driver: the library's own error classes
        return {}, f"NVML: {error}"
    return counters, None


@contextmanager
def _nvml() -> Iterator[Any]:
    import pynvml

    pynvml.nvmlInit()
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()
