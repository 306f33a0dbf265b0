"""The figure of a study."""

from __future__ import annotations

from typing import Any

import pytest

from kvmap.figures.study import MOST_CONFIGURATIONS, configuration_dots
from tests.figures.overlaps import overlaps


def study_rows(
    n: int, label: str = "#{} {}", measures: tuple[str, ...] = ("accuracy kept", "context carried")
) -> Any:
    return [
        {
            "configuration": label.format(place, 2**place),
            "measure": measure,
            "value": 0.5 + 0.01 * place,
            "low": 0.4,
            "high": 0.7,
            "n_runs": 3,
        }
        for measure in measures
        for place in range(1, n + 1)
    ]


@pytest.mark.parametrize("n", [2, 24])
@pytest.mark.parametrize("label", ["#{} {}", "#{} a_rather_long_mapper_name, own_kind, {}, full_head"])
def test_texts_do_not_overlap_and_stay_inside(n: int, label: str) -> None:
    figure = configuration_dots(study_rows(n, label), ["mapper", "regressors", "top_k", "support"])
    assert overlaps(figure) == []


def test_every_configuration_has_its_value_and_interval() -> None:
    figure = configuration_dots(study_rows(3))
    axis = figure.axes[0]
    dots = [line for line in axis.lines if line.get_marker() == "o"]
    assert [float(dot.get_xdata()[0]) for dot in dots] == pytest.approx([0.51, 0.52, 0.53])
    spans = [line for line in axis.lines if list(line.get_xdata()) == [0.4, 0.7]]
    assert len(spans) == 3
    assert "n = 3 runs" in figure.get_supxlabel()


def test_one_without_an_interval_is_a_dot_alone() -> None:
    rows = [{**row, "low": None, "high": None} for row in study_rows(2)]
    axis = configuration_dots(rows).axes[0]
    assert all(len(line.get_xdata()) == 1 for line in axis.lines if line.get_marker() == "o")


def test_too_many_are_cut_and_said_to_be() -> None:
    figure = configuration_dots(study_rows(MOST_CONFIGURATIONS + 5))
    assert f"first {MOST_CONFIGURATIONS} of {MOST_CONFIGURATIONS + 5}" in figure.get_supxlabel()
