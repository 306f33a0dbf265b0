"""`python -m kvmap.report`, of a run."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from kvmap import report
from kvmap.tracking import Run


def test_prints_again_and_names_the_run_last(run_directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report.main([str(run_directory)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == f"run: {run_directory}"
    assert {f"report: {run_directory / name}" for name in ("report.html", "report.md")} <= set(lines)
    assert (run_directory / "figures" / "latency.png").is_file()


@pytest.mark.slow
def test_output_leaves_the_run_as_it_was_and_draws_every_figure(diagnosed: Path, tmp_path: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in diagnosed.rglob("*")}
    output = tmp_path / "elsewhere"
    assert report.main([str(diagnosed), "--output", str(output)]) == 0
    assert {path: path.stat().st_mtime_ns for path in diagnosed.rglob("*")} == before
    figures = sorted(path.stem for path in output.glob("figures/*.png"))
    of_map = ["attention", "errors_by_position", "errors_by_token", "probes", "r2", "spectrum"]
    assert figures == sorted([*of_map, "accuracy", "perplexity", "latency"])
    for name in figures:
        width, _ = Image.open(output / "figures" / f"{name}.png").size
        assert width == pytest.approx(3.3 * 300, abs=2)
    assert (output / "report.html").read_text().count("data:image/png") == len(figures)


def test_a_wrong_directory_is_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report.main([str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert str(tmp_path) in error
    assert "run.json" in error


def test_a_run_without_tables_gives_no_figures(tmp_path: Path) -> None:
    with Run(tmp_path, "tiny", {}, "none"):
        pass
    assert report.save_figures(tmp_path) == []
