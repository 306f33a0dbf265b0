"""Figures of the latency study."""

from __future__ import annotations

import math
from typing import Any

import pytest

from kvmap.figures import latency, run
from tests.figures.overlaps import overlaps

ARMS = ("source_prefill", "map", "hand_off", "re_prefill", "first_token", "transport")


def rows(lengths: tuple[int, ...] = (64, 1024, 16384), roofline: bool = True) -> list[dict[str, Any]]:
    return [
        {
            "length": length,
            "arm": arm,
            "p20_ms": 0.9 * time,
            "p50_ms": time,
            "p80_ms": 1.2 * time,
            "whole_p50_ms": time,
            "roofline_share": 0.1 * (1 + place) if roofline and arm != "transport" else None,
            "n_repeats": 5,
        }
        for length in lengths
        for place, arm in enumerate(ARMS)
        for time in [length * (1 + place) / 100]
    ]


@pytest.mark.parametrize("roofline", [True, False])
@pytest.mark.parametrize("lengths", [(64,), (64, 256, 1024, 4096, 16384, 32768, 65536)])
def test_texts_do_not_overlap_and_stay_inside(lengths: tuple[int, ...], roofline: bool) -> None:
    assert overlaps(latency.cost_panels(rows(lengths, roofline))) == []
    assert overlaps(run.latency_lines(rows(lengths))) == []


def test_ratios_are_those_of_the_medians() -> None:
    upper, lower = latency.cost_panels(rows()).axes
    lines = {line.get_label(): list(line.get_ydata()) for line in upper.get_lines()}
    assert lines["map alone"] == pytest.approx([2.0] * 3)
    assert lines["warm: hand-off"] == pytest.approx([4 / 3] * 3)
    assert lines["cold: source prefill + hand-off"] == pytest.approx([1.0] * 3)
    shares = {line.get_label(): line.get_ydata()[0] for line in lower.get_lines()}
    assert shares["share: map"] == pytest.approx(0.2)
    assert "share: transport" not in shares


def test_no_roofline_no_panel() -> None:
    made = rows(roofline=False)
    assert len(latency.cost_panels(made).axes) == 1
    for row in made:
        row["roofline_share"] = math.nan
    assert len(latency.cost_panels(made).axes) == 1
