"""Sweeps as a user starts them: what is done is skipped, what is half done resumed, new points added."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.sweeps.conftest import Sweep, contents, records, summary, sweep_directories, top_k_of


@pytest.mark.slow
def test_a_sweep_that_is_started_again_only_adds(start: Sweep, tmp_path: Path) -> None:
    """A value inserted in the middle runs alone, though it shifts the numbers of the others."""
    study = tmp_path / "debug"
    assert start("-m", "mapper.top_k=1,3")[0] == 0
    before = contents(study)
    assert len(before) > 8

    code, out, err = start("-m", "mapper.top_k=1,2,3")
    assert code == 0, err
    assert sorted(top_k_of(study)) == [1, 2, 3]
    assert {file: file.read_bytes() for file in before} == before
    first, second = sweep_directories(study)
    assert [f"done already: {first / number}" in out for number in "01"] == [True, True]
    assert json.loads((second / "0" / "skipped.json").read_text())["directory"] == str(first / "0")
    assert not (second / "0" / "run.json").exists()
    for folder, jobs in ((study, 3), (second, 3), (first, 2)):
        rows = summary(folder)
        assert [row["status"] for row in rows] == ["done"] * jobs
        assert len({row["identity"] for row in rows}) == jobs
        assert sorted(row["mapper.top_k"] for row in rows) == ["1", "2", "3"][:: 3 - jobs + 1]


@pytest.mark.slow
def test_a_failed_job_is_resumed_in_its_own_directory(
    start: Sweep, tmp_path: Path, fail_at: Callable[[Any], None]
) -> None:
    study = tmp_path / "debug"
    fail_at(2)
    code, _, err = start("-m", "mapper.top_k=2,1")
    assert (code, "no layer 2 today" in err) == (1, True)
    assert [row["status"] for row in summary(sweep_directories(study)[0])] == ["failed", "done"]
    failed = next(run for run, record in records(study).items() if record["status"] == "failed")

    fail_at(None)
    code, out, _ = start("-m", "mapper.top_k=1,2")
    assert (code, f"going on: {failed}" in out) == (0, True)
    found = records(study)
    assert len(found) == 2
    assert found[failed]["status"] == "done"
    assert [attempt["error"] for attempt in found[failed]["attempts"]] == ["KvmapError: no layer 2 today"]
    assert len({record["facts"]["identity"] for record in found.values()}) == 2
    assert [row["status"] for row in summary(study)] == ["done", "done"]


@pytest.mark.slow
def test_what_changes_no_result_makes_no_other_job(start: Sweep, tmp_path: Path) -> None:
    code, out, _ = start("-m", "mapper.ridge_lambda=1,1.0", "threads=1,null", "tracking.group=g")
    assert (code, out.count("done already")) == (0, 3)
    assert len(records(tmp_path / "debug")) == 1
    assert len(summary(tmp_path / "debug")) == 1


@pytest.mark.slow
def test_what_is_made_afresh_serves_a_later_sweep(start: Sweep, tmp_path: Path) -> None:
    """A single run, and a job that is told not to skip; the register names the newest that is done."""
    study = tmp_path / "debug"
    assert start("mapper.top_k=1")[0] == 0
    (single,) = records(study)
    _, out, _ = start("-m", "mapper.top_k=1")
    assert f"done already: {single}" in out
    code, _, err = start("-m", "mapper.top_k=1", "sweep.skip_done=false")
    assert code == 0, err
    assert top_k_of(study) == [1, 1]
    (row,) = summary(study)
    assert study / row["job"] == sweep_directories(study)[1] / "0"
