"""Plans against runs, by the command that the documentation names."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvmap.benchmark.planning import main
from kvmap.files import read_json

SMALL = "pair=tiny calibration.n_sequences=60"


@pytest.mark.slow
def test_a_plan_is_within_a_tenth_of_what_a_run_takes(tmp_path: Path) -> None:
    assert main(["--folder", str(tmp_path), SMALL]) == 0
    rows = read_json(tmp_path / "planning.json")["rows"]
    assert {row["what"] for row in rows} >= {"moments file", "map file", "peak of calibrate", "peak of fit"}


@pytest.mark.slow
def test_a_run_that_fails_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--folder", str(tmp_path), "pair=tiny mapper.top_k=99"]) == 1
    assert "mapper.top_k=99" in capsys.readouterr().err
