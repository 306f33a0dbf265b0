"""A hand-off through `map_cache`: the same on every path, written in place, within bounded memory."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from kvmap.fit.features import KINDS, Recipe, geometry_shape
from kvmap.fit.linear import LinearWeights
from kvmap.kernels.map_cache import Columns as Written
from kvmap.kernels.map_cache import Inputs, Side, why_not_triton
from kvmap.kernels.settings import KernelSettings, use
from kvmap.mappers import LinearMapper, Mapper
from kvmap.models.cache import InvalidCache, KVCache
from kvmap.models.capture import forward, prefill
from kvmap.transfer import HandOff, TransferError, mapping, transfer
from kvmap.transfer.columns import split_columns, unfilled_cache
from kvmap.transfer.context import read_context
from tests.tiny_random_models import left_padding, random_ids
from tests.transfer.fitted_maps import FORMS, fitted_mapper, source_model, target_model
from tests.transfer.noisy_map import NoisyMap

IDS, MASK = random_ids(3, 20, seed=3), left_padding(3, 20)


def layer_by_layer(mapper: Mapper) -> Mapper:
    """The same mapper, applied by its own `map_layer` and `kvmap.models.rope`."""

    class Apart(type(mapper)):  # type: ignore[misc]
        def map_layer(self, *features: Any) -> Any:
            return super().map_layer(*features)

    return Apart.from_state(mapper.settings(), mapper.tensors())


def assert_alike(got: HandOff, expected: HandOff, **near: float) -> None:
    assert (got.n_mapped, got.n_clamped) == (expected.n_mapped, expected.n_clamped)
    for mine, theirs in zip(
        (*got.kv.keys, *got.kv.values), (*expected.kv.keys, *expected.kv.values), strict=True
    ):
        # the last column is the target's own, made from all others
        torch.testing.assert_close(mine[:, :, :-1], theirs[:, :, :-1], **near)
    torch.testing.assert_close(got.logits, expected.logits, rtol=0, atol=20 * near["atol"])


@pytest.mark.parametrize("rope", ["strip", "coupled", "no_rerotate"])
@pytest.mark.parametrize("form", FORMS)
def test_every_path_hands_over_what_the_mapper_maps(form: str, rope: str) -> None:
    mapper, target = fitted_mapper(form, rope), target_model()
    own = layer_by_layer(mapper)
    assert mapper.cache_map() is not None
    assert own.cache_map() is None
    source = prefill(source_model(), IDS, MASK)
    expected = transfer(source, own, target, IDS, MASK, native_head=2, rope=rope)
    # products of float8 weights are rounded to bfloat16, but by the reference
    near = {"rtol": 2e-2, "atol": 4e-2} if form.startswith("float8") else {"rtol": 2e-5, "atol": 2e-5}
    for path, chunk_tokens in (("reference", 1), ("batched", 2048), ("batched", 7)):
        with use(KernelSettings(map_cache=path, chunk_tokens=chunk_tokens)):
            got = transfer(source, mapper, target, IDS, MASK, native_head=2, rope=rope)
        assert_alike(got, expected, **near)


@pytest.mark.interpreter
@pytest.mark.parametrize("form", FORMS)
def test_the_triton_path_hands_over_what_the_mapper_maps(form: str) -> None:
    mapper, target = fitted_mapper(form), target_model()
    source = prefill(source_model(), IDS, MASK)
    reason = triton_reason(mapper, source)
    if reason is not None:
        pytest.skip(reason)
    with use(KernelSettings(map_cache="reference")):
        expected = transfer(source, mapper, target, IDS, MASK, native_head=2)
    with use(KernelSettings(map_cache="triton")):
        got = transfer(source, mapper, target, IDS, MASK, native_head=2)
    # the interpreter does not round what float8 weights are multiplied by to bfloat16
    near = {"rtol": 2e-2, "atol": 4e-2} if form.startswith("float8") else {"rtol": 2e-5, "atol": 2e-5}
    assert_alike(got, expected, **near)


def triton_reason(mapper: Mapper, source: KVCache) -> str | None:
    """Why the Triton path cannot serve here; None where it can."""
    target = target_model()
    columns = split_columns(read_context(target, IDS, MASK, 1), torch.full((3,), 2))
    kv = unfilled_cache(target, columns, target.rotations(20))
    part = source.slice_tokens(columns.start, columns.context.n_columns)
    inputs = Inputs(Side(part.keys, part.values, part.rotations), part.positions)
    cache_map = mapper.cache_map()
    assert cache_map is not None
    output = Written(dict(enumerate(kv.keys)), dict(enumerate(kv.values)), kv.rotations)
    return why_not_triton(cache_map, inputs, output)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_models_and_mappers_in_half_precision_lose_what_their_dtype_loses(dtype: torch.dtype) -> None:
    mapper, target = fitted_mapper("full-head").to(dtype=dtype), target_model("qwen3", dtype)
    source = prefill(source_model(), IDS).to(dtype=dtype)
    for path in ("reference", "batched"):
        with use(KernelSettings(map_cache=path)):
            got = transfer(source, mapper, target, IDS)
        expected = transfer(source, layer_by_layer(mapper), target, IDS)
        assert got.kv.keys[0].dtype == dtype
        assert_alike(got, expected, rtol=3e-2, atol=3e-2)


def test_the_cache_is_in_the_order_of_tokens_and_holds_nothing_at_pads() -> None:
    columns = split_columns(read_context(target_model(), IDS, MASK, 1), torch.tensor([1, 1, 1]))
    kv = unfilled_cache(target_model(), columns, target_model().rotations(20))
    assert all(part.transpose(1, 2).is_contiguous() for part in (*kv.keys, *kv.values))
    source = prefill(source_model(), IDS, MASK)
    handoff = transfer(source, fitted_mapper("full-head"), target_model(), IDS, MASK)
    pads = ~MASK[:, :19].bool()
    assert all(not part[:, :, :19].transpose(1, 2)[pads].any() for part in handoff.kv.keys)


def test_a_source_read_at_other_positions_is_stripped_by_its_own() -> None:
    """The end of a longer context: the same content keys at other positions than these ids have."""
    source = prefill(source_model(), IDS)
    shifted = replace(source.strip(), positions=source.positions + 5)
    assert source.rotations is not None
    shifted = shifted.rotate(source.rotations)
    mapper, target = fitted_mapper("full-head"), target_model()
    assert_alike(
        transfer(shifted, mapper, target, IDS), transfer(source, mapper, target, IDS), rtol=1e-4, atol=1e-4
    )


def test_a_cache_of_two_frequencies_is_refused() -> None:
    kv = replace(prefill(source_model(), IDS), mixed=True)
    with pytest.raises(InvalidCache, match="cannot be stripped"):
        transfer(kv, fitted_mapper("full-head"), target_model(), IDS)


@pytest.mark.parametrize("path", ["reference", "batched"])
@pytest.mark.parametrize("kind", ["keys", "values"])
def test_what_is_not_finite_is_named_by_layer_and_kind(kind: str, path: str) -> None:
    linear = fitted_mapper("full-head")
    tensors = {name: tensor.clone() for name, tensor in linear.tensors().items()}
    tensors[f"{kind[:-1]}.1.bias"][0, 0] = float("nan")
    broken = LinearMapper.from_state(linear.settings(), tensors)
    source = prefill(source_model(), IDS)
    # 18 columns of 3 rows; a key's channel turns into the one it is paired with
    count = 108 if kind == "keys" else 54
    message = f"{count} mapped {kind} of target layer 1 are NaN or infinite"
    with use(KernelSettings(map_cache=path)), pytest.raises(TransferError, match=message):
        transfer(source, broken, target_model(), IDS)


def test_a_mapper_without_tables_says_once_that_it_is_mapped_layer_by_layer(
    caplog: pytest.LogCaptureFixture,
) -> None:
    target = target_model("qwen3")
    noisy = NoisyMap(target)
    noisy.source_shape = geometry_shape(source_model().geometry)
    noisy.weights = {
        name: torch.zeros(noisy.source_shape[0][0] * noisy.source_shape[0][1], weight.shape[1])
        for name, weight in noisy.weights.items()
    }
    mapping._log_layer_by_layer.cache_clear()
    source = prefill(source_model(), IDS)
    with caplog.at_level(logging.INFO, logger="kvmap.transfer.mapping"):
        for _ in range(2):
            transfer(source, noisy, target, IDS)
    assert caplog.messages == [
        "NoisyMap is no table of weights: mapped layer by layer in PyTorch, without a kernel"
    ]


def test_what_is_given_stays_as_it_was() -> None:
    source = prefill(source_model(), IDS, MASK)
    before = [part.clone() for part in (*source.keys, *source.values)]
    mapper = fitted_mapper("head-local, native layers")
    weights = {name: tensor.clone() for name, tensor in mapper.tensors().items()}
    transfer(source, mapper, target_model(), IDS, MASK)
    assert all(torch.equal(a, b) for a, b in zip(before, (*source.keys, *source.values), strict=True))
    assert all(torch.equal(tensor, mapper.tensors()[name]) for name, tensor in weights.items())


def peak_bytes(run: Callable[[], object]) -> int:
    """The most that was allocated at a time beyond what there was before, by the allocator's own account."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        kept = run()
    del kept
    held = peak = 0
    events = (e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]")
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def test_mapping_holds_its_output_and_one_chunk() -> None:
    """A source of 8 layers, all of which are read; a chunk is an eighth of the context."""
    n_tokens, chunk, n_source, channels = 2048, 256, 8, 4 * 16
    generator = torch.Generator().manual_seed(0)
    shape = ((4, 16),) * n_source
    recipe = Recipe(shape, shape, "full_head", {kind: (tuple(range(n_source)),) * n_source for kind in KINDS})
    weight, bias = (
        {kind: tuple(torch.randn(*sizes, generator=generator).bfloat16() for _ in shape) for kind in KINDS}
        for sizes in ((4, n_source * channels, 16), (4, 16))
    )
    bias = {kind: tuple(part.float() for part in bias[kind]) for kind in KINDS}
    cache_map = LinearMapper(LinearWeights(recipe, weight, bias, ())).cache_map()
    assert cache_map is not None
    rotation = source_model().rotations(n_tokens)[0]
    assert rotation is not None
    rotations = [replace(rotation, inv_freq=torch.rand(8, generator=generator))] * n_source

    def layers() -> list[torch.Tensor]:
        return [torch.randn(1, 4, n_tokens, 16, generator=generator).bfloat16() for _ in shape]

    inputs = Inputs(Side(layers(), layers(), rotations), torch.arange(n_tokens).unsqueeze(0))
    # content of all layers and the features of one product in bfloat16; its output, and what its rotation
    # and its cast make of it, no more than six at a time in float32
    one_chunk = chunk * channels * (2 * n_source * 2 + 6 * 4)
    tables = 4 * chunk * 8 * 4

    def mapped() -> object:
        kv = [torch.empty(1, 4, n_tokens, 16, dtype=torch.bfloat16) for _ in range(2 * n_source)]
        output = Written(dict(enumerate(kv[:n_source])), dict(enumerate(kv[n_source:])), rotations)
        with use(KernelSettings(map_cache="batched", chunk_tokens=chunk)):
            from kvmap.kernels.map_cache import map_cache

            map_cache(cache_map, inputs, output)
        return kv

    output_bytes = 2 * n_source * n_tokens * channels * 2
    assert output_bytes < peak_bytes(mapped) < output_bytes + one_chunk + 2 * tables


def test_a_hand_off_holds_no_second_copy_of_the_cache() -> None:
    ids = random_ids(2, 400, seed=8)
    mapper, target = fitted_mapper("full-head"), target_model()
    source = prefill(source_model(), ids)

    def handed_over() -> HandOff:
        with use(KernelSettings(map_cache="batched", chunk_tokens=32)):
            return transfer(source, mapper, target, ids, native_head=0)

    handed_over()
    output = 2 * sum(heads * width for heads, width in mapper.target_shape) * 2 * 400 * 4
    assert output < peak_bytes(handed_over) < 1.4 * output


def test_a_cache_grown_after_a_hand_off_leaves_the_first_as_it_was() -> None:
    source = prefill(source_model(), IDS)
    handoff = transfer(source, fitted_mapper("full-head"), target_model(), IDS)
    before = [part.clone() for part in handoff.kv.keys]
    _, grown = forward(target_model(), IDS[:, :4], handoff.kv)
    forward(target_model(), IDS[:, 4:6], handoff.kv)
    assert all(torch.equal(a, b) for a, b in zip(before, handoff.kv.keys, strict=True))
    assert grown.n_tokens == 24


def test_new_tokens_are_written_into_room_behind_the_cache() -> None:
    whole = prefill(target_model(), IDS, MASK)
    room = replace(
        whole,
        keys=tuple(part.clone() for part in whole.keys),
        values=tuple(part.clone() for part in whole.values),
    )
    for part in (*room.keys, *room.values):
        part[:, :, 17:] = float("nan")
    held = room.slice_tokens(0, 17)
    logits, grown = forward(target_model(), IDS[:, 17:], held, MASK[:, 17:], room=room)
    expected, copied = forward(target_model(), IDS[:, 17:], whole.slice_tokens(0, 17), MASK[:, 17:])
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)
    for got, stored, wanted in zip(grown.keys, room.keys, copied.keys, strict=True):
        assert got.data_ptr() == stored.data_ptr()
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-5)
    assert held.n_tokens == 17
    assert held.keys[0].shape[2] == 17
