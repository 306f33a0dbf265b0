from __future__ import annotations

import pytest

from kvmap.config.schema import PLAN_DEVICES
from kvmap.errors import UnknownName
from kvmap.planning.devices import DEVICES, EFFICIENCY, NAMES, find_device, host_device, known_gpu


def test_the_configuration_offers_the_devices_there_are() -> None:
    assert PLAN_DEVICES == NAMES


@pytest.mark.parametrize(
    ("said", "name"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-40GB", "a100"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA A10", "a10"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
    ],
)
def test_a_driver_s_name_is_known(said: str, name: str) -> None:
    found = known_gpu(said)
    assert found is not None
    assert found.name == name


@pytest.mark.parametrize("said", ["NVIDIA L40", "Tesla T4", "NVIDIA A1000"])
def test_another_gpu_is_measured_and_not_taken_for_one_of_the_table(said: str) -> None:
    assert known_gpu(said) is None


def test_the_slower_of_products_and_traffic_counts() -> None:
    device = DEVICES["h100"]
    assert device.seconds(989e12, "bfloat16") == pytest.approx(1 / EFFICIENCY)
    assert device.seconds(1.0, "bfloat16", 3.35e12) == pytest.approx(1)


def test_a_processor_has_the_rate_of_its_threads_and_no_memory_of_its_own() -> None:
    one, four = host_device(1), host_device(4)
    assert four.flops_per_s["float64"] == 4 * one.flops_per_s["float64"]
    assert one.memory_bytes is None
    assert find_device("cpu", threads=4) == four
    assert find_device("measured") is None


def test_an_unknown_device_is_refused() -> None:
    with pytest.raises(UnknownName, match="h100"):
        find_device("h10")
