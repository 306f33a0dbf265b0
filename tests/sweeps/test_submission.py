"""What was submitted, and the jobs that refuse to start as anything else."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvmap import run as cli
from kvmap.config import checkout_root
from kvmap.sweeps import submission
from kvmap.sweeps.code import code_hash, loaded_files, source_files
from kvmap.sweeps.submission import CodeChanged, Point, check_submission, read_submissions, write_submission
from tests.sweeps.conftest import Sweep, records, sweep_directories

FILES = {"conf/mapper/linear.yaml": "1", "kvmap/fit/ridge.py": "2", "kvmap/run.py": "3"}
POINTS = [Point(0, ("mapper.top_k=1",), "aa"), Point(1, ("mapper.top_k=2",), "bb")]


def write(folder: Path, points: list[Point] = POINTS) -> None:
    write_submission(
        folder,
        points,
        study="s",
        outputs=folder,
        hydra_overrides=["hydra.mode=MULTIRUN"],
        task_overrides=["mapper.top_k=1,2"],
        files=FILES,
    )


@pytest.fixture
def on_disk(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets the files that a job finds, and those that its process had loaded before."""

    def choose(files: dict[str, str], loaded: tuple[str, ...] = ()) -> None:
        monkeypatch.setattr(submission, "source_files", lambda: files)
        monkeypatch.setattr(submission, "loaded_files", lambda: set(loaded))

    return choose


def test_every_python_file_and_every_option_is_known_by_its_content() -> None:
    files = source_files()
    root = checkout_root()
    assert root is not None
    assert set(files) >= {"kvmap/run.py", "kvmap/fit/ridge.py", "conf/config.yaml", "conf/pair/tiny.yaml"}
    assert all((root / name).is_file() for name in files)
    assert not any(name.startswith("conf/local/") for name in files)
    assert code_hash(files) == code_hash(dict(reversed(files.items())))
    assert code_hash(files) != code_hash({**files, "kvmap/run.py": "0"})
    assert "kvmap/sweeps/code.py" in loaded_files() <= set(files)


def test_it_says_what_where_and_with_what(tmp_path: Path) -> None:
    write(tmp_path)
    record = json.loads((tmp_path / "submission.json").read_text())
    assert record["points"][1] == {"number": 1, "overrides": ["mapper.top_k=2"], "identity": "bb"}
    assert record["code"] == {"hash": code_hash(FILES), "files": FILES}
    assert {"argv", "cwd", "git", "versions", "submitted", "process"} <= set(record)


def test_an_earlier_submission_stays(tmp_path: Path, on_disk: Callable[..., None]) -> None:
    on_disk(FILES)
    for identity in ("x", "y", "z"):
        write(tmp_path, [Point(0, (), identity)])
    assert [each.points[0].identity for each in read_submissions(tmp_path)] == ["z", "y", "x"]
    for identity in ("x", "y", "z"):
        check_submission(tmp_path, 0, identity, allow_changed_code=False)


@pytest.mark.parametrize(
    ("changes", "loaded", "named"),
    [
        ({}, (), None),
        ({"kvmap/fit/ridge.py": "new"}, (), "kvmap/fit/ridge.py"),
        ({"kvmap/fit/ridge.py": None}, (), "kvmap/fit/ridge.py"),
        ({"kvmap/fit/ridge.py": "new"}, ("kvmap/fit/ridge.py",), None),
        ({"kvmap/added.py": "new"}, (), None),
        (
            {"conf/mapper/linear.yaml": "new"},
            (),
            None,
        ),  # the identity says that it does not matter to this job
    ],
)
def test_changed_code_is_refused_by_name(
    tmp_path: Path,
    on_disk: Callable[..., None],
    changes: dict[str, str | None],
    loaded: tuple[str, ...],
    named: str | None,
) -> None:
    write(tmp_path)
    now = {name: content for name, content in {**FILES, **changes}.items() if content is not None}
    on_disk(now, loaded)
    if named is None:
        check_submission(tmp_path, 0, "aa", allow_changed_code=False)
        return
    with pytest.raises(CodeChanged, match=rf"job 0 .*{named} changed .*sweep\.allow_changed_code=true"):
        check_submission(tmp_path, 0, "aa", allow_changed_code=False)
    check_submission(tmp_path, 0, "aa", allow_changed_code=True)


def test_what_is_loaded_counts_in_the_submitting_process_alone(
    tmp_path: Path, on_disk: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path)
    on_disk({**FILES, "kvmap/run.py": "new"}, ("kvmap/run.py",))
    check_submission(tmp_path, 0, "aa", allow_changed_code=False)
    monkeypatch.setattr(submission, "machine", lambda: "elsewhere.1")
    with pytest.raises(CodeChanged, match=r"kvmap/run\.py"):
        check_submission(tmp_path, 0, "aa", allow_changed_code=False)


def test_points_that_a_sweeper_made_later_are_judged_by_option_files_too(
    tmp_path: Path, on_disk: Callable[..., None]
) -> None:
    write(tmp_path, [])
    on_disk({**FILES, "conf/mapper/linear.yaml": "new"})
    with pytest.raises(CodeChanged, match=r"conf/mapper/linear\.yaml"):
        check_submission(tmp_path, 0, "aa", allow_changed_code=False)


def test_without_a_submission_there_is_nothing_to_compare(tmp_path: Path) -> None:
    check_submission(tmp_path, 0, "aa", allow_changed_code=False)


@pytest.mark.slow
@pytest.mark.parametrize("allowed", [False, True])
def test_options_that_change_while_a_sweep_runs_stop_its_later_jobs(
    start: Sweep, status: Sweep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, allowed: bool
) -> None:
    """Hydra reads the files again for each job; here the first job changes one of them."""
    from kvmap.stages import plan

    root = checkout_root()
    assert root is not None
    shutil.copytree(root / "conf", tmp_path / "conf")
    monkeypatch.setattr(cli, "config_path", lambda: str(tmp_path / "conf"))
    file, check = tmp_path / "conf" / "config.yaml", plan.check

    def change(ctx: Any) -> None:
        check(ctx)
        file.write_text(file.read_text().replace("seed: 0\n", "seed: 5\n"))

    monkeypatch.setattr(plan, "check", change)
    more = ["sweep.allow_changed_code=true"] if allowed else []
    code, _, err = start("-m", "mapper.top_k=1,2", *more)
    study = tmp_path / "debug"
    seeds = [record["config"]["seed"] for record in records(study).values()]
    if allowed:
        assert (code, sorted(seeds)) == (0, [0, 5])
        return
    assert (code, seeds) == (1, [0])
    assert "job 1 of " in err
    assert "a file of conf/ has changed" in err
    refused = json.loads((sweep_directories(study)[0] / "1" / "refused.json").read_text())
    assert "job 1 of " in refused["error"]
    code, out, _ = status(str(study))
    assert code == 1
    assert "1 done, 1 failed" in out
    assert "a file of conf/ has changed" in out


@pytest.mark.slow
def test_code_that_changes_while_a_job_waits_stops_it(tmp_path: Path) -> None:
    """Each job in a process of its own, as from a queue; a file is edited while the first one runs."""
    root = checkout_root()
    assert root is not None
    copy = tmp_path / "checkout"
    for name in ("kvmap", "conf"):
        shutil.copytree(root / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(root / "pyproject.toml", copy)
    command = [sys.executable, "-m", "kvmap.run", "-m", "mapper.top_k=1,2", "experiment=debug"]
    command += ["stages=[plan]", "hydra/launcher=local", "hydra.launcher.n_jobs=1"]
    environment = {**os.environ, "KVMAP_OUTPUTS": str(tmp_path / "outputs"), "PYTHONPATH": str(copy)}
    process = subprocess.Popen(command, env=environment, cwd=copy, stderr=subprocess.PIPE, text=True)
    while not list(tmp_path.glob("outputs/debug/*/0/run.json")):
        assert process.poll() is None
        time.sleep(0.05)
    with open(copy / "kvmap" / "fit" / "ridge.py", "a") as stream:
        stream.write("# edited\n")
    _, err = process.communicate(timeout=100)
    assert process.returncode == 1
    assert "kvmap/fit/ridge.py changed since it was submitted" in err
    assert [file.parent.name for file in tmp_path.glob("outputs/debug/*/*/refused.json")] == ["1"]
    assert [record["status"] for record in records(tmp_path / "outputs" / "debug").values()] == ["done"]
