from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from kvmap.errors import UnknownName
from kvmap.fit.features import CacheShape, Recipe
from kvmap.fit.linear import LinearWeights
from kvmap.fit.mlp import MLPSettings, train_mlp
from kvmap.fit.network_rows import TensorRows, residual_rows
from kvmap.fit.networks import FORMS, HeadNetworks, MLPWeights
from kvmap.mappers import mlp as mlp_module
from kvmap.mappers.base import MapperMismatch, get_mapper
from kvmap.mappers.mlp import MLPMapper
from kvmap.mappers.store import load_mapper, save_mapper
from kvmap.models.cache import KVCache

SOURCE_SHAPE: CacheShape = ((2, 3), (2, 3), (2, 3))
TARGET_SHAPE: CacheShape = ((2, 4), (4, 2), (2, 4))
SELECTION = {"key": ((0,), (2, 0), (1,)), "value": ((0,), (1,), (0, 2))}
KINDS = ("key", "value")


def recipe_of(support: str = "full_head", regressors: str = "own_kind", native_layers: int = 0) -> Recipe:
    return Recipe(SOURCE_SHAPE, TARGET_SHAPE, support, SELECTION, regressors, native_layers)


def layers_of(shape: CacheShape, batch: int, tokens: int, seed: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(
        torch.randn(batch, heads, tokens, width, generator=generator, dtype=torch.float64)
        for heads, width in shape
    )


class Layers(NamedTuple):
    """Keys and values of some layers, perhaps of none."""

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]


def noise(shape: CacheShape, batch: int, tokens: int, seed: int) -> Layers:
    return Layers(*(layers_of(shape, batch, tokens, seed + i) for i in range(2)))


def cache(shape: CacheShape, batch: int, tokens: int, seed: int) -> KVCache:
    """A content cache of noise."""
    mask = torch.ones(batch, tokens, dtype=torch.bool)
    return KVCache(*noise(shape, batch, tokens, seed), torch.arange(tokens).expand(batch, -1), mask, None)


def random_mlp(
    recipe: Recipe,
    hidden: tuple[int, ...] = (5, 3),
    dtype: torch.dtype = torch.float64,
    centred: bool = True,
    kinds: tuple[str, ...] = KINDS,
) -> MLPWeights:
    generator = torch.Generator().manual_seed(2)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    def one(kind: str, layer: int) -> HeadNetworks | None:
        if layer < recipe.native_layers:
            return None
        heads, width = TARGET_SHAPE[layer]
        p = recipe.n_features(kind, layer)
        widths = (p, *hidden, width)
        return HeadNetworks(
            tuple(drawn(heads, widths[i], widths[i + 1]) for i in range(len(widths) - 1)),
            tuple(drawn(heads, w) for w in widths[1:]),
            drawn(1 if recipe.shared else heads, p) if centred else None,
        )

    return MLPWeights(recipe, {kind: tuple(one(kind, i) for i in range(3)) for kind in kinds})


def random_linear(recipe: Recipe, dtype: torch.dtype = torch.float64) -> LinearWeights:
    generator = torch.Generator().manual_seed(3)
    weight, bias = {}, {}
    for kind in KINDS:
        sizes = [
            (heads, recipe.n_features(kind, i) if i >= recipe.native_layers else 0, width)
            for i, (heads, width) in enumerate(TARGET_SHAPE)
        ]
        weight[kind] = tuple(torch.randn(size, generator=generator, dtype=dtype) for size in sizes)
        bias[kind] = tuple(torch.randn(one, generator=generator, dtype=dtype) for one in TARGET_SHAPE)
    return LinearWeights(recipe, weight, bias)


def column(
    recipe: Recipe, kind: str, layer: int, head: int, source: Layers, native: Layers, at: tuple[int, int]
) -> np.ndarray:
    """The features of one head at one (row, token), number by number."""
    found = []
    for block in recipe.blocks(kind, layer, head):
        origin = source if block.origin == "source" else native
        tensor = (origin.keys if block.kind == "key" else origin.values)[block.layer]
        heads = range(tensor.shape[1]) if block.head is None else [block.head]
        found += [float(channel) for h in heads for channel in tensor[at[0], h, at[1]]]
    return np.array(found)


def by_hand(
    form: str,
    mlp: MLPWeights,
    linear: LinearWeights,
    kind: str,
    layer: int,
    source: Layers,
    native: Layers,
) -> Tensor:
    heads, width = TARGET_SHAPE[layer]
    batch, _, tokens, _ = source.keys[0].shape
    out = torch.zeros(batch, heads, tokens, width, dtype=torch.float64)
    for b, t, h in np.ndindex(batch, tokens, heads):
        result = np.zeros(width)
        if "mlp" in FORMS[form][kind]:
            x = column(mlp.recipe, kind, layer, h, source, native, (b, t))
            networks = mlp.networks[kind][layer]
            if networks.input_bias is not None:
                x = x + networks.input_bias[h if len(networks.input_bias) > 1 else 0].double().numpy()
            for i, (weight, bias) in enumerate(zip(networks.weights, networks.biases, strict=True)):
                x = x @ weight[h].double().numpy() + bias[h].double().numpy()
                x = np.maximum(x, 0) if i + 1 < len(networks.weights) else x
            result += x
        if "linear" in FORMS[form][kind]:
            x = column(linear.recipe, kind, layer, h, source, native, (b, t))
            result += x @ linear.weight[kind][layer][h].double().numpy()
            result += linear.bias[kind][layer][h].double().numpy()
        out[b, h, t] = torch.from_numpy(result)
    return out


def assert_maps_by_hand(
    mapper: MLPMapper, mlp: MLPWeights, linear: LinearWeights, **tolerance: float
) -> None:
    native_layers = mlp.recipe.native_layers
    batch, tokens = 2, 4  # as many tokens as heads: a confusion of the two would pass for shapes alone
    source = noise(SOURCE_SHAPE, batch, tokens, seed=10)
    native = noise(TARGET_SHAPE[:native_layers], batch, tokens, seed=20)
    for layer in range(native_layers, 3):
        got = mapper.map_layer(layer, source.keys, source.values, native.keys, native.values)
        for kind, mine in zip(KINDS, got, strict=True):
            expected = by_hand(mapper.form, mlp, linear, kind, layer, source, native)
            torch.testing.assert_close(mine.double(), expected, **tolerance)


EXACT = {"rtol": 1e-11, "atol": 1e-11}  # the same float64 products, summed in another order


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("support", ["full_head", "head_local", "banded"])
@pytest.mark.parametrize(
    ("regressors", "native_layers"), [("own_kind", 0), ("both_kinds", 0), ("both_kinds", 1)]
)
def test_every_form_equals_its_definition(
    form: str, support: str, regressors: str, native_layers: int
) -> None:
    recipe = recipe_of(support, regressors, native_layers)
    mlp, linear = random_mlp(recipe), random_linear(recipe)
    mapper = MLPMapper.from_weights(form, mlp, linear)
    assert mapper.native_layers == native_layers
    assert (mapper.source_shape, mapper.target_shape) == (SOURCE_SHAPE, TARGET_SHAPE)
    assert_maps_by_hand(mapper, mlp, linear, **EXACT)


@pytest.mark.parametrize("form", ["residual", "residual_values"])
def test_a_network_of_matched_heads_can_ride_on_a_linear_map_of_all_heads(form: str) -> None:
    mlp, linear = random_mlp(recipe_of("head_local")), random_linear(recipe_of("banded", "both_kinds"))
    assert_maps_by_hand(MLPMapper.from_weights(form, mlp, linear), mlp, linear, **EXACT)


@pytest.mark.parametrize("support", ["full_head", "head_local"])
@pytest.mark.parametrize("hidden", [(), (6,)])
def test_networks_of_any_depth_without_centring(support: str, hidden: tuple[int, ...]) -> None:
    recipe = recipe_of(support)
    mlp, linear = random_mlp(recipe, hidden, centred=False), random_linear(recipe)
    assert_maps_by_hand(MLPMapper.from_weights("full", mlp), mlp, linear, **EXACT)


def test_many_columns_are_mapped_a_part_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = recipe_of()
    mlp, linear = random_mlp(recipe), random_linear(recipe)
    monkeypatch.setattr(mlp_module, "ROWS_AT_ONCE", 3)
    assert_maps_by_hand(MLPMapper.from_weights("residual", mlp, linear), mlp, linear, **EXACT)


def test_a_whole_cache_is_mapped_and_native_layers_pass_as_they_are() -> None:
    recipe = recipe_of("full_head", "both_kinds", 1)
    mapper = MLPMapper.from_weights("full", random_mlp(recipe))
    source, native = cache(SOURCE_SHAPE, 2, 5, 10), cache(TARGET_SHAPE[:1], 2, 5, 20)
    mapped = mapper.map(source, native)
    assert torch.equal(mapped.keys[0], native.keys[0])
    assert torch.equal(
        mapped.values[2], mapper.map_layer(2, source.keys, source.values, native.keys, native.values)[1]
    )
    assert [tuple(v.shape) for v in mapped.values] == [(2, 2, 5, 4), (2, 4, 5, 2), (2, 2, 5, 4)]
    with pytest.raises(MapperMismatch, match="target layer 0 is not mapped"):
        mapper.map_layer(0, source.keys, source.values, native.keys, native.values)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("support", ["full_head", "head_local"])
@pytest.mark.parametrize("native_layers", [0, 1])
def test_a_mapper_comes_back_from_disk_as_it_was(
    tmp_path: Path, form: str, support: str, native_layers: int
) -> None:
    recipe = recipe_of(support, "own_kind", native_layers)
    mlp, linear = random_mlp(recipe), random_linear(replace(recipe, regressors="both_kinds"))
    mapper = MLPMapper.from_weights(form, mlp, linear)
    save_mapper(mapper, tmp_path, {})
    loaded, record = load_mapper(tmp_path)
    assert isinstance(loaded, MLPMapper)
    assert record["kind"] == mapper.kind == "mlp"
    assert get_mapper("mlp") is MLPMapper
    assert loaded.settings() == mapper.settings()
    before, after = mapper.tensors(), loaded.tensors()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert_maps_by_hand(loaded, mlp, linear, **EXACT)


def test_a_part_that_the_form_does_not_use_is_not_stored() -> None:
    recipe = recipe_of()
    full = MLPMapper.from_weights("full", random_mlp(recipe), random_linear(recipe))
    assert {name.split(".")[0] for name in full.tensors()} == {"mlp"}
    values_only = MLPMapper.from_weights("values_only", random_mlp(recipe), random_linear(recipe))
    assert {".".join(name.split(".")[:2]) for name in values_only.tensors()} == {"linear.key", "mlp.value"}


def test_weights_and_bytes_are_counted_and_bfloat16_costs_its_rounding() -> None:
    recipe = recipe_of("full_head", "own_kind", 1)
    mlp, linear = random_mlp(recipe, dtype=torch.float32), random_linear(recipe, torch.float32)
    single = MLPMapper.from_weights("residual_values", mlp, linear)
    # layer 1: 4 heads of width 2, layer 2: 2 of 4; p is 6 a selected layer, and 8 for the native layer
    p = {("key", 1): 20, ("key", 2): 14, ("value", 1): 14, ("value", 2): 20}
    heads, width = {1: 4, 2: 2}, {1: 2, 2: 4}
    n_linear = sum(heads[layer] * p[kind, layer] * width[layer] for kind, layer in p)
    n_mlp = sum(heads[i] * (p["value", i] * 5 + 5 * 3 + 3 * width[i]) for i in (1, 2))
    n_bias = sum(heads[i] * (2 * width[i] + 5 + 3 + width[i]) + p["value", i] for i in (1, 2))
    assert single.n_weights == n_linear + n_mlp
    assert single.nbytes == 4 * (n_linear + n_mlp + n_bias)
    half = single.to(dtype=torch.bfloat16)
    assert half.n_weights == single.n_weights
    assert half.nbytes == 2 * (n_linear + n_mlp) + 4 * n_bias
    source, native = noise(SOURCE_SHAPE, 2, 7, 10), noise(TARGET_SHAPE[:1], 2, 7, 20)
    got, expected = (
        m.map_layer(2, source.keys, source.values, native.keys, native.values) for m in (half, single)
    )
    for mine, theirs in zip(got, expected, strict=True):
        assert mine.dtype == torch.float32
        # rounded to 8 bits before each of three products: a few 2⁻⁸ of the largest output
        assert float((mine - theirs).abs().max()) < 6 * 2**-8 * float(theirs.abs().max())
    assert half.to(dtype=torch.float32).tensors()["mlp.value.1.0.weight"].dtype == torch.float32


def test_centred_features_lose_nothing_of_a_large_mean_to_bfloat16() -> None:
    """Features of mean 500 and deviation 1: bfloat16 holds them to within 2 as they are."""
    recipe = recipe_of("head_local")
    plain = random_mlp(recipe, dtype=torch.float32, centred=False)
    shifted = {
        kind: tuple(
            HeadNetworks(n.weights, n.biases, torch.full((len(n.weights[0]), n.weights[0].shape[1]), -500.0))
            for n in plain.networks[kind]
        )
        for kind in KINDS
    }
    source = noise(SOURCE_SHAPE, 1, 50, 10)
    small = [tuple(t.float() for t in layers) for layers in (source.keys, source.values)]
    large = [tuple(t + 500 for t in layers) for layers in small]
    expected = MLPMapper.from_weights("full", plain).map_layer(2, *small)[0]
    mapper = MLPMapper.from_weights("full", MLPWeights(recipe, shifted)).to(dtype=torch.bfloat16)
    got = mapper.map_layer(2, *large)[0]
    assert float((got - expected).abs().max()) < 6 * 2**-8 * float(expected.abs().max())


@pytest.mark.parametrize("support", ["full_head", "head_local"])
def test_first_layers_lie_in_memory_as_they_are_applied(support: str) -> None:
    mapper = MLPMapper.from_weights("full", random_mlp(recipe_of(support)))
    for moved in (mapper, mapper.to(dtype=torch.float32)):
        weight = moved.tensors()["mlp.key.1.0.weight"]
        packed = weight.transpose(0, 1) if support == "full_head" else weight
        assert packed.is_contiguous()


def test_what_does_not_belong_together_is_refused() -> None:
    recipe = recipe_of()
    mlp = random_mlp(recipe)
    with pytest.raises(UnknownName, match="Did you mean 'residual'"):
        MLPMapper.from_weights("residul", mlp)
    with pytest.raises(MapperMismatch, match="form 'values_only' needs linear weights for each key"):
        MLPMapper.from_weights("values_only", mlp)
    with pytest.raises(MapperMismatch, match="form 'full' needs mlp weights for each key"):
        MLPMapper.from_weights("full", random_mlp(recipe, kinds=("value",)))
    native = random_linear(recipe_of(native_layers=1))
    with pytest.raises(MapperMismatch, match="the linear part has native_layers=1, the networks 0"):
        MLPMapper.from_weights("residual", mlp, native)
    narrow = replace(recipe, regressors="both_kinds")
    with pytest.raises(
        MapperMismatch,
        match=r"mlp weights for the keys of target layer 0: .* \(2, 6, 4\); the recipe needs \(2, 12, 4\)",
    ):
        MLPMapper.from_weights("full", MLPWeights(narrow, mlp.networks))


def test_trained_networks_on_top_of_a_linear_map_come_closer_than_it_alone() -> None:
    recipe = recipe_of("head_local")
    source = noise(SOURCE_SHAPE, 8, 30, 10)
    linear = random_linear(recipe, torch.float32)
    truth: dict[tuple[str, int], Tensor] = {}

    def rows_for(kind: str, layer: int) -> TensorRows:
        x = recipe.gather(kind, layer, source.keys, source.values).float()
        weight, bias = linear.weight[kind][layer], linear.bias[kind][layer]
        y = x @ weight + bias.unsqueeze(1) + x[..., :1].abs()
        truth[kind, layer] = y
        return residual_rows(TensorRows({"fit": x}, {"fit": y}), weight, bias)

    settings = MLPSettings(hidden=(16,), epochs=20, batch_size=32, learning_rate=2e-2, standardise=True)
    mlp = train_mlp(rows_for, recipe, settings)
    mapper = MLPMapper.from_weights("residual", mlp, linear)
    for layer, (heads, width) in enumerate(TARGET_SHAPE):
        for kind, got in zip(KINDS, mapper.map_layer(layer, source.keys, source.values), strict=True):
            y = truth[kind, layer].view(heads, 8, 30, width).transpose(0, 1)
            missed = recipe.gather(kind, layer, source.keys, source.values)[..., :1].abs().square().mean()
            assert float((got - y).square().mean()) < 0.2 * float(missed)
