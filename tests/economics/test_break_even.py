"""Break-evens put back where they came from: both ways are then equal, and each is better beside it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvmap.benchmark.links import network_rows
from kvmap.economics import Axes, Latencies, Prices, Workload, analyse, counted
from kvmap.economics.break_even import better_from, break_even_rows, in_words
from kvmap.economics.outcomes import outcome_rows
from kvmap.economics.policies import serve
from kvmap.economics.surfaces import cost_surface, time_surface
from tests.economics.cases import benchmark_rows, latencies

CONTEXTS = counted([300, 1000, 6000], [3, 2, 1])
WORKLOAD = Workload(escalation_rate=0.3, output_tokens=30, link_ms=1.0)
PRICES = Prices(target=1.5, source_gpus=2, target_gpus=4, gbyte=0.01)


RANGES = {"length": (128, 8192), "escalation_rate": (0, 1), "cached_share": (0, 1)} | dict.fromkeys(
    ("gbit_per_s", "price_ratio"), (0, 1e9)
)


def means(
    workload: Workload, prices: Prices, contexts: Any = CONTEXTS, curves: Latencies | None = None
) -> dict[str, dict[str, float]]:
    served = serve(curves or latencies(), contexts.lengths, workload, prices.cached_discount)
    rows = outcome_rows(served, contexts, workload.escalation_rate, prices)
    return {row["policy"]: row for row in rows}


def gain(row: dict[str, Any], value: float) -> float:
    """By how much the policy is the better one where what is broken even is set to a value."""
    workload, prices, contexts = WORKLOAD, PRICES, CONTEXTS
    if row["what"] == "price_ratio":
        prices = replace(prices, target=value * prices.source_second / prices.target_gpus)
    elif row["what"] == "length":
        contexts = counted([value])
        workload = replace(workload, escalation_rate=1.0)
    else:
        workload = replace(workload, **{row["what"]: value})
        if row["what"] == "cached_share":
            workload = replace(workload, escalation_rate=1.0)
    found = means(workload, prices, contexts)
    column = "takeover_mean_ms" if row["by"] == "time" else "cost"
    return found[row["against"]][column] - found[row["policy"]][column]


def rows(prices: Prices = PRICES) -> list[dict[str, Any]]:
    return break_even_rows(latencies(), CONTEXTS, WORKLOAD, prices)


def test_every_break_even_makes_both_equal_and_is_on_the_side_it_says() -> None:
    checked = 0
    for row in rows():
        value = row["value"]
        if value is None:
            continue
        low, high = RANGES[row["what"]]
        at_low, at_value, at_high = (
            gain(row, point) for point in (max(0.9 * value, low), value, min(1.1 * value, high))
        )
        assert abs(at_value) < 1e-6 * (abs(at_low) + abs(at_high)), row
        better, worse = (at_high, at_low) if row["better"] == "above" else (at_low, at_high)
        assert better > 0 > worse, row
        checked += 1
    assert checked >= 10


def test_all_five_are_there() -> None:
    assert {row["what"] for row in rows()} == {
        "length",
        "gbit_per_s",
        "escalation_rate",
        "price_ratio",
        "cached_share",
    }


def test_at_every_and_at_no_are_meant() -> None:
    never = latencies(hand_off=(1e4, 2e4, 4e4, 8e4))
    found = break_even_rows(never, CONTEXTS, WORKLOAD, PRICES)
    warm = [row for row in found if row["policy"] == "hand_off_warm" and row["against"] == "re_prefill"]
    assert {row["better"] for row in warm} == {"never"}
    always = latencies(hand_off=(0.01, 0.01, 0.01, 0.01))
    quick = break_even_rows(always, CONTEXTS, replace(WORKLOAD, gbit_per_s=None), PRICES)
    length = next(row for row in quick if row["policy"] == "hand_off_warm" and row["what"] == "length")
    assert (length["better"], length["value"]) == ("always", None)


def test_the_bandwidth_of_one_length_is_the_benchmarks() -> None:
    for place, length in enumerate((128.0, 512.0, 2048.0, 8192.0)):
        expected = network_rows(benchmark_rows())[place * 10]["break_even_gbit_per_s"]
        found = break_even_rows(latencies(), counted([length]), Workload(), PRICES)
        row = next(row for row in found if row["what"] == "gbit_per_s" and row["policy"] == "hand_off_warm")
        assert row["value"] == (pytest.approx(expected) if np.isfinite(expected) else None)


def test_a_gain_that_comes_and_goes_counts_from_where_it_stays() -> None:
    better, value = better_from(lambda x: (x - 2) * (x - 5) * (x - 7), np.linspace(0, 10, 50))
    assert better == "above"
    assert value == pytest.approx(7)


def test_a_free_source_has_no_price_ratio() -> None:
    for gbyte, better in ((0.0, {"always"}), (1e3, {"always", "never"})):
        prices = replace(PRICES, source=0.0, gbyte=gbyte)
        found = [row for row in rows(prices) if row["what"] == "price_ratio"]
        assert {row["better"] for row in found} == better
        assert {row["value"] for row in found} == {None}


def test_each_is_said_in_a_sentence() -> None:
    said = [in_words(row) for row in rows()]
    assert len(set(said)) == len(said)
    assert any("warm hand-off is faster than re-prefill above" in line and "tokens" in line for line in said)
    assert any("Gb/s" in line for line in said)


class TestSurfaces:
    def test_each_cell_of_time_is_an_analysis_of_its_own(self) -> None:
        found = time_surface(latencies(), WORKLOAD, [200, 4000], [0.5, 80])
        assert len(found) == 4
        for row in found:
            alone = means(replace(WORKLOAD, gbit_per_s=row["gbit_per_s"]), PRICES, counted([row["length"]]))
            for name in ("re_prefill", "cached_re_prefill", "hand_off_warm", "hand_off_cold"):
                assert row[f"{name}_ms"] == pytest.approx(alone[name]["takeover_mean_ms"])
            warm = alone["re_prefill"]["takeover_mean_ms"] / alone["hand_off_warm"]["takeover_mean_ms"]
            assert row["warm_ratio"] == pytest.approx(warm)

    def test_each_cell_of_cost_is_an_analysis_of_its_own(self) -> None:
        found = cost_surface(latencies(), CONTEXTS, WORKLOAD, PRICES, [0.0, 0.35, 1.0], [0.5, 6.0])
        assert len(found) == 6
        for row in found:
            target = row["price_ratio"] * PRICES.source_second / PRICES.target_gpus
            alone = means(
                replace(WORKLOAD, escalation_rate=row["escalation_rate"]), replace(PRICES, target=target)
            )
            costs = {name: entry["cost"] for name, entry in alone.items()}
            assert {name: row[f"{name}_cost"] for name in costs} == pytest.approx(costs)
            del costs["always_small"]
            assert costs[row["cheapest"]] == pytest.approx(min(costs.values()))


class TestAnalysis:
    def test_without_contexts_every_known_length_counts_alike(self) -> None:
        found = analyse(latencies(), workload=WORKLOAD, prices=PRICES)
        alone = means(WORKLOAD, PRICES, counted([128, 512, 2048, 8192]))
        assert found.policies[4]["cost"] == pytest.approx(alone["hand_off_warm"]["cost"])
        assert found.facts["extended_share"] == 0
        assert found.notes == []

    def test_what_is_extended_is_said(self) -> None:
        contexts = counted([64, 1000], [1, 3])
        found = analyse(latencies(beyond="extend"), contexts, axes=Axes(lengths=(64.0, 1000.0)))
        assert found.facts["extended_share"] == 0.25
        assert "25.0% of the contexts are outside of the 128 to 8,192 tokens" in found.notes[0]

    def test_lengths_have_rows_of_their_own(self) -> None:
        found = analyse(latencies(), workload=WORKLOAD, prices=PRICES, axes=Axes(lengths=(300.0,)))
        (row,) = (row for row in found.by_length if row["policy"] == "hand_off_cold")
        alone = means(WORKLOAD, PRICES, counted([300]))["hand_off_cold"]
        assert row["cost"] == pytest.approx(alone["cost"])
        assert row["takeover_ms"] == pytest.approx(alone["takeover_mean_ms"])
        assert row["ttft_escalated_ms"] == pytest.approx(row["ttft_kept_ms"] + row["takeover_ms"])
