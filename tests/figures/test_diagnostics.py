"""Figures of the map: they show the numbers of the tables, and can be read."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest

from kvmap.figures import diagnostics, errors
from tests.figures.overlaps import overlaps
from tests.report.rows import TOKEN_KINDS, diagnostic_tables

DRAWN: dict[str, Callable[[dict[str, Any]], Any]] = {
    "probes": lambda tables: diagnostics.probe_heat_maps(tables["probes"]),
    "attention": lambda tables: diagnostics.attention_heat_maps(tables["attention_output"]),
    "token kinds": lambda tables: errors.token_kind_dots(tables["errors_by_token"]),
    "positions": lambda tables: errors.position_lines(tables["errors_by_position"], tables["next_token"]),
    "spectrum": lambda tables: errors.spectrum_lines(tables["spectrum"], tables["spectrum_summary"]),
}
SIZES: dict[str, dict[str, Any]] = {
    "small": {},
    "one text": {"texts": ("held_out",)},
    "one layer and head": {"n_layers": 1, "n_heads": 1, "n_kv_heads": 1},
    "large": {"n_layers": 28, "n_heads": 16, "n_kv_heads": 2, "head_dim": 16},
}


@pytest.mark.parametrize("name", DRAWN)
@pytest.mark.parametrize("size", SIZES)
def test_texts_do_not_overlap_and_stay_inside(name: str, size: str) -> None:
    figure = DRAWN[name](diagnostic_tables(**SIZES[size]))
    assert overlaps(figure) == []
    assert figure.get_size_inches()[0] == pytest.approx(3.3)


@pytest.mark.parametrize("name", DRAWN)
def test_data_frames_serve_as_rows(name: str) -> None:
    DRAWN[name]({table: pd.DataFrame(rows) for table, rows in diagnostic_tables().items()})


def test_a_probe_stands_at_its_layers_and_the_best_is_marked() -> None:
    rows = [
        {"source_layer": source, "target_layer": target, "kind": "key", "r2": 0.1 * source + 0.01 * target}
        for source in range(4)
        for target in range(3)
    ]
    figure = diagnostics.probe_heat_maps(rows)
    grid = figure.axes[0].images[0].get_array()
    assert grid.shape == (3, 4)
    assert grid[2, 3] == pytest.approx(0.32)
    assert [(float(dot.get_xdata()[0]), float(dot.get_ydata()[0])) for dot in figure.axes[0].lines] == [
        (3.0, 0.0),
        (3.0, 1.0),
        (3.0, 2.0),
    ]


def test_concentration_is_drawn_in_powers_of_two_around_one() -> None:
    rows = [
        {"layer": 0, "head": head, "cosine": 0.9, "concentration_key": value, "concentration_value": 1.0}
        for head, value in enumerate((0.25, 1.0, 4.0))
    ]
    figure = diagnostics.attention_heat_maps(rows)
    image = figure.axes[1].images[0]
    assert image.get_array().tolist() == [[-2.0, 0.0, 2.0]]
    assert image.get_clim() == (-2.0, 2.0)
    middle = figure.axes[1].images[0].cmap(0.5)
    assert min(middle[:3]) > 0.9  # evenly spread error is nearly white


def test_attention_without_concentration_is_drawn_too() -> None:
    rows = [{"layer": layer, "head": 0, "cosine": 0.9, "n": 8} for layer in range(3)]
    figure = diagnostics.attention_heat_maps(rows)
    assert [axis.get_title() for axis in figure.axes[:1]] == ["cosine"]
    assert overlaps(figure) == []


def test_token_kinds_stand_in_their_order_with_mean_and_range_over_layers() -> None:
    tables = diagnostic_tables(texts=("evaluation",))
    (axis,) = errors.token_kind_dots(tables["errors_by_token"]).axes
    dots = [line for line in axis.lines if line.get_marker() == "o"]
    assert [float(dot.get_ydata()[0]) for dot in dots] == pytest.approx(
        [error * 1.1 for error in TOKEN_KINDS.values()]
    )
    spans = [
        line.get_ydata() for line in axis.lines if len(line.get_ydata()) == 2 and line.get_linestyle() == "-"
    ]
    assert [float(low) for low, _ in spans[::1]][:4] == pytest.approx(list(TOKEN_KINDS.values()))
    assert "n = 4 | 14 | 24 | 34 tokens" in axis.get_title()


def test_a_bin_stands_at_its_geometric_middle_counted_from_one() -> None:
    tables = diagnostic_tables(texts=("evaluation",))
    figure = errors.position_lines(tables["errors_by_position"], tables["next_token"])
    places = figure.axes[0].lines[0].get_xdata()
    assert places[0] == 1.0
    assert places[-1] == pytest.approx(math.sqrt(65 * 128))
    after = figure.axes[2].lines[0].get_xdata()
    assert after[0] == 1.0
    assert after[-1] == pytest.approx(math.sqrt(64 * 127))


@pytest.mark.parametrize("missing", ["next_token", "errors_by_position"])
def test_positions_are_drawn_of_what_there_is(missing: str) -> None:
    tables = diagnostic_tables()
    tables[missing] = []
    figure = errors.position_lines(tables["errors_by_position"], tables["next_token"])
    assert len(figure.axes) == {"next_token": 2, "errors_by_position": 1}[missing]


def test_the_spectrum_is_cumulated_over_components() -> None:
    tables = diagnostic_tables(texts=("evaluation",), head_dim=4)
    figure = errors.spectrum_lines(tables["spectrum"], tables["spectrum_summary"])
    drawn = figure.axes[0].lines[0].get_ydata()
    weights = np.array([1, 1 / 2, 1 / 3, 1 / 4])
    assert drawn == pytest.approx(np.cumsum(weights) / weights.sum())
    assert f"error {weights.sum() ** 2 / (weights**2).sum():.1f}, target 4.0" in figure.axes[0].get_title()


def test_drawing_leaves_matplotlib_as_it_was() -> None:
    import matplotlib

    before = dict(matplotlib.rcParams)
    for draw in DRAWN.values():
        draw(diagnostic_tables())
    assert dict(matplotlib.rcParams) == before
