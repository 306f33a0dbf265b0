"""Where the jobs of sweeps lie: no two share a directory, and no value becomes part of a name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.sweeps.conftest import QUICK, Sweep, contents, records, summary, sweep_directories, top_k_of


@pytest.mark.slow
def test_a_sweep_in_the_same_directory_overwrites_nothing(start: Sweep, tmp_path: Path) -> None:
    """A value inserted before the others takes the number of one of them, and another directory."""
    study, place = tmp_path / "debug", f"hydra.sweep.dir={tmp_path}/debug/fixed"
    start("-m", "mapper.top_k=3", place)
    before = contents(study)
    code, out, err = start("-m", "mapper.top_k=1,3", place)
    assert code == 0, err
    assert f"done already: {study}/fixed/0" in out
    jobs = {run.name: record["config"]["mapper"]["top_k"] for run, record in records(study).items()}
    (added,) = set(jobs) - {"0"}
    assert jobs == {"0": 3, added: 1}
    assert added.startswith("0-")
    assert {file: file.read_bytes() for file in before} == before
    for job, top_k in jobs.items():
        composed = yaml.safe_load((study / "fixed" / job / ".hydra" / "config.yaml").read_text())
        assert composed["mapper"]["top_k"] == top_k
    assert [row["mapper.top_k"] for row in summary(study)] == ["1", "3"]
    assert sorted(path.name for path in (study / "fixed").glob("*.json")) == [
        "submission-1.json",
        "submission.json",
    ]


# What is given on the command line, and the value that the job is to see.
AWKWARD = {
    "'a/b, c=[d].jsonl'": "a/b, c=[d].jsonl",
    r"'it\'s {ü}, x=1'": "it's {ü}, x=1",
    "../up/and/down": "../up/and/down",
}


@pytest.mark.slow
def test_awkward_values_reach_the_job_exactly_and_name_no_directory(start: Sweep, tmp_path: Path) -> None:
    code, _, err = start("-m", f"calibration.data.path={','.join(AWKWARD)}")
    assert code == 0, err
    found = records(tmp_path / "debug")
    paths = [record["config"]["calibration"]["data"]["path"] for record in found.values()]
    assert sorted(paths) == sorted(AWKWARD.values())
    assert sorted(run.name for run in found) == ["0", "1", "2"]
    assert {run.parent.parent for run in found} == {tmp_path / "debug"}
    column = [row["calibration.data.path"] for row in summary(tmp_path / "debug")]
    assert sorted(column) == sorted(AWKWARD.values())


@pytest.mark.slow
def test_jobs_of_several_studies_are_written_down_with_each(start: Sweep, tmp_path: Path) -> None:
    assert start("-m", "pair=tiny,tiny_self", "study=${pair.name}")[0] == 0
    for study in ("tiny", "tiny_self"):
        (submission,) = (tmp_path / study).glob("*/submission.json")
        points = json.loads(submission.read_text())["points"]
        (run,) = records(tmp_path / study)
        assert [str(point["number"]) for point in points] == [run.name]
        assert [row["status"] for row in summary(tmp_path / study)] == ["done"]


def test_a_point_that_cannot_be_composed_leaves_nothing_to_wait_for(start: Sweep, tmp_path: Path) -> None:
    code, _, err = start("-m", "pair=tiny,tinny")
    assert (code, "Did you mean pair=tiny?" in err) == (2, True)
    assert list(tmp_path.glob("*/*/submission.json")) == []


@pytest.mark.slow
def test_two_starts_in_one_second_share_no_directory_and_no_work(tmp_path: Path) -> None:
    """Two processes, the same sweep, at the same time: the point is run by one of them."""
    command = [sys.executable, "-m", "kvmap.run", "-m", "mapper.top_k=1", *QUICK]
    environment = {**os.environ, "KVMAP_OUTPUTS": str(tmp_path)}
    both = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    out = "".join(process.communicate(timeout=100)[0] for process in both)
    assert [process.returncode for process in both] == [0, 0]
    assert len(sweep_directories(tmp_path / "debug")) == 2
    assert top_k_of(tmp_path / "debug") == [1]
    assert out.count("already: ") == 1
