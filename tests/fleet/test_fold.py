"""Two linear maps folded into one give what they give one after the other."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from kvmap.errors import KvmapError
from kvmap.fit.features import KINDS, REGRESSORS, SUPPORTS, CacheShape, Recipe
from kvmap.fit.linear import LinearWeights, r2_of
from kvmap.fleet import fold, folded_recipe
from kvmap.mappers import IdentityMapper, LinearMapper, MapperMismatch
from kvmap.mappers.base import FittedFor
from kvmap.models.identity import ModelIdentity
from tests.fit.caches import random_cache

A: CacheShape = ((2, 3), (2, 3), (2, 3))
B: CacheShape = ((2, 4), (2, 4))
C: CacheShape = ((2, 2), (2, 2), (2, 2))
UNEVEN_A: CacheShape = ((2, 3), (4, 2), (1, 5))
UNEVEN_B: CacheShape = ((4, 2), (1, 3))
UNEVEN_C: CacheShape = ((1, 4), (2, 2), (4, 1))


def mapper_of(
    source: CacheShape, target: CacheShape, support: str, regressors: str, seed: int
) -> LinearMapper:
    """Random weights over a random choice of layers, keys' and values' apart, in no order."""
    generator = torch.Generator().manual_seed(seed)

    def choice() -> tuple[tuple[int, ...], ...]:
        drawn = (
            torch.randperm(len(source), generator=generator)[: 1 + i % 2].tolist() for i in range(len(target))
        )
        return tuple(tuple(layers) for layers in drawn)

    recipe = Recipe(source, target, support, {kind: choice() for kind in KINDS}, regressors)
    weight, bias = {}, {}
    for kind in KINDS:
        sizes = [(heads, recipe.n_features(kind, i), width) for i, (heads, width) in enumerate(target)]
        weight[kind] = tuple(torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes)
        bias[kind] = tuple(torch.randn(one, generator=generator, dtype=torch.float64) for one in target)
    return LinearMapper(LinearWeights(recipe, weight, bias))


@pytest.mark.parametrize("shapes", [(A, B, C), (UNEVEN_A, UNEVEN_B, UNEVEN_C)], ids=["alike", "uneven"])
@pytest.mark.parametrize(("first", "second"), list(product(SUPPORTS, SUPPORTS)))
@pytest.mark.parametrize("regressors", list(product(REGRESSORS, REGRESSORS)))
def test_a_folded_map_is_both_one_after_the_other(shapes, first, second, regressors) -> None:
    a, b, c = shapes
    there, on = mapper_of(a, b, first, regressors[0], 1), mapper_of(b, c, second, regressors[1], 2)
    kv = random_cache(a, 2, 5, torch.Generator().manual_seed(3))
    wanted, got = on.map(there.map(kv)), fold(there, on).map(kv)
    for kind in ("keys", "values"):
        for x, y in zip(getattr(wanted, kind), getattr(got, kind), strict=True):
            # float64 sums of some hundred products of order 1, added in another order
            torch.testing.assert_close(y, x, rtol=1e-10, atol=1e-10)
    assert not got.exact


def test_head_local_maps_of_like_heads_stay_head_local() -> None:
    there, on = mapper_of(A, B, "head_local", "own_kind", 1), mapper_of(B, C, "head_local", "own_kind", 2)
    folded = fold(there, on)
    assert folded.recipe.support == "head_local"
    assert folded.n_weights == sum(t.numel() for name, t in folded.tensors().items() if "weight" in name)
    uneven = folded_recipe(
        mapper_of(UNEVEN_A, UNEVEN_B, "head_local", "own_kind", 1).recipe,
        mapper_of(UNEVEN_B, UNEVEN_C, "head_local", "own_kind", 2).recipe,
    )
    assert uneven.support == "full_head"


def test_a_folded_map_reads_only_layers_that_feed_what_it_needs() -> None:
    one = Recipe(A, B, "full_head", {"key": ((0,), (2,)), "value": ((1,), (1,))})
    two = Recipe(B, C, "full_head", {"key": ((0,), (1,), (1, 0)), "value": ((0,), (0,), (0,))})
    folded = folded_recipe(one, two)
    assert folded.selection["key"] == ((0,), (2,), (0, 2))
    assert folded.selection["value"] == ((1,), (1,), (1,))


def test_moments_give_the_r2_of_a_folded_map_of_real_caches(mappers, moments) -> None:
    """The best direct linear map cannot miss more of the rows it was fitted on than the way round."""
    folded = fold(mappers["a", "b"], mappers["b", "c"])
    round_about = r2_of(folded, moments["a", "c"], "fit")
    direct = r2_of(mappers["a", "c"], moments["a", "c"], "fit")
    for kind in KINDS:
        assert torch.isfinite(round_about[kind]).all()
        assert round_about[kind].mean() < direct[kind].mean()


def identity(name: str) -> ModelIdentity:
    fields = dict.fromkeys(ModelIdentity.__dataclass_fields__, name)
    return ModelIdentity(**fields)


def test_a_folded_map_is_known_to_be_of_a_and_c() -> None:
    there, on = mapper_of(A, B, "banded", "own_kind", 1), mapper_of(B, C, "banded", "own_kind", 2)
    there.fitted_for = FittedFor(identity("a"), identity("b"), "strip")
    on.fitted_for = FittedFor(identity("b"), identity("c"), "strip")
    assert fold(there, on).fitted_for == FittedFor(identity("a"), identity("c"), "strip")
    on.fitted_for = FittedFor(identity("other"), identity("c"), "strip")
    with pytest.raises(MapperMismatch, match="middle"):
        fold(there, on)
    on.fitted_for = FittedFor(identity("b"), identity("c"), "coupled")
    with pytest.raises(MapperMismatch, match="rope: 'strip' of the first is not 'coupled'"):
        fold(there, on)


def test_maps_that_do_not_fold_are_refused() -> None:
    there, on = mapper_of(A, B, "full_head", "own_kind", 1), mapper_of(B, C, "full_head", "own_kind", 2)
    with pytest.raises(MapperMismatch, match="not of one model B"):
        fold(there, there)
    with pytest.raises(KvmapError, match="'identity'; only plain linear maps fold"):
        # the wrong type is what is refused
        fold(there, IdentityMapper(B, B))  # type: ignore[arg-type]
    native = Recipe(B, C, "full_head", dict.fromkeys(KINDS, ((0,),) * 3), "own_kind", 1)
    weight = {
        kind: tuple(
            torch.zeros(heads, native.n_features(kind, i) if i else 0, d) for i, (heads, d) in enumerate(C)
        )
        for kind in KINDS
    }
    bias = {kind: tuple(torch.zeros(one) for one in C) for kind in KINDS}
    with pytest.raises(KvmapError, match="native_layers=1"):
        fold(there, LinearMapper(LinearWeights(native, weight, bias)))
    assert fold(there, on).target_shape == C
