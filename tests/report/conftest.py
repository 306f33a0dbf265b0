"""Run directories made up of rows, without a model."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.report.rows import write_run


@pytest.fixture
def run_directory(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run")


@pytest.fixture
def diagnosed(tmp_path: Path) -> Path:
    """The same run with every table of the stage `diagnose`."""
    return write_run(tmp_path / "run", diagnosed=True)
