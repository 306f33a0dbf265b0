"""Networks in a run: captures that are kept, an interrupted training, and forms with a linear part."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kvmap.fit import mlp
from kvmap.mappers import LinearMapper
from kvmap.stages.calibrated import read_moments
from tests.stages.conftest import Runner

NETWORK = "mapper.mlp.epochs=2 mapper.mlp.hidden=[8] mapper.top_k=1"
N_LAYERS = 2 * 6  # keys and values


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[tuple[str, int]]]:
    """Notes which layers are trained from here on; interrupts before a number of them."""

    def watch(stop_before: int | None = None) -> list[tuple[str, int]]:
        seen: list[tuple[str, int]] = []
        real = mlp.train_layer if not hasattr(mlp.train_layer, "real") else mlp.train_layer.real

        def train_layer(rows: Any, settings: Any, kind: str, layer: int, *args: Any) -> Any:
            if len(seen) == stop_before:
                raise KeyboardInterrupt
            seen.append((kind, layer))
            return real(rows, settings, kind, layer, *args)

        train_layer.real = real  # type: ignore[attr-defined]
        monkeypatch.setattr(mlp, "train_layer", train_layer)
        return seen

    return watch


@pytest.mark.slow
@pytest.mark.parametrize("form", ["full", "residual"])
def test_an_interrupted_training_goes_on_where_it_was(
    run: Runner, tmp_path: Path, trained: Callable[..., list[tuple[str, int]]], form: str
) -> None:
    overrides = f"stages=[fit] mapper=mlp mapper.mlp.form={form} {NETWORK}"
    before = trained(stop_before=5)
    with pytest.raises(KeyboardInterrupt):
        run(overrides, tmp_path)
    assert len(before) == 5
    assert not list((tmp_path / "artifacts" / "mapper").glob("*/artifact.json"))
    after = trained()
    resumed = run(overrides, tmp_path)
    assert len(after) == N_LAYERS - 5
    assert not set(before) & set(after)
    assert not list((tmp_path / "artifacts" / "mlp_layers").iterdir())
    whole = run(overrides).mapper
    for name, tensor in whole.tensors().items():
        assert torch.equal(resumed.mapper.tensors()[name], tensor)
    epochs = {(row["kind"], row["layer"]) for row in resumed.table("mlp_history")}
    assert len(epochs) == N_LAYERS


@pytest.mark.parametrize(
    "changed",
    [
        "mapper.mlp.epochs=1",
        "mapper.seed=1",
        "calibration.token_stride=2",
        "calibration.outliers.policy=drop",
    ],
)
def test_layers_of_other_settings_are_trained_anew(
    run: Runner, tmp_path: Path, trained: Callable[..., list[tuple[str, int]]], changed: str
) -> None:
    overrides = f"stages=[fit] mapper=mlp {NETWORK}"
    trained(stop_before=2)
    with pytest.raises(KeyboardInterrupt):
        run(overrides, tmp_path)
    after = trained()
    run(f"{overrides} {changed}", tmp_path)
    assert len(after) == N_LAYERS


def test_one_capture_serves_many_trainings(run: Runner, tmp_path: Path) -> None:
    for settings in ("mapper.mlp.epochs=1", "mapper.seed=1", "mapper.mlp.form=residual_values"):
        run(f"stages=[fit] mapper=mlp {NETWORK} {settings}", tmp_path)
    assert len(list((tmp_path / "artifacts" / "captures").glob("*/artifact.json"))) == 1
    assert len(list((tmp_path / "artifacts" / "moments").glob("*/artifact.json"))) == 1


def test_moments_of_kept_captures_are_those_of_the_models(run: Runner, tmp_path: Path) -> None:
    """Under one key, so which run made them must not matter beyond the rounding of batches cut elsewhere."""
    kept = run("stages=[calibrate] calibration.keep_captures=true", tmp_path / "kept")
    live = run("stages=[calibrate]", tmp_path / "live")
    assert kept.artifact("moments").name == live.artifact("moments").name
    assert kept.artifact("captures").is_dir()
    mine, theirs = (read_moments(run_.artifact("moments")).to_tensors()[0] for run_ in (kept, live))
    for name, tensor in theirs.items():
        # float32 caches; sums over rows, of which some cancel
        scale = 1e-5 * float(tensor.abs().max())
        torch.testing.assert_close(mine[name], tensor, rtol=1e-5, atol=scale)


@pytest.mark.parametrize(("form", "linear"), [("values_only", {"key"}), ("residual", {"key", "value"})])
def test_the_linear_part_is_the_linear_mapper(run: Runner, form: str, linear: set[str]) -> None:
    plain = run("stages=[fit] mapper=linear mapper.top_k=1").mapper
    built = run(f"stages=[fit] mapper=mlp mapper.mlp.form={form} {NETWORK}").mapper
    assert isinstance(plain, LinearMapper)
    weights, found = plain.linear_weights(), built.tensors()
    assert {name.split(".")[1] for name in found if name.startswith("linear.")} == linear
    for kind in linear:
        for layer in range(6):
            stem = f"linear.{kind}.{layer}.0"
            assert torch.equal(found[f"{stem}.weight"], weights.weight[kind][layer])
            assert torch.equal(found[f"{stem}.bias"], weights.bias[kind][layer])


@pytest.mark.slow
def test_networks_may_read_other_features_than_ridge(run: Runner) -> None:
    own = "mapper.mlp.support=head_local mapper.mlp.regressors=both_kinds mapper.mlp.top_k=1"
    untrained = "mapper.mlp.epochs=1 mapper.mlp.hidden=[8] mapper.mlp.learning_rate=1e-20"
    stages = "stages=[plan,calibrate,fit,diagnose] mapper.top_k=2"
    ridge = run(f"{stages} mapper=linear")
    built = run(f"{stages} mapper=residual {untrained} {own}")
    linear, network = (built.mapper.recipes[part] for part in ("linear", "mlp"))
    assert (linear.support, linear.regressors) == ("full_head", "own_kind")
    assert (network.support, network.regressors) == ("head_local", "both_kinds")
    for kind in ("key", "value"):
        for layer, (read, among) in enumerate(
            zip(network.selection[kind], linear.selection[kind], strict=True)
        ):
            assert len(read) == 1
            assert set(read) < set(among)
            assert (
                built.mapper.tensors()[f"mlp.{kind}.{layer}.0.weight"].shape[1]
                == 2 * network.source_shape[0][1]
            )
    weights = sum(tensor.numel() for name, tensor in built.mapper.tensors().items() if "weight" in name)
    planned = {(row["part"], row["quantity"]): float(row["value"]) for row in built.table("plan")}
    assert planned["mapper", "n_weights"] == weights
    for mine, theirs in zip(built.table("r2"), ridge.table("r2"), strict=True):
        # sums of float32 products on one side, of moments on the other
        assert float(mine["r2"]) == pytest.approx(float(theirs["r2"]), abs=1e-4)


@pytest.mark.parametrize("outliers", ["keep", "drop"])
def test_a_network_that_learns_nothing_leaves_the_r2_of_ridge(
    run: Runner, monkeypatch: pytest.MonkeyPatch, outliers: str
) -> None:
    """R² by mapping captured caches is R² from moments, of the rows that the network is trained on."""
    policy = f"calibration.outliers.policy={outliers} calibration.outliers.threshold=2"
    stages = f"stages=[calibrate,fit,diagnose] mapper.top_k=1 {policy} calibration.outliers.share=0.2"
    ridge = run(f"{stages} mapper=linear")
    n_rows: list[int] = []
    train = mlp.train_layer

    def train_layer(rows: Any, *args: Any) -> Any:
        n_rows.append(rows.n_rows("fit"))
        return train(rows, *args)

    monkeypatch.setattr(mlp, "train_layer", train_layer)
    network = "mapper.mlp.epochs=1 mapper.mlp.hidden=[8] mapper.mlp.learning_rate=1e-20"
    residual = run(f"{stages} mapper=residual {network}")
    assert n_rows == [ridge.metric("calibrate/rows/fit/n_rows")] * N_LAYERS
    for mine, theirs in zip(residual.table("r2"), ridge.table("r2"), strict=True):
        # sums of float32 products on one side, of moments on the other
        assert float(mine.pop("r2")) == pytest.approx(float(theirs.pop("r2")), abs=1e-4)
        assert mine == theirs
