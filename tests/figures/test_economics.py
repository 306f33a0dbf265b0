"""The figure of an analysis of costs."""

from __future__ import annotations

from typing import Any

import matplotlib.figure
import pytest

from kvmap.economics import Axes, Economics, Prices, Workload, analyse
from kvmap.figures.economics import economics_panels
from tests.economics.cases import latencies
from tests.figures.overlaps import overlaps


def drawn(found: Economics) -> matplotlib.figure.Figure:
    return economics_panels(
        found.by_length, found.time_surface, found.cost_surface, found.break_even, found.facts
    )


CASES: dict[str, dict[str, Any]] = {
    "usual": {},
    "dear": {"prices": Prices(target=300.0, source=7.0)},
    "shared memory": {"workload": Workload(gbit_per_s=None)},
    "one cell": {"axes": Axes((200.0,), (10.0,), (0.5,), (2.0,))},
    "many lengths": {"axes": Axes(tuple(128.0 * 1.3**n for n in range(16)))},
    "free source": {"prices": Prices(source=0.0)},
}


@pytest.mark.parametrize("name", CASES)
def test_texts_do_not_overlap_and_stay_inside(name: str) -> None:
    assert overlaps(drawn(analyse(latencies(), **CASES[name]))) == []


def test_lines_are_the_tables() -> None:
    found = analyse(latencies(), workload=Workload(link_ms=5.0))
    times, _, costs, _ = drawn(found).axes[:4]
    lines = {line.get_label(): line for line in times.get_lines()}
    expected = [row["takeover_ms"] for row in found.by_length if row["policy"] == "hand_off_cold"]
    assert list(lines["cold hand-off"].get_ydata()) == pytest.approx(expected)
    (even,) = (
        row["value"]
        for row in found.break_even
        if (row["what"], row["policy"], row["against"], row["by"])
        == ("length", "hand_off_warm", "re_prefill", "time")
    )
    marks = [line for line in times.get_lines() if str(line.get_label()).startswith("_")]
    assert marks[0].get_xdata()[0] == pytest.approx(even)
    of_costs = {line.get_label(): list(line.get_ydata()) for line in costs.get_lines()}
    assert of_costs["always large"] == pytest.approx([1.0] * 11)
    rows = [row for row in found.cost_surface if row["price_ratio"] == 1.0]
    assert of_costs["warm hand-off"] == pytest.approx(
        [row["hand_off_warm_cost"] / row["always_large_cost"] for row in rows]
    )
