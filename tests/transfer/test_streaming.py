"""Mapping while the source reads: the same bits as reading first, in the order of what is there."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvmap.fit.features import geometry_shape
from kvmap.kernels.settings import KernelSettings, use
from kvmap.mappers import MapperMismatch
from kvmap.models.cache import InvalidCache, KVCache
from kvmap.models.capture import prefill
from kvmap.models.loaded import LoadedModel
from kvmap.transfer import HandOff, TransferError, prefill_and_transfer, transfer
from kvmap.transfer.mapping import Filling
from tests.tiny_random_models import ORIGINAL_MAX, build, left_padding, random_ids
from tests.transfer.fitted_maps import FORMS, fitted_mapper, source_model, target_model
from tests.transfer.noisy_map import NoisyMap
from tests.transfer.test_kernels import triton_reason

IDS, MASK = random_ids(3, 20, seed=3), left_padding(3, 20)


def assert_same_bits(got: tuple[HandOff, KVCache], expected: tuple[HandOff, KVCache]) -> None:
    for mine, theirs in zip(got, expected, strict=True):
        a, b = (part.kv if isinstance(part, HandOff) else part for part in (mine, theirs))
        for x, y in zip((*a.keys, *a.values), (*b.keys, *b.values), strict=True):
            assert torch.equal(x, y)
        assert torch.equal(a.mask, b.mask)
        assert (a.exact, a.mixed, a.owner) == (b.exact, b.mixed, b.owner)
    assert torch.equal(got[0].logits, expected[0].logits)
    counts = ("n_mapped", "n_native_head", "n_hold_back", "n_clamped", "n_native_layers", "n_recomputed")
    assert [getattr(got[0], name) for name in counts] == [getattr(expected[0], name) for name in counts]


@pytest.mark.parametrize("path", ["reference", "batched"])
@pytest.mark.parametrize("form", FORMS)
def test_it_gives_the_bits_of_reading_first(form: str, path: str) -> None:
    source, target = source_model(), target_model()
    for rope in ("strip", "coupled"):
        mapper = fitted_mapper(form, rope)
        with use(KernelSettings(map_cache=path, chunk_tokens=16)):
            got = prefill_and_transfer(source, mapper, target, IDS, MASK, rope=rope, native_head=2)
            read = prefill(source, IDS, MASK)
            expected = transfer(read, mapper, target, IDS, MASK, rope=rope, native_head=2), read
        assert_same_bits(got, expected)


@pytest.mark.interpreter
@pytest.mark.parametrize(
    "form", ["full-head", pytest.param("head-local, native layers", marks=pytest.mark.slow)]
)
def test_it_gives_the_bits_of_reading_first_on_the_triton_path(form: str) -> None:
    source, mapper, target = source_model(), fitted_mapper(form), target_model()
    read = prefill(source, IDS, MASK)
    reason = triton_reason(mapper, read)
    if reason is not None:
        pytest.skip(reason)
    with use(KernelSettings(map_cache="triton")):
        expected = transfer(read, mapper, target, IDS, MASK), read
        assert_same_bits(prefill_and_transfer(source, mapper, target, IDS, MASK), expected)


@pytest.mark.parametrize(
    "options",
    [
        {"native_head": 0, "hold_back": 3},
        {"rope": "no_rerotate"},
        {"recompute_share": 0.25, "recompute_rule": "map_error"},
        {"own_kind": "value"},
    ],
    ids=str,
)
def test_it_takes_what_a_transfer_takes(options: dict[str, Any]) -> None:
    source, mapper, target = source_model(), fitted_mapper("full-head, native layers"), target_model()
    read = prefill(source, IDS)
    expected = transfer(read, mapper, target, IDS, **options), read
    assert_same_bits(prefill_and_transfer(source, mapper, target, IDS, **options), expected)


@pytest.mark.parametrize("q", [5, 19])
def test_a_prefix_the_target_has_is_used(q: int) -> None:
    source, mapper, target = source_model(), fitted_mapper("full-head"), target_model()
    prefix, read = prefill(target, IDS[:, :q]), prefill(source, IDS)
    expected = transfer(read, mapper, target, IDS, native_prefix=prefix), read
    assert_same_bits(prefill_and_transfer(source, mapper, target, IDS, native_prefix=prefix), expected)


def test_a_context_with_nothing_to_map_is_read_by_both() -> None:
    source, mapper, target = source_model(), fitted_mapper("full-head"), target_model()
    ids = IDS[:, :2]
    read = prefill(source, ids)
    expected = transfer(read, mapper, target, ids), read
    assert_same_bits(prefill_and_transfer(source, mapper, target, ids), expected)


def test_keys_are_stripped_by_the_frequencies_of_this_very_prefill() -> None:
    """A dynamic model changes them with the length: those of the call before must not stick."""
    source = source_model("llama_dynamic")
    mapper, target = fitted_mapper("full-head", family="llama_dynamic"), target_model()
    ids = random_ids(2, ORIGINAL_MAX + 9, seed=4)
    read = prefill(source, ids)
    expected = transfer(read, mapper, target, ids), read
    prefill(source, ids[:, :5])
    assert_same_bits(prefill_and_transfer(source, mapper, target, ids), expected)


def test_a_target_layer_is_mapped_before_the_source_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    source, mapper, target = source_model(), fitted_mapper("head-local"), target_model()
    cache_map = mapper.cache_map()
    assert cache_map is not None
    finished: list[int] = []
    mapped: dict[int, int] = {}
    map_layers = Filling.map_layers

    def watched(self: Filling, cache_map: Any, side: Any, layers: Any) -> None:
        mapped.update(dict.fromkeys(layers, len(finished)))
        map_layers(self, cache_map, side, layers)

    monkeypatch.setattr(Filling, "map_layers", watched)
    hooks = [layer.register_forward_hook(lambda *_: finished.append(1)) for layer in source.body.layers]
    prefill_and_transfer(source, mapper, target, IDS)
    for hook in hooks:
        hook.remove()
    # a layer's keys are cached before its attention: layers before it alone have been run to their end
    assert mapped == {layer: cache_map.needs(layer) for layer in cache_map.layers}
    assert min(mapped.values()) < source.geometry.n_layers - 1


def test_a_mapper_without_tables_maps_when_all_is_read() -> None:
    target = target_model()
    noisy = NoisyMap(target)
    noisy.source_shape = geometry_shape(source_model().geometry)
    read = prefill(source_model(), IDS, MASK)
    expected = transfer(read, noisy, target, IDS, MASK), read
    assert_same_bits(prefill_and_transfer(source_model(), noisy, target, IDS, MASK), expected)


def test_what_does_not_fit_is_refused_before_anything_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvmap.transfer import streaming

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("nothing may be read")

    monkeypatch.setattr(streaming, "prefill", never)
    other = LoadedModel.from_model(build("llama", seed=1, n_layers=2), name="other")
    with pytest.raises(MapperMismatch, match="source cache has 2 layers"):
        prefill_and_transfer(other, fitted_mapper("full-head"), target_model(), IDS)
    with pytest.raises(TransferError, match="hold_back=0"):
        prefill_and_transfer(source_model(), fitted_mapper("full-head"), target_model(), IDS, hold_back=0)


class TestAnnouncing:
    def test_each_layer_is_told_of_in_order_with_what_is_cached(self) -> None:
        told: list[tuple[int, torch.Tensor, torch.Tensor]] = []
        kv = prefill(source_model(), IDS, MASK, on_layer=lambda *layer: told.append(layer))
        assert [layer for layer, _, _ in told] == [*range(4)]
        plain = prefill(source_model(), IDS, MASK)
        for layer, keys, values in told:
            assert keys.data_ptr() == kv.keys[layer].data_ptr()
            assert values.data_ptr() == kv.values[layer].data_ptr()
            assert torch.equal(keys, plain.keys[layer])

    @pytest.mark.parametrize("beside", [{"n_layers": 2}, {"length": 50}])
    def test_parts_of_contexts_are_refused(self, beside: dict[str, int]) -> None:
        with pytest.raises(InvalidCache, match="on_layer"):
            prefill(source_model(), IDS, on_layer=lambda *_: None, **beside)


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
def test_on_a_gpu_streams_change_no_bit(form: str) -> None:
    source = LoadedModel.from_model(
        build("llama_llama3", seed=1, n_layers=4).cuda().bfloat16(), name="source"
    )
    target = LoadedModel.from_model(
        build("qwen3", seed=2, n_layers=3, num_key_value_heads=4, head_dim=6).cuda().bfloat16(), name="target"
    )
    mapper = fitted_mapper(form).to(device="cuda", dtype=torch.bfloat16)
    ids = random_ids(2, 600, seed=9).cuda()
    read = prefill(source, ids)
    for path in ("batched", "auto"):
        with use(KernelSettings(map_cache=path, chunk_tokens=256)):
            expected = transfer(read, mapper, target, ids), read
            for _ in range(3):
                assert_same_bits(prefill_and_transfer(source, mapper, target, ids), expected)
