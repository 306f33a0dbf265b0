"""How sweeps are started in these tests: in this process, with a stage that takes no time."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvmap import run as cli
from kvmap import sweep
from kvmap.config import start_token
from kvmap.sweeps import callback, submission
from kvmap.sweeps.code import source_files

Answer = tuple[int, str, str]
Sweep = Callable[..., Answer]
QUICK = ("experiment=debug", "stages=[plan]")


@pytest.fixture
def start(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Sweep:
    """Runs `python -m kvmap.run` with outputs in tmp_path: exit status, stdout, stderr.

    The code counts as unchanged, whatever is edited while the tests run.
    """
    files = source_files()
    for module in (callback, submission):
        monkeypatch.setattr(module, "source_files", lambda: files)
    monkeypatch.setenv("KVMAP_OUTPUTS", str(tmp_path))

    def run(*overrides: str) -> Answer:
        from hydra.core.global_hydra import GlobalHydra

        GlobalHydra.instance().clear()
        start_token.cache_clear()  # each call stands for a process of its own
        monkeypatch.setattr(sys, "argv", ["kvmap.run", *overrides, *QUICK])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        captured = capsys.readouterr()
        return int(stop.value.code or 0), captured.out, captured.err

    return run


@pytest.fixture
def status(capsys: pytest.CaptureFixture[str]) -> Sweep:
    """Runs `python -m kvmap.sweep status`: exit status, stdout, stderr."""

    def run(*arguments: str) -> Answer:
        start_token.cache_clear()
        code = sweep.main(["status", *arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture
def fail_at(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """Makes jobs of this `mapper.top_k` fail in their first stage; None: none of them."""
    from kvmap.errors import KvmapError
    from kvmap.stages import plan

    check = plan.check

    def choose(top_k: Any) -> None:
        def failing(ctx: Any) -> None:
            if ctx.cfg.mapper.top_k == top_k:
                raise KvmapError(f"no layer {top_k} today")
            check(ctx)

        monkeypatch.setattr(plan, "check", failing)

    return choose


def records(study: Path) -> dict[Path, dict[str, Any]]:
    """Every run below a study, by its directory; put-away attempts are no runs."""
    files = [*study.glob("*/run.json"), *study.glob("*/*/run.json")]
    return {file.parent: json.loads(file.read_text()) for file in files}


def top_k_of(study: Path) -> list[Any]:
    """What the runs of a study were about, in the order in which they began."""
    return [record["config"]["mapper"]["top_k"] for record in records(study).values()]


def sweep_directories(study: Path) -> list[Path]:
    return sorted(
        (file.parent for file in study.glob("*/multirun.yaml")), key=lambda path: path.stat().st_mtime
    )


def contents(study: Path) -> dict[Path, bytes]:
    """Every file of every finished run."""
    done = [run for run, record in records(study).items() if record["status"] == "done"]
    return {file: file.read_bytes() for run in done for file in run.rglob("*") if file.is_file()}


def summary(path: Path) -> list[dict[str, str]]:
    with open(path / "summary.csv", newline="") as stream:
        return list(csv.DictReader(stream))
