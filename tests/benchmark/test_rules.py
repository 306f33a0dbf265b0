"""What a benchmark's configuration may ask, and the stage that it runs."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from kvmap.benchmark.mapping import MAPPING_PATHS
from kvmap.config import schema, validate
from kvmap.stages import run_stages
from tests.test_config import GROUPS, composed, with_settings

RANDOM = "stages=[plan,benchmark,report] benchmark.random_weights=true mapper.top_k=1"
MISTAKES = {
    "benchmark.lengths=[]": "expected at least one length",
    "benchmark.buffers=0": "benchmark.buffers=0: expected at least 1",
    "benchmark.repeats=0": "benchmark.repeats=0: expected at least 1",
    "benchmark.link_gbit_per_s=0": "expected a finite number above 0",
    "benchmark.paths=[batchd]": "did you mean 'batched'",
    "benchmark.paths=[auto,auto]": "a path stands twice",
    "benchmark.max_layers=2": "set benchmark.random_weights=true",
    "benchmark.random_weights=true": "would give numbers that mean nothing",
    f"{RANDOM} mapper.kind=mlp": "draw a linear one",
    f"{RANDOM} mapper.top_k=auto": "no held-out rows",
    f"{RANDOM} benchmark.max_layers=0": "benchmark.max_layers=0: expected at least 1",
    f"{RANDOM} mapper.top_k=4 benchmark.max_layers=2": "mapper.top_k=4 source layers are to be read",
    f"{RANDOM} mapper.native_layers=2 benchmark.max_layers=2": "leaves nothing to map",
}


@pytest.mark.parametrize(("override", "named"), MISTAKES.items())
def test_a_mistake_is_named(override: str, named: str) -> None:
    assert any(named in mistake for mistake in validate(with_settings(override)))


def test_several_mistakes_come_at_once() -> None:
    found = validate(with_settings("benchmark.buffers=0 benchmark.warmup=-1 benchmark.paths=[x]"))
    assert len([line for line in found if line.startswith("benchmark.")]) == 3


def test_the_schema_knows_every_path() -> None:
    assert set(schema.MAPPING_PATHS) == set(MAPPING_PATHS)


@pytest.mark.parametrize("name", GROUPS["benchmark"])
def test_shipped_lengths_serve_random_models_of_every_pair(name: str) -> None:
    settings = (f"benchmark={name}", "benchmark.random_weights=true", "stages=[plan,benchmark,report]")
    assert validate(composed("pair=qwen3_14b_32b", "mapper.top_k=8", *settings)) == []


def finished(tmp_path: Path, overrides: str) -> Path:
    common = "tracking.backend=none benchmark.lengths=[8,16] benchmark.repeats=1 benchmark.warmup=0"
    cfg = with_settings(f"{common} {overrides}")
    cfg.outputs = str(tmp_path)
    assert validate(cfg) == []
    run_stages(cfg, tmp_path / "run")
    return tmp_path / "run"


def rows(directory: Path, table: str) -> list[dict[str, str]]:
    with open(directory / "tables" / f"{table}.csv", newline="") as stream:
        return list(csv.DictReader(stream))


@pytest.mark.slow
def test_random_weights_need_no_calibration_and_are_labelled(tmp_path: Path) -> None:
    run = finished(tmp_path, f"{RANDOM} benchmark.max_layers=2 benchmark.paths=[auto,per_head]")
    latency = rows(run, "latency")
    assert len(latency) == 2 * 6
    assert all("scaled from 2 of" in row["how"] for row in latency)
    assert {row["path"] for row in rows(run, "paths")} == {"auto", "per_head"}
    for table in ("ratios", "transport", "network"):
        assert rows(run, table)
    assert (run / "figures" / "latency_cost.png").is_file()
    facts = json.loads((run / "run.json").read_text())["facts"]
    assert facts["benchmarked"]["models"].startswith("random weights: source 2 of")
    assert facts["roofline"]["gflop_per_s"] > 0
    assert not (tmp_path / "artifacts").exists()


@pytest.mark.slow
def test_a_random_mapper_serves_loaded_models(tmp_path: Path) -> None:
    run = finished(
        tmp_path, "stages=[benchmark] benchmark.random_mapper=true mapper.top_k=1 benchmark.paths=[]"
    )
    facts = json.loads((run / "run.json").read_text())["facts"]
    assert facts["benchmarked"] == {"models": "loaded", "mapper": "random weights"}
    assert not (run / "tables" / "paths.csv").exists()
    metrics = json.loads((run / "metrics.json").read_text())
    assert metrics["benchmark/16/hand_off/warm_ratio"]["value"] > 0
