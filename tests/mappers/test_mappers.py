from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from kvmap.errors import UnknownName
from kvmap.fit.features import KINDS, REGRESSORS, SUPPORTS, CacheShape, Recipe, SelectionError, both
from kvmap.fit.linear import LinearWeights, Penalty, fit_linear, r2_of
from kvmap.fit.pair_moments import PairMoments, head_local_tables, selected_tables
from kvmap.mappers import (
    BiasOnlyMapper,
    IdentityMapper,
    LinearMapper,
    Mapper,
    MapperMismatch,
    RandomMapper,
    RawMapper,
    RegistryCollision,
    Unavailable,
    get_mapper,
    mapper_kinds,
    register,
)
from kvmap.mappers.linear import linear_feature_count, linear_weight_count
from kvmap.models.cache import KVCache
from tests.fit.caches import (
    GROUPED_TARGET_SHAPE,
    SOURCE_SHAPE,
    TARGET_SHAPE,
    UNEVEN_SOURCE_SHAPE,
    UNEVEN_TARGET_SHAPE,
    kind_layers,
    moments_of,
    pair_of_caches,
    random_cache,
    rows_of,
    stripped,
)

SELECTION = ((0, 2), (1,))
SHAPES = [TARGET_SHAPE, GROUPED_TARGET_SHAPE, ((1, 5), (3, 2))]
PENALTY = Penalty(0.01)


def recipe_of(
    support: str,
    shape: CacheShape = TARGET_SHAPE,
    regressors: str = "own_kind",
    native: int = 0,
    source_shape: CacheShape = SOURCE_SHAPE,
) -> Recipe:
    """Where both kinds are read, keys and values select apart."""
    selection = both((*SELECTION, (2, 1))[: len(shape)])
    if regressors == "both_kinds":
        selection["value"] = ((1,), (2, 0), (0,))[: len(shape)]
    return Recipe(source_shape, shape, support, selection, regressors, native)


def native_of(target: KVCache, count: int) -> KVCache | None:
    """The target's own first layers, as a mapper reads them."""
    return stripped(list(target.keys[:count]), list(target.values[:count]), target.mask) if count else None


def random_weights(recipe: Recipe, dtype: torch.dtype = torch.float64) -> LinearWeights:
    generator = torch.Generator().manual_seed(0)
    weight, bias = {}, {}
    for kind in KINDS:
        sizes = [
            (heads, recipe.n_features(kind, layer) if layer >= recipe.native_layers else 0, width)
            for layer, (heads, width) in enumerate(recipe.target_shape)
        ]
        weight[kind] = tuple(torch.randn(size, generator=generator, dtype=dtype) for size in sizes)
        bias[kind] = tuple(torch.randn(one, generator=generator, dtype=dtype) for one in recipe.target_shape)
    return LinearWeights(recipe, weight, bias)


def by_loops(source: KVCache, target: KVCache, weights: LinearWeights, kind: str, layer: int) -> Tensor:
    """The map of one target layer, number by number."""
    recipe = weights.recipe
    heads, width = recipe.target_shape[layer]
    batch, tokens = source.mask.shape
    kinds = [kind] if recipe.regressors == "own_kind" else [kind, "value" if kind == "key" else "key"]
    out = torch.empty(batch, heads, tokens, width, dtype=torch.float64)
    for b in range(batch):
        for h in range(heads):
            for t in range(tokens):
                features = []
                for kv, numbers in (
                    (source, recipe.selection[kind][layer]),
                    (target, range(recipe.native_layers)),
                ):
                    for read_kind in kinds:
                        for chosen in numbers:
                            read_layer = kind_layers(kv, read_kind)[chosen]
                            n_heads = read_layer.shape[1]
                            read = (
                                [h * n_heads // heads] if recipe.support == "head_local" else range(n_heads)
                            )
                            features += [float(c) for a in read for c in read_layer[b, a, t]]
                x = torch.tensor(features, dtype=torch.float64)
                out[b, h, t] = x @ weights.weight[kind][layer][h].double() + weights.bias[kind][layer][h]
    return out


def assert_by_loops(weights: LinearWeights, batch: int, tokens: int) -> None:
    recipe = weights.recipe
    generator = torch.Generator().manual_seed(1)
    source, target = (
        random_cache(shape, batch, tokens, generator) for shape in (recipe.source_shape, recipe.target_shape)
    )
    mapper = LinearMapper(weights)
    assert mapper.native_layers == recipe.native_layers
    mapped = mapper.map(source, native_of(target, recipe.native_layers))
    assert mapped.stripped
    assert not mapped.exact
    assert mapped.n_tokens == tokens
    for kind in KINDS:
        for layer in recipe.mapped_layers:
            expected = by_loops(source, target, weights, kind, layer)
            # the same float64 products in another order
            torch.testing.assert_close(kind_layers(mapped, kind)[layer], expected, rtol=1e-12, atol=1e-12)
        for layer in range(recipe.native_layers):
            assert torch.equal(kind_layers(mapped, kind)[layer], kind_layers(target, kind)[layer])


@pytest.mark.parametrize("support", SUPPORTS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("batch", "tokens"), [(1, 1), (1, 7), (3, 2), (2, 4)])  # also tokens = heads
def test_a_linear_mapper_equals_its_definition(
    support: str, shape: CacheShape, batch: int, tokens: int
) -> None:
    assert_by_loops(random_weights(recipe_of(support, shape)), batch, tokens)


@pytest.mark.parametrize("support", SUPPORTS)
@pytest.mark.parametrize("regressors", REGRESSORS)
@pytest.mark.parametrize("native", [0, 1, 2])
def test_every_feature_recipe_is_mapped_as_it_is_defined(support: str, regressors: str, native: int) -> None:
    recipe = recipe_of(support, UNEVEN_TARGET_SHAPE, regressors, native, UNEVEN_SOURCE_SHAPE)
    assert_by_loops(random_weights(recipe), 2, 4)


@pytest.mark.parametrize("support", SUPPORTS)
@pytest.mark.parametrize("regressors", REGRESSORS)
@pytest.mark.parametrize("native", [0, 1])
def test_mapped_rows_have_the_r2_that_the_moments_give(support: str, regressors: str, native: int) -> None:
    """The mapper reads a cache in the order in which the moments were taken of it."""
    pairs = pair_of_caches(GROUPED_TARGET_SHAPE)
    recipe = recipe_of(support, GROUPED_TARGET_SHAPE, regressors, native)
    moments = moments_of(pairs, native, lambda _: selected_tables(recipe))
    penalty = Penalty(0.1, 1.0 if support == "banded" else None)
    mapper = LinearMapper(fit_linear(moments, recipe, penalty, dtype=torch.float64))
    for split, (source, target) in pairs.items():
        r2 = r2_of(mapper, moments, split)
        mapped = mapper.map(source, native_of(target, native))
        for kind in KINDS:
            for layer in recipe.mapped_layers:
                for head in range(4):
                    y, z = (
                        rows_of((kind_layers(kv, kind)[layer][:, head : head + 1],))
                        for kv in (target, mapped)
                    )
                    expected = 1 - ((y - z) ** 2).sum() / ((y - y.mean(0)) ** 2).sum()
                    assert float(r2[kind][layer, head]) == pytest.approx(expected, abs=1e-10)


@pytest.mark.parametrize("support", SUPPORTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_values_that_encode_layer_head_and_position_reach_the_right_head(
    support: str, shape: CacheShape
) -> None:
    """Weights that pick channel 1 of the last head they may read, of the last selected layer."""
    tokens = 2
    code = [
        torch.tensor([[[[1000 * layer + 100 * h + t] * 3 for t in range(tokens)] for h in range(2)]]).float()
        for layer in range(3)
    ]
    source = stripped(code, code)
    weights = random_weights(recipe_of(support, shape), torch.float32)
    for kind in ("key", "value"):
        for layer in range(2):
            weights.weight[kind][layer].zero_()
            weights.weight[kind][layer][:, -2, :] = 1
            weights.bias[kind][layer].zero_()
    mapped = LinearMapper(weights).map(source)
    for layer, (heads, _) in enumerate(shape):
        for h in range(heads):
            for t in range(tokens):
                head = h * 2 // heads if support == "head_local" else 1
                expected = 1000 * SELECTION[layer][-1] + 100 * head + t
                assert set(mapped.values[layer][0, h, t].tolist()) == {expected}


@pytest.mark.parametrize("support", SUPPORTS)
def test_float32_weights_map_within_float32_rounding(support: str) -> None:
    pairs = pair_of_caches()
    exact = fit_linear(moments_of(pairs), recipe_of(support), PENALTY, dtype=torch.float64)
    mapper = LinearMapper(exact)
    source = pairs["held_out"][0]
    single = mapper.to(dtype=torch.float32).map(source)
    assert single.keys[0].dtype == torch.float32
    torch.testing.assert_close(single.keys[0].double(), mapper.map(source).keys[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("support", SUPPORTS)
def test_bfloat16_weights_halve_the_bytes_and_cost_bfloat16_rounding(support: str) -> None:
    pairs = pair_of_caches()
    moments = moments_of(pairs)
    single = LinearMapper(fit_linear(moments, recipe_of(support), PENALTY))
    half = LinearMapper(fit_linear(moments, recipe_of(support), PENALTY, dtype=torch.bfloat16))
    n_bias = sum(b.numel() for b in single.linear_weights().bias["key"]) * 2
    assert half.n_weights == single.n_weights
    assert (single.nbytes, half.nbytes) == (4 * (single.n_weights + n_bias), 2 * half.n_weights + 4 * n_bias)
    source = pairs["fit"][0]
    mapped, expected = half.map(source).keys[0], single.map(source).keys[0]
    assert mapped.dtype == torch.float32
    # inputs, weights and product rounded to 8 bits each: three times 2⁻⁸ of the largest output
    assert float((mapped - expected).abs().max()) < 3 * 2**-8 * float(expected.abs().max())


@pytest.mark.parametrize("support", SUPPORTS)
@pytest.mark.parametrize("native", [0, 1])
def test_a_mapper_gives_back_the_weights_it_was_made_of(support: str, native: int) -> None:
    moments = moments_of(pair_of_caches(GROUPED_TARGET_SHAPE), native)
    fit = fit_linear(moments, recipe_of(support, GROUPED_TARGET_SHAPE, native=native), PENALTY)
    mapper = LinearMapper(fit)
    back = mapper.linear_weights()
    for kind in ("key", "value"):
        assert all(torch.equal(a, b) for a, b in zip(fit.weight[kind], back.weight[kind], strict=True))
        assert all(torch.equal(a, b) for a, b in zip(fit.bias[kind], back.bias[kind], strict=True))
    found, expected = (r2_of(weights, moments, "fit")["key"][native:] for weights in (mapper, fit))
    assert torch.equal(found, expected)
    assert mapper.linear_weights().recipe == fit.recipe
    stored = {int(name.split(".")[1]) for name in mapper.tensors()}
    assert stored == set(range(native, 2))  # native layers have no tensors


def test_the_number_of_weights_is_the_papers_formula() -> None:
    recipe = Recipe(SOURCE_SHAPE, TARGET_SHAPE, "full_head", both(((0, 2), (1, 2))))
    weights = fit_linear(moments_of(pair_of_caches()), recipe, PENALTY)
    layers, heads, width = 2, 2, 4
    assert LinearMapper(weights).n_weights == 2 * layers * heads * (2 * 2 * 3) * width
    assert linear_weight_count(SOURCE_SHAPE, TARGET_SHAPE, 2, "full_head") == 2 * 2 * 2 * 12 * 4
    assert linear_weight_count(SOURCE_SHAPE, TARGET_SHAPE, 2, "banded") == 2 * 2 * 2 * 12 * 4
    assert linear_weight_count(SOURCE_SHAPE, TARGET_SHAPE, 2, "head_local") == 2 * 2 * 2 * 6 * 4
    uneven = ((2, 3), (4, 5), (1, 6))  # the two widest: 20 and 6 with all heads, 6 and 5 with one
    assert linear_feature_count(uneven, TARGET_SHAPE, 2, "full_head") == 26
    assert linear_feature_count(uneven, TARGET_SHAPE, 2, "head_local") == 11
    assert linear_weight_count(uneven, ((1, 5), (3, 2)), 3, "full_head") == 2 * 32 * (5 + 6)
    with pytest.raises(UnknownName, match="'full_head'"):
        linear_feature_count(uneven, TARGET_SHAPE, 2, "full-head")
    # [H] table: Qwen3 14B → 32B, k = 8 and 8B → 32B, k = 12: 1.07 and 1.61 billion
    assert round(linear_weight_count(((8, 128),) * 40, ((8, 128),) * 64, 8, "full_head") / 1e9, 2) == 1.07
    assert round(linear_weight_count(((8, 128),) * 36, ((8, 128),) * 64, 12, "full_head") / 1e9, 2) == 1.61


@pytest.mark.parametrize("support", SUPPORTS)
@pytest.mark.parametrize("regressors", REGRESSORS)
@pytest.mark.parametrize("native", [0, 1, 2])
def test_the_size_that_is_foretold_is_the_size_of_the_mapper(
    support: str, regressors: str, native: int
) -> None:
    shape = ((2, 4), (4, 2), (3, 1))
    selection = both(((0, 2), (1, 2), (0, 1)))
    recipe = Recipe(SOURCE_SHAPE, shape, support, selection, regressors, native)
    mapper = LinearMapper(random_weights(recipe))
    settings = (SOURCE_SHAPE, shape, 2, support, regressors, native)
    assert mapper.n_weights == linear_weight_count(*settings)
    assert recipe.n_features("value", 2) == linear_feature_count(*settings)


def test_a_selection_without_layers_is_refused() -> None:
    weights = BiasOnlyMapper.from_moments(moments_of(pair_of_caches())).linear_weights()
    with pytest.raises(SelectionError, match="use bias_only"):
        LinearMapper(weights)
    # a layer that reads native features alone reads something
    recipe = Recipe(SOURCE_SHAPE, TARGET_SHAPE, "full_head", both(((), ())), native_layers=1)
    assert LinearMapper(random_weights(recipe)).native_layers == 1


def test_the_identity_changes_nothing_and_needs_one_shape() -> None:
    source = random_cache(SOURCE_SHAPE, 2, 5, torch.Generator().manual_seed(0))
    mapped = IdentityMapper(SOURCE_SHAPE).map(source)
    assert all(torch.equal(a, b) for a, b in zip(mapped.keys, source.keys, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(mapped.values, source.values, strict=True))
    with pytest.raises(Unavailable, match="one shape"):
        IdentityMapper(SOURCE_SHAPE, TARGET_SHAPE)


def test_raw_copies_the_layer_at_the_same_depth_where_shapes_match() -> None:
    shape = ((2, 3),) * 5
    source = random_cache(SOURCE_SHAPE, 2, 5, torch.Generator().manual_seed(0))
    mapped = RawMapper(SOURCE_SHAPE, shape).map(source)
    for layer, expected in enumerate([0, 1, 1, 2, 2]):  # round(ℓ · 3 / 5)
        assert torch.equal(mapped.keys[layer], source.keys[expected])
    with pytest.raises(Unavailable, match=r"source layer 0 has \(2, 3\) and target layer 0 \(2, 4\)"):
        RawMapper(SOURCE_SHAPE, TARGET_SHAPE)


@pytest.mark.parametrize("kind", ["raw", "bias_only"])
@pytest.mark.parametrize("tables", ["full", "head_local", "selected"])
def test_a_control_beside_native_layers_leaves_them_to_the_target(kind: str, tables: str) -> None:
    shape = ((2, 3),) * 2
    pairs = pair_of_caches(shape)
    recipe = Recipe(SOURCE_SHAPE, shape, "head_local", both(((0,), (2,))), native_layers=1)
    specs = {"full": None, "head_local": head_local_tables, "selected": lambda _: selected_tables(recipe)}
    moments = moments_of(pairs, 1, specs[tables])
    mapper = BiasOnlyMapper.from_moments(moments, 1, torch.float64)
    if kind == "raw":
        mapper = RawMapper(SOURCE_SHAPE, shape, 1)
    assert mapper.native_layers == 1
    assert type(mapper).from_state(mapper.settings(), mapper.tensors()).native_layers == 1
    source, target = pairs["held_out"]
    mapped = mapper.map(source, native_of(target, 1))
    assert torch.equal(mapped.values[0], target.values[0])
    if kind == "raw":
        assert torch.equal(mapped.keys[1], source.keys[2])  # round(1 · 3 / 2)
    r2 = r2_of(mapper, moments, "held_out")
    assert bool(r2["key"][0].isnan().all())
    for head in range(2):
        y, z = (rows_of((kv.keys[1][:, head : head + 1],)) for kv in (target, mapped))
        expected = 1 - ((y - z) ** 2).sum() / ((y - y.mean(0)) ** 2).sum()
        assert float(r2["key"][1, head]) == pytest.approx(expected, rel=1e-10)


def test_bias_only_is_the_mean_cache_and_what_a_huge_lambda_gives() -> None:
    pairs = pair_of_caches()
    moments = moments_of(pairs)
    source, target = pairs["fit"]
    mapped = BiasOnlyMapper.from_moments(moments, dtype=torch.float64).map(source)
    mean = target.keys[1].mean((0, 2))
    torch.testing.assert_close(mapped.keys[1], mean[None, :, None].expand_as(target.keys[1]))
    fit = fit_linear(moments, recipe_of("full_head"), Penalty(1e14), dtype=torch.float64)
    limit = LinearMapper(fit).map(source)
    torch.testing.assert_close(limit.keys[1], mapped.keys[1], rtol=0, atol=1e-9)


@pytest.mark.parametrize("support", SUPPORTS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("native", [0, 1])
def test_a_random_mapper_has_the_fitted_means_and_variances_and_no_meaning(
    support: str, shape: CacheShape, native: int
) -> None:
    pairs = pair_of_caches(shape)
    recipe = recipe_of(support, shape, native=native)
    moments = moments_of(pairs, native, lambda _: selected_tables(recipe))
    fit = fit_linear(moments, recipe, PENALTY, dtype=torch.float64)
    source, target = pairs["fit"]
    fitted = LinearMapper(fit).map(source, native_of(target, native))
    random = RandomMapper.from_fitted(fit, moments, seed=3)
    mapped = random.map(source, native_of(target, native))
    for kind in ("key", "value"):
        layers = zip(kind_layers(fitted, kind), kind_layers(mapped, kind), strict=True)
        for a, b in list(layers)[native:]:
            torch.testing.assert_close(a.mean((0, 2)), b.mean((0, 2)), rtol=1e-9, atol=1e-10)
            torch.testing.assert_close(a.var((0, 2)), b.var((0, 2)), rtol=1e-9, atol=1e-10)
            assert float((a - b).abs().max()) > 0.5
    again = RandomMapper.from_fitted(fit, moments, seed=3)
    other = RandomMapper.from_fitted(fit, moments, seed=4)
    assert torch.equal(random.tensors()["key.1.weight"], again.tensors()["key.1.weight"])
    assert not torch.equal(random.tensors()["key.1.weight"], other.tensors()["key.1.weight"])
    assert random.kind == "random"


@pytest.mark.parametrize("support", SUPPORTS)
def test_a_random_mapper_imitates_a_fit_of_weighted_rows_over_those(support: str) -> None:
    source, target = pair_of_caches()["fit"]
    recipe = recipe_of(support)
    generator = torch.Generator().manual_seed(5)
    weights = {
        (kind, layer): torch.rand(5, 2, 17, generator=generator, dtype=torch.float64)
        for kind in KINDS
        for layer in range(2)
    }
    moments = PairMoments.zeros(recipe.layout, selected_tables(recipe, weighted=True))
    moments.update("fit", source, target, weights=weights)
    fit = fit_linear(moments, recipe, PENALTY, dtype=torch.float64)
    fitted = LinearMapper(fit).map(source)
    mapped = RandomMapper.from_fitted(fit, moments, seed=3).map(source)
    for kind, layer, head in (
        (kind, layer, head) for kind in KINDS for layer in range(2) for head in range(2)
    ):
        w = weights[kind, layer][:, head].flatten().numpy()
        a, b = (rows_of((kind_layers(kv, kind)[layer][:, head : head + 1],)) for kv in (fitted, mapped))
        means = [np.average(rows, axis=0, weights=w) for rows in (a, b)]
        spreads = [
            np.average((rows - m) ** 2, axis=0, weights=w) for rows, m in zip((a, b), means, strict=True)
        ]
        np.testing.assert_allclose(means[0], means[1], rtol=1e-9, atol=1e-10)
        np.testing.assert_allclose(spreads[0], spreads[1], rtol=1e-9, atol=1e-10)


def test_the_linear_weights_of_every_control_are_judged_as_their_rows() -> None:
    shape = ((2, 3),) * 2
    pairs = pair_of_caches(shape)
    moments = moments_of(pairs)
    fit = fit_linear(moments, recipe_of("full_head", shape), PENALTY)
    controls = [
        RawMapper(SOURCE_SHAPE, shape),
        BiasOnlyMapper.from_moments(moments, dtype=torch.float64),
        RandomMapper.from_fitted(fit, moments, 0),
    ]
    source, target = pairs["held_out"]
    for mapper in controls:
        r2 = r2_of(mapper, moments, "held_out")
        mapped = mapper.map(source)
        for layer in range(2):
            for head in range(2):
                y, z = (rows_of((kv.values[layer][:, head : head + 1],)) for kv in (target, mapped))
                expected = 1 - ((y - z) ** 2).sum() / ((y - y.mean(0)) ** 2).sum()
                # the mapped rows of the random control are float32
                assert float(r2["value"][layer, head]) == pytest.approx(expected, rel=1e-5)


def test_a_cache_with_rotated_keys_or_another_shape_is_refused() -> None:
    source = random_cache(SOURCE_SHAPE, 2, 5, torch.Generator().manual_seed(0))
    mapper = LinearMapper(random_weights(recipe_of("full_head")))
    with pytest.raises(MapperMismatch, match="strip"):
        mapper.map(source.rotate([None] * 3))
    with pytest.raises(MapperMismatch, match="has 2 layers; the mapper was fitted for 3"):
        mapper.map(stripped(list(source.keys[:2]), list(source.values[:2])))
    wide = random_cache(((2, 3), (2, 3), (3, 2)), 2, 5, torch.Generator().manual_seed(0))
    with pytest.raises(MapperMismatch, match="layer 2 of the source cache has 3 KV heads of width 2"):
        mapper.map(wide)


def test_native_layers_must_be_given_and_be_the_targets_own() -> None:
    generator = torch.Generator().manual_seed(0)
    source, target = (random_cache(shape, 2, 5, generator) for shape in (SOURCE_SHAPE, TARGET_SHAPE))
    mapper = LinearMapper(random_weights(recipe_of("full_head", native=1)))
    mapper.map(source, native_of(target, 1))
    for native, message in (
        (None, "reads the target's first 1 layers, and none were given"),
        (native_of(target, 2), "2 native layers were given; this mapper reads 1"),
        (native_of(target, 1).rotate([None]), "rotated keys"),
        (native_of(source, 1), "layer 0 of the native layers has 2 KV heads of width 3"),
        (native_of(target, 1).slice_tokens(1, None), "2 rows of 4 columns"),
    ):
        with pytest.raises(MapperMismatch, match=message):
            mapper.map(source, native)
    with pytest.raises(MapperMismatch, match="1 native layers were given; this mapper reads 0"):
        LinearMapper(random_weights(recipe_of("full_head"))).map(source, native_of(target, 1))


def test_the_registry_knows_every_kind_and_answers_a_typing_error_with_the_nearest() -> None:
    assert mapper_kinds() == (
        "bias_only",
        "compressed_linear",
        "identity",
        "linear",
        "mlp",
        "random",
        "raw",
        "separate",
    )
    assert all(get_mapper(kind).kind == kind for kind in mapper_kinds())
    with pytest.raises(
        UnknownName, match=r"'linaer'\. Did you mean 'linear'\? Known: bias_only, compressed_linear, identity"
    ):
        get_mapper("linaer")


def test_two_classes_cannot_have_one_kind() -> None:
    class Impostor(IdentityMapper):
        pass

    with pytest.raises(RegistryCollision, match="'identity' is taken by"):
        register("identity")(Impostor)
    assert get_mapper("identity") is IdentityMapper
    assert register("identity")(IdentityMapper) is IdentityMapper


def test_mapping_leaves_the_source_as_it_was() -> None:
    generator = torch.Generator().manual_seed(0)
    source, target = (random_cache(shape, 2, 5, generator) for shape in (SOURCE_SHAPE, TARGET_SHAPE))
    given = (*source.keys, *source.values, *target.keys, *target.values)
    before = [t.clone() for t in given]
    mappers: list[Mapper] = [
        LinearMapper(random_weights(recipe_of(support, native=native)))
        for support in SUPPORTS
        for native in (0, 1)
    ]
    for mapper in mappers:
        mapper.map(source, native_of(target, mapper.native_layers))
    assert all(np.array_equal(a, b) for a, b in zip(before, given, strict=True))
