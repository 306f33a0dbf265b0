"""What a preflight said, in a report: lines and tables of its rows."""

from __future__ import annotations

from kvmap.report.preflight import preflight_grid, preflight_lines, preflight_rates_grid
from kvmap.report.run_page import run_page
from kvmap.tracking import Run

ROWS = [
    {"mapper": "head_local", "decision": "fail", "predicted": 0.31, "low": 0.2, "high": 0.4, "n_pairs": 11}
    | {"reason": "predicted"},
    {"mapper": "mlp", "decision": "unknown", "predicted": None, "low": None, "high": None, "n_pairs": None}
    | {"reason": "cases of 2 pairs"},
]
RATES = [
    {"rate": "false accepts", "value": 0.05, "wrong": 1, "n": 20, "pairs": 12},
    {"rate": "false rejects", "value": None, "wrong": 0, "n": 0, "pairs": 12},
]


def test_a_line_a_mapper():
    grid = preflight_grid(ROWS)
    assert grid.rows[0] == ["head_local", "fail", "0.310 [0.200, 0.400]", "11", "predicted"]
    assert grid.rows[1] == ["mlp", "unknown", "–", "–", "cases of 2 pairs"]


def test_rates_come_with_what_they_are_of():
    grid = preflight_rates_grid(RATES)
    assert "12 pairs" in grid.title
    assert [line[1:] for line in grid.rows] == [["0.050", "1 of 20"], ["–", "0 of 0"]]


def test_a_run_without_a_preflight_says_nothing():
    assert preflight_grid([]) is None
    assert preflight_rates_grid([]) is None
    assert preflight_lines({"facts": {}}) == []


def test_the_page_of_a_run_shows_it(tmp_path):
    with Run(tmp_path / "run", "s", {"study": "s"}, "none") as run:
        run.table("preflight", ROWS)
        run.table("preflight_rates", RATES)
        run.note(preflight={"lines": ["Preflight: no-go: nothing passes.", "more"]})
    section = next(part for part in run_page(tmp_path / "run").sections if part.title == "Preflight")
    assert section.lines == ["Preflight: no-go: nothing passes."]
    assert [grid.n_left for grid in section.grids] == [2, 1]
