from __future__ import annotations

import math

import pytest

from kvmap.benchmark.links import break_even, network_rows, ratio_rows, transport_rows


def measured(**p50):
    """Rows of made-up medians: arm → one median per length 64, 128, 256."""
    return [
        {
            "length": length,
            "arm": arm,
            "whole_p50_ms": medians[i],
            "source_bytes": 10**6,
            "mapped_bytes": 2 * 10**6,
        }
        for arm, medians in p50.items()
        for i, length in enumerate((64, 128, 256))
    ]


MADE = measured(source_prefill=(4, 4, 4), map=(1, 1, 1), hand_off=(2, 2, 2), re_prefill=(3, 1, 5))


def test_break_even_is_the_length_from_which_a_hand_off_stays_faster():
    ratios = ratio_rows(MADE)
    assert [row["map_ratio"] for row in ratios] == [3, 1, 5]
    assert [row["warm_ratio"] for row in ratios] == [1.5, 0.5, 2.5]
    assert [row["cold_ratio"] for row in ratios] == pytest.approx([3 / 6, 1 / 6, 5 / 6])
    found = break_even(MADE)
    assert (found["warm_length"], found["cold_length"]) == (256, None)
    assert found["note"] == (
        "a hand-off is faster than re-prefill: warm from 256 tokens on, cold never "
        "(measured: 64 to 256 tokens)"
    )


def test_transport_takes_eight_bits_a_byte():
    made = transport_rows(measured(map=(1, 1, 1)), gbit_per_s=(10, 100))
    assert len(made) == 3 * 2 * 2
    mapped = next(r for r in made if (r["length"], r["cache"], r["gbit_per_s"]) == (64, "mapped", 10))
    assert mapped["transport_ms"] == pytest.approx(2e6 * 8 / 10e9 * 1000)


def test_the_break_even_bandwidth_is_that_at_which_sending_takes_what_is_spared():
    made = network_rows(MADE, gbit_per_s=(10, 400))
    by_case = {(r["length"], r["cache"], r["gbit_per_s"]): r for r in made}
    row = by_case[256, "mapped", 10]
    assert row["remote_ms"] == pytest.approx(1.6 + 2)
    assert row["ratio"] == pytest.approx(5 / 3.6)
    # 2 MB in the 3 ms between hand-off and re-prefill
    assert row["break_even_gbit_per_s"] == pytest.approx(2e6 * 8 / 3e-3 / 1e9)
    rate = row["break_even_gbit_per_s"]
    (at,) = [
        r for r in network_rows(MADE, gbit_per_s=(rate,)) if r["length"] == 256 and r["cache"] == "mapped"
    ]
    assert at["ratio"] == pytest.approx(1)
    assert by_case[128, "source", 400]["break_even_gbit_per_s"] == math.inf
