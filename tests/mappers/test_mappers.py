from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from kvmap.errors import UnknownName
from kvmap.fit.linear import LinearWeights, fit_linear, r2_of
from kvmap.fit.moments import CacheShape
from kvmap.fit.selection import SelectionError
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
    kind_layers,
    moments_of,
    pair_of_caches,
    random_cache,
    rows_of,
    stripped,
)

SELECTION = ((0, 2), (1,))
SHAPES = [TARGET_SHAPE, GROUPED_TARGET_SHAPE, ((1, 5), (3, 2))]
SUPPORTS = ["full_head", "head_local"]


def random_weights(shape: CacheShape, support: str, dtype: torch.dtype = torch.float64) -> LinearWeights:
    generator = torch.Generator().manual_seed(0)
    n_heads = SOURCE_SHAPE[0][0] if support == "full_head" else 1
    weight, bias = {}, {}
    for kind in ("key", "value"):
        sizes = [(heads, len(SELECTION[i]) * n_heads * 3, width) for i, (heads, width) in enumerate(shape)]
        weight[kind] = tuple(torch.randn(size, generator=generator, dtype=dtype) for size in sizes)
        bias[kind] = tuple(torch.randn(one, generator=generator, dtype=dtype) for one in shape)
    return LinearWeights(support, SELECTION, SOURCE_SHAPE, shape, weight, bias)


def by_loops(source: KVCache, weights: LinearWeights, kind: str, layer: int) -> Tensor:
    """The map of one target layer, number by number."""
    layers = kind_layers(source, kind)
    heads, width = weights.target_shape[layer]
    batch, tokens = source.mask.shape
    out = torch.empty(batch, heads, tokens, width, dtype=torch.float64)
    for b in range(batch):
        for h in range(heads):
            for t in range(tokens):
                features = []
                for chosen in weights.selection[layer]:
                    n_heads = layers[chosen].shape[1]
                    read = range(n_heads) if weights.support == "full_head" else [h * n_heads // heads]
                    features += [float(c) for a in read for c in layers[chosen][b, a, t]]
                x = torch.tensor(features, dtype=torch.float64)
                out[b, h, t] = x @ weights.weight[kind][layer][h].double() + weights.bias[kind][layer][h]
    return out


@pytest.mark.parametrize("support", SUPPORTS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("batch", "tokens"), [(1, 1), (1, 7), (3, 2), (2, 4)])  # also tokens = heads
def test_a_linear_mapper_equals_its_definition(
    support: str, shape: CacheShape, batch: int, tokens: int
) -> None:
    weights = random_weights(shape, support)
    source = random_cache(SOURCE_SHAPE, batch, tokens, torch.Generator().manual_seed(1))
    mapped = LinearMapper(weights).map(source)
    assert mapped.stripped
    assert not mapped.exact
    assert mapped.n_tokens == tokens
    for layer in range(len(shape)):
        for kind in ("key", "value"):
            expected = by_loops(source, weights, kind, layer)
            # the same float64 products in another order
            torch.testing.assert_close(kind_layers(mapped, kind)[layer], expected, rtol=1e-12, atol=1e-12)


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
    weights = random_weights(shape, support, torch.float32)
    for kind in ("key", "value"):
        for layer in range(2):
            weights.weight[kind][layer].zero_()
            weights.weight[kind][layer][:, -2, :] = 1
            weights.bias[kind][layer].zero_()
    mapped = LinearMapper(weights).map(source)
    for layer, (heads, _) in enumerate(shape):
        for h in range(heads):
            for t in range(tokens):
                head = 1 if support == "full_head" else h * 2 // heads
                expected = 1000 * SELECTION[layer][-1] + 100 * head + t
                assert set(mapped.values[layer][0, h, t].tolist()) == {expected}


@pytest.mark.parametrize("support", SUPPORTS)
def test_float32_weights_map_within_float32_rounding(support: str) -> None:
    pairs = pair_of_caches()
    exact = fit_linear(moments_of(pairs), SELECTION, support, 0.01, dtype=torch.float64)
    mapper = LinearMapper(exact)
    source = pairs["held_out"][0]
    single = mapper.to(dtype=torch.float32).map(source)
    assert single.keys[0].dtype == torch.float32
    torch.testing.assert_close(single.keys[0].double(), mapper.map(source).keys[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("support", SUPPORTS)
def test_bfloat16_weights_halve_the_bytes_and_cost_bfloat16_rounding(support: str) -> None:
    pairs = pair_of_caches()
    moments = moments_of(pairs)
    single = LinearMapper(fit_linear(moments, SELECTION, support, 0.01))
    half = LinearMapper(fit_linear(moments, SELECTION, support, 0.01, dtype=torch.bfloat16))
    n_bias = sum(b.numel() for b in single.linear_weights().bias["key"]) * 2
    assert half.n_weights == single.n_weights
    assert (single.nbytes, half.nbytes) == (4 * (single.n_weights + n_bias), 2 * half.n_weights + 4 * n_bias)
    source = pairs["fit"][0]
    mapped, expected = half.map(source).keys[0], single.map(source).keys[0]
    assert mapped.dtype == torch.float32
    # inputs, weights and product rounded to 8 bits each: three times 2⁻⁸ of the largest output
    assert float((mapped - expected).abs().max()) < 3 * 2**-8 * float(expected.abs().max())


@pytest.mark.parametrize("support", SUPPORTS)
def test_a_mapper_gives_back_the_weights_it_was_made_of(support: str) -> None:
    moments = moments_of(pair_of_caches(GROUPED_TARGET_SHAPE))
    fit = fit_linear(moments, SELECTION, support, 0.01)
    mapper = LinearMapper(fit)
    back = mapper.linear_weights()
    for kind in ("key", "value"):
        assert all(torch.equal(a, b) for a, b in zip(fit.weight[kind], back.weight[kind], strict=True))
    assert torch.equal(r2_of(mapper, moments, "fit")["key"], r2_of(fit, moments, "fit")["key"])


def test_the_number_of_weights_is_the_papers_formula() -> None:
    weights = fit_linear(moments_of(pair_of_caches()), ((0, 2), (1, 2)), "full_head", 0.01)
    layers, heads, width = 2, 2, 4
    assert LinearMapper(weights).n_weights == 2 * layers * heads * (2 * 2 * 3) * width
    assert linear_weight_count(SOURCE_SHAPE, TARGET_SHAPE, 2, "full_head") == 2 * 2 * 2 * 12 * 4
    assert linear_weight_count(SOURCE_SHAPE, TARGET_SHAPE, 2, "head_local") == 2 * 2 * 2 * 6 * 4
    uneven = ((2, 3), (4, 5), (1, 6))  # the two widest: 20 and 6 with all heads, 6 and 5 with one
    assert linear_feature_count(uneven, 2, "full_head") == 26
    assert linear_feature_count(uneven, 2, "head_local") == 11
    assert linear_weight_count(uneven, ((1, 5), (3, 2)), 3, "full_head") == 2 * 32 * (5 + 6)
    with pytest.raises(UnknownName, match="'full_head'"):
        linear_feature_count(uneven, 2, "full-head")
    # [H] table: Qwen3 14B → 32B, k = 8 and 8B → 32B, k = 12: 1.07 and 1.61 billion
    assert round(linear_weight_count(((8, 128),) * 40, ((8, 128),) * 64, 8, "full_head") / 1e9, 2) == 1.07
    assert round(linear_weight_count(((8, 128),) * 36, ((8, 128),) * 64, 12, "full_head") / 1e9, 2) == 1.61


def test_a_selection_without_layers_is_refused() -> None:
    weights = BiasOnlyMapper.from_moments(moments_of(pair_of_caches())).linear_weights()
    with pytest.raises(SelectionError, match="use bias_only"):
        LinearMapper(weights)


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


def test_bias_only_is_the_mean_cache_and_what_a_huge_lambda_gives() -> None:
    pairs = pair_of_caches()
    moments = moments_of(pairs)
    source, target = pairs["fit"]
    mapped = BiasOnlyMapper.from_moments(moments, torch.float64).map(source)
    mean = target.keys[1].mean((0, 2))
    torch.testing.assert_close(mapped.keys[1], mean[None, :, None].expand_as(target.keys[1]))
    limit = LinearMapper(fit_linear(moments, SELECTION, "full_head", 1e14, dtype=torch.float64)).map(source)
    torch.testing.assert_close(limit.keys[1], mapped.keys[1], rtol=0, atol=1e-9)


@pytest.mark.parametrize("support", SUPPORTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_random_mapper_has_the_fitted_means_and_variances_and_no_meaning(
    support: str, shape: CacheShape
) -> None:
    pairs = pair_of_caches(shape)
    moments = moments_of(pairs)
    fit = fit_linear(moments, SELECTION, support, 0.01, dtype=torch.float64)
    source = pairs["fit"][0]
    fitted = LinearMapper(fit).map(source)
    random = RandomMapper.from_fitted(fit, moments, seed=3)
    mapped = random.map(source)
    for kind in ("key", "value"):
        for a, b in zip(kind_layers(fitted, kind), kind_layers(mapped, kind), strict=True):
            torch.testing.assert_close(a.mean((0, 2)), b.mean((0, 2)), rtol=1e-9, atol=1e-10)
            torch.testing.assert_close(a.var((0, 2)), b.var((0, 2)), rtol=1e-9, atol=1e-10)
            assert float((a - b).abs().max()) > 0.5
    again = RandomMapper.from_fitted(fit, moments, seed=3)
    other = RandomMapper.from_fitted(fit, moments, seed=4)
    assert torch.equal(random.tensors()["key.0.weight"], again.tensors()["key.0.weight"])
    assert not torch.equal(random.tensors()["key.0.weight"], other.tensors()["key.0.weight"])
    assert random.kind == "random"


def test_the_linear_weights_of_every_control_are_judged_as_their_rows() -> None:
    shape = ((2, 3),) * 2
    pairs = pair_of_caches(shape)
    moments = moments_of(pairs)
    fit = fit_linear(moments, SELECTION, "full_head", 0.01)
    controls = [
        RawMapper(SOURCE_SHAPE, shape),
        BiasOnlyMapper.from_moments(moments, torch.float64),
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
    mapper = LinearMapper(random_weights(TARGET_SHAPE, "full_head"))
    with pytest.raises(MapperMismatch, match="strip"):
        mapper.map(source.rotate([None] * 3))
    with pytest.raises(MapperMismatch, match="has 2 layers; the mapper was fitted for 3"):
        mapper.map(stripped(list(source.keys[:2]), list(source.values[:2])))
    wide = random_cache(((2, 3), (2, 3), (3, 2)), 2, 5, torch.Generator().manual_seed(0))
    with pytest.raises(MapperMismatch, match="layer 2 of the source cache has 3 KV heads of width 2"):
        mapper.map(wide)


def test_the_registry_knows_every_kind_and_answers_a_typing_error_with_the_nearest() -> None:
    assert mapper_kinds() == ("bias_only", "identity", "linear", "random", "raw")
    assert all(get_mapper(kind).kind == kind for kind in mapper_kinds())
    with pytest.raises(UnknownName, match=r"'linaer'\. Did you mean 'linear'\? Known: bias_only, identity"):
        get_mapper("linaer")


def test_two_classes_cannot_have_one_kind() -> None:
    class Impostor(IdentityMapper):
        pass

    with pytest.raises(RegistryCollision, match="'identity' is taken by"):
        register("identity")(Impostor)
    assert get_mapper("identity") is IdentityMapper
    assert register("identity")(IdentityMapper) is IdentityMapper


def test_mapping_leaves_the_source_as_it_was() -> None:
    source = random_cache(SOURCE_SHAPE, 2, 5, torch.Generator().manual_seed(0))
    before = [t.clone() for t in (*source.keys, *source.values)]
    mappers: list[Mapper] = [LinearMapper(random_weights(TARGET_SHAPE, s)) for s in SUPPORTS]
    for mapper in mappers:
        mapper.map(source)
    assert all(np.array_equal(a, b) for a, b in zip(before, (*source.keys, *source.values), strict=True))
