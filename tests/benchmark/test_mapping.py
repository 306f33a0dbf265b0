"""Mapping alone, by whatever path, is what a mapper and a rotation give."""

from __future__ import annotations

import pytest
import torch

from kvmap.benchmark.mapping import prepare_mapping
from kvmap.benchmark.random_models import random_mapper
from kvmap.fit.features import geometry_shape
from kvmap.mappers import RawMapper
from kvmap.models.capture import prefill
from kvmap.models.pair import LoadedModel
from tests.tiny_random_models import build, random_ids

PATHS = ("auto", "reference", "batched", "per_head", "per_head_stripped")


@pytest.fixture(scope="module")
def models():
    return [LoadedModel.from_model(build("qwen3", seed=seed, n_layers=3)) for seed in (1, 2)]


def cases(models, native_layers=0):
    shapes = [geometry_shape(model.geometry) for model in models]
    yield from (
        random_mapper(*shapes, 2, support, regressors=regressors, native_layers=native_layers, seed=3)
        for support in ("full_head", "head_local")
        for regressors in ("own_kind", "both_kinds")
    )
    yield RawMapper(*shapes, native_layers)


@pytest.mark.parametrize("native_layers", [0, 1])
def test_every_path_writes_the_mapped_cache(models, native_layers):
    source, target = models
    ids = random_ids(2, 7)
    source_kv = prefill(source, ids)
    native = prefill(target, ids, n_layers=native_layers) if native_layers else None
    for mapper in cases(models, native_layers):
        stripped = None if native is None else native.strip()
        wanted = mapper.map(source_kv.strip(), stripped).rotate(target.rotations(7))
        for path in PATHS:
            mapping = prepare_mapping(mapper, source_kv, target, native)
            mapping.call(path)()
            for layer in range(native_layers, 3):
                for got, want in (
                    (mapping.output.keys[layer], wanted.keys[layer]),
                    (mapping.output.values[layer], wanted.values[layer]),
                ):
                    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_a_copy_lies_elsewhere_and_maps_alike(models):
    source, target = models
    mapper = next(cases(models))
    mapping = prepare_mapping(mapper, prefill(source, random_ids(1, 5)), target)
    other = mapping.copy()
    assert other.source.keys[0].data_ptr() != mapping.source.keys[0].data_ptr()
    mapping.call("batched")()
    other.call("per_head")()
    torch.testing.assert_close(other.output.keys[2], mapping.output.keys[2], rtol=1e-5, atol=1e-5)
    written = sum(t.nbytes for t in (*mapping.output.keys.values(), *mapping.output.values.values()))
    assert mapping.nbytes == mapping.source.nbytes + written
