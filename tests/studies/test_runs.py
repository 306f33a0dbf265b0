"""Run directories as a table."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from kvmap.errors import KvmapError
from kvmap.files import write_json
from kvmap.studies.runs import PAIR, metrics_of, require, runs_table, varied


def make_run(
    folder: Path,
    *,
    direction: str = "up",
    mapper: str = "linear",
    k: object = 1,
    seed: int = 0,
    status: str = "done",
) -> Path:
    config = {
        "study": "s",
        "direction": direction,
        "seed": 0,
        "pair": {"name": "tiny", "source": {"id": "zoo:tiny-small"}, "target": {"id": "/models/large"}},
        "mapper": {
            "kind": "linear",
            "support": "head_local" if mapper == "head_local" else "full_head",
            "top_k": k,
        },
        "calibration": {"data": {"seed": seed, "path": f"/texts/{seed}"}},
        "tracking": {"backend": f"none{seed}"},
        "evaluation": {"arms": ["target", "mapped"]},
    }
    record = {
        "study": "s",
        "status": status,
        "started": f"2026-01-01T00:00:{seed:02}",
        "config": config,
        "facts": {},
    }
    write_json(folder / "run.json", record)
    accuracy = {"value": 0.5 + 0.1 * seed, "n": 12, "standard_error": 0.1}
    metrics = {
        "evaluate/average/mapped/accuracy": accuracy,
        "fit/x": {"value": None, "n": 1, "standard_error": None},
    }
    write_json(folder / "metrics.json", metrics)
    (folder / ".hydra").mkdir(exist_ok=True)
    choices = {"hydra": {"runtime": {"choices": {"pair": "tiny", "mapper": mapper}}}}
    OmegaConf.save(OmegaConf.create(choices), folder / ".hydra" / "hydra.yaml")
    return folder


def test_a_row_has_settings_metrics_and_what_the_run_was_composed_of(tmp_path):
    make_run(tmp_path / "sweep" / "0", k="all")
    make_run(tmp_path / "sweep" / "1", direction="down", seed=1)
    make_run(tmp_path / "sweep" / "2", status="failed")
    table = runs_table([tmp_path / "sweep"])
    assert list(table[PAIR]) == ["tiny-small → large", "large → tiny-small"]
    assert list(table["mapper.top_k"]) == ["all", 1]
    assert list(table["pair"]) == ["tiny", "tiny"]
    assert list(table["evaluate/average/mapped/accuracy"]) == [0.5, 0.6]
    assert list(table["evaluate/average/mapped/accuracy:n"]) == [12, 12]
    assert list(table["evaluate/average/mapped/accuracy:standard_error"]) == [0.1, 0.1]
    assert all(math.isnan(value) for value in table["fit/x"])
    assert table["evaluation.arms"][0] == "['target', 'mapped']"
    assert [Path(run).name for run in table["run"]] == ["0", "1"]
    assert metrics_of(table, "evaluate/") == ["evaluate/average/mapped/accuracy"]


def test_what_varies_is_neither_a_seed_nor_a_path_nor_what_changes_no_result(tmp_path):
    runs = [make_run(tmp_path / str(seed), seed=seed, k=seed) for seed in range(2)]
    assert varied(runs_table(runs)) == ["mapper.top_k"]


def test_what_a_mappers_file_sets_is_the_mapper(tmp_path):
    runs = [make_run(tmp_path / mapper, mapper=mapper) for mapper in ("linear", "head_local")]
    assert varied(runs_table(runs)) == ["mapper"]


def test_a_run_without_hydras_record_is_named_by_its_settings(tmp_path):
    run = make_run(tmp_path / "0")
    (run / ".hydra" / "hydra.yaml").unlink()
    table = runs_table([run])
    assert (table["pair"][0], table["mapper"][0]) == ("tiny", "linear")


def test_a_missing_metric_is_named_with_what_there_is_of_its_kind(tmp_path):
    table = runs_table([make_run(tmp_path / "0")])
    with pytest.raises(KvmapError, match="evaluate/average/mapped/accuracy"):
        require(table, ["evaluate/world_where/mapped/accuracy"])


def test_nothing_finished_is_refused(tmp_path):
    with pytest.raises(KvmapError, match="none of 1 runs is finished"):
        runs_table([make_run(tmp_path / "0", status="failed")])
