"""Captured caches are the live ones, bit for bit, and so are the moments and rows made of them."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
import torch

from kvmap.files import ArtifactMissing
from kvmap.fit import captures as captures_module
from kvmap.fit.calibrate import CalibrationOptions, accumulate_moments, live_stream
from kvmap.fit.captures import CapturedBatch, Captures, SensitivityOptions, capture
from kvmap.fit.features import KINDS, REGRESSORS, SUPPORTS, Layout, Recipe, geometry_shape
from kvmap.fit.pair_moments import SPLITS, PairMoments, calibration_rows, full_tables, selected_tables
from kvmap.fit.rows import layer_rows
from kvmap.fit.sensitivity import read_sensitivity
from kvmap.fit.view import calibration_view
from kvmap.models.cache import KVCache
from kvmap.models.capture import prefill
from kvmap.models.pair import LoadedModel, ModelPair, ModelSpec
from kvmap.models.rope import same_rotations
from tests.fit.caches import kind_layers
from tests.fit.oracles import FIELDS, assert_same
from tests.fit.watched_pair import WatchedPair
from tests.models.tiny_tokenizers import byte_level_tokenizer
from tests.tiny_random_models import build, random_ids

IDS = random_ids(7, 9)
WHOLE = {"fit": [0, 1, 2, 3], "held_out": [4, 5]}  # batches of two lie in one split
MIXED = {"fit": [5, 0, 3], "held_out": [1, 4]}  # no batch of two does; 2 and 6 are in neither


def models(dtype: torch.dtype) -> tuple[LoadedModel, LoadedModel]:
    source = build("llama_yarn", seed=1, n_layers=3, vocab_size=272).to(dtype)
    target = build("smollm3", seed=2, n_layers=3, vocab_size=272).to(dtype)
    return LoadedModel.from_model(source, name="source"), LoadedModel.from_model(target, name="target")


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def pair(request) -> ModelPair:
    """With a rotation that stretches keys, and layers that have none."""
    return ModelPair(*models(request.param))


@pytest.fixture(scope="module")
def captured(pair, tmp_path_factory) -> Captures:
    return capture(pair, IDS, tmp_path_factory.mktemp("captures"), batch_size=2)


@pytest.fixture(scope="module")
def layout(pair) -> Layout:
    shapes = (geometry_shape(geometry) for geometry in (pair.source_geometry, pair.target_geometry))
    return Layout(*shapes, 1)


def assert_same_caches(found: KVCache, expected: KVCache) -> None:
    for mine, theirs in zip((*found.keys, *found.values), (*expected.keys, *expected.values), strict=True):
        assert mine.dtype == theirs.dtype
        assert torch.equal(mine, theirs)
    assert torch.equal(found.positions, expected.positions)
    assert torch.equal(found.mask, expected.mask)
    assert same_rotations(found.rotations, expected.rotations)
    assert (found.exact, found.mixed) == (expected.exact, expected.mixed)


def assert_same_batches(found: list[CapturedBatch], expected: list[CapturedBatch]) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        assert (mine.split, mine.sequences) == (theirs.split, theirs.sequences)
        assert_same_caches(mine.source, theirs.source)
        assert_same_caches(mine.target, theirs.target)


def live(pair: ModelPair, folder: Path, splits: dict[str, list[int]], batch_size: int = 2):
    return live_stream(
        pair, IDS, splits, batch_size=batch_size, sequential=False, spill_folder=folder / "spill"
    )


def test_what_is_read_back_is_what_the_models_made(pair, captured, tmp_path) -> None:
    assert captured.batches == ((0, 2), (2, 4), (4, 6), (6, 7))
    assert_same_batches(list(captured.stream(WHOLE)), list(live(pair, tmp_path, WHOLE)))
    last = list(captured.stream({"fit": [6], "held_out": []}))
    assert [(batch.split, batch.sequences) for batch in last] == [("fit", (6,))]
    assert_same_caches(last[0].source, prefill(pair.source, IDS[6:]))


def test_the_sequences_of_a_batch_are_taken_apart_by_split(pair, captured) -> None:
    found = list(captured.stream(MIXED))
    assert [(batch.split, batch.sequences) for batch in found] == [
        ("fit", (0,)),
        ("held_out", (1,)),
        ("fit", (3,)),
        ("fit", (5,)),
        ("held_out", (4,)),
    ]
    for batch in found:
        (number,) = batch.sequences
        start = number // 2 * 2
        for model, kv in ((pair.source, batch.source), (pair.target, batch.target)):
            # as it was in its batch: the forward of another batch may round otherwise
            assert_same_caches(kv, prefill(model, IDS[start : start + 2]).select_rows([number - start]))
        assert batch.sensitivity is None


def test_every_sequence_of_a_split_comes_once(captured) -> None:
    for splits in (WHOLE, MIXED, {"fit": list(range(7)), "held_out": []}):
        seen: dict[str, list[int]] = {split: [] for split in splits}
        for batch in captured.stream(splits):
            seen[batch.split] += batch.sequences
            assert batch.source.batch_size == batch.target.batch_size == len(batch.sequences)
        assert {split: sorted(numbers) for split, numbers in splits.items()} == {
            split: sorted(numbers) for split, numbers in seen.items()
        }


@pytest.mark.parametrize("rope", ["strip", "coupled"])
def test_moments_of_captures_are_those_of_the_live_caches(pair, captured, layout, tmp_path, rope) -> None:
    options = CalibrationOptions(native_head=1, token_stride=2, rope=rope)
    tables = full_tables(layout, "both_kinds")
    found = accumulate_moments(captured.stream(WHOLE), layout, tables, options)
    expected = accumulate_moments(live(pair, tmp_path, WHOLE), layout, tables, options)
    for split in SPLITS:
        mine, theirs = found.tables[0].splits[split], expected.tables[0].splits[split]
        assert (mine.n_rows, mine.weight) == (theirs.n_rows, theirs.weight)
        assert all(torch.equal(getattr(mine, name), getattr(theirs, name)) for name in FIELDS)


def test_captures_serve_any_split_table_and_stride_afterwards(pair, captured, layout) -> None:
    for stride in (1, 3):
        options = CalibrationOptions(token_stride=stride)
        tables = full_tables(layout)
        found = accumulate_moments(captured.stream(MIXED), layout, tables, options)
        expected = PairMoments.zeros(layout, tables)
        for split, numbers in MIXED.items():
            for number in numbers:
                start = number // 2 * 2
                caches = [
                    prefill(model, IDS[start : start + 2]).select_rows([number - start])
                    for model in (pair.source, pair.target)
                ]
                views = calibration_view(*caches)
                expected.update(split, *views, calibration_rows(views[0].mask, 1, stride))
        for mine, theirs in zip(found.tables, expected.tables, strict=True):
            for split in SPLITS:
                assert_same(mine.splits[split], theirs.splits[split], rtol=1e-11)


def test_captures_are_opened_as_they_were_written(captured) -> None:
    assert Captures.open(captured.folder) == captured
    names = {file.name for file in captured.folder.iterdir()}
    starts = [start for start, _ in captured.batches]
    files = {f"{start}.{role}.safetensors" for start in starts for role in ("source", "target")}
    assert names == files | {"captures.json"}


@pytest.mark.parametrize("batch_size", [1, 3, 7, 100])
def test_any_batch_size_holds_every_sequence(pair, layout, tmp_path, batch_size) -> None:
    found = capture(pair, IDS, tmp_path, batch_size=batch_size)
    assert [number for start, stop in found.batches for number in range(start, stop)] == list(range(7))
    options = CalibrationOptions()
    moments = accumulate_moments(found.stream(MIXED), layout, full_tables(layout), options)
    assert {split: moments.n_rows(split) for split in SPLITS} == {"fit": 3 * 8, "held_out": 2 * 8}


@pytest.fixture(scope="module")
def specs(tmp_path_factory) -> list[ModelSpec]:
    folder = tmp_path_factory.mktemp("models")
    for side, loaded in zip(("source", "target"), models(torch.float32), strict=True):
        loaded.model.save_pretrained(folder / side)
        byte_level_tokenizer().save_pretrained(folder / side)
    return [ModelSpec(str(folder / side), device="cpu") for side in ("source", "target")]


@pytest.mark.slow
@pytest.mark.parametrize("sensitivity", [None, SensitivityOptions()])
def test_one_model_at_a_time_captures_what_both_at_once_do(specs, tmp_path, sensitivity) -> None:
    settings = {"batch_size": 2, "sensitivity": sensitivity}
    both_at_once = capture(ModelPair(*specs), IDS, tmp_path / "both", **settings)
    watched = WatchedPair(*specs)
    assert watched.target is not None  # as an earlier stage may leave it
    one = capture(watched, IDS, tmp_path / "one", sequential=True, **settings)
    assert watched.order == ["target", "source", "target"]
    assert watched._loaded == {}
    found, expected = list(one.stream(MIXED)), list(both_at_once.stream(MIXED))
    assert_same_batches(found, expected)
    for mine, theirs in zip(found, expected, strict=True):
        assert (mine.sensitivity is None) == (sensitivity is None)
        for key, weight in (theirs.sensitivity or {}).items():
            assert torch.equal(mine.sensitivity[key], weight)


def test_sensitivity_weights_are_kept_beside_the_caches(pair, tmp_path) -> None:
    options = SensitivityOptions(n_boundaries=3, native_head=2, token_stride=2)
    found = capture(pair, IDS, tmp_path, batch_size=2, sensitivity=options)
    assert Captures.open(tmp_path) == found
    for batch in found.stream(MIXED):
        (number,) = batch.sequences
        ids = IDS[number // 2 * 2 :][:2]
        rows = calibration_rows(torch.ones_like(ids), 2, 2)
        kv, expected = read_sensitivity(pair.target, ids, None, rows, boundaries=3)
        assert_same_caches(batch.target, kv.select_rows([number % 2]))
        assert batch.sensitivity.keys() == set(product(KINDS, range(3)))
        for key, weight in expected.items():
            assert torch.equal(batch.sensitivity[key], weight[[number % 2]])
            assert bool((batch.sensitivity[key][0][:, ~rows[0]] == 0).all())


def test_sensitivity_weights_weigh_the_rows_of_their_own_sequences(pair, layout, tmp_path) -> None:
    found = capture(pair, IDS, tmp_path, batch_size=2, sensitivity=SensitivityOptions())
    selection = dict.fromkeys(KINDS, ((), (0, 1), (2,)))
    recipe = Recipe(layout.source_shape, layout.target_shape, "head_local", selection, native_layers=1)
    tables = selected_tables(recipe, weighted=True)
    moments = accumulate_moments(
        found.stream(MIXED), layout, tables, CalibrationOptions(), lambda batch, rows: batch.sensitivity
    )
    for table in moments.tables:
        kind, layer, head = table.spec.head
        for split, numbers in MIXED.items():
            total = 0.0
            for batch in found.stream({split: numbers}):
                total += float(batch.sensitivity[kind, layer][:, head, 1:].double().sum())
            assert table.splits[split].weight == pytest.approx(total, rel=1e-12)


def test_a_capture_that_was_cut_short_is_not_taken_for_a_whole_one(pair, tmp_path, monkeypatch) -> None:
    def failing(loaded: LoadedModel, ids: torch.Tensor) -> KVCache:
        if torch.equal(ids, IDS[4:6]):
            raise RuntimeError("out of memory")
        return prefill(loaded, ids)

    monkeypatch.setattr(captures_module, "prefill", failing)
    with pytest.raises(RuntimeError, match="out of memory"):
        capture(pair, IDS, tmp_path, batch_size=2)
    with pytest.raises(ArtifactMissing, match=r"captures\.json"):
        Captures.open(tmp_path)


@pytest.mark.parametrize("role", ["source", "target"])
@pytest.mark.parametrize("kind", KINDS)
def test_some_layers_alone_are_those_of_the_whole_cache(pair, captured, role, kind) -> None:
    kv = prefill(getattr(pair, role), IDS[2:4])
    for layers in ([0], [2, 0], [0, 1, 2], []):
        content = captured.layers(role, kind, layers, 2)
        raw = captured.layers(role, kind, layers, 2, stripped=False)
        assert len(content) == len(raw) == len(layers)
        for layer, mine, stored in zip(layers, content, raw, strict=True):
            assert mine.dtype == stored.dtype == torch.float32
            assert torch.equal(mine, kind_layers(kv.strip(), kind)[layer])
            assert torch.equal(stored, kind_layers(kv, kind)[layer].float())


@pytest.mark.parametrize("support", SUPPORTS)
@pytest.mark.parametrize("regressors", REGRESSORS)
@pytest.mark.parametrize("rope", ["strip", "coupled"])
def test_rows_of_a_layer_are_those_that_the_moments_are_of(
    captured, layout, support, regressors, rope
) -> None:
    selection = {"key": ((), (2, 0), (1,)), "value": ((), (1,), (0, 1, 2))}
    shapes = layout.source_shape, layout.target_shape
    recipe = Recipe(*shapes, support, selection, regressors, 1)
    options = CalibrationOptions(native_head=2, token_stride=3, rope=rope)
    moments = accumulate_moments(captured.stream(MIXED), layout, selected_tables(recipe), options)
    for kind, layer in product(KINDS, recipe.mapped_layers):
        rows = layer_rows(captured, recipe, MIXED, kind, layer, options)
        for split in SPLITS:
            every = torch.arange(rows.n_rows(split))
            x, y = rows.features(split, every).double(), rows.targets(split, every).double()
            assert x.dtype == y.dtype == torch.float64
            for head in range(len(y)):
                group = 0 if recipe.shared else head
                found = moments.cut(
                    split, recipe.columns(kind, layer)[group], layout.targets(kind, layer, head)
                )
                assert found.n_rows == len(every) == 3 * len(MIXED[split])
                xc, yc = x[group] - x[group].mean(0), y[head] - y[head].mean(0)
                # the same float32 rows, summed in another order
                torch.testing.assert_close(found.mean_x, x[group].mean(0), rtol=0, atol=1e-11)
                torch.testing.assert_close(found.mean_y, y[head].mean(0), rtol=0, atol=1e-11)
                torch.testing.assert_close(found.s_xx, xc.T @ xc, rtol=1e-11, atol=1e-9)
                torch.testing.assert_close(found.s_xy, xc.T @ yc, rtol=1e-11, atol=1e-9)
