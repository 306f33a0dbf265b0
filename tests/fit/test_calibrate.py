"""The pass over the calibration tokens: every way through it gives the moments of the same rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from kvmap.errors import KvmapError
from kvmap.fit import reading
from kvmap.fit.calibrate import CalibrationOptions, Stream, accumulate_moments, live_stream
from kvmap.fit.captures import CapturedBatch
from kvmap.fit.features import KINDS, Block, Layout, Recipe, both, geometry_shape
from kvmap.fit.moments import Moments, MomentsError
from kvmap.fit.pair_moments import (
    SPLITS,
    MemoryBudgetExceeded,
    PairMoments,
    full_tables,
    selected_tables,
)
from kvmap.models.capture import prefill
from kvmap.models.pair import LoadedModel, ModelPair, ModelSpec
from kvmap.models.rope import strip_rotation
from tests.fit.oracles import FIELDS, assert_same, from_rows
from tests.fit.watched_pair import WatchedPair
from tests.models.tiny_tokenizers import byte_level_tokenizer
from tests.tiny_random_models import FAMILIES, random_ids

SETTINGS = {"vocab_size": 272}
IDS = random_ids(5, 9)
SPLITS_OF = {"fit": [3, 0, 1], "held_out": [4, 2]}
DEFAULTS = CalibrationOptions()


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


def layout_of(pair: ModelPair, native_layers: int = 0) -> Layout:
    shapes = (geometry_shape(geometry) for geometry in (pair.source_geometry, pair.target_geometry))
    return Layout(*shapes, native_layers)


def stream_of(
    pair: ModelPair,
    spill: Path,
    batch_size: int = 8,
    sequential: bool = False,
    splits: dict[str, list[int]] = SPLITS_OF,
) -> Stream:
    return live_stream(
        pair, IDS, splits, batch_size=batch_size, sequential=sequential, spill_folder=spill / "spill"
    )


def accumulated(
    pair: ModelPair,
    spill: Path,
    options: CalibrationOptions = DEFAULTS,
    **settings: object,
) -> PairMoments:
    """All source layers and heads, and one native layer."""
    layout = layout_of(pair, 1)
    return accumulate_moments(stream_of(pair, spill, **settings), layout, full_tables(layout), options)


def own_kind(moments: PairMoments, kind: str, split: str) -> Moments:
    """Source features of one kind against its targets."""
    source = moments.layout.kind_features(kind)
    source = source[source < Layout(moments.source_shape, moments.target_shape).n_features]
    return moments.cut(split, source, moments.layout.targets(kind))


def assert_same_moments(got: PairMoments, expected: PairMoments) -> None:
    """Equal to float64 rounding: the order in which batches are added may differ."""
    assert got.layout == expected.layout
    for mine, theirs in zip(got.tables, expected.tables, strict=True):
        for split in SPLITS:
            assert_same(mine.splits[split], theirs.splits[split], rtol=1e-11)


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
    options = CalibrationOptions(native_head=native_head, token_stride=stride, rope=rope)
    moments = accumulated(pair, tmp_path, options, batch_size=2)
    for split, indices in SPLITS_OF.items():
        x_rows = own_rows(models["source"], IDS[indices], rope, columns)
        y_rows = own_rows(models["target"], IDS[indices], rope, columns)
        for kind in KINDS:
            table = own_kind(moments, kind, split)
            assert table.n_rows == len(indices) * len(columns)
            expected = from_rows(x_rows[kind], y_rows[kind])
            for name in FIELDS:
                # float32 models in batches of another size: their caches agree to some 1e-6
                wanted = expected[name].astype(float)
                np.testing.assert_allclose(getattr(table, name).numpy(), wanted, rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("rope", ["strip", "coupled"])
def test_native_features_are_the_targets_own_first_layers(models, pair, tmp_path, rope) -> None:
    moments = accumulated(pair, tmp_path, CalibrationOptions(rope=rope), batch_size=2)
    native = moments.layout.features([Block("native", "key", 0)])
    rows = own_rows(models["target"], IDS[SPLITS_OF["fit"]], rope, list(range(1, 9)))["key"]
    table = moments.cut("fit", native, moments.layout.targets("key"))
    expected = from_rows(rows, rows)
    for name in FIELDS:
        np.testing.assert_allclose(getattr(table, name), expected[name].astype(float), rtol=1e-4, atol=2e-4)
    # the target has one layer, so its features are its targets
    torch.testing.assert_close(table.s_xx, table.s_xy, rtol=1e-12, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("rope", ["strip", "coupled"])
def test_one_model_at_a_time_gives_the_moments_of_both_at_once(specs, tmp_path, rope) -> None:
    options = CalibrationOptions(rope=rope)
    live = accumulated(ModelPair(*specs), tmp_path, options, batch_size=2)
    assert not (tmp_path / "spill").exists()
    watched = WatchedPair(*specs)
    sequential = accumulated(watched, tmp_path, options, batch_size=2, sequential=True)
    assert_same_moments(sequential, live)
    assert watched.order == ["source", "target"]
    assert not (tmp_path / "spill").exists()


@pytest.mark.slow
def test_a_target_already_in_memory_makes_room_for_the_source(specs, tmp_path) -> None:
    watched = WatchedPair(*specs)
    assert watched.target is not None
    accumulated(watched, tmp_path, sequential=True)
    assert watched.order == ["target", "source", "target"]


def test_the_batch_size_does_not_matter(pair, tmp_path) -> None:
    one, three, whole = (accumulated(pair, tmp_path, batch_size=size) for size in (1, 3, 100))
    for other in (one, three):
        for mine, theirs in zip(other.tables, whole.tables, strict=True):
            for split in SPLITS:
                found, expected = mine.splits[split], theirs.splits[split]
                assert found.n_rows == expected.n_rows
                for name in FIELDS:
                    # float32 matrix products round otherwise in batches of another size
                    torch.testing.assert_close(
                        getattr(found, name), getattr(expected, name), rtol=1e-4, atol=2e-4
                    )


def test_shards_of_the_sequences_add_up_to_the_whole(pair, tmp_path) -> None:
    whole = accumulated(pair, tmp_path, batch_size=1)
    parts = [
        accumulated(pair, tmp_path, batch_size=1, splits=splits)
        for splits in ({"fit": [1], "held_out": [2]}, {"fit": [0, 3], "held_out": [4]})
    ]
    assert_same_moments(parts[0].merge(parts[1]), whole)


def test_batches_are_read_in_order_and_each_in_its_own_split(pair, tmp_path) -> None:
    splits = {"fit": [0], "held_out": [1, 2, 3, 4]}
    moments = accumulated(pair, tmp_path, splits=splits)
    assert {split: moments.n_rows(split) for split in SPLITS} == {"fit": 8, "held_out": 32}
    for sequential in (False, True):
        stream = stream_of(pair, tmp_path, 2, sequential, {"fit": [3, 0, 1], "held_out": [4, 2]})
        read = [(batch.split, batch.sequences, batch.source.batch_size) for batch in stream]
        assert read == [("fit", (3, 0), 2), ("fit", (1,), 1), ("held_out", (4, 2), 2)]


def test_float32_products_are_within_float32_rounding(pair, tmp_path) -> None:
    single = accumulated(pair, tmp_path, CalibrationOptions(product_dtype="float32"))
    exact = accumulated(pair, tmp_path)
    assert single.product_dtype == torch.float32
    for kind in KINDS:
        # products of centred float32 numbers: 2⁻²⁴ relative
        assert_same(own_kind(single, kind, "fit"), own_kind(exact, kind, "fit"), rtol=1e-6)


def test_weights_are_asked_for_batch_by_batch_with_the_rows_that_count(pair, tmp_path) -> None:
    layout = layout_of(pair)
    recipe = Recipe(layout.source_shape, layout.target_shape, "full_head", both(((0,),)))
    heads = layout.target_shape[0][0]
    asked = []

    def weigh(batch: CapturedBatch, rows: Tensor) -> dict[tuple[str, int], Tensor]:
        asked.append((batch.split, batch.sequences))
        assert rows.sum(-1).tolist() == [4] * len(batch.sequences)
        # a weight of 2 for the first sequence of all, of 0 for the second, whatever the batches are
        weight = torch.tensor([{0: 2.0, 1: 0.0}.get(number, 1.0) for number in batch.sequences])
        return {(kind, 0): weight[:, None, None].expand(-1, heads, rows.shape[1]) for kind in KINDS}

    options = CalibrationOptions(token_stride=2)
    tables = selected_tables(recipe, weighted=True)
    found = accumulate_moments(stream_of(pair, tmp_path, 2), layout, tables, options, weigh)
    assert asked == [("fit", (3, 0)), ("fit", (1,)), ("held_out", (4, 2))]
    # integer weights are repeated rows, sequence by sequence
    repeated = stream_of(pair, tmp_path, 1, splits={"fit": [3, 0, 0], "held_out": [4, 2]})
    plain = accumulate_moments(repeated, layout, selected_tables(recipe), options)
    for kind, split in ((kind, split) for kind in KINDS for split in SPLITS):
        columns, targets = recipe.columns(kind, 0)[0], layout.targets(kind, 0, 1)
        mine, theirs = (moments.cut(split, columns, targets) for moments in (found, plain))
        assert mine.n_rows == 8
        assert mine.weight == theirs.weight == (12 if split == "fit" else 8)
        for name in FIELDS:
            # float32 models in batches of another size
            torch.testing.assert_close(getattr(mine, name), getattr(theirs, name), rtol=1e-4, atol=2e-4)


def failing_model(monkeypatch: pytest.MonkeyPatch, n_layers: int, n_reads: int) -> None:
    """Reading fails in the model that has so many layers, after some batches."""
    done = []

    def read(loaded: LoadedModel, *args: object, **kwargs: object) -> object:
        if loaded.geometry.n_layers == n_layers:
            if len(done) == n_reads:
                raise RuntimeError("out of memory")
            done.append(1)
        return prefill(loaded, *args, **kwargs)

    monkeypatch.setattr(reading, "prefill", read)


@pytest.mark.parametrize(("n_layers", "waiting"), [(2, 2), (1, 5 + 2)], ids=["source", "target"])
def test_what_was_spilled_serves_the_next_stream_after_a_model_failed(
    pair, tmp_path, monkeypatch, n_layers, waiting
) -> None:
    failing_model(monkeypatch, n_layers, 2)
    with pytest.raises(RuntimeError, match="out of memory"):
        accumulated(pair, tmp_path, sequential=True, batch_size=1)
    files = {path: path.stat().st_mtime_ns for path in (tmp_path / "spill").iterdir()}
    assert len(files) == waiting
    read: list[int] = []

    def counted(loaded: LoadedModel, ids: Tensor) -> object:
        read.append(loaded.geometry.n_layers)
        return prefill(loaded, ids)

    monkeypatch.setattr(reading, "prefill", counted)
    found = accumulated(pair, tmp_path, sequential=True, batch_size=1)
    assert len(read) == 2 * 5 - waiting
    assert not (tmp_path / "spill").exists()
    assert_same_moments(found, accumulated(pair, tmp_path, batch_size=1))


def test_spilled_caches_that_cannot_be_added_are_refused(pair, tmp_path, monkeypatch) -> None:
    def overflown(loaded: LoadedModel, ids: Tensor) -> object:
        kv = prefill(loaded, ids)
        kv.values[0][0, 0, -1, 0] = float("inf")
        return kv

    monkeypatch.setattr(reading, "prefill", overflown)
    with pytest.raises(MomentsError, match="NaN or infinite"):
        accumulated(pair, tmp_path, sequential=True)


def test_a_sequential_stream_needs_a_folder(pair) -> None:
    with pytest.raises(KvmapError, match="spill_folder"):
        next(live_stream(pair, IDS, SPLITS_OF, batch_size=2, sequential=True))


@pytest.fixture
def unloadable(specs, monkeypatch) -> ModelPair:
    """A pair whose weights must not be read."""
    refused = ModelPair(*specs)
    monkeypatch.setattr(refused, "_load", lambda side: pytest.fail(f"the {side} was loaded"))
    return refused


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("sequential", [False, True])
def test_an_empty_split_is_refused_by_name_before_weights_load(
    unloadable, tmp_path: Path, split, sequential
) -> None:
    with pytest.raises(KvmapError, match=rf"the {split} split holds no sequence.*calibration\.n_sequences"):
        accumulated(unloadable, tmp_path, splits={**SPLITS_OF, split: []}, sequential=sequential)


def test_moments_over_the_budget_are_refused_before_weights_load(unloadable, tmp_path: Path) -> None:
    options = CalibrationOptions(budget_bytes=1000)
    with pytest.raises(MemoryBudgetExceeded, match="1,000 are allowed"):
        accumulated(unloadable, tmp_path, options)
