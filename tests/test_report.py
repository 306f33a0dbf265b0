from __future__ import annotations

import csv
import io
import math
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from PIL import Image
from rich.console import Console

from kvmap import report
from kvmap.errors import KvmapError
from kvmap.figures import run as figures
from kvmap.tracking import Metric, Run

ACCURACY = {"no_context": 0.14, "mapped": 0.52, "target": 0.73, "source": 0.45, "random": 0.12}


def arms_rows() -> list[dict[str, Any]]:
    rows = [
        {"task": task, "arm": arm, "metric": "accuracy", "value": value, "n": 120, "standard_error": 0.045}
        for task in ("lookup", "comparison_of_two_people_in_one_town")
        for arm, value in ACCURACY.items()
    ]
    rows.append({"task": "lookup", "arm": "raw", "metric": "accuracy", "value": math.nan, "n": 0})
    rows[-1]["note"] = "unavailable: shapes [2, 16] and [4, 16] differ"
    for arm, value in {"target": 24.5, "mapped": 28.7, "random": 15000.0}.items():
        rows.append({"task": "world", "arm": arm, "metric": "perplexity", "value": value, "n": 4096})
    kept = {"metric": "retention", "value": 0.712, "low": 0.61, "high": 0.815, "n": 120}
    rows.append({"task": "lookup", "arm": "mapped", **kept})
    lead = {"metric": "accuracy_minus_source", "value": 0.07, "low": -0.031, "high": 0.172, "n": 120}
    rows.append({"task": "lookup", "arm": "mapped", **lead})
    rows.append({"task": "lookup", "arm": "mapped", "metric": "mcnemar_source_p", "value": 0.185, "n": 120})
    return rows


def r2_rows(n_layers: int = 4, n_heads: int = 2) -> list[dict[str, Any]]:
    return [
        {"layer": layer, "head": head, "kind": kind, "split": split, "r2": 0.9 - 0.3 * layer / n_layers}
        for layer in range(n_layers)
        for head in range(n_heads)
        for kind in ("key", "value")
        for split in ("fit", "held_out")
    ]


def latency_rows() -> list[dict[str, Any]]:
    return [
        {
            "length": length,
            "arm": arm,
            "p20_ms": 0.9 * time,
            "p50_ms": time,
            "p80_ms": 1.2 * time,
            "n_repeats": 5,
        }
        for length in (64, 1024)
        for arm, time in (("map", length / 100), ("re_prefill", length / 20))
    ]


@pytest.fixture
def run_directory(tmp_path: Path) -> Path:
    with Run(tmp_path / "run", "tiny", {"mapper": {"top_k": 8}}, "none") as run, run.stage("evaluate"):
        run.table("arms", arms_rows())
        run.table("r2", r2_rows())
        run.table("latency", latency_rows())
        run.log({"evaluate/lookup/mapped/accuracy": Metric(0.52, 120, 0.045)})
    return tmp_path / "run"


def printed(directory: Path, width: int = 120) -> str:
    output = io.StringIO()
    report.print_summary(directory, Console(file=output, width=width))
    return output.getvalue()


class TestSummary:
    def test_gives_every_measure_with_its_error(self, run_directory: Path) -> None:
        text = printed(run_directory)
        for cell in ("0.520 ±.045", "28.7", "15,000", "0.712 [0.610, 0.815]", "120", "5.0×"):
            assert cell in text
        assert "tiny: done after evaluate" in text

    @pytest.mark.parametrize("width", [60, 80, 200])
    def test_cuts_no_number_short(self, run_directory: Path, width: int) -> None:
        text = printed(run_directory, width)
        assert "…" not in text
        assert max(len(line) for line in text.splitlines()) <= width
        assert text.count("0.520 ±.045") == 2

    def test_of_a_plan_alone_shows_the_plan(self, tmp_path: Path) -> None:
        with Run(tmp_path, "tiny", {}, "none") as run:
            run.table("plan", [{"part": "source", "quantity": "cache_bytes", "value": 1234567}])
        assert "1,234,567" in printed(tmp_path)

    def test_says_why_an_arm_has_no_number(self, run_directory: Path) -> None:
        assert "raw: unavailable: shapes [2, 16] and [4, 16] differ" in printed(run_directory)

    def test_holds_arms_against_the_source_alone(self, run_directory: Path) -> None:
        text = printed(run_directory)
        assert "Difference to the source alone" in text
        assert "0.070 [-0.031, 0.172]" in text
        assert "0.185" in text

    def test_says_which_answers_were_kept_from_before(self, tmp_path: Path) -> None:
        with Run(tmp_path, "tiny", {}, "none") as run:
            run.note(n_reused={"questions": {"target": 40, "no_context": 40, "mapped": 0}})
            run.note(n_reused={"prefix_perplexity": {"target": 0}})
        text = printed(tmp_path)
        assert "questions: answers kept from before: target 40, no context 40" in text
        assert "prefix perplexity" not in text

    def test_arms_stand_in_their_fixed_order(self, run_directory: Path) -> None:
        text = printed(run_directory)
        places = [text.index(arm) for arm in ("target", "source", "mapped", "raw", "random", "no context")]
        assert places == sorted(places)

    def test_without_a_table_of_arms_the_metrics_serve(self, run_directory: Path) -> None:
        (run_directory / "tables" / "arms.csv").unlink()
        assert "0.520 ±.045" in printed(run_directory)

    def test_of_a_failed_run_says_what_failed(self, tmp_path: Path) -> None:
        with pytest.raises(KvmapError), Run(tmp_path, "tiny", {}, "none"):
            raise KvmapError("pair [x] is unknown")
        text = printed(tmp_path)
        assert "tiny: failed" in text
        assert "error: KvmapError: pair [x] is unknown" in text

    def test_of_no_run_names_the_directory(self, tmp_path: Path) -> None:
        with pytest.raises(KvmapError, match="holds no run"):
            report.print_summary(tmp_path)


class TestFigures:
    def test_every_table_gives_its_figure(self, run_directory: Path) -> None:
        paths = report.save_figures(run_directory)
        assert [path.name for path in paths] == ["r2.png", "accuracy.png", "perplexity.png", "latency.png"]
        for path in paths:
            width, _ = Image.open(path).size
            assert width == pytest.approx(3.3 * 300, abs=2)

    def test_a_run_without_tables_gives_none(self, tmp_path: Path) -> None:
        with Run(tmp_path, "tiny", {}, "none"):
            pass
        assert report.save_figures(tmp_path) == []

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


def overlaps(figure: Any) -> list[str]:
    """Pairs of texts that cover each other by more than a pixel, and texts that leave the figure."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.text import Text

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    renderer = canvas.get_renderer()
    unseen = unseen_tick_labels(figure)
    # Slanted labels are boxed by upright rectangles, which may cross where the letters do not.
    texts = [
        text
        for text in figure.findobj(Text)
        if text.get_visible() and text.get_text().strip() and text.get_rotation() != 40 and text not in unseen
    ]
    drawn = [(text.get_text(), text.get_window_extent(renderer).padded(-1)) for text in texts]
    found = [
        f"{name} | {other}"
        for place, (name, box) in enumerate(drawn)
        for other, other_box in drawn[place + 1 :]
        if box.overlaps(other_box)
    ]
    whole = figure.bbox
    found += [
        f"{name} leaves the figure"
        for name, box in drawn
        if box.x0 < whole.x0 or box.x1 > whole.x1 or box.y0 < whole.y0 or box.y1 > whole.y1
    ]
    return found


def unseen_tick_labels(figure: Any) -> list[Any]:
    """Labels of ticks outside the axis, which matplotlib keeps and does not draw."""
    unseen = []
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            for tick in [*axis.get_major_ticks(), *axis.get_minor_ticks()]:
                if not low <= tick.get_loc() <= high:
                    unseen += [tick.label1, tick.label2]
    return unseen


class TestCommand:
    def test_prints_again_and_names_the_run_last(
        self, run_directory: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert report.main([str(run_directory)]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[-1] == f"run: {run_directory}"
        assert (run_directory / "figures" / "latency.png").is_file()

    def test_a_wrong_directory_is_one_message(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert report.main([str(tmp_path)]) == 1
        assert str(tmp_path) in capsys.readouterr().err


def test_a_sweep_is_summed_up_by_what_differs(tmp_path: Path) -> None:
    for job, top_k in enumerate((1, 2, 4)):
        config = {"mapper": {"kind": "linear", "top_k": top_k}}
        with Run(tmp_path / str(job), "sweep", config, "none") as run:
            run.log({"evaluate/lookup/mapped/accuracy": Metric(0.1 * top_k)})
    with open(report.write_sweep_summary(tmp_path), newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert [row["mapper.top_k"] for row in rows] == ["1", "2", "4"]
    assert [float(row["evaluate/lookup/mapped/accuracy"]) for row in rows] == pytest.approx([0.1, 0.2, 0.4])
    assert "mapper.kind" not in rows[0]
    assert {row["status"] for row in rows} == {"done"}
