"""Times between and beyond the lengths that are known, from a benchmark's table and otherwise."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvmap.economics import EconomicsError, Latencies, latencies_of_table, read_latencies
from tests.economics.cases import ARMS, LENGTHS, SIZES, benchmark_rows, latencies


def at(curves: Latencies, name: str, length: float) -> float:
    return float(curves.at(name, np.array([length]))[0])


@pytest.mark.parametrize("arm", ARMS)
def test_known_lengths_have_their_own_times(arm: str) -> None:
    np.testing.assert_allclose(latencies().at(arm, np.array(LENGTHS)), ARMS[arm])


@pytest.mark.parametrize("power", [0.0, 1.0, 1.7, 2.0])
def test_powers_of_the_length_are_met_exactly_and_gone_on_with(power: float) -> None:
    curves = latencies(beyond="extend", re_prefill=tuple(3e-3 * n**power for n in LENGTHS))
    for length in (64.0, 128.0, 1000.0, 5000.0, 50000.0):
        assert at(curves, "re_prefill", length) == pytest.approx(3e-3 * length**power)


@pytest.mark.parametrize(("factor", "most"), [(2, 0.028), (4, 0.106)])
def test_a_fixed_cost_with_linear_and_square_terms_is_met_closely(factor: int, most: float) -> None:
    """What prefills look like: never too little, and by how much too much at most."""

    def true(n: Any) -> Any:
        return 20 + 0.02 * n + 3e-6 * n * n

    lengths = 128.0 * factor ** np.arange(7 if factor == 2 else 4)
    ones = np.ones_like(lengths)
    curves = Latencies(lengths, dict.fromkeys(ARMS, true(lengths)), dict.fromkeys(SIZES, ones))
    between = np.geomspace(128, 8192, 500)
    off = curves.at("re_prefill", between) / true(between) - 1
    assert off.min() > -1e-12
    assert 0.9 * most < off.max() < most


def test_a_length_outside_is_refused_with_both_ranges() -> None:
    with pytest.raises(EconomicsError, match=r"64 to 300 tokens: .* from 128 to 8,192 alone"):
        latencies().at("hand_off", np.array([64.0, 300.0]))


def test_one_length_alone_is_in_proportion() -> None:
    one = Latencies(
        np.array([100.0]),
        {arm: np.array([5.0]) for arm in ARMS},
        {name: np.array([1e6]) for name in SIZES},
        beyond="extend",
    )
    assert at(one, "re_prefill", 300.0) == pytest.approx(15.0)


def test_a_cached_prefix_saves_its_own_prefill_and_none_saves_nothing() -> None:
    saved = latencies().saved_ms(np.array([0.0, 32.0, 128.0, 2048.0]))
    np.testing.assert_allclose(saved, [0.0, 10.0 / 4, 10.0, 210.0])


class TestTable:
    def test_is_read_as_it_was_measured(self) -> None:
        curves = latencies_of_table(benchmark_rows(), origin="here")
        for arm in ("source_prefill", "re_prefill", "hand_off", "target_token"):
            np.testing.assert_allclose(curves.ms[arm], ARMS[arm])
        assert curves.n_bytes["mapped_bytes"][0] == 128 * 2.5e5
        assert curves.batch_size == 1

    def test_a_token_of_the_source_is_estimated_and_said_to_be(self) -> None:
        curves = latencies_of_table(benchmark_rows(), origin="here")
        assert curves.ms["source_token"][2] == pytest.approx(5.9 * 60 / 210)
        assert any("token of the source" in note for note in curves.notes)
        given = latencies_of_table(benchmark_rows(), origin="here", source_token_ms=2.5, target_token_ms=4.0)
        assert set(given.ms["source_token"]) == {2.5}
        assert set(given.ms["target_token"]) == {4.0}
        assert given.notes == ()

    def test_scaled_times_count_and_are_said_to_be(self) -> None:
        rows = benchmark_rows(how="measured, scaled from 2 of 4 layers")
        for row in rows:
            row["whole_p50_ms"] = 2 * row["p50_ms"]
        curves = latencies_of_table(rows, origin="here")
        assert curves.ms["re_prefill"][0] == 20.0
        assert any("scaled" in note for note in curves.notes)

    def test_tables_without_scaled_times_are_read_too(self) -> None:
        rows = [
            {key: value for key, value in row.items() if key != "whole_p50_ms"} for row in benchmark_rows()
        ]
        assert latencies_of_table(rows, origin="here").ms["hand_off"][0] == 12.0

    def test_of_a_file_and_of_a_run(self, tmp_path: Path) -> None:
        file = write(tmp_path / "tables" / "latency.csv", benchmark_rows())
        for place in (file, tmp_path):
            np.testing.assert_allclose(read_latencies(place).ms["hand_off"], ARMS["hand_off"])

    @pytest.mark.parametrize(
        ("change", "said"),
        [
            ({"arm": "map"}, "no source_prefill at 128 tokens"),
            ({"arm": ""}, "line 2: no arm"),
            ({"whole_p50_ms": "fast"}, "line 2: whole_p50_ms='fast', no number"),
            ({"whole_p50_ms": -1.0}, "line 2: whole_p50_ms=-1"),
            ({"source_bytes": ""}, "line 2: source_bytes=''"),
            ({"batch_size": 8}, r"batch sizes \[1, 8\]"),
            ({"length": 512}, "line 6: source_prefill at 512 tokens stands twice"),
        ],
    )
    def test_a_mistake_is_named_with_its_line(
        self, tmp_path: Path, change: dict[str, Any], said: str
    ) -> None:
        rows = benchmark_rows()
        rows[0] |= change
        with pytest.raises(EconomicsError, match=said):
            read_latencies(write(tmp_path / "latency.csv", rows))

    def test_no_file_and_no_rows(self, tmp_path: Path) -> None:
        with pytest.raises(EconomicsError, match="cannot be read"):
            read_latencies(tmp_path / "nowhere.csv")
        with pytest.raises(EconomicsError, match="no rows; expected the table latency"):
            latencies_of_table([], origin="here")


def write(file: Path, rows: list[dict[str, Any]]) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    with open(file, "w", newline="") as stream:
        writer = csv.DictWriter(stream, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return file


MISTAKES = {
    "lengths": ({"lengths": np.array([2.0, 1.0])}, "expected rising"),
    "batch": ({"batch_size": 0}, "batch_size=0"),
    "beyond": ({"beyond": "guess"}, "beyond='guess'"),
    "arm": ({"ms": {}}, "no source_prefill"),
    "zero": ({"ms": {arm: np.zeros(4) for arm in ARMS}}, "source_prefill="),
    "infinite": ({"n_bytes": {name: np.full(4, math.inf) for name in SIZES}}, "source_bytes="),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_what_no_curve_goes_through_is_refused(name: str) -> None:
    change, said = MISTAKES[name]
    good = latencies()
    with pytest.raises(EconomicsError, match=said):
        Latencies(**({"lengths": good.lengths, "ms": good.ms, "n_bytes": good.n_bytes} | change))
