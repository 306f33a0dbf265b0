"""Which features a target head reads, in what order: against loops over layers, heads and channels."""

from __future__ import annotations

import json
from itertools import product

import numpy as np
import pytest
import torch

from kvmap.errors import UnknownName
from kvmap.fit.features import (
    KINDS,
    REGRESSORS,
    SUPPORTS,
    Block,
    CacheShape,
    Layout,
    Recipe,
    Selection,
    SelectionError,
    both,
    cache_shape,
    geometry_shape,
    n_channels,
    shape_from_json,
)
from kvmap.fit.pair_moments import feature_rows
from kvmap.models.geometry import geometry_from_config
from tests.fit.caches import (
    GROUPED_TARGET_SHAPE,
    SOURCE_SHAPE,
    TARGET_SHAPE,
    UNEVEN_SOURCE_SHAPE,
    UNEVEN_TARGET_SHAPE,
    random_cache,
)
from tests.fit.oracles import bands, regressors
from tests.tiny_random_models import build_config

PAIRS = [
    (SOURCE_SHAPE, TARGET_SHAPE),
    (SOURCE_SHAPE, GROUPED_TARGET_SHAPE),
    (UNEVEN_SOURCE_SHAPE, UNEVEN_TARGET_SHAPE),
]
SELECTIONS: dict[int, dict[str, Selection]] = {
    2: {"key": ((2, 0), (1,)), "value": ((1,), (0, 1, 2))},
    3: {"key": ((2, 0), (1,), (0, 1)), "value": ((1,), (0, 1, 2), (2, 1))},
}
NATIVE = [0, 1, 2]


def recipe_of(shapes: tuple[CacheShape, CacheShape], support: str, regressors: str, native: int) -> Recipe:
    return Recipe(*shapes, support, SELECTIONS[len(shapes[1])], regressors, native)


every_recipe = pytest.mark.parametrize(
    "recipe", [recipe_of(*case) for case in product(PAIRS, SUPPORTS, REGRESSORS, NATIVE)]
)


def caches_of(recipe: Recipe):
    generator = torch.Generator().manual_seed(0)
    return [random_cache(shape, 2, 4, generator) for shape in (recipe.source_shape, recipe.target_shape)]


@pytest.mark.parametrize("shapes", PAIRS)
@pytest.mark.parametrize("native", NATIVE)
def test_features_and_targets_are_numbered_by_origin_kind_layer_head_channel(
    shapes: tuple[CacheShape, CacheShape], native: int
) -> None:
    layout = Layout(*shapes, native)
    number = 0
    for origin, shape in (("source", shapes[0]), ("native", shapes[1][:native])):
        for kind in KINDS:
            for layer, (n_heads, width) in enumerate(shape):
                first = number
                for head in range(n_heads):
                    expected = list(range(number, number + width))
                    assert layout.features([Block(origin, kind, layer, head)]).tolist() == expected
                    number += width
                assert layout.features([Block(origin, kind, layer)]).tolist() == list(range(first, number))
    assert layout.n_features == number
    number = 0
    for kind in KINDS:
        start = number
        for layer, (n_heads, width) in enumerate(shapes[1]):
            first = number
            for head in range(n_heads):
                assert layout.targets(kind, layer, head).tolist() == list(range(number, number + width))
                number += width
            assert layout.targets(kind, layer).tolist() == list(range(first, number))
        assert layout.targets(kind).tolist() == list(range(start, number))
    assert layout.n_targets == number


@pytest.mark.parametrize("kind", KINDS)
def test_the_features_of_one_kind_are_the_sources_and_the_native_layers(kind: str) -> None:
    layout = Layout(SOURCE_SHAPE, TARGET_SHAPE, 1)
    blocks = [Block("source", kind, layer) for layer in range(3)] + [Block("native", kind, 0)]
    assert torch.equal(layout.kind_features(kind), layout.features(blocks))
    assert len(layout.kind_features("key")) + len(layout.kind_features("value")) == layout.n_features


@pytest.mark.parametrize("native", [-1, 3])
def test_a_layout_has_no_more_native_layers_than_the_target(native: int) -> None:
    with pytest.raises(SelectionError, match=f"native_layers={native}: the target has 2 layers"):
        Layout(SOURCE_SHAPE, TARGET_SHAPE, native)


@pytest.mark.parametrize(
    "block",
    [
        Block("source", "key", 3),
        Block("source", "key", -1),
        Block("source", "value", 0, 2),
        Block("source", "value", 0, -1),
        Block("native", "key", 1),
    ],
)
def test_a_block_that_is_not_there_is_refused(block: Block) -> None:
    with pytest.raises(SelectionError, match=f"{block.origin} layer {block.layer}, head {block.head}"):
        Layout(SOURCE_SHAPE, TARGET_SHAPE, 1).features([block])


@every_recipe
def test_a_head_reads_what_the_method_says_in_that_order(recipe: Recipe) -> None:
    """`gather`, the numbers of `columns`, `bands` and `n_features` against columns joined one by one."""
    source, target = caches_of(recipe)
    native = recipe.native_layers
    every_row = feature_rows(recipe.layout, source, target, source.mask)
    larger = Layout(recipe.source_shape, recipe.target_shape, 2)
    every_larger_row = feature_rows(larger, source, target, source.mask)
    assert recipe.mapped_layers == range(native, len(recipe.target_shape))
    for kind in KINDS:
        for layer in recipe.mapped_layers:
            gathered = recipe.gather(
                kind, layer, source.keys, source.values, target.keys[:native], target.values[:native]
            )
            columns, moved = recipe.columns(kind, layer), recipe.columns(kind, layer, larger)
            n_heads = recipe.target_shape[layer][0]
            assert len(gathered) == len(columns) == len(moved) == (1 if recipe.shared else n_heads)
            for head in range(n_heads):
                expected = regressors(recipe, source, target, kind, layer, head)
                group = 0 if recipe.shared else head
                np.testing.assert_array_equal(gathered[group].numpy(), expected)
                np.testing.assert_array_equal(every_row[:, columns[group]].numpy(), expected)
                np.testing.assert_array_equal(every_larger_row[:, moved[group]].numpy(), expected)
                assert recipe.n_features(kind, layer) == expected.shape[1]
                blocks = recipe.blocks(kind, layer, head)
                assert torch.equal(recipe.layout.features(blocks), columns[group])
                want = bands(recipe, source, target, kind, layer, head)
                np.testing.assert_array_equal(recipe.bands(kind, layer, head).numpy(), want)


def test_the_order_of_a_selection_is_the_order_of_the_features() -> None:
    source, _ = caches_of(recipe_of(PAIRS[0], "full_head", "own_kind", 0))
    ascending, descending = (
        Recipe(SOURCE_SHAPE, TARGET_SHAPE, "full_head", both((layers,) * 2)) for layers in ((0, 2), (2, 0))
    )
    first, second = (
        recipe.gather("key", 0, source.keys, source.values)[0] for recipe in (ascending, descending)
    )
    assert torch.equal(first, torch.cat([second[:, 6:], second[:, :6]], 1))
    assert torch.equal(ascending.columns("key", 0).sort().values, descending.columns("key", 0).sort().values)


@pytest.mark.parametrize("support", SUPPORTS)
def test_a_layer_that_reads_nothing_has_no_columns(support: str) -> None:
    recipe = Recipe(SOURCE_SHAPE, TARGET_SHAPE, support, both(((), (1,))))
    assert recipe.n_features("key", 0) == 0
    assert recipe.columns("key", 0).shape == (2 if support == "head_local" else 1, 0)
    assert recipe.columns("key", 0).dtype == recipe.bands("key", 0, 0).dtype == torch.int64


@every_recipe
def test_a_recipe_comes_back_from_json(recipe: Recipe) -> None:
    assert Recipe.from_json(json.loads(json.dumps(recipe.to_json()))) == recipe


def test_a_recipe_that_the_pair_cannot_serve_is_refused_by_name() -> None:
    whole = both(((0,), (1,)))

    def recipe(support="full_head", selection=whole, regressors="own_kind", native=0):
        return Recipe(SOURCE_SHAPE, TARGET_SHAPE, support, selection, regressors, native)

    with pytest.raises(UnknownName, match="head_local"):
        recipe(support="head-local")
    with pytest.raises(UnknownName, match="both_kinds"):
        recipe(regressors="both")
    with pytest.raises(SelectionError, match="native_layers=3"):
        recipe(native=3)
    with pytest.raises(SelectionError, match=r"target layer 1 selects source layers \(3,\).*from 0 to 2"):
        recipe(selection=both(((0,), (3,))))
    with pytest.raises(SelectionError, match=r"target layer 0 selects source layers \(1, 1\).*distinct"):
        recipe(selection={"key": ((0,), (1,)), "value": ((1, 1), (0,))})
    with pytest.raises(SelectionError, match="serves 1 target layers; the target has 2"):
        recipe(selection=both(((0,),)))


def test_shapes_are_read_from_caches_models_and_json() -> None:
    kv = random_cache(UNEVEN_SOURCE_SHAPE, 1, 2, torch.Generator().manual_seed(0))
    assert cache_shape(kv) == UNEVEN_SOURCE_SHAPE
    assert n_channels(UNEVEN_SOURCE_SHAPE) == 6 + 8 + 5
    assert shape_from_json(json.loads(json.dumps(UNEVEN_SOURCE_SHAPE))) == UNEVEN_SOURCE_SHAPE
    config = build_config("qwen3", n_layers=2, num_key_value_heads=4, head_dim=6)
    assert geometry_shape(geometry_from_config(config)) == ((4, 6), (4, 6))
