"""The reference, against complex numbers in float64 and against the mappers' own `map`."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvmap.fit.features import KINDS, Recipe
from kvmap.fit.linear import LinearWeights
from kvmap.kernels.map_cache import CacheMap, Columns, Inputs, KernelError, Product, Side, Slot
from kvmap.kernels.map_cache.reference import map_cache_reference, saturated
from kvmap.mappers import LinearMapper
from kvmap.mappers.compressed import CompressedLinearMapper
from kvmap.models.cache import KVCache
from kvmap.models.rope import Rotation
from tests.kernels.map_cases import CASES, Case, assert_computes_the_equation


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_it_computes_the_equation(case: Case) -> None:
    assert_computes_the_equation(case, map_cache_reference)


def test_pages_are_written_at_their_places_alone() -> None:
    case = CASES["plain"]
    cache_map, inputs = case.build()
    pages = case.pages(cache_map)
    map_cache_reference(cache_map, inputs, pages)
    for kind in KINDS:
        for layer in cache_map.layers:
            untouched = (pages.tensor(kind, layer) == 7.0).all(-1).all(-1)
            assert int((~untouched).sum()) == case.batch * case.tokens


def test_chosen_layers_are_written_in_the_order_asked_for() -> None:
    case = Case(native=1)
    cache_map, inputs = case.build()
    output = case.columns(cache_map)
    loud = replace(cache_map.products["value"][2], bias=cache_map.products["value"][2].bias + float("nan"))
    cache_map = CacheMap({**cache_map.products, "value": {**cache_map.products["value"], 2: loud}})
    counts = map_cache_reference(cache_map, inputs, output, [2])
    assert bool((output.keys[1] == 7.0).all())
    assert counts.tolist() == [[[0, 0], [loud.bias.numel() * case.batch * case.tokens, 0]]]


@pytest.mark.parametrize("support", ["full_head", "head_local", "banded"])
@pytest.mark.parametrize("native_layers", [0, 1])
def test_it_maps_as_the_mappers_do(support: str, native_layers: int) -> None:
    generator = torch.Generator().manual_seed(4)
    source_shape, target_shape = ((2, 6), (2, 6), (2, 6)), ((3, 4), (3, 4), (3, 4))
    selection = {"key": ((0, 2), (1, 0), (2, 1)), "value": ((1, 2), (2, 1), (0, 1))}
    recipe = Recipe(source_shape, target_shape, support, selection, "both_kinds", native_layers)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    weight = {
        kind: tuple(
            drawn(heads, recipe.n_features(kind, layer) if layer >= native_layers else 0, width)
            for layer, (heads, width) in enumerate(target_shape)
        )
        for kind in KINDS
    }
    bias = {kind: tuple(drawn(*shape) for shape in target_shape) for kind in KINDS}
    linear = LinearMapper(LinearWeights(recipe, weight, bias, ()))
    rotation = Rotation(torch.tensor([1.0, 0.2, 0.05]), 1.1, "half")
    turned = [Rotation(torch.tensor([0.7, 0.1]), 0.9, "interleaved"), None, None]

    def cache(shape: tuple[tuple[int, int], ...], rotations: tuple[Rotation | None, ...]) -> KVCache:
        parts = [[drawn(2, heads, 5, width) for heads, width in shape] for _ in KINDS]
        positions = torch.arange(5).expand(2, 5)
        return KVCache(
            tuple(parts[0]), tuple(parts[1]), positions, torch.ones(2, 5, dtype=torch.bool), rotations
        )

    source = cache(source_shape, (rotation, rotation, None))
    native = cache(target_shape[:native_layers], (turned[0],) * native_layers) if native_layers else None
    for mapper in (linear, CompressedLinearMapper.from_linear(linear, "fp8")):
        exact = mapper is linear
        cache_map = mapper.cache_map()
        assert cache_map is not None
        assert cache_map is mapper.cache_map()
        content = mapper.map(source.strip(), None if native is None else native.strip())
        expected = replace(content, keys=content.keys, rotations=None).rotate(turned)
        kept = range(native_layers, 3)
        keys, values = (
            {i: torch.empty(2, *target_shape[i], 5, dtype=torch.float64).transpose(2, 3) for i in kept}
            for _ in KINDS
        )
        output = Columns(keys, values, turned)
        side = None if native is None else Side(native.keys, native.values, native.rotations)
        inputs = Inputs(Side(source.keys, source.values, source.rotations), source.positions, side)
        map_cache_reference(cache_map, inputs, output)
        # the mapper rounds products of float8 weights to bfloat16, the reference does not
        near = {"rtol": 1e-12, "atol": 1e-12} if exact else {"rtol": 2e-2, "atol": 6e-2}
        for layer in kept:
            torch.testing.assert_close(keys[layer], expected.keys[layer].double(), **near)
            torch.testing.assert_close(values[layer], expected.values[layer].double(), **near)


def test_what_the_output_cannot_hold_is_clamped_and_counted() -> None:
    x = torch.tensor([1.0, 7e4, -7e4, float("inf"), float("nan"), -65504.0])
    cast, count = saturated(x, torch.float16)
    assert count.tolist() == [2, 2]
    assert cast[[0, 1, 2, 5]].tolist() == [1.0, 65504.0, -65504.0, -65504.0]


def test_native_layers_that_are_missing_are_named() -> None:
    cache_map, inputs = Case(native=1).build()
    with pytest.raises(KernelError, match="native layers"):
        map_cache_reference(
            cache_map, Inputs(inputs.source, inputs.positions), Case(native=1).columns(cache_map)
        )


def test_a_map_knows_its_cost_and_what_each_layer_waits_for() -> None:
    bias = torch.zeros(2, 4)
    product = Product(
        (Slot("source", "key", 5), Slot("native", "key", 0)), torch.zeros(24, 8).bfloat16(), bias
    )
    alone = Product((Slot("native", "value", 0),), torch.zeros(8, 8).bfloat16(), bias)
    cache_map = CacheMap({"key": {1: product, 2: alone}, "value": {1: alone, 2: alone}})
    assert cache_map.layers == (1, 2)
    assert (cache_map.needs(1), cache_map.needs(2)) == (5, -1)
    assert cache_map.flops(10) == 2 * 10 * (24 * 8 + 3 * 64)
    assert cache_map.nbytes == 2 * (24 * 8 + 3 * 64) + 4 * 8 * 4
