"""The heat maps of a fleet."""

from __future__ import annotations

import math
from itertools import permutations

import pytest

from kvmap.figures.fleet import fleet_heat_maps
from tests.figures.overlaps import overlaps


def routes(n: int, label: str = "model-{}b"):
    names = [label.format(number) for number in range(1, n + 1)]
    direct = [
        {"source": a, "via": "", "target": b, "context_carried": 0.5 + 0.01 * place}
        for place, (a, b) in enumerate(permutations(names, 2))
    ]
    relays = [
        {
            "source": a,
            "target": b,
            "via": next(c for c in names if c not in (a, b)),
            "relay_context_carried": -0.2,
        }
        for a, b in permutations(names, 2)
        if n > 2
    ]
    return direct, relays


@pytest.mark.parametrize("n", [2, 3, 4, 8])
def test_texts_do_not_overlap_and_stay_inside(n: int) -> None:
    assert overlaps(fleet_heat_maps(*routes(n))) == []


def test_every_pair_has_its_number_in_the_order_of_the_rows() -> None:
    direct, relays = routes(3)
    direct[0]["context_carried"] = math.nan
    figure = fleet_heat_maps(direct, relays)
    first, second = figure.axes[:2]
    assert [label.get_text() for label in first.get_yticklabels()] == ["model-1b", "model-2b", "model-3b"]
    written = {
        (int(text.get_position()[1]), int(text.get_position()[0])): text.get_text() for text in first.texts
    }
    assert written == {(0, 2): "0.51", (1, 0): "0.52", (1, 2): "0.53", (2, 0): "0.54", (2, 1): "0.55"}
    assert second.texts[0].get_text() == "-0.20\nmodel-3b"
    assert len(fleet_heat_maps(direct).axes) == 2  # one panel and the bar


def test_of_many_models_the_middle_one_is_named_by_its_number() -> None:
    figure = fleet_heat_maps(*routes(5))
    assert figure.axes[0].get_yticklabels()[2].get_text() == "(3) model-3b"
    assert figure.axes[1].texts[0].get_text() == "-0.20\n(3)"
