"""Each kind of map through plan, fit and diagnosis: what was planned comes out, and the tables agree."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from kvmap.fit.features import KINDS
from kvmap.mappers import LinearMapper, mapper_kinds
from tests.stages.conftest import Finished, Runner

STAGES = "stages=[plan,calibrate,fit,diagnose]"
NETWORK = "mapper.mlp.epochs=1 mapper.mlp.hidden=[8]"
SEPARATE = (
    "calibration.outliers.policy=separate calibration.outliers.threshold=2 calibration.outliers.share=0.2"
)

# What is asked for: the kind of mapper that comes out, and the tables that only this leaves.
MAPS = {
    "mapper=linear": ("linear", {"conditioning"}),
    "mapper=head_local mapper.dtype=bfloat16 mapper.top_k=2": ("linear", {"conditioning"}),
    "mapper=linear selection=forward selection.apart=true mapper.top_k=2": ("linear", {"conditioning"}),
    "mapper=linear selection=cosine mapper.top_k=1": ("linear", {"conditioning"}),
    "mapper=linear selection=proportional mapper.penalty=relative mapper.top_k=1": (
        "linear",
        {"conditioning"},
    ),
    "mapper=native_features": ("linear", {"conditioning"}),
    "mapper=linear mapper.regressors=both_kinds mapper.top_k=1 mapper.native_layers=2": (
        "linear",
        {"conditioning"},
    ),
    "mapper=banded": ("linear", {"tuning", "tuning_heads", "conditioning"}),
    "mapper=tuned": ("linear", {"tuning", "tuning_heads", "conditioning"}),
    "mapper=weighted": ("linear", {"row_weights", "conditioning"}),
    f"mapper=mlp {NETWORK}": ("mlp", {"mlp_history"}),
    f"mapper=mlp mapper.mlp.form=values_only mapper.native_layers=1 {NETWORK}": ("mlp", {"mlp_history"}),
    f"mapper=residual mapper.support=head_local {NETWORK}": ("mlp", {"mlp_history"}),
    f"mapper=residual mapper.mlp.form=residual_values mapper.top_k=auto {NETWORK}": (
        "mlp",
        {"mlp_history", "tuning", "tuning_heads"},
    ),
    "mapper=bias_only mapper.native_layers=1": ("bias_only", set()),
    "mapper=raw mapper.native_layers=1": ("raw", set()),
    "mapper=identity pair=tiny_self": ("identity", set()),
    "mapper=random mapper.native_layers=1": ("random", set()),
    "pair=tiny_unmatched mapper=banded mapper.top_k=1 mapper.native_layers=1": (
        "linear",
        {"tuning", "tuning_heads"},
    ),
    "direction=down mapper=tuned mapper.native_layers=1": ("linear", {"tuning", "tuning_heads"}),
    f"{SEPARATE} mapper=weighted": ("separate", {"outliers", "row_weights"}),
    f"{SEPARATE} {NETWORK} mapper=residual": ("separate", {"outliers", "mlp_history"}),
}


# Whose parts others here have too.
SLOW = {
    "mapper=linear selection=cosine mapper.top_k=1",
    "mapper=native_features",
    "mapper=tuned",
    f"mapper=mlp mapper.mlp.form=values_only mapper.native_layers=1 {NETWORK}",
    f"mapper=mlp {NETWORK}",
    f"mapper=residual mapper.support=head_local {NETWORK}",
    "mapper=identity pair=tiny_self",
    "mapper=weighted",
    "mapper=banded",
    "mapper=linear selection=forward selection.apart=true mapper.top_k=2",
    "direction=down mapper=tuned mapper.native_layers=1",
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "overrides", [pytest.param(asked, marks=[pytest.mark.slow] if asked in SLOW else []) for asked in MAPS]
)
def test_what_was_planned_is_fitted_and_diagnosed(run: Runner, overrides: str) -> None:
    kind, tables = MAPS[overrides]
    finished = run(f"{STAGES} {overrides}")
    assert finished.json("run")["status"] == "done"
    assert finished.mapper.kind == kind
    assert tables <= finished.tables
    special = {"tuning", "tuning_heads", "row_weights", "mlp_history", "outliers", "compression"}
    assert finished.tables & special == tables & special
    planned = {(row["part"], row["quantity"]): row["value"] for row in finished.table("plan")}
    if kind not in ("identity", "raw", "bias_only"):
        assert float(planned["mapper", "n_weights"]) == finished.metric("fit/mapper/all/n_weights")
    native = finished.mapper.native_layers
    r2 = {
        (row["kind"], int(row["layer"]), int(row["head"]), row["split"]): row for row in finished.table("r2")
    }
    heads = {
        (kind, layer, head, split)
        for kind in KINDS
        for layer, (n_heads, _) in enumerate(finished.mapper.target_shape)
        for head in range(n_heads)
        for split in ("fit", "held_out", "evaluation", "questions")
        if layer >= native
    }
    assert set(r2) == heads
    assert all(math.isfinite(float(row["r2"])) for row in r2.values())


def test_the_kinds_above_are_all_there_are() -> None:
    assert {kind for kind, _ in MAPS.values()} | {"compressed_linear"} == set(mapper_kinds())


@pytest.fixture(scope="module")
def with_one_mapper(run: Runner, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Outputs that hold the plain linear mapper."""
    outputs = tmp_path_factory.mktemp("with_one_mapper")
    run("stages=[fit] mapper=linear", outputs)
    return outputs


@pytest.mark.parametrize(
    ("setting", "reused"),
    [
        ("evaluation.batch_size=3 benchmark.repeats=1 diagnostics.n_sequences=1", 1),
        ("mapper.tuning.per=head mapper.mlp.epochs=3 mapper.compression.tolerance=0.5", 1),
        ("mapper.allow_few_rows=true mapper.seed=4 calibration.batch_size=4", 1),
        ("selection=proportional", 1),  # every layer is read, whatever the rule
        ("mapper.ridge_lambda=0.02", 0),
        ("mapper.penalty=relative", 0),
        ("mapper.dtype=bfloat16", 0),
        ("mapper.support=banded", 0),
        ("mapper.native_layers=1", 0),
        ("mapper.regressors=both_kinds", 0),
        ("mapper.row_weights=sensitivity", 0),
        ("mapper.compression.method=bfloat16", 0),
        ("mapper.top_k=2", 0),
        ("mapper.ridge_lambda=auto", 0),
        ("calibration.token_stride=2", 0),
        ("calibration.seed=1", 0),
        ("calibration.outliers.policy=drop", 0),
        ("rope=coupled", 0),
        ("transfer.native_head=2", 0),
    ],
)
def test_a_mapper_is_made_again_where_a_setting_matters_and_only_there(
    run: Runner, with_one_mapper: Path, setting: str, reused: int
) -> None:
    finished = run(f"stages=[fit] mapper=linear {setting}", with_one_mapper)
    assert finished.metric("fit/mapper/all/reused") == reused


def held_out_r2(finished: Finished) -> dict[tuple[str, int, int], float]:
    return {
        (row["kind"], int(row["layer"]), int(row["head"])): float(row["r2"])
        for row in finished.table("r2")
        if row["split"] == "held_out"
    }


@pytest.mark.parametrize(
    "overrides", ["mapper=tuned", "mapper=banded", "mapper=native_features mapper.lambda_native=auto"]
)
def test_the_r2_that_tuning_promised_is_that_of_the_diagnosis(run: Runner, overrides: str) -> None:
    finished = run(f"{STAGES} {overrides}")
    found = held_out_r2(finished)
    promised = {
        (row["kind"], int(row["layer"]), int(row["head"])): float(row["held_out_r2"])
        for row in finished.table("tuning_heads")
    }
    assert set(promised) == set(found)
    for head, r2 in promised.items():
        # weights are stored in float32
        assert found[head] == pytest.approx(r2, abs=1e-4)
    grid = finished.table("tuning")
    assert sum(int(row["n_heads"]) for row in grid) == len(found)


@pytest.mark.slow
def test_tuning_finds_what_single_fits_find(run: Runner) -> None:
    """The grid's point of ratio 1 is the full-head map, that of ratio ∞ the head-local one."""
    banded = run(f"{STAGES} mapper=banded mapper.ridge_lambda=0.5")
    by_ratio = {row["cross_ratio"]: float(row["held_out_r2"]) for row in banded.table("tuning")}
    assert set(by_ratio) == {"1.0", "10.0", "100.0", "1000.0", "inf"}
    for support, ratio in (("full_head", "1.0"), ("head_local", "inf")):
        alone = held_out_r2(run(f"{STAGES} mapper=linear mapper.support={support} mapper.ridge_lambda=0.5"))
        assert sum(alone.values()) / len(alone) == pytest.approx(by_ratio[ratio], abs=1e-4)


def test_every_tuned_head_has_its_system_in_the_conditioning(run: Runner) -> None:
    finished = run(f"{STAGES} mapper=banded mapper.top_k=2 mapper.tuning.per=head")
    rows = finished.table("conditioning")
    chosen = {(row["kind"], row["layer"], row["head"]) for row in finished.table("tuning_heads")}
    served = {
        (row["kind"], layer, head)
        for row in rows
        for layer in row["layers"].split()
        for head in row["heads"].split()
    }
    assert chosen <= served
    for row in rows:
        # two source layers of two heads of 32 channels
        assert int(row["n_features"]) == 128
        assert 0 < float(row["degrees_of_freedom"]) <= 128
        assert float(row["condition_number"]) >= 1


@pytest.mark.parametrize("native_layers", [0, 1])
def test_weights_keep_two_rows_a_feature(run: Runner, native_layers: int) -> None:
    finished = run(f"{STAGES} mapper=weighted mapper.native_layers={native_layers}")
    planned = {row["quantity"]: row["value"] for row in finished.table("plan") if row["part"] == "mapper"}
    n_features = int(planned["n_features"])
    rows = finished.table("row_weights")
    assert len(rows) == 2 * 2 * (6 - native_layers)
    for row in rows:
        assert int(row["n_rows"]) == finished.metric("calibrate/rows/fit/n_rows")
        assert float(row["effective_rows"]) >= min(2 * n_features, int(row["n_rows"])) - 1e-6
        assert 0 <= float(row["alpha"]) <= 1
    # rows and their weights are another fit than rows alone
    plain = run(f"{STAGES} mapper=head_local mapper.native_layers={native_layers}")
    assert held_out_r2(plain) != held_out_r2(finished)


def test_keys_and_values_choose_apart_where_they_are_told_to(run: Runner) -> None:
    for apart in (False, True):
        finished = run(f"stages=[fit] mapper.top_k=1 selection.apart={str(apart).lower()}")
        chosen = {
            (row["kind"], row["target_layer"]): row["source_layers"] for row in finished.table("selection")
        }
        alike = all(chosen["key", layer] == chosen["value", layer] for kind, layer in chosen if kind == "key")
        assert alike is not apart


@pytest.mark.parametrize("regressors", ["own_kind", "both_kinds"])
def test_moments_of_more_than_a_map_reads_serve_it_alike(
    run: Runner, tmp_path: Path, regressors: str
) -> None:
    asked = f"mapper.regressors={regressors} mapper.native_layers=1"
    more = "calibration.regressors=both_kinds calibration.native_layers=2"
    rich = run(f"stages=[calibrate,fit] {asked} {more}", tmp_path)
    once_more = run(f"stages=[calibrate,fit] mapper=head_local {more}", tmp_path)
    assert once_more.metric("calibrate/moments/all/reused") == 1
    plain = run(f"stages=[calibrate,fit] {asked}").mapper
    assert isinstance(plain, LinearMapper)
    for name, tensor in plain.tensors().items():
        # weights are float32; systems of condition 1e7 in float64
        torch.testing.assert_close(rich.mapper.tensors()[name], tensor, rtol=1e-5, atol=1e-6)
