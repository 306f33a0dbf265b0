"""Mapping columns of pages gives what a hand-off in memory gives, whatever the mapper's kind."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from kvmap.fit.features import cache_shape
from kvmap.mappers import Mapper
from kvmap.mappers.identity import IdentityMapper
from kvmap.models.cache import KVCache
from kvmap.models.capture import prefill
from kvmap.serving.vllm.column_map import ColumnMap
from kvmap.transfer import transfer
from tests.tiny_random_models import random_ids
from tests.transfer.fitted_maps import FORMS, fitted_mapper, source_model, target_model

N_TOKENS = 25


@cache
def mapper_of(form: str) -> Mapper:
    if form == "identity":
        return IdentityMapper(cache_shape(source_cache()))
    return fitted_mapper(form)


def source_cache() -> KVCache:
    return prefill(source_model(), random_ids(1, N_TOKENS, seed=3))


def engine_map(
    mapper: Mapper, target: KVCache, rope: str, first: int, stop: int
) -> dict[str, list[torch.Tensor]]:
    """By kind, the mapped layers over columns first:stop."""
    source = source_cache()
    assert source.rotations is not None
    assert target.rotations is not None
    columns = ColumnMap(mapper, rope, source.rotations, target.rotations, target.keys[0].dtype)
    native = [
        (target.keys[layer][:, :, first:stop], target.values[layer][:, :, first:stop])
        for layer in range(mapper.native_layers)
    ]
    mapped = columns.map(
        [key[:, :, first:stop] for key in source.keys],
        [v[:, :, first:stop] for v in source.values],
        first,
        native,
    )
    assert (mapped.n_bad, mapped.n_clamped) == (0, 0)
    return {
        "keys": [mapped.keys[layer] for layer in columns.layers],
        "values": [mapped.values[layer] for layer in columns.layers],
    }


@pytest.mark.parametrize("form", sorted(FORMS))
@pytest.mark.parametrize(("first", "stop"), [(1, N_TOKENS - 1), (7, 12)])
def test_columns_equal_those_of_a_hand_off(form: str, first: int, stop: int) -> None:
    mapper, target = mapper_of(form), target_model()
    ids = random_ids(1, N_TOKENS, seed=3)
    handed = transfer(source_cache(), mapper, target, ids).kv
    found = engine_map(mapper, handed, "strip", first, stop)
    for number, layer in enumerate(range(mapper.native_layers, handed.n_layers)):
        torch.testing.assert_close(
            found["keys"][number], handed.keys[layer][:, :, first:stop], atol=2e-5, rtol=2e-5
        )
        torch.testing.assert_close(
            found["values"][number], handed.values[layer][:, :, first:stop], atol=2e-5, rtol=2e-5
        )


@pytest.mark.parametrize("form", [*sorted(FORMS), "identity"])
def test_a_layer_is_mapped_from_the_source_layers_it_needs_alone(form: str) -> None:
    """As they arrive: nothing of the layers above is there, and each layer is the same as in one go."""
    mapper, source = mapper_of(form), source_cache()
    target = source if form == "identity" else prefill(target_model(), random_ids(1, N_TOKENS, seed=3))
    assert source.rotations is not None
    assert target.rotations is not None
    columns = ColumnMap(mapper, "strip", source.rotations, target.rotations, torch.float32)
    native = [(target.keys[layer], target.values[layer]) for layer in range(mapper.native_layers)]
    whole = columns.map(source.keys, source.values, 0, native)
    needs = [columns.needs(layer) for layer in columns.layers]
    for layer, n in zip(columns.layers, needs, strict=True):
        assert 0 < n <= len(source.keys)
        alone = columns.map(source.keys[:n], source.values[:n], 0, native, [layer])
        assert list(alone.keys) == list(alone.values) == [layer]
        torch.testing.assert_close(alone.keys[layer], whole.keys[layer])
        torch.testing.assert_close(alone.values[layer], whole.values[layer])
        with pytest.raises(IndexError):
            columns.map(source.keys[: n - 1], source.values[: n - 1], 0, native, [layer])


def test_the_identity_map_gives_back_the_cache_within_rounding() -> None:
    source = source_cache()
    found = engine_map(mapper_of("identity"), source, "strip", 0, N_TOKENS)
    for got, wanted in zip(found["keys"], source.keys, strict=True):
        torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)
    for got, wanted in zip(found["values"], source.values, strict=True):
        assert torch.equal(got, wanted)


def test_numbers_that_are_not_finite_are_counted() -> None:
    mapper, source, target = (
        mapper_of("full-head"),
        source_cache(),
        prefill(target_model(), random_ids(1, 4, seed=3)),
    )
    assert source.rotations is not None
    assert target.rotations is not None
    keys = [key.clone() for key in source.keys]
    keys[0][0, 0, 3, 0] = float("nan")
    columns = ColumnMap(mapper, "strip", source.rotations, target.rotations, torch.float32)
    read = any(
        slot.layer == 0 for product in mapper.cache_map().products["key"].values() for slot in product.slots
    )
    assert (columns.map(keys, list(source.values), 0).n_bad > 0) == read
