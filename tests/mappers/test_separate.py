"""Outlier tokens mapped apart: their own vectors for them, the inner mapper for all others, bit by bit."""

from __future__ import annotations

import gc
import threading
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kvmap.fit.calibrate import CalibrationOptions, accumulate_moments
from kvmap.fit.captures import CapturedBatch
from kvmap.fit.features import KINDS, CacheShape, Layout, Recipe, both
from kvmap.fit.linear import Penalty, fit_linear, r2_of
from kvmap.fit.outliers import OutlierError, OutlierRows, OutlierRule
from kvmap.fit.pair_moments import PairMoments, full_tables
from kvmap.mappers import (
    BiasOnlyMapper,
    IdentityMapper,
    LinearMapper,
    Mapper,
    MapperMismatch,
    load_mapper,
    save_mapper,
)
from kvmap.mappers.compressed import CompressedLinearMapper
from kvmap.mappers.mlp import MLPMapper, linear_networks
from kvmap.mappers.separate import SeparateMapper
from kvmap.models.cache import KVCache
from kvmap.models.capture import prefill
from kvmap.models.loaded import LoadedModel
from kvmap.transfer.handoff import transfer
from tests.fit.caches import kind_layers, linear_image, random_cache, stripped
from tests.tiny_random_models import FAMILIES, random_ids

SOURCE: CacheShape = ((2, 8), (2, 8), (1, 12))
TARGET: CacheShape = ((2, 4), (3, 4))
TOKENS = 40
SINKS = [(row, token) for row in range(4) for token in (3 + row, 17, 30 - row)]
OWN = {"key": 50.0, "value": -3.0}


def flags() -> Tensor:
    found = torch.zeros(4, TOKENS, dtype=torch.bool)
    for row, token in SINKS:
        found[row, token] = True
    return found


def caches() -> tuple[KVCache, KVCache]:
    """A source with drained values and far keys at the sinks; a target that is one vector a head there."""
    generator = torch.Generator().manual_seed(0)
    source = random_cache(SOURCE, 4, TOKENS, generator).to(dtype=torch.float32)
    target = linear_image(source.to(dtype=torch.float64), TARGET, 3).to(dtype=torch.float32)
    at = flags()[:, None, :, None]
    keys = [torch.where(at, torch.tensor(20.0), k) for k in source.keys]
    values = [torch.where(at, 0.01 * v, v) for v in source.values]
    made = {
        kind: tuple(torch.where(at, own_vector(kind, layer)[:, None], y) for layer, y in enumerate(layers))
        for kind, layers in (("key", target.keys), ("value", target.values))
    }
    return stripped(keys, values), replace(target, keys=made["key"], values=made["value"])


def own_vector(kind: str, layer: int) -> Tensor:
    """What the target holds at every sink, (H_t, d_t): sums of a few of them are exact."""
    heads, width = TARGET[layer]
    return OWN[kind] + torch.arange(heads * width, dtype=torch.float32).view(heads, width)


def calibrated(native_layers: int = 0, policy: str = "separate") -> tuple[PairMoments, OutlierRows]:
    source, target = caches()
    layout = Layout(SOURCE, TARGET, native_layers)
    rows = OutlierRows(OutlierRule.fit([source]), policy, layout)

    def stream():
        for number in range(4):
            kv = source.select_rows([number]), target.select_rows([number])
            yield CapturedBatch("held_out" if number == 2 else "fit", (number,), *kv)

    return accumulate_moments(stream(), layout, full_tables(layout), CalibrationOptions(), None, rows), rows


def linear(moments: PairMoments, native_layers: int = 0, dtype: torch.dtype = torch.float32) -> LinearMapper:
    selection = both(tuple(() if i < native_layers else (0, 2) for i in range(len(TARGET))))
    recipe = Recipe(SOURCE, TARGET, "full_head", selection, native_layers=native_layers)
    return LinearMapper(fit_linear(moments, recipe, Penalty(0.01), dtype=dtype))


def inner_mapper(kind: str, moments: PairMoments) -> Mapper:
    own = linear(moments)
    made = {
        "linear": lambda: own,
        "bfloat16": lambda: linear(moments, dtype=torch.bfloat16),
        "fp8": lambda: CompressedLinearMapper.from_linear(own, "fp8"),
        "bias_only": lambda: BiasOnlyMapper.from_moments(moments),
        "mlp": lambda: MLPMapper("full", {"mlp": linear_networks(own.linear_weights())}),
    }
    return made[kind]()


INNER = ["linear", "bfloat16", "fp8", "bias_only", "mlp"]


def separate(kind: str = "linear") -> SeparateMapper:
    moments, rows = calibrated()
    return SeparateMapper.from_rows(inner_mapper(kind, moments), rows)


@pytest.mark.parametrize("kind", INNER)
def test_outliers_get_their_means_and_other_tokens_what_they_would_have(kind: str) -> None:
    source, _ = caches()
    mapper = separate(kind)
    mapped, inner = mapper.map(source), mapper.inner.map(source)
    assert torch.equal(mapper.rule.flag(source), flags())
    for name in KINDS:
        for layer in range(len(TARGET)):
            got, other = kind_layers(mapped, name)[layer], kind_layers(inner, name)[layer]
            assert got.dtype == other.dtype
            rows, own = got.transpose(1, 2), own_vector(name, layer)
            assert torch.equal(rows[flags()], own.expand(len(SINKS), -1, -1).to(got.dtype))
            assert torch.equal(rows[~flags()], other.transpose(1, 2)[~flags()])
            assert not torch.equal(rows[flags()], other.transpose(1, 2)[flags()])


def test_the_held_out_sinks_took_no_part_in_the_means() -> None:
    moments, rows = calibrated()
    assert [row["n_flagged"] for row in rows.counts()] == [9, 3]
    assert moments.n_rows("fit") == 3 * (TOKENS - 1) - 9
    for layer in range(len(TARGET)):
        assert torch.equal(rows.means()["key"][layer].float(), own_vector("key", layer))
    assert all(float(table.nan_to_num().abs().max()) < 1e-12 for table in rows.relative_error("fit").values())


@pytest.mark.parametrize("kind", INNER)
def test_it_comes_back_exactly_from_disk(kind: str, tmp_path: Path) -> None:
    source, _ = caches()
    mapper = separate(kind)
    save_mapper(mapper, tmp_path, {"note": "sinks apart"})
    back, manifest = load_mapper(tmp_path)
    assert isinstance(back, SeparateMapper)
    assert type(back.inner) is type(mapper.inner)
    assert back.settings() == mapper.settings() == manifest["settings"]
    assert back.rule.same_as(mapper.rule)
    for name, tensor in mapper.tensors().items():
        assert back.tensors()[name].dtype == tensor.dtype
        assert torch.equal(back.tensors()[name], tensor)
    for one, other in zip(back.map(source).keys, mapper.map(source).keys, strict=True):
        assert torch.equal(one, other)


def test_narrower_weights_leave_the_rule_and_the_vectors_as_they_are() -> None:
    mapper = separate()
    narrow = mapper.to(dtype=torch.bfloat16)
    assert narrow.rule.same_as(mapper.rule)
    dtypes = {name: tensor.dtype for name, tensor in narrow.tensors().items()}
    assert dtypes["inner.key.0.weight"] == torch.bfloat16
    assert dtypes["inner.key.0.bias"] == dtypes["outlier.key.0.bias"] == torch.float32
    fp8 = separate("fp8").to(dtype=torch.bfloat16)
    assert fp8.tensors()["inner.key.0.weight"].dtype == torch.float8_e4m3fn


def test_sizes_are_the_inner_mappers_and_what_comes_with_it() -> None:
    mapper = separate()
    assert mapper.n_weights == mapper.inner.n_weights > 0
    extra = sum(
        t.numel() * t.element_size() for n, t in mapper.tensors().items() if not n.startswith("inner.")
    )
    assert mapper.nbytes == mapper.inner.nbytes + extra
    # three numbers a source channel, four a layer, one a target channel; float32
    channels, targets = 16 + 16 + 12, 2 * (8 + 12)
    assert extra == 4 * (3 * channels + 4 * 3 + targets)


def test_r2_from_moments_is_over_the_tokens_that_are_not_flagged() -> None:
    source, target = caches()
    moments, rows = calibrated()
    mapper = SeparateMapper.from_rows(linear(moments), rows)
    mapped = mapper.map(source)
    for split, sequences in (("fit", [0, 1, 3]), ("held_out", [2])):
        counted = ~flags()[sequences]
        counted[:, 0] = False
        found = r2_of(mapper, moments, split)
        for kind in KINDS:
            for layer, (heads, _) in enumerate(TARGET):
                got, true = (
                    kind_layers(kv, kind)[layer][sequences].transpose(1, 2)[counted].double()
                    for kv in (mapped, target)
                )
                r2 = 1 - ((got - true) ** 2).sum((0, 2)) / ((true - true.mean(0)) ** 2).sum((0, 2))
                # the map itself runs in float32
                torch.testing.assert_close(found[kind][layer, :heads], r2, rtol=1e-5, atol=0)


def test_a_map_that_is_not_linear_does_not_pretend_to_be() -> None:
    assert hasattr(separate("linear"), "linear_weights")
    assert not hasattr(separate("mlp"), "linear_weights")


@pytest.mark.parametrize("native_layers", [1, 2])
def test_native_layers_pass_through(native_layers: int, tmp_path: Path) -> None:
    source, target = caches()
    moments, rows = calibrated(native_layers)
    inner = linear(moments, native_layers)
    mapper = SeparateMapper.from_rows(inner, rows)
    assert mapper.native_layers == native_layers
    save_mapper(mapper, tmp_path, {})
    back = load_mapper(tmp_path)[0]
    assert not any(name.startswith("outlier.key.0") for name in mapper.tensors())
    native = replace(target, keys=target.keys[:native_layers], values=target.values[:native_layers])
    mapped, again, plain = (m.map(source, native) for m in (mapper, back, inner))
    for layer in range(len(TARGET)):
        assert torch.equal(mapped.keys[layer], again.keys[layer])
        if layer < native_layers:
            assert torch.equal(mapped.keys[layer], target.keys[layer])
        else:
            rows_of = mapped.values[layer].transpose(1, 2)
            assert torch.equal(rows_of[flags()], own_vector("value", layer).expand(len(SINKS), -1, -1))
            assert torch.equal(rows_of[~flags()], plain.values[layer].transpose(1, 2)[~flags()])


@pytest.fixture
def calls(monkeypatch) -> list[int]:
    """How many columns each flagging read."""
    made: list[int] = []
    flag = OutlierRule.flag_columns

    def counted(self, keys, values):
        made.append(keys[0].shape[2])
        return flag(self, keys, values)

    monkeypatch.setattr(OutlierRule, "flag_columns", counted)
    return made


def test_a_map_flags_its_columns_once(calls: list[int]) -> None:
    source, _ = caches()
    mapper = separate()
    calls.clear()
    mapper.map(source)
    mapper.map(source)
    assert calls == [TOKENS]
    mapper.map(source.slice_tokens(0, 9))
    assert calls == [TOKENS, 9]


def test_other_columns_and_changed_ones_are_flagged_anew() -> None:
    source, _ = caches()
    mapper = separate()
    before = mapper.map(source)
    moved = source.slice_tokens(1, None)
    assert torch.equal(mapper.map(moved).keys[1], before.keys[1][:, :, 1:])
    mapper.map(source)
    for keys in source.keys:
        keys[:, :, [5, 17]] = keys[:, :, [17, 5]]
    for values in source.values:
        values[:, :, [5, 17]] = values[:, :, [17, 5]]
    swapped = mapper.map(source).keys[0].transpose(1, 2)
    assert torch.equal(swapped[0, 5], own_vector("key", 0))
    assert not torch.equal(swapped[0, 17], own_vector("key", 0))


def test_inference_mode_maps_alike_even_where_columns_change() -> None:
    source, _ = caches()
    mapper = separate()
    wanted = mapper.map(source)
    with torch.inference_mode():
        fresh = replace(
            source, keys=tuple(k.clone() for k in source.keys), values=tuple(v.clone() for v in source.values)
        )
        assert torch.equal(mapper.map(fresh).keys[0], wanted.keys[0])
        for layers in (fresh.keys, fresh.values):
            for layer in layers:
                layer.copy_(layer.flip(2))
        got = mapper.map(fresh).keys[0].flip(2)
    rows = got.transpose(1, 2)
    assert torch.equal(rows[flags()], own_vector("key", 0).expand(len(SINKS), -1, -1))


def test_a_mapper_keeps_no_cache_alive() -> None:
    source, _ = caches()
    mapper = separate()
    mapper.map(source)
    held = weakref.ref(source.keys[0])
    del source
    gc.collect()
    assert held() is None


def test_threads_do_not_mix_their_columns() -> None:
    source, _ = caches()
    mapper = separate()
    pieces = [source.slice_tokens(start, start + 20) for start in range(0, 20, 5)]
    wanted = [mapper.map(piece).keys[1] for piece in pieces]
    wrong: list[int] = []

    def work(number: int) -> None:
        for _ in range(40):
            if not torch.equal(mapper.map(pieces[number]).keys[1], wanted[number]):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(pieces))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_parts_that_do_not_belong_together_are_refused() -> None:
    moments, rows = calibrated()
    inner, means = linear(moments), rows.means()
    with pytest.raises(MapperMismatch, match="the outlier rule reads source layers"):
        SeparateMapper(IdentityMapper(TARGET), rows.rule, means)
    with pytest.raises(MapperMismatch, match="outlier keys of shapes"):
        SeparateMapper(inner, rows.rule, {kind: layers[:1] for kind, layers in means.items()})


@pytest.mark.parametrize("policy", ["keep", "drop"])
def test_only_a_calibration_that_separated_can_be_mapped_apart(policy: str) -> None:
    moments, rows = calibrated(policy=policy)
    with pytest.raises(OutlierError, match=f"outlier policy '{policy}'"):
        SeparateMapper.from_rows(linear(moments), rows)
    few = OutlierRows(rows.rule, "separate", rows.layout)
    with pytest.raises(OutlierError, match="0 flagged rows of 8 needed"):
        SeparateMapper.from_rows(linear(moments), few)
    few.settle(moments)
    with pytest.raises(OutlierError, match="applied as 'keep'"):
        SeparateMapper.from_rows(linear(moments), few)


def test_a_hand_off_flags_once_and_gives_flagged_columns_their_vectors(calls: list[int]) -> None:
    model = LoadedModel.from_model(FAMILIES["qwen3"](seed=2), name="tiny")
    ids = random_ids(2, 40)
    kv = prefill(model, ids)
    inner = IdentityMapper(tuple((k.shape[1], k.shape[3]) for k in kv.keys))
    content = kv.strip()
    rule = OutlierRule.fit([content])
    nothing = {kind: [layer.mean((0, 2)) for layer in kind_layers(content, kind)] for kind in KINDS}
    mapper = SeparateMapper(inner, rule, nothing)
    calls.clear()
    given, plain = transfer(kv, mapper, model, ids), transfer(kv, inner, model, ids)
    assert len(calls) == 1
    assert not rule.flag(content).any()
    assert torch.equal(given.logits, plain.logits)

    all_far = SeparateMapper(inner, replace(rule, threshold=1e-9, share=0.2), nothing)
    given = transfer(kv, all_far, model, ids)
    values = given.kv.values[0][:, :, 1:39]
    assert torch.equal(values, nothing["value"][0][None, :, None].expand_as(values))
    assert not torch.equal(given.logits, plain.logits)
