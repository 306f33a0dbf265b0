"""Figures of every run: R², accuracy, perplexity, latency."""

from __future__ import annotations

import pandas as pd

from kvmap.figures import run as figures
from tests.figures.overlaps import overlaps
from tests.report.rows import arms_rows, latency_rows, r2_rows


class TestFigures:
    def test_data_frames_serve_as_rows(self) -> None:
        figures.accuracy_bars(pd.DataFrame(arms_rows()))
        figures.r2_heat_map(pd.DataFrame(r2_rows()))

    def test_texts_do_not_overlap_and_stay_inside(self) -> None:
        drawn = {
            "small heat map": figures.r2_heat_map(r2_rows()),
            "large heat map": figures.r2_heat_map(r2_rows(n_layers=80, n_heads=8)),
            "accuracy": figures.accuracy_bars(arms_rows()),
            "perplexity": figures.perplexity_bars(arms_rows()),
            "latency": figures.latency_lines(latency_rows()),
        }
        for name, figure in drawn.items():
            assert overlaps(figure) == [], name

    def test_bars_carry_their_standard_errors_and_units(self) -> None:
        figure = figures.accuracy_bars([row for row in arms_rows() if row["task"] == "lookup"])
        (axis,) = figure.axes
        heights = [round(bar.get_height(), 2) for bar in axis.patches]
        assert heights == [0.73, 0.45, 0.52, 0.12, 0.14]
        spreads = [
            container.lines[2][0].get_segments()[0]
            for container in axis.containers
            if hasattr(container, "has_yerr")
        ]
        assert [round(float(top - bottom), 3) for (_, bottom), (_, top) in spreads] == [0.09] * 5
        assert "n = 120 items" in axis.get_title()
        assert figures.latency_lines(latency_rows()).axes[0].get_xlabel() == "context length (tokens)"

    def test_drawing_leaves_matplotlib_as_it_was(self) -> None:
        import matplotlib

        before = dict(matplotlib.rcParams)
        figures.latency_lines(latency_rows())
        assert dict(matplotlib.rcParams) == before
