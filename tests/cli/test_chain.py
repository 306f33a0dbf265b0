"""The command line, as a user meets it: whole runs, reuse, interruption, any working directory."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvmap import run as cli
from tests.cli.conftest import Answer


def run_directory(out: str) -> Path:
    """The directory that the last line of a run names."""
    last = out.strip().splitlines()[-1]
    assert last.startswith("run: ")
    return Path(last.removeprefix("run: "))


def test_the_whole_chain(call: Callable[..., Answer], shared_outputs: Path) -> None:
    status, out, err = call(f"outputs={shared_outputs}")
    assert status == 0, err
    directory = run_directory(out)
    record = json.loads((directory / "run.json").read_text())
    assert record["status"] == "done"
    assert list(record["stages"]) == [
        "plan",
        "calibrate",
        "fit",
        "diagnose",
        "evaluate",
        "benchmark",
        "report",
    ]
    metrics = json.loads((directory / "metrics.json").read_text())
    arms = {key.split("/")[2] for key in metrics if key.startswith("evaluate/perplexity/")}
    assert {"target", "source", "mapped", "bias_only", "random", "no_context"} <= arms
    assert metrics["evaluate/perplexity/target/kl_nats"]["value"] == 0
    tables = {path.stem for path in (directory / "tables").glob("*.csv")}
    assert {
        "plan",
        "selection",
        "r2",
        "probes",
        "arms",
        "items",
        "sequences",
        "latency",
        "transport",
    } <= tables
    assert {path.stem for path in (directory / "figures").glob("*.png")} >= {
        "r2",
        "accuracy",
        "perplexity",
        "latency",
    }
    assert "mapped" in out


def test_a_second_run_reuses_the_moments_and_another_lambda_refits(
    call: Callable[..., Answer], shared_outputs: Path
) -> None:
    common = (f"outputs={shared_outputs}", "stages=[calibrate,fit]")
    call(*common)
    for override, mapper_reused in (("mapper.ridge_lambda=0.01", 1.0), ("mapper.ridge_lambda=0.5", 0.0)):
        status, out, _ = call(*common, override)
        metrics = json.loads((run_directory(out) / "metrics.json").read_text())
        assert status == 0
        assert metrics["calibrate/moments/all/reused"]["value"] == 1.0
        assert metrics["fit/mapper/all/reused"]["value"] == mapper_reused


def test_the_identity_pair_equals_the_native_target(
    call: Callable[..., Answer], shared_outputs: Path
) -> None:
    overrides = (f"outputs={shared_outputs}", "pair=tiny_self", "mapper=identity")
    status, out, err = call(*overrides, "stages=[evaluate]", "evaluation.arms=[target,mapped,no_context]")
    assert status == 0, err
    metrics = json.loads((run_directory(out) / "metrics.json").read_text())
    # float32 through one GEMM-free path: only the order of attention sums differs
    assert metrics["evaluate/perplexity/mapped/kl_nats"]["value"] == pytest.approx(0, abs=1e-6)
    assert metrics["evaluate/perplexity/mapped/top1_agreement"]["value"] == 1.0


@pytest.mark.slow
@pytest.mark.parametrize("overrides", [("direction=down",), ("pair=tiny_unmatched", "mapper=head_local")])
def test_other_ways_to_pair(
    call: Callable[..., Answer],
    shared_outputs: Path,
    overrides: tuple[str, ...],
) -> None:
    stages = "stages=[plan,calibrate,fit,diagnose,evaluate]"
    status, out, err = call(f"outputs={shared_outputs}", stages, *overrides)
    assert status == 0, err
    assert (run_directory(out) / "tables" / "arms.csv").is_file()


@pytest.mark.slow
def test_interrupt_keeps_what_was_finished(tmp_path: Path) -> None:
    """Ctrl-C while the evaluation runs: status 130, moments and mapper are there, the record says so."""
    command = [sys.executable, "-m", "kvmap.run", "experiment=debug", f"outputs={tmp_path}"]
    command += ["evaluation.world.n_per_kind=200", "evaluation.batch_size=2", "tracking=none"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=tmp_path,
        # A test run in the background of a shell ignores Ctrl-C, and its children would inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    deadline = time.monotonic() + 90
    while not list(tmp_path.glob("debug/*/tables/items.csv")):
        assert process.poll() is None, process.stderr and process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == cli.EXIT_INTERRUPTED
    assert "interrupted; what was finished is kept" in err
    assert "Traceback" not in err
    (record,) = tmp_path.glob("debug/*/run.json")
    content = json.loads(record.read_text())
    assert (content["status"], content["error"]) == ("failed", "interrupted")
    assert content["stages"]["fit"]["status"] == "done"
    assert list((tmp_path / "artifacts" / "mapper").glob("*/manifest.json"))


@pytest.mark.slow
def test_it_runs_from_any_working_directory(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kvmap.run", "experiment=debug", "stages=[plan]"]
    environment = {**os.environ, "KVMAP_OUTPUTS": str(tmp_path / "here")}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert run_directory(done.stdout).parent == tmp_path / "here" / "debug"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["here"]
