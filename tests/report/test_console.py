"""What a run's summary prints."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from kvmap import report
from kvmap.errors import KvmapError
from kvmap.report.console import fitting
from kvmap.report.page import Grid
from kvmap.tracking import Run


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


@pytest.mark.parametrize("width", [30, 60, 200])
def test_a_wide_table_is_split_between_columns_and_keeps_every_cell(width: int) -> None:
    grid = Grid("Wide (± 1)", ["#", *"abcdef"], [["1", *("12345678",) * 6], ["2", *("x",) * 6]])
    parts = fitting(grid, width, n_labels=1)
    assert [column for part in parts for column in part.columns[1:]] == list("abcdef")
    assert all(row[0] in "12" and len(row) == len(part.columns) for part in parts for row in part.rows)
    assert [part.title for part in parts] == ["Wide (± 1)", *["Wide, continued"] * (len(parts) - 1)]
    assert len(parts) == {30: 3, 60: 2, 200: 1}[width]


def test_a_cell_with_brackets_is_printed_as_it_is(run_directory: Path) -> None:
    table = run_directory / "tables" / "arms.csv"
    table.write_text(table.read_text().replace("lookup", "[bold]lookup[/bold]"))
    assert "[bold]lookup[/bold]" in printed(run_directory, 200)
