from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from sklearn.metrics import r2_score

from kvmap.diagnostics.reconstruction import probe_rows, r2_metrics, r2_rows
from kvmap.errors import KvmapError
from kvmap.fit.features import Layout, Recipe, both
from kvmap.fit.linear import Penalty, fit_linear
from kvmap.fit.pair_moments import PairMoments, full_tables, selected_tables
from kvmap.fit.selection import probe_r2
from kvmap.mappers import BiasOnlyMapper, LinearMapper, Mapper, RandomMapper, RawMapper
from kvmap.models.cache import KVCache

SOURCE = ((2, 3), (2, 3), (2, 3))
TARGET = ((2, 3), (2, 3))


def cache(shape, like=None, seed=0):
    """A stripped cache of 4 × 40 tokens; `like` makes it depend linearly on another, plus noise."""
    generator = torch.Generator().manual_seed(seed)

    def tensors(source):
        noise = [torch.randn(4, heads, 40, width, generator=generator) + 2 for heads, width in shape]
        return tuple(noise if source is None else [0.5 * n + source[i + 1] for i, n in enumerate(noise)])

    positions = torch.arange(40).expand(4, -1)
    keys, values = (
        tensors(None if like is None else part) for part in (like and like.keys, like and like.values)
    )
    return KVCache(keys, values, positions, torch.ones(4, 40, dtype=torch.bool), None)


@pytest.fixture(scope="module")
def caches():
    found = {}
    for seed, split in enumerate(("fit", "held_out")):
        source = cache(SOURCE, seed=seed)
        found[split] = (source, cache(TARGET, like=source, seed=10 + seed))
    return found


def moments_of(caches, native=0, tables=full_tables):
    layout = Layout(SOURCE, TARGET, native)
    made = PairMoments.zeros(layout, tables(layout))
    for split, (source, target) in caches.items():
        made.update(split, source, target)
    return made


@pytest.fixture(scope="module")
def moments(caches):
    return moments_of(caches)


def fit(moments, selection, support, ridge_lambda, native=0):
    recipe = Recipe(SOURCE, TARGET, support, both(selection), native_layers=native)
    return fit_linear(moments, recipe, Penalty(ridge_lambda, 10.0 if support == "banded" else None))


@pytest.fixture(scope="module")
def mappers(moments):
    fitted = fit(moments, ((0, 1), (1, 2)), "full_head", 0.01)
    return {
        "full_head": LinearMapper(fitted),
        "head_local": LinearMapper(fit(moments, ((1,), (2,)), "head_local", 1.0)),
        "banded": LinearMapper(fit(moments, ((1, 0), (2,)), "banded", 1.0)),
        "bias_only": BiasOnlyMapper.from_moments(moments),
        "raw": RawMapper(SOURCE, TARGET),
        "random": RandomMapper.from_fitted(fitted, moments, seed=1),
    }


def assert_sklearns(rows, mapper, caches):
    for row in rows:
        source, target = caches[row["split"]]
        count = mapper.native_layers
        native = replace(target, keys=target.keys[:count], values=target.values[:count]) if count else None
        mapped = mapper.map(source, native)
        name = "keys" if row["kind"] == "key" else "values"
        true, found = (
            getattr(kv, name)[row["layer"]][:, row["head"]].flatten(0, 1).double().numpy()
            for kv in (target, mapped)
        )
        # One number per head: channels weighted by their variance, as a sum of squares weighs them.
        expected = r2_score(true, found, multioutput="variance_weighted")
        assert row["r2"] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("kind", ["full_head", "head_local", "banded", "bias_only", "raw", "random"])
def test_r2_from_moments_is_sklearns_on_the_mapped_rows(mappers, moments, caches, kind):
    rows = r2_rows(mappers[kind], moments)
    assert len(rows) == 2 * 2 * 2 * 2
    assert_sklearns(rows, mappers[kind], caches)


@pytest.mark.parametrize("kind", ["full_head", "head_local", "banded", "bias_only", "raw", "random"])
def test_layers_that_the_target_computes_itself_get_no_rows(caches, kind):
    moments = moments_of(caches, native=1)
    support = kind if kind in ("head_local", "banded") else "full_head"
    fitted = fit(moments, ((), (1, 2)), support, 0.01, native=1)
    mapper = LinearMapper(fitted)
    if kind == "bias_only":
        mapper = BiasOnlyMapper.from_moments(moments, 1)
    elif kind == "raw":
        mapper = RawMapper(SOURCE, TARGET, 1)
    elif kind == "random":
        mapper = RandomMapper.from_fitted(fitted, moments, seed=1)
    rows = r2_rows(mapper, moments)
    assert [(row["layer"], row["head"]) for row in rows] == [(1, 0), (1, 1)] * 4
    assert_sklearns(rows, mapper, caches)
    metrics = r2_metrics(rows)
    assert {metric.n for metric in metrics.values()} == {2}
    assert not any(math.isnan(metric.value) for metric in metrics.values())


def test_moments_of_the_selected_layers_alone_judge_the_same(caches):
    recipe = Recipe(SOURCE, TARGET, "head_local", both(((), (1, 2))), native_layers=1)
    moments = moments_of(caches, 1, lambda _: selected_tables(recipe))
    for mapper in (
        LinearMapper(fit_linear(moments, recipe, Penalty())),
        BiasOnlyMapper.from_moments(moments, 1),
    ):
        assert_sklearns(r2_rows(mapper, moments), mapper, caches)


def test_the_fitted_mapper_beats_its_controls_and_the_mean_scores_nothing(mappers, moments):
    means = {kind: r2_metrics(r2_rows(mapper, moments), kind) for kind, mapper in mappers.items()}
    held_out = {kind: metrics[f"diagnose/held_out/{kind}/r2_value"].value for kind, metrics in means.items()}
    assert held_out["full_head"] > 0.7
    assert max(held_out[kind] for kind in ("bias_only", "random")) < 0.05
    assert means["bias_only"]["diagnose/fit/bias_only/r2_key"].value == pytest.approx(0, abs=1e-6)
    assert means["full_head"]["diagnose/fit/full_head/r2_key"].n == 4


def test_probe_rows_rank_the_layer_each_target_layer_was_made_from_first(moments):
    r2 = probe_r2(moments)
    rows = probe_rows(r2)
    assert len(rows) == 3 * 3 * 2
    by_layers = {(r["source_layer"], r["target_layer"]): r["r2"] for r in rows if r["kind"] == "both"}
    for target in range(2):
        assert max(range(3), key=lambda source, t=target: by_layers[source, t]) == target + 1
    mean = sum(float(r2[kind][1, 0].mean()) for kind in ("key", "value")) / 2
    assert by_layers[1, 0] == pytest.approx(mean)


def test_probes_leave_out_the_layers_that_the_target_computes_itself(caches, moments):
    rows = probe_rows(probe_r2(moments_of(caches, native=1)))
    expected = [row for row in probe_rows(probe_r2(moments)) if row["target_layer"] == 1]
    assert len(rows) == 3 * 3
    for row, want in zip(rows, expected, strict=True):
        assert row == {**want, "r2": pytest.approx(want["r2"], rel=1e-12)}


def test_a_mapper_that_is_not_linear_is_refused(moments):
    class Curved(Mapper):
        kind = "curved"
        map_layer = settings = tensors = from_state = None

    with pytest.raises(KvmapError, match="'curved' is not linear"):
        r2_rows(Curved(SOURCE, TARGET), moments)
