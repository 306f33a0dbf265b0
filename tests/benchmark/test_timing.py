from __future__ import annotations

import time

import pytest
import torch

from kvmap.benchmark.roofline import Roofline, measure_roofline
from kvmap.benchmark.timing import COLD_BYTES, in_turn, n_copies, peak_bytes, percentiles, time_interleaved

CPU = torch.device("cpu")


def test_arms_take_turns_after_a_warm_up_that_is_not_timed():
    order = []
    calls = {name: lambda name=name: order.append(name) for name in "abc"}
    seconds = time_interleaved(calls, repeats=3, warmup=1)
    assert "".join(order) == "abc" + "bca" + "cab" + "abc"
    assert {name: len(times) for name, times in seconds.items()} == {"a": 3, "b": 3, "c": 3}


def test_times_are_wall_clock():
    seconds = time_interleaved({"nap": lambda: time.sleep(0.01)}, repeats=2, warmup=0)
    assert all(0.01 <= value < 1 for value in seconds["nap"])


def test_copies_take_turns():
    order = []
    call = in_turn([lambda i=i: order.append(i) for i in range(3)])
    for _ in range(7):
        call()
    assert order == [0, 1, 2, 0, 1, 2, 0]


def test_there_are_no_more_copies_than_fill_the_caches():
    assert n_copies(4, 1000) == 4
    assert n_copies(4, COLD_BYTES // 2) == 2
    assert n_copies(4, 10 * COLD_BYTES) == 1
    assert n_copies(4, 0) == 4


def test_percentiles_are_in_milliseconds():
    found = percentiles([0.001 * i for i in range(1, 12)])
    assert list(found.values()) == pytest.approx([3.0, 6.0, 9.0])


X = torch.zeros(1000, 1000)


@pytest.mark.parametrize(
    ("call", "wanted"),
    [
        (lambda: X + 1, 4_000_000),
        (lambda: (X + 1).relu(), 8_000_000),
        (lambda: X.t(), 0),
        (lambda: X.view(-1).split(10), 0),
        (lambda: torch.empty(1000, 1000).copy_(X.t())[:10].t(), 4_000_000),
        (lambda: [(X + 1).sum() for _ in range(3)], 4_000_012),
    ],
)
def test_peak_memory_is_what_is_held_at_a_time(call, wanted):
    assert peak_bytes(call, CPU) == wanted


@pytest.mark.gpu
def test_peak_memory_on_a_gpu_is_the_allocator_s():
    x = torch.zeros(1024, 1024, device="cuda")
    assert peak_bytes(lambda: (x + 1).relu(), x.device) == 2 * x.nbytes


def test_the_roofline_is_the_slower_of_both_bounds():
    roofline = Roofline(100.0, 10.0)
    assert roofline.seconds(200, 10) == 2
    assert roofline.seconds(200, 50) == 5
    assert roofline.share(200, 50, 10.0) == 0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rates_are_measured(dtype):
    found = measure_roofline(CPU, dtype, repeats=2, matmul_size=64, copy_bytes=1 << 16)
    assert found.flops_per_s > 0
    assert found.bytes_per_s > 0
