from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from kvmap.diagnostics import first_token as room
from kvmap.diagnostics.first_token import first_token_metrics, first_token_rows
from kvmap.errors import KvmapError
from kvmap.fit.features import Recipe, both, geometry_shape
from kvmap.fit.linear import LinearWeights
from kvmap.fit.view import cache_view
from kvmap.mappers import (
    BiasOnlyMapper,
    FittedFor,
    IdentityMapper,
    LinearMapper,
    MapperMismatch,
    RawMapper,
)
from kvmap.models.capture import prefill
from kvmap.models.pair import LoadedModel, ModelPair
from tests.tiny_random_models import FAMILIES, random_ids

IDS = random_ids(7, 5)
IDS[:3, 0] = 9  # one token begins three sequences


@pytest.fixture(scope="module")
def pair():
    source = LoadedModel.from_model(FAMILIES["llama_yarn"](seed=1, n_layers=3), name="source")
    return ModelPair(source, LoadedModel.from_model(FAMILIES["llama"](seed=2), name="target"))


@pytest.fixture(scope="module")
def mappers(pair):
    source, target = (geometry_shape(m.geometry) for m in (pair.source, pair.target))
    generator = torch.Generator().manual_seed(0)
    bias = {kind: [torch.randn(shape, generator=generator) for shape in target] for kind in ("key", "value")}
    return {"raw": RawMapper(source, target), "bias_only": BiasOnlyMapper(source, target, bias)}


def by_loops(pair, mapper, rope, row):
    """Sequence by sequence, each read whole; at position 0 a rotation is its factor alone."""
    name = "keys" if row["kind"] == "key" else "values"
    error = found_norm = true_norm = 0.0
    for ids in IDS:
        source, target = prefill(pair.source, ids[None]), prefill(pair.target, ids[None])
        if rope != "coupled":
            source, target = source.strip(), target.strip()
        mapped = mapper.map(replace(source, rotations=None))
        for x, y in zip(
            getattr(mapped, name)[row["layer"]][0, row["head"], 0].tolist(),
            getattr(target, name)[row["layer"]][0, row["head"], 0].tolist(),
            strict=True,
        ):
            error, found_norm, true_norm = error + (x - y) ** 2, found_norm + x * x, true_norm + y * y
    return error / true_norm, math.sqrt(found_norm / true_norm)


@pytest.mark.parametrize("rope", ["strip", "coupled", "no_rerotate"])
@pytest.mark.parametrize("kind", ["raw", "bias_only"])
def test_errors_are_those_of_a_plain_loop_over_whole_sequences(pair, mappers, kind, rope):
    rows = first_token_rows(pair, mappers[kind], IDS, rope)
    assert len(rows) == len({(r["layer"], r["head"], r["kind"]) for r in rows}) == 2 * 2 * 2
    for row in rows:
        expected = by_loops(pair, mappers[kind], rope, row)
        # float32 forwards of one token and of five
        assert (row["relative_error"], row["sink_norm_ratio"]) == pytest.approx(expected, rel=1e-4)


def native_mappers(pair):
    """That read, or leave alone, the target's first layer."""
    source, target = (geometry_shape(m.geometry) for m in (pair.source, pair.target))
    generator = torch.Generator().manual_seed(0)
    recipe = Recipe(source, target, "head_local", both(((), (2, 0))), "both_kinds", native_layers=1)
    sizes = [0, recipe.n_features("key", 1)]
    weight = {
        kind: tuple(
            torch.randn(heads, p, width, generator=generator)
            for p, (heads, width) in zip(sizes, target, strict=True)
        )
        for kind in ("key", "value")
    }
    bias = {kind: tuple(torch.randn(s, generator=generator) for s in target) for kind in ("key", "value")}
    return {
        "linear": LinearMapper(LinearWeights(recipe, weight, bias)),
        "bias_only": BiasOnlyMapper(source, target, bias, 1),
        "raw": RawMapper(source, target, 1),
    }


@pytest.mark.parametrize("rope", ["strip", "coupled", "no_rerotate"])
@pytest.mark.parametrize("kind", ["linear", "raw", "bias_only"])
def test_layers_that_the_target_computes_itself_get_no_rows(pair, kind, rope):
    mapper = native_mappers(pair)[kind]
    rows = first_token_rows(pair, mapper, IDS, rope)
    assert sorted({(r["layer"], r["head"], r["kind"]) for r in rows}) == [
        (1, head, name) for head in range(2) for name in ("key", "value")
    ]
    assert len(rows) == 4
    for row in rows:
        name = "keys" if row["kind"] == "key" else "values"
        error = norm = 0.0
        for ids in IDS:
            source, target = (cache_view(prefill(m, ids[None]), rope) for m in (pair.source, pair.target))
            native = replace(target, keys=target.keys[:1], values=target.values[:1])
            mapped = mapper.map(source, native)
            x, y = (getattr(kv, name)[1][0, row["head"], 0].double() for kv in (mapped, target))
            error, norm = error + float(((x - y) ** 2).sum()), norm + float((y * y).sum())
        # float32 forwards of one token and of five
        assert row["relative_error"] == pytest.approx(error / norm, rel=1e-4)


def test_chunks_change_nothing(monkeypatch, pair, mappers):
    whole = first_token_rows(pair, mappers["raw"], IDS)
    monkeypatch.setattr(room, "TOKENS_AT_ONCE", 2)
    chunked = first_token_rows(pair, mappers["raw"], IDS)
    for one, other in zip(whole, chunked, strict=True):
        assert one["relative_error"] == pytest.approx(other["relative_error"], rel=1e-5)


def test_one_model_at_a_time_is_released_before_the_other_reads(monkeypatch, pair, mappers):
    events = []
    expected = first_token_rows(pair, mappers["raw"], IDS)
    monkeypatch.setattr(pair, "release", lambda side: events.append(f"release {side}"))
    monkeypatch.setattr(
        room, "prefill", lambda model, ids: events.append(model.identity.name) or prefill(model, ids)
    )
    assert first_token_rows(pair, mappers["raw"], IDS, sequential=True) == expected
    assert events == ["release target", "source", "release source", "target"]


def test_each_distinct_token_is_read_once_and_alone(monkeypatch, pair, mappers):
    seen = []
    monkeypatch.setattr(room, "prefill", lambda model, ids: seen.append(ids.tolist()) or prefill(model, ids))
    first_token_rows(pair, mappers["raw"], IDS)
    assert seen == [[[token] for token in sorted(set(IDS[:, 0].tolist()))]] * 2


@pytest.mark.parametrize("rope", ["strip", "coupled"])
def test_the_identity_of_a_model_with_itself_makes_no_error(pair, rope):
    both = ModelPair(pair.source, pair.source)
    rows = first_token_rows(both, IdentityMapper(geometry_shape(pair.source.geometry)), IDS, rope)
    assert {(row["relative_error"], row["sink_norm_ratio"]) for row in rows} == {(0.0, 1.0)}
    metrics = first_token_metrics(rows)
    assert set(metrics) == {f"diagnose/first_token/mapped/relative_error_{kind}" for kind in ("key", "value")}
    assert {(metric.value, metric.n) for metric in metrics.values()} == {(0.0, 3 * 2)}


def test_metrics_are_means_over_layers_and_heads_that_have_a_number():
    errors = [0.5, 0.25, math.nan]
    rows = [{"layer": n, "head": 0, "kind": "key", "relative_error": error} for n, error in enumerate(errors)]
    metrics = first_token_metrics(rows, "raw")
    assert metrics["diagnose/first_token/raw/relative_error_key"].value == 0.375
    assert metrics["diagnose/first_token/raw/relative_error_key"].n == 2
    assert len(metrics) == 1


def test_a_target_of_zeros_has_no_relative_error():
    assert all(math.isnan(x) for x in room._ratios(torch.tensor([1.0, 1.0, 0.0])).values())


def test_no_tokens_and_a_mapper_fitted_for_something_else_are_refused(pair, mappers):
    with pytest.raises(KvmapError, match=r"shape \(2, 0\)"):
        first_token_rows(pair, mappers["raw"], IDS[:2, :0])
    own = (geometry_shape(m.geometry) for m in (pair.source, pair.target))
    fitted = RawMapper(*own)
    fitted.fitted_for = FittedFor(pair.source_identity, pair.target_identity, "coupled")
    with pytest.raises(MapperMismatch, match="rope: 'coupled'"):
        first_token_rows(pair, fitted, IDS, "strip")
