"""Every kind of map from the command line: fitted, diagnosed, transferred, and its speed measured."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvmap import run as cli
from kvmap.fit import mlp
from tests.cli.conftest import Answer
from tests.cli.test_bad_input import assert_one_message
from tests.cli.test_chain import run_directory

SMALL = (
    "calibration.n_sequences=15",
    "calibration.sequence_length=96",
    "diagnostics.n_sequences=1",
    "evaluation.arms=[target,mapped,no_context]",
    "evaluation.world.n_per_kind=1",
    "evaluation.generate=false",
    "evaluation.perplexity.n_sequences=2",
    "evaluation.bootstrap_samples=10",
    "benchmark.lengths=[16]",
    "benchmark.repeats=1",
)
STAGES = "stages=[plan,calibrate,fit,diagnose,evaluate,benchmark]"
NETWORK = ("mapper.mlp.epochs=1", "mapper.mlp.hidden=[8]")
STRICT = ("calibration.outliers.threshold=2", "calibration.outliers.share=0.2")

MAPS = {
    "mlp": ("mapper=mlp", *NETWORK),
    "residual": ("mapper=residual", *NETWORK),
    "weighted": ("mapper=weighted",),
    "tuned": ("mapper=tuned",),
    "banded": ("mapper=banded",),
    "native features": ("mapper=native_features",),
    "both kinds": ("mapper.regressors=both_kinds", "mapper.top_k=1", "mapper.native_layers=2"),
    "compressed": (
        "mapper.compression.method=fp8",
        "mapper.compression.max_r2_loss=2",
        "mapper.compression.max_kl_nats=2",
    ),
    "outliers dropped": ("calibration.outliers.policy=drop", *STRICT),
    "outliers apart": ("calibration.outliers.policy=separate", "mapper.native_layers=1", *STRICT),
    "selected layers": ("calibration.mode=selected", "mapper.top_k=1"),
}


def metrics_of(out: str) -> dict[str, float]:
    content = json.loads((run_directory(out) / "metrics.json").read_text())
    return {name: entry["value"] for name, entry in content.items()}


# What `tests/stages` runs by default; here the command line's other stages join in.
QUICK = {"mlp"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in MAPS]
)
def test_a_map_of_every_kind_goes_through_all_stages(
    call: Callable[..., Answer], shared_outputs: Path, name: str
) -> None:
    status, out, err = call(f"outputs={shared_outputs}", STAGES, *SMALL, *MAPS[name])
    assert status == 0, err
    assert "Traceback" not in err
    metrics = metrics_of(out)
    for kind in ("key", "value"):
        assert metrics[f"diagnose/held_out/mapped/r2_{kind}"] < 1
    assert metrics["evaluate/perplexity/target/kl_nats"] == 0
    assert metrics["evaluate/perplexity/mapped/kl_nats"] > 0
    tables = run_directory(out) / "tables"
    with open(tables / "latency.csv", newline="") as stream:
        assert {"map", "re_prefill"} <= {row["arm"] for row in csv.DictReader(stream)}
    with open(tables / "attention_output.csv", newline="") as stream:
        assert all(-1.0001 <= float(row["cosine"]) <= 1.0001 for row in csv.DictReader(stream))


def test_a_compression_that_the_gate_refuses_is_said_once(
    call: Callable[..., Answer], shared_outputs: Path
) -> None:
    gate = ("mapper.compression.max_r2_loss=0", "mapper.compression.max_kl_nats=0")
    settings = ("mapper.compression.method=low_rank_fp8", *gate)
    status, out, err = call(f"outputs={shared_outputs}", "stages=[fit]", *SMALL, *settings)
    assert status == 0, err
    assert "not used" in (run_directory(out) / "run.log").read_text()
    with open(run_directory(out) / "tables" / "compression.csv", newline="") as stream:
        assert [row["passes"] for row in csv.DictReader(stream)] == ["True", "False"]


def test_a_calibration_in_parts_is_found_again(call: Callable[..., Answer], tmp_path: Path) -> None:
    common = (f"outputs={tmp_path}", *SMALL)
    status, out, err = call(*common, "stages=[calibrate]", "calibration.shards=2", "calibration.worker=1")
    assert status == 0, err
    assert metrics_of(out)["calibrate/moments/all/reused"] == 0
    assert metrics_of(out)["calibrate/moments/all/n_parts_made"] == 2
    status, out, err = call(*common, "stages=[calibrate,fit]")
    assert status == 0, err
    assert metrics_of(out)["calibrate/moments/all/reused"] == 1


@pytest.mark.slow
def test_an_interrupted_training_of_networks_goes_on(
    call: Callable[..., Answer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    common = (f"outputs={tmp_path}", *SMALL, "stages=[fit]", "mapper=mlp", "mapper.top_k=1", *NETWORK)
    train, layers = mlp.train_layer, []

    def interrupted(rows: Any, settings: Any, kind: str, layer: int, *args: Any) -> Any:
        if len(layers) == 7:
            raise KeyboardInterrupt
        layers.append((kind, layer))
        return train(rows, settings, kind, layer, *args)

    monkeypatch.setattr(mlp, "train_layer", interrupted)
    status, _, err = call(*common)
    assert status == cli.EXIT_INTERRUPTED
    assert_one_message(err)
    status, out, err = call(*common)
    assert status == cli.EXIT_INTERRUPTED  # before the first that is left to train: the seven were found
    monkeypatch.setattr(mlp, "train_layer", train)
    status, out, err = call(*common)
    assert status == 0, err
    with open(run_directory(out) / "tables" / "mlp_history.csv", newline="") as stream:
        assert len({(row["kind"], row["layer"]) for row in csv.DictReader(stream)}) == 12
    assert len(layers) == 7
