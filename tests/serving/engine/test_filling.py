"""However a cache arrives, its pages are those of mapping it in one go. Pages and model are stand-ins."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache

import pytest
import torch
from torch import Tensor

from kvmap.fit.features import Recipe, both, cache_shape
from kvmap.fit.linear import Penalty, fit_linear
from kvmap.mappers import LinearMapper, Mapper
from kvmap.mappers.base import FittedFor
from kvmap.mappers.identity import IdentityMapper
from kvmap.models.cache import KVCache
from kvmap.models.capture import prefill
from kvmap.models.identity import ModelIdentity
from kvmap.serving.compatibility import EngineFacts, Incompatible
from kvmap.serving.manifest import Manifest
from tests.tiny_random_models import random_ids
from tests.transfer.fitted_maps import FORMS, fitted_mapper, moments, source_model, target_model

pytest.importorskip("vllm")

from kvmap.serving.vllm.column_map import ColumnMap
from kvmap.serving.vllm.filling import Filling
from kvmap.serving.vllm.heads import KeptHeads
from kvmap.serving.vllm.loading import Arrived
from kvmap.serving.vllm.mapper_files import EngineMapper
from kvmap.serving.vllm.messages import Take
from kvmap.serving.vllm.own_tokens import TargetParts

N, STOP, NATIVE_HEAD = 25, 24, 2
SMALL, LARGE = (ModelIdentity(name, name, name, "t", name, "float32") for name in ("small", "large"))
LOWEST = "the lowest source layers alone"


class Pages:
    """One layer's pages, as plain tensors by token."""

    def __init__(self, shape: tuple[int, int]) -> None:
        self.dtype, self.device = torch.float32, torch.device("cpu")
        self.keys, self.values = (torch.full((N, *shape), torch.nan) for _ in range(2))
        self.times = torch.zeros(N, dtype=torch.long)

    def write(self, _block_ids: Tensor, start: int, keys: Tensor, values: Tensor) -> None:
        stop = start + len(keys)
        self.keys[start:stop], self.values[start:stop] = keys, values
        self.times[start:stop] += 1

    def read(self, _block_ids: Tensor, start: int, stop: int) -> tuple[Tensor, Tensor]:
        return self.keys[start:stop].transpose(0, 1)[None], self.values[start:stop].transpose(0, 1)[None]


class Native:
    """The target's own layers: what it caches of the prompt is known."""

    def __init__(self, kv: KVCache) -> None:
        self.kv = kv

    def run(
        self, token_ids: Tensor, start: int, n_first: int, n_layers: int, past: object
    ) -> tuple[list[tuple[Tensor, Tensor]], list[tuple[Tensor, Tensor]]]:
        def of(layer: int, n: int) -> tuple[Tensor, Tensor]:
            return self.kv.keys[layer][:, :, start : start + n], self.kv.values[layer][
                :, :, start : start + n
            ]

        below = [of(layer, len(token_ids)) for layer in range(n_layers)]
        above = [of(layer, n_first) for layer in range(n_layers, self.kv.n_layers)]
        return below, above if n_first else []


@cache
def source_cache() -> KVCache:
    return prefill(source_model(), random_ids(1, N, seed=3))


@cache
def target_cache(form: str) -> KVCache:
    return source_cache() if form == "identity" else prefill(target_model(), random_ids(1, N, seed=3))


@cache
def mapper_of(form: str) -> Mapper:
    if form == "identity":
        mapper: Mapper = IdentityMapper(cache_shape(source_cache()))
    elif form == LOWEST:
        sums = moments("strip", "llama_llama3", 0)
        recipe = Recipe(sums.source_shape, sums.target_shape, "full_head", both(((0,), (1,), (0,))))
        mapper = LinearMapper(fit_linear(sums, recipe, Penalty(0.01)))
    else:
        mapper = fitted_mapper(form)
    mapper.fitted_for = FittedFor(SMALL, LARGE, "strip")
    return mapper


def arriving(cuts: Sequence[int], start: int) -> list[Arrived]:
    """All parts in the order in which they come, of runs that end at `cuts`."""
    kv = source_cache()
    runs = list(zip([0, *cuts], [*cuts, N], strict=True))
    return [
        Arrived(layer, low, high, kv.keys[layer][:, :, low:high], kv.values[layer][:, :, low:high])
        for low, high in runs
        if low < STOP and high > start
        for layer in range(kv.n_layers)
    ]


def begun(form: str, n_own: int, chunk_tokens: int) -> tuple[Filling, list[Pages]]:
    mapper, own, source = mapper_of(form), target_cache(form), source_cache()
    shape = cache_shape(own)
    assert own.rotations is not None
    assert source.rotations is not None
    facts = EngineFacts(LARGE, shape, ("default",) * len(shape), own.rotations, "float32", 32)
    ids = tuple(random_ids(1, N, seed=3)[0].tolist())
    manifest = Manifest("n", SMALL, "g", ids, cache_shape(source), "float32", source.rotations)
    pages = [Pages(layer) for layer in shape]
    for layer, each in enumerate(pages):
        each.keys[:n_own] = own.keys[layer][0, :, :n_own].transpose(0, 1)
        each.values[:n_own] = own.values[layer][0, :, :n_own].transpose(0, 1)
    engine_mapper = EngineMapper(mapper, "strip", NATIVE_HEAD)
    parts = TargetParts(facts, engine_mapper, pages, lambda: Native(own), KeptHeads())
    take = Take("r", manifest, ids[:STOP], n_own, (0,), 0.0)
    filling = Filling(parts, take, chunk_tokens)
    filling.begin()
    return filling, pages


def expected(form: str, n_own: int) -> list[tuple[Tensor, Tensor]]:
    """Of every layer keys and values (STOP, heads, width), mapped in one go."""
    mapper, own, source = mapper_of(form), target_cache(form), source_cache()
    assert own.rotations is not None
    assert source.rotations is not None
    columns = ColumnMap(mapper, "strip", source.rotations, own.rotations, torch.float32)
    native = [(own.keys[layer], own.values[layer]) for layer in range(mapper.native_layers)]
    mapped = columns.map(source.keys, source.values, 0, native)
    n_exact = max(n_own, NATIVE_HEAD)
    found = []
    for layer in range(own.n_layers):
        pair = []
        for kind, held in ((mapped.keys, own.keys[layer]), (mapped.values, own.values[layer])):
            whole = held.clone() if layer < mapper.native_layers else kind[layer].clone()
            whole[:, :, :n_exact] = held[:, :, :n_exact]
            pair.append(whole[0, :, :STOP].transpose(0, 1))
        found.append((pair[0], pair[1]))
    return found


@pytest.mark.parametrize("form", [*sorted(FORMS), "identity", LOWEST])
@pytest.mark.parametrize("n_own", [0, 8])
@pytest.mark.parametrize("seed", range(3))
def test_pages_are_those_of_mapping_in_one_go(form: str, n_own: int, seed: int) -> None:
    """Any runs, any number of parts at a time, any pieces."""
    draw = random.Random(seed)
    cuts = sorted(draw.sample(range(1, N), draw.randrange(5)))
    parts = arriving(cuts, n_own)
    filling, pages = begun(form, n_own, chunk_tokens=draw.choice([3, 7, 100]))
    while parts:
        n_come = draw.randrange(1, 6)
        for part in parts[:n_come]:
            filling.add(part)
        del parts[:n_come]
        for _ in range(draw.randrange(4)):
            filling.work()
    while filling.has_work:
        assert filling.work()
    assert not filling.work()
    filling.check_full()
    for layer, (keys, values) in enumerate(expected(form, n_own)):
        torch.testing.assert_close(pages[layer].keys[:STOP], keys, atol=2e-5, rtol=2e-5)
        torch.testing.assert_close(pages[layer].values[:STOP], values, atol=2e-5, rtol=2e-5)
        assert pages[layer].times.tolist() == [0] * n_own + [1] * (STOP - n_own) + [0] * (N - STOP)


def test_a_layer_is_mapped_as_soon_as_what_it_reads_has_come() -> None:
    filling, pages = begun(LOWEST, 0, chunk_tokens=100)
    first, second, *_ = arriving([], 0)
    filling.add(first)
    assert filling.work()
    assert not filling.work()
    assert [int(each.times[NATIVE_HEAD]) for each in pages] == [1, 0, 1]
    filling.add(second)
    assert filling.work()
    assert [int(each.times[NATIVE_HEAD]) for each in pages] == [1, 1, 1]
    filling.check_full()


@pytest.mark.parametrize("n_parts", [0, 1, 5])
def test_pages_that_are_not_full_are_refused(n_parts: int) -> None:
    filling, _ = begun("full-head", 0, chunk_tokens=100)
    for part in arriving([10], 0)[:n_parts]:
        filling.add(part)
    while filling.work():
        pass
    with pytest.raises(Incompatible, match="columns of layers came"):
        filling.check_full()


def test_a_layer_of_zeros_is_refused() -> None:
    filling, _ = begun("full-head", 0, chunk_tokens=100)
    (part, *_) = arriving([], 0)
    values = part.values.clone()
    values[:, :, -1] = 0
    with pytest.raises(Incompatible, match="values of source layer 0 are 0 at token 24"):
        filling.add(Arrived(part.layer, part.start, part.stop, part.keys, values))
