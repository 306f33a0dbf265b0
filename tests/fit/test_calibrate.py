"""The pass over the calibration tokens: every way through it gives the moments of the same rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from kvmap.errors import KvmapError
from kvmap.fit import calibrate
from kvmap.fit.calibrate import CalibrationOptions, accumulate_moments
from kvmap.fit.moments import KINDS, SPLITS, MemoryBudgetExceeded, PairMoments
from kvmap.models.capture import prefill
from kvmap.models.pair import LoadedModel, ModelPair, ModelSpec
from kvmap.models.rope import strip_rotation
from tests.models.tiny_tokenizers import byte_level_tokenizer
from tests.tiny_random_models import FAMILIES, random_ids

SETTINGS = {"vocab_size": 272}
IDS = random_ids(5, 9)
SPLITS_OF = {"fit": [3, 0, 1], "held_out": [4, 2]}
TENSORS = ("mean_x", "mean_y", "s_xx", "s_xy", "s_yy")


@pytest.fixture(scope="module")
def models() -> dict[str, LoadedModel]:
    return {
        "source": LoadedModel.from_model(FAMILIES["llama"](seed=1, **SETTINGS), name="source"),
        "target": LoadedModel.from_model(
            FAMILIES["qwen3"](seed=2, n_layers=1, head_dim=8, **SETTINGS), name="target"
        ),
    }


@pytest.fixture(scope="module")
def pair(models) -> ModelPair:
    return ModelPair(models["source"], models["target"])


@pytest.fixture(scope="module")
def specs(models, tmp_path_factory) -> list[ModelSpec]:
    folder = tmp_path_factory.mktemp("models")
    for side, loaded in models.items():
        loaded.model.save_pretrained(folder / side)
        byte_level_tokenizer().save_pretrained(folder / side)
    return [ModelSpec(str(folder / side), device="cpu") for side in ("source", "target")]


class WatchedPair(ModelPair):
    """Fails where both models are in memory, and keeps the order in which they were loaded."""

    def __init__(self, source: ModelSpec, target: ModelSpec) -> None:
        super().__init__(source, target)
        self.order: list[str] = []

    def _load(self, side):
        model = super()._load(side)
        assert len(self._loaded) == 1, "source and target are in memory together"
        if self.order[-1:] != [side]:
            self.order.append(side)
        return model


def assert_same_moments(got: PairMoments, expected: PairMoments) -> None:
    """Equal to float64 rounding: the order in which batches are added may differ."""
    assert (got.source_shape, got.target_shape) == (expected.source_shape, expected.target_shape)
    for key, table in expected.tables.items():
        assert (got.tables[key].n_rows, got.tables[key].weight) == (table.n_rows, table.weight)
        for name in TENSORS:
            torch.testing.assert_close(
                getattr(got.tables[key], name), getattr(table, name), rtol=1e-10, atol=1e-9
            )


def own_rows(loaded: LoadedModel, ids: Tensor, rope: str, columns: list[int]) -> dict[str, np.ndarray]:
    """By kind (rows, features) from transformers' own cache, one sequence and one column at a time."""
    found: dict[str, list[np.ndarray]] = {kind: [] for kind in KINDS}
    for sequence in ids:
        with torch.no_grad():
            cache = loaded.model(sequence[None], use_cache=True).past_key_values
        rotations = loaded.rotations(len(sequence))
        positions = torch.arange(len(sequence))[None]
        layers: dict[str, list[Tensor]] = {kind: [] for kind in KINDS}
        for layer, rotation in zip(cache.layers, rotations, strict=True):
            keys = layer.keys if rope == "coupled" else strip_rotation(layer.keys, positions, rotation)
            layers["key"].append(keys[0])
            layers["value"].append(layer.values[0])
        for column in columns:
            for kind in KINDS:
                features = [head[column].double().numpy() for layer in layers[kind] for head in layer]
                found[kind].append(np.concatenate(features))
    return {kind: np.stack(rows) for kind, rows in found.items()}


@pytest.mark.parametrize(
    ("native_head", "stride", "columns"),
    [(0, 1, list(range(9))), (1, 1, list(range(1, 9))), (2, 3, [2, 5, 8]), (0, 4, [0, 4, 8])],
)
@pytest.mark.parametrize("rope", ["strip", "coupled"])
def test_the_moments_are_those_of_the_models_own_caches(
    models, pair, tmp_path, rope, native_head, stride, columns
) -> None:
    options = CalibrationOptions(native_head=native_head, token_stride=stride, rope=rope, batch_size=2)
    moments = accumulate_moments(pair, IDS, SPLITS_OF, options, tmp_path / "spill")
    for split, indices in SPLITS_OF.items():
        x_rows = own_rows(models["source"], IDS[indices], rope, columns)
        y_rows = own_rows(models["target"], IDS[indices], rope, columns)
        for kind in KINDS:
            table, x, y = moments.tables[kind, split], x_rows[kind], y_rows[kind]
            assert table.n_rows == len(indices) * len(columns)
            dx, dy = x - x.mean(0), y - y.mean(0)
            expected = {
                "mean_x": x.mean(0),
                "mean_y": y.mean(0),
                "s_xx": dx.T @ dx,
                "s_xy": dx.T @ dy,
                "s_yy": (dy**2).sum(0),
            }
            for name, wanted in expected.items():
                # float32 models in batches of another size: their caches agree to some 1e-6
                np.testing.assert_allclose(getattr(table, name).numpy(), wanted, rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("rope", ["strip", "coupled"])
def test_one_model_at_a_time_gives_the_moments_of_both_at_once(specs, tmp_path, rope) -> None:
    options = {"rope": rope, "batch_size": 2}
    live = accumulate_moments(
        ModelPair(*specs), IDS, SPLITS_OF, CalibrationOptions(**options), tmp_path / "unused"
    )
    watched = WatchedPair(*specs)
    spill = tmp_path / "spill"
    sequential = accumulate_moments(
        watched, IDS, SPLITS_OF, CalibrationOptions(sequential=True, **options), spill
    )
    assert_same_moments(sequential, live)
    assert watched.order == ["source", "target"]
    assert not spill.exists()
    assert not (tmp_path / "unused").exists()


def test_a_target_already_in_memory_makes_room_for_the_source(specs, tmp_path) -> None:
    watched = WatchedPair(*specs)
    assert watched.target is not None
    accumulate_moments(watched, IDS, SPLITS_OF, CalibrationOptions(sequential=True), tmp_path / "spill")
    assert watched.order == ["target", "source", "target"]


def test_the_batch_size_does_not_matter(pair, tmp_path) -> None:
    one, three, whole = (
        accumulate_moments(pair, IDS, SPLITS_OF, CalibrationOptions(batch_size=size), tmp_path / "spill")
        for size in (1, 3, 100)
    )
    for other in (one, three):
        for key, table in whole.tables.items():
            assert other.tables[key].n_rows == table.n_rows
            for name in TENSORS:
                # float32 matrix products round otherwise in batches of another size
                torch.testing.assert_close(
                    getattr(other.tables[key], name), getattr(table, name), rtol=1e-4, atol=2e-4
                )


def test_batches_are_read_in_order_and_each_in_its_own_split(pair, tmp_path) -> None:
    moments = accumulate_moments(
        pair, IDS, {"fit": [0], "held_out": [1, 2, 3, 4]}, CalibrationOptions(), tmp_path / "spill"
    )
    assert {split: moments.tables["key", split].n_rows for split in SPLITS} == {"fit": 8, "held_out": 32}


def failing_target(monkeypatch: pytest.MonkeyPatch, n_layers: int) -> None:
    """Reading fails in the model that has so many layers."""

    def read(loaded: LoadedModel, *args: object, **kwargs: object) -> object:
        if loaded.geometry.n_layers == n_layers:
            raise RuntimeError("out of memory")
        return prefill(loaded, *args, **kwargs)

    monkeypatch.setattr(calibrate, "prefill", read)


@pytest.mark.parametrize("n_layers", [1, 2], ids=["target", "source"])
def test_what_was_spilled_is_removed_when_a_model_fails(pair, tmp_path, monkeypatch, n_layers) -> None:
    failing_target(monkeypatch, n_layers)
    spill = tmp_path / "spill"
    with pytest.raises(RuntimeError, match="out of memory") as failed:
        accumulate_moments(pair, IDS, SPLITS_OF, CalibrationOptions(sequential=True), spill)
    assert not spill.exists()
    assert failed.tb is not None  # also while the traceback is alive


def test_the_spill_folder_holds_no_more_than_what_is_still_to_be_read(pair, tmp_path, monkeypatch) -> None:
    spill, left = tmp_path / "spill", []

    def watched(loaded: LoadedModel, ids: Tensor) -> object:
        if loaded.geometry.n_layers == 1:
            left.append(len(list(spill.iterdir())))
        return prefill(loaded, ids)

    monkeypatch.setattr(calibrate, "prefill", watched)
    accumulate_moments(pair, IDS, SPLITS_OF, CalibrationOptions(sequential=True, batch_size=1), spill)
    assert left == [5, 4, 3, 2, 1]


@pytest.fixture
def unloadable(specs, monkeypatch) -> ModelPair:
    """A pair whose weights must not be read."""
    refused = ModelPair(*specs)
    monkeypatch.setattr(refused, "_load", lambda side: pytest.fail(f"the {side} was loaded"))
    return refused


@pytest.mark.parametrize("split", SPLITS)
def test_an_empty_split_is_refused_by_name_before_weights_load(unloadable, tmp_path: Path, split) -> None:
    with pytest.raises(KvmapError, match=rf"the {split} split holds no sequence.*calibration\.n_sequences"):
        accumulate_moments(
            unloadable, IDS, {**SPLITS_OF, split: []}, CalibrationOptions(), tmp_path / "spill"
        )


def test_moments_over_the_budget_are_refused_before_weights_load(unloadable, tmp_path: Path) -> None:
    options = CalibrationOptions(budget_bytes=1000)
    with pytest.raises(MemoryBudgetExceeded, match="1,000 are allowed"):
        accumulate_moments(unloadable, IDS, SPLITS_OF, options, tmp_path / "spill")
