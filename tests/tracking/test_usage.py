"""What a run used, measured on work of known size and on a stand-in for the driver's library."""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest

from kvmap import provenance
from kvmap.tracking import usage

UUID = "0f3e"


class Nvml:
    """One device whose counter goes up by 5 J with every look; `counts`: whether it has one."""

    class NVMLError(Exception):
        pass

    def __init__(self, counts: bool = True, starts: bool = True) -> None:
        self.counts, self.starts, self.millijoules, self.open = counts, starts, 0, 0

    def nvmlInit(self) -> None:  # noqa: N802 (the library's names)
        if not self.starts:
            raise self.NVMLError("Driver Not Loaded")
        self.open += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return 1

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        return index

    def nvmlDeviceGetUUID(self, _: int) -> str:  # noqa: N802
        return f"GPU-{UUID}"

    def nvmlDeviceGetTotalEnergyConsumption(self, _: int) -> int:  # noqa: N802
        if not self.counts:
            raise self.NVMLError("Not Supported")
        self.millijoules += 5000
        return self.millijoules


def fake_torch(monkeypatch: pytest.MonkeyPatch, nvml: Nvml | None) -> None:
    device = SimpleNamespace(uuid=UUID, name="H", total_memory=1, major=9, minor=0)
    cuda = SimpleNamespace(
        is_initialized=lambda: True,
        is_available=lambda: True,
        device_count=lambda: 1,
        get_device_properties=lambda _: device,
        max_memory_allocated=lambda _: 123,
    )
    version = SimpleNamespace(cuda="13.0")
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda, version=version))
    monkeypatch.setitem(sys.modules, "pynvml", nvml)


def test_processor_time_is_the_runs_own() -> None:
    before = time.process_time()
    while time.process_time() - before < 0.3:
        pass
    found = usage.Usage()
    while time.process_time() - before < 0.7:
        pass
    assert 0.35 < found.facts()["cpu_seconds"] < 0.6


def test_peak_memory_of_an_earlier_job_in_the_process_does_not_count() -> None:
    def peak(megabytes: int) -> int:
        found = usage.Usage()
        block = bytearray(megabytes << 20)
        for place in range(0, len(block), 4096):
            block[place] = 1
        return int(found.facts()["peak_memory_bytes"])

    large = peak(200)
    small = peak(1)
    assert large - small > 150 << 20 or not _can_reset()


def _can_reset() -> bool:
    with suppress(OSError), open("/proc/self/clear_refs", "w") as file:
        file.write("5")
        return True
    return False


def test_without_a_gpu_nothing_is_said_of_one() -> None:
    assert "gpu" not in usage.Usage().facts()


def test_energy_and_gpu_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = Nvml()
    fake_torch(monkeypatch, nvml)
    found = usage.Usage()
    time.sleep(0.05)
    facts = found.facts()
    assert facts["gpu"]["energy_joules"] == 5.0
    assert facts["gpu"]["seconds"] == pytest.approx(facts["seconds"], abs=0.002)
    assert facts["gpu"]["peak_memory_bytes"] == [123]
    assert "energy_absent" not in facts["gpu"]
    assert nvml.open == 0
    numbers = usage.numbers(facts)
    assert numbers["gpu_energy_joules"] == 5.0
    assert "gpu" not in numbers


@pytest.mark.parametrize(
    ("nvml", "reason"),
    [(None, "not installed"), (Nvml(starts=False), "Driver Not Loaded"), (Nvml(counts=False), "counts none")],
)
def test_where_no_energy_is_counted_the_reason_stands(
    monkeypatch: pytest.MonkeyPatch, nvml: Nvml | None, reason: str
) -> None:
    fake_torch(monkeypatch, nvml)
    gpu: dict[str, Any] = usage.Usage().facts()["gpu"]
    assert gpu["energy_joules"] is None
    assert reason in gpu["energy_absent"]


def test_devices_are_named_with_their_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_torch(monkeypatch, None)
    facts = provenance.device_facts()
    assert facts is not None
    assert facts["devices"] == [{"name": "H", "memory_bytes": 1, "capability": "9.0", "uuid": UUID}]
    assert set(facts) == {"type", "cuda", "driver", "devices"}
