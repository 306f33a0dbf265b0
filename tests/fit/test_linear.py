"""Maps from moments, against scikit-learn's Ridge and R² on explicit rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product

import numpy as np
import pytest
import torch
from sklearn.linear_model import Ridge
from sklearn.metrics import r2_score as sklearn_r2
from torch import Tensor

import kvmap.fit.linear as fit_linear_module
from kvmap.errors import UnknownName
from kvmap.fit.features import KINDS, REGRESSORS, SUPPORTS, CacheShape, Layout, Recipe, Selection, both
from kvmap.fit.linear import (
    Fallback,
    LinearWeights,
    Penalty,
    assembled,
    copying_weights,
    fit_heads,
    fit_linear,
    layer_cuts,
    output_variance,
    r2_of,
    systems,
)
from kvmap.fit.moments import MomentsError
from kvmap.fit.pair_moments import (
    PairMoments,
    calibration_rows,
    full_tables,
    head_local_tables,
    probe_tables,
    selected_tables,
)
from kvmap.fit.ridge import FewRowsWarning, RidgeError, TooFewRows
from kvmap.models.cache import KVCache
from tests.fit.caches import (
    GROUPED_TARGET_SHAPE,
    SOURCE_SHAPE,
    TARGET_SHAPE,
    UNEVEN_SOURCE_SHAPE,
    UNEVEN_TARGET_SHAPE,
    linear_image,
    moments_of,
    pair_of_caches,
    random_cache,
    stripped,
)
from tests.fit.oracles import bands, head_rows, regressors

SELECTION = ((0, 2), (1,))
ALL = ((0, 1, 2),) * 2
TARGETS = [TARGET_SHAPE, GROUPED_TARGET_SHAPE, ((1, 5), (3, 2))]
UNEVEN = (UNEVEN_SOURCE_SHAPE, UNEVEN_TARGET_SHAPE)
PAIRS = [*((SOURCE_SHAPE, shape) for shape in TARGETS), UNEVEN]
BAND_PENALTY = {"full_head": None, "head_local": None, "banded": 7.0}


def recipe_of(
    support: str = "full_head",
    selection: Selection = SELECTION,
    shape: CacheShape = TARGET_SHAPE,
    regressors: str = "own_kind",
    native: int = 0,
) -> Recipe:
    return Recipe(SOURCE_SHAPE, shape, support, both(selection), regressors, native)


def moments_between(source: KVCache, target: KVCache, rows: Tensor | None = None) -> PairMoments:
    """Of a fit split alone, all source layers and heads."""
    return PairMoments.zeros(Layout(SOURCE_SHAPE, TARGET_SHAPE)).update("fit", source, target, rows)


def heads_of(recipe: Recipe) -> Iterator[tuple[str, int, int]]:
    for kind, layer in product(KINDS, recipe.mapped_layers):
        for head in range(recipe.target_shape[layer][0]):
            yield kind, layer, head


def row_weights(shape: CacheShape, batch: int, tokens: int) -> dict[tuple[str, int], Tensor]:
    """Of mean 1, a fifth of them 0."""
    generator = torch.Generator().manual_seed(4)
    found = {}
    for kind in KINDS:
        for layer, (heads, _) in enumerate(shape):
            drawn = torch.rand(batch, heads, tokens, generator=generator, dtype=torch.float64)
            found[kind, layer] = torch.where(drawn < 0.2, 0.0, 2 * drawn)
    return found


def lambdas(penalty: Penalty, numbers: np.ndarray, x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """λ of each column as METHOD says it: by band, absolute or in units of the mean diagonal of S_xx."""
    own = penalty.own
    cross = own if penalty.cross is None else penalty.cross
    native = own if penalty.native is None else penalty.native
    found = np.array([own, cross, native])[numbers]
    if penalty.convention == "absolute":
        return found
    read = np.isfinite(found)
    centred = x - w @ x / w.sum()
    return found * (w[:, None] * centred**2).sum(0)[read].mean()


def sklearn_ridge(
    x: np.ndarray, y: np.ndarray, penalty: np.ndarray, w: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Weights (p, m) and intercepts of scikit-learn's Ridge; features of their own λ_j by rescaling."""
    read = np.isfinite(penalty)
    root = np.sqrt(penalty[read])
    oracle = Ridge(alpha=1.0, solver="svd").fit(x[:, read] / root, y, sample_weight=w)
    weight = np.zeros((x.shape[1], y.shape[1]))
    weight[read] = oracle.coef_.reshape(y.shape[1], -1).T / root[:, None]
    return weight, oracle.intercept_


def assert_ridge(
    fit: LinearWeights,
    source: KVCache,
    target: KVCache,
    penalty: Penalty,
    weights: dict[tuple[str, int], Tensor] | None = None,
) -> None:
    recipe = fit.recipe
    for kind, layer, head in heads_of(recipe):
        x = regressors(recipe, source, target, kind, layer, head)
        y = head_rows(target, kind, layer, head)
        w = np.ones(len(x)) if weights is None else weights[kind, layer][:, head].flatten().numpy()
        own = lambdas(penalty, bands(recipe, source, target, kind, layer, head), x, w)
        weight, intercept = sklearn_ridge(x, y, own, w)
        # normal equations against an SVD, condition numbers below 1,000 (native features nearly repeat
        # what the source says)
        scale = max(1.0, float(np.abs(weight).max()))
        np.testing.assert_allclose(fit.weight[kind][layer][head], weight, atol=1e-9 * scale)
        np.testing.assert_allclose(fit.bias[kind][layer][head], intercept, atol=1e-8 * scale)


@pytest.mark.parametrize("selection", [SELECTION, ALL])
@pytest.mark.parametrize("support", SUPPORTS)
def test_a_fast_fit_says_one_line(
    caplog: pytest.LogCaptureFixture, support: str, selection: Selection
) -> None:
    moments = moments_of(pair_of_caches())
    recipe = recipe_of(support, selection)
    with caplog.at_level("INFO", "kvmap.progress"):
        fit_linear(moments, recipe, Penalty())
    (line,) = caplog.messages
    count = len(systems(moments, recipe, Penalty()))
    assert line.startswith(f"fit: maps of target layers: {count} done in")


@pytest.mark.parametrize("support", SUPPORTS)
@pytest.mark.parametrize("shape", TARGETS)
@pytest.mark.parametrize("ridge_lambda", [0.01, 20.0])
def test_every_head_equals_scikit_learns_ridge(support: str, shape: CacheShape, ridge_lambda: float) -> None:
    source, target = pair_of_caches(shape)["fit"]
    moments = moments_of({"fit": (source, target)})
    penalty = Penalty(ridge_lambda, BAND_PENALTY[support])
    fit = fit_linear(moments, recipe_of(support, shape=shape), penalty, dtype=torch.float64)
    for kind, (layer, size) in product(KINDS, enumerate(shape)):
        assert fit.bias[kind][layer].shape == size
    assert_ridge(fit, source, target, penalty)
    assert fit.fallbacks == ()


@pytest.mark.filterwarnings("ignore::kvmap.fit.ridge.FewRowsWarning")
@pytest.mark.parametrize("support", SUPPORTS)
@pytest.mark.parametrize("regressors", REGRESSORS)
@pytest.mark.parametrize("native", [0, 1, 2])
@pytest.mark.parametrize("convention", ["absolute", "relative"])
def test_every_feature_recipe_equals_scikit_learns_ridge_on_rescaled_features(
    support: str, regressors: str, native: int, convention: str
) -> None:
    """Layers of different shapes, keys and values that select apart, one λ for each band."""
    source, target = pair_of_caches(UNEVEN_TARGET_SHAPE, source_shape=UNEVEN_SOURCE_SHAPE)["fit"]
    selection = {"key": ((2, 0), (0, 1), (1,)), "value": ((1,), (2, 1, 0), (0, 1))}
    recipe = Recipe(*UNEVEN, support, selection, regressors, native)
    tables = partial(full_tables, regressors=regressors)
    moments = moments_of({"fit": (source, target)}, native, tables)
    own = 0.5 if convention == "absolute" else 0.02
    cross = 10 * own if support == "banded" else None
    penalty = Penalty(own, cross, own / 5, convention)
    fit = fit_linear(moments, recipe, penalty, dtype=torch.float64)
    assert_ridge(fit, source, target, penalty)
    assert fit.fallbacks == ()
    for kind, layer in product(KINDS, range(native)):
        heads, width = UNEVEN_TARGET_SHAPE[layer]
        assert fit.weight[kind][layer].shape == (heads, 0, width)
        assert fit.bias[kind][layer].shape == (heads, width)


@pytest.mark.parametrize("shapes", PAIRS)
@pytest.mark.parametrize("support", SUPPORTS)
@pytest.mark.parametrize("native", [0, 1])
@pytest.mark.parametrize("convention", ["absolute", "relative"])
def test_weighted_rows_equal_scikit_learns_sample_weight(
    shapes: tuple[CacheShape, CacheShape], support: str, native: int, convention: str
) -> None:
    source, target = pair_of_caches(shapes[1], source_shape=shapes[0])["fit"]
    selection = both(((2, 0), (1,), (0, 1))[: len(shapes[1])])
    recipe = Recipe(*shapes, support, selection, native_layers=native)
    weights = row_weights(shapes[1], 5, 17)
    moments = PairMoments.zeros(recipe.layout, selected_tables(recipe, weighted=True))
    moments.update("fit", source, target, weights=weights)
    penalty = Penalty(0.3, BAND_PENALTY[support], 0.1 if native else None, convention)
    fit = fit_linear(moments, recipe, penalty, dtype=torch.float64)
    assert_ridge(fit, source, target, penalty, weights)
    assert len(systems(moments, recipe, penalty)) == len(list(heads_of(recipe)))


@pytest.mark.parametrize("support", SUPPORTS)
def test_layers_of_other_head_counts_match_other_source_heads_of_the_same_layers(support: str) -> None:
    shape = ((2, 2), (4, 1))  # head 1 matches source head 1 in one layer and 0 in the other
    source, target = pair_of_caches(shape)["fit"]
    penalty = Penalty(0.5, BAND_PENALTY[support])
    moments = moments_of({"fit": (source, target)})
    fit = fit_linear(moments, recipe_of(support, ALL, shape), penalty, dtype=torch.float64)
    assert_ridge(fit, source, target, penalty)


@pytest.mark.parametrize("convention", ["absolute", "relative"])
@pytest.mark.parametrize("regressors", REGRESSORS)
def test_the_bands_meet_both_papers_at_their_ends(convention: str, regressors: str) -> None:
    """λ_cross = λ_own is full-head, λ_cross = ∞ head-local."""
    pairs = pair_of_caches(GROUPED_TARGET_SHAPE)
    moments = moments_of(pairs, 0, partial(full_tables, regressors=regressors))
    recipes = {support: recipe_of(support, ALL, GROUPED_TARGET_SHAPE, regressors) for support in SUPPORTS}

    def r2(support: str, cross: float | None) -> dict[str, Tensor]:
        penalty = Penalty(0.4, cross, convention=convention)
        return r2_of(fit_linear(moments, recipes[support], penalty, dtype=torch.float64), moments, "held_out")

    for cross, expected in ((0.4, "full_head"), (None, "full_head"), (float("inf"), "head_local")):
        found, wanted = r2("banded", cross), r2(expected, None)
        for kind in KINDS:
            # the same system, solved with features left out or without them
            torch.testing.assert_close(found[kind], wanted[kind], rtol=0, atol=1e-11)


@pytest.mark.parametrize("native", [0, 1])
@pytest.mark.parametrize("convention", ["absolute", "relative"])
def test_bands_that_are_not_read_equal_ridge_without_them(native: int, convention: str) -> None:
    source, target = pair_of_caches(UNEVEN_TARGET_SHAPE, source_shape=UNEVEN_SOURCE_SHAPE)["fit"]
    recipe = Recipe(*UNEVEN, "banded", both(((2, 0), (1,), (0, 1))), native_layers=native)
    moments = moments_of({"fit": (source, target)}, native)
    penalty = Penalty(0.3, float("inf"), 0.1, convention)
    assert_ridge(fit_linear(moments, recipe, penalty, dtype=torch.float64), source, target, penalty)


@pytest.mark.parametrize("shapes", PAIRS)
@pytest.mark.parametrize("support", SUPPORTS)
@pytest.mark.parametrize("regressors_", REGRESSORS)
@pytest.mark.parametrize(("native", "dtype"), [(0, torch.float64), (0, torch.bfloat16), (1, torch.float64)])
def test_r2_from_moments_is_the_r2_of_the_rows_on_both_splits(
    shapes: tuple[CacheShape, CacheShape], support: str, regressors_: str, native: int, dtype: torch.dtype
) -> None:
    pairs = pair_of_caches(shapes[1], source_shape=shapes[0])
    selection = both(((2, 0), (1,), (0, 1))[: len(shapes[1])])
    recipe = Recipe(*shapes, support, selection, regressors_, native)
    moments = moments_of(pairs, native, lambda _: selected_tables(recipe))
    fit = fit_linear(moments, recipe, Penalty(0.01, BAND_PENALTY[support]), dtype=dtype)
    for split, (source, target) in pairs.items():
        r2 = r2_of(fit, moments, split)
        for kind, layer, head in heads_of(recipe):
            x = regressors(recipe, source, target, kind, layer, head)
            weight = fit.weight[kind][layer][head].double().numpy()
            predicted = x @ weight + fit.bias[kind][layer][head].double().numpy()
            y = head_rows(target, kind, layer, head)
            # pooled over the head's channels: ΣSSE/ΣSST
            expected = sklearn_r2(y, predicted, multioutput="variance_weighted")
            assert float(r2[kind][layer, head]) == pytest.approx(expected, abs=1e-10)
        for kind, (layer, (heads, _)) in product(KINDS, enumerate(shapes[1])):
            assert r2[kind][layer, 0 if layer < native else heads :].isnan().all()


@pytest.mark.parametrize("support", SUPPORTS)
def test_r2_over_weighted_rows_weighs_them(support: str) -> None:
    pairs = pair_of_caches()
    recipe = recipe_of(support, native=1)
    moments = PairMoments.zeros(recipe.layout, selected_tables(recipe, weighted=True))
    weights = {split: row_weights(TARGET_SHAPE, pairs[split][0].batch_size, 17) for split in pairs}
    for split, pair in pairs.items():
        moments.update(split, *pair, None, weights[split])
    fit = fit_linear(moments, recipe, Penalty(0.01, BAND_PENALTY[support]), dtype=torch.float64)
    for split, (source, target) in pairs.items():
        r2 = r2_of(fit, moments, split)
        for kind, layer, head in heads_of(recipe):
            x = regressors(recipe, source, target, kind, layer, head)
            predicted = x @ fit.weight[kind][layer][head].numpy() + fit.bias[kind][layer][head].numpy()
            w = weights[split][kind, layer][:, head].flatten().numpy()
            y = head_rows(target, kind, layer, head)
            expected = sklearn_r2(y, predicted, sample_weight=w, multioutput="variance_weighted")
            assert float(r2[kind][layer, head]) == pytest.approx(expected, abs=1e-10)


def test_the_held_out_error_counts_the_bias_of_the_fit_split() -> None:
    moments = moments_of(pair_of_caches())
    fit = fit_linear(moments, recipe_of(selection=ALL), Penalty(), dtype=torch.float64)
    shifted = replace(fit, bias={kind: tuple(b + 1.0 for b in fit.bias[kind]) for kind in KINDS})
    assert bool((r2_of(shifted, moments, "held_out")["key"] < r2_of(fit, moments, "held_out")["key"]).all())


TABLES = {
    "full": full_tables,
    "full, both kinds": partial(full_tables, regressors="both_kinds"),
    "head_local": head_local_tables,
    "head_local, both kinds": partial(head_local_tables, regressors="both_kinds"),
    "probes": probe_tables,
}


@pytest.mark.parametrize("tables", TABLES)
@pytest.mark.parametrize("shapes", [*PAIRS, (((1, 3), (1, 2), (1, 4)), ((2, 2), (2, 2)))])
def test_what_moments_cover_is_fitted_and_judged_and_nothing_else(
    tables: str, shapes: tuple[CacheShape, CacheShape]
) -> None:
    """Heads that read the same features may stand in different tables: one table a matched native head."""
    pairs = pair_of_caches(shapes[1], source_shape=shapes[0])
    moments = moments_of(pairs, 1, TABLES[tables])
    everything = moments_of(pairs, 1, TABLES["full, both kinds"])
    fitted = 0
    for support, regressors_, native, top_k in product(SUPPORTS, REGRESSORS, (0, 1), (1, 2)):
        selection = both(((0, 1)[:top_k],) * len(shapes[1]))
        recipe = Recipe(*shapes, support, selection, regressors_, native)
        penalty = Penalty(0.5, BAND_PENALTY[support])
        if not moments.covers(recipe):
            with pytest.raises(MomentsError, match="do not hold"):
                fit_linear(moments, recipe, penalty)
            continue
        fitted += 1
        fit = fit_linear(moments, recipe, penalty, dtype=torch.float64)
        expected = fit_linear(everything, recipe, penalty, dtype=torch.float64)
        r2, expected_r2 = r2_of(fit, moments, "held_out"), r2_of(expected, everything, "held_out")
        # one system cut from larger or smaller tables, conditioned below 1,000
        for kind in KINDS:
            torch.testing.assert_close(fit.weight[kind], expected.weight[kind], rtol=0, atol=1e-9)
            torch.testing.assert_close(r2[kind], expected_r2[kind], rtol=0, atol=1e-9, equal_nan=True)
    assert fitted


@pytest.mark.parametrize(
    ("selection", "factors"), [(ALL, 2), (SELECTION, 4), (((1,), (1,)), 2), (((0, 1), (1, 0)), 4)]
)
def test_one_factorisation_serves_all_heads_and_layers_of_one_selection(
    selection: Selection, factors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    original = fit_linear_module.factor_ridge
    monkeypatch.setattr(
        fit_linear_module, "factor_ridge", lambda s, lam: calls.append(s.shape) or original(s, lam)
    )
    fit_linear(moments_of(pair_of_caches()), recipe_of(selection=selection), Penalty())
    assert len(calls) == factors  # once for keys and once for values, for each distinct selection


@pytest.mark.parametrize(
    ("support", "shape", "cross", "count"),
    [
        ("head_local", TARGET_SHAPE, None, 2),
        ("head_local", GROUPED_TARGET_SHAPE, None, 2),  # four heads on two source heads
        ("banded", TARGET_SHAPE, 5.0, 2),
        ("banded", GROUPED_TARGET_SHAPE, 5.0, 2),
        ("banded", TARGET_SHAPE, None, 1),
        ("banded", TARGET_SHAPE, 0.01, 1),
        ("full_head", GROUPED_TARGET_SHAPE, None, 1),
        ("banded", ((1, 5), (3, 2)), 5.0, 2),  # heads 0 and 0, 1 read source head 0; head 2 reads 1
    ],
)
def test_systems_are_shared_by_the_heads_that_match_the_same_source_heads(
    support: str, shape: CacheShape, cross: float | None, count: int
) -> None:
    moments = moments_of(pair_of_caches(shape))
    recipe = recipe_of(support, ALL, shape)
    found = systems(moments, recipe, Penalty(0.01, cross))
    assert len(found) == 2 * count
    served = [(system.kind, *head) for system in found for head in system.heads]
    assert sorted(served) == sorted(heads_of(recipe))
    for system in found:
        for layer, head in system.heads:
            assert torch.equal(system.bands, recipe.bands(system.kind, layer, head)) or cross != 5.0
        assert len(system.targets) == sum(shape[layer][1] for layer, _ in system.heads)


@pytest.mark.parametrize("support", SUPPORTS)
def test_each_head_may_have_a_penalty_of_its_own(support: str) -> None:
    source, target = pair_of_caches(GROUPED_TARGET_SHAPE)["fit"]
    recipe = recipe_of(support, ALL, GROUPED_TARGET_SHAPE)
    moments = moments_of({"fit": (source, target)})
    penalties = {
        head: Penalty(0.1 * (1 + i % 3), BAND_PENALTY[support]) for i, head in enumerate(heads_of(recipe))
    }
    fit = fit_linear(moments, recipe, penalties, dtype=torch.float64)
    for (kind, layer, head), penalty in penalties.items():
        alone = fit_linear(moments, recipe, penalty, dtype=torch.float64)
        for name in ("weight", "bias"):
            # solved beside others or alone: the same Cholesky factor
            torch.testing.assert_close(
                getattr(fit, name)[kind][layer][head],
                getattr(alone, name)[kind][layer][head],
                rtol=1e-11,
                atol=1e-11,
            )


def test_heads_without_a_penalty_are_left_out_and_put_together_from_elsewhere() -> None:
    recipe = recipe_of("banded", ALL)
    moments = moments_of(pair_of_caches())
    penalty = Penalty(0.5, 7.0)
    every = list(heads_of(recipe))
    fitted = {}
    for named in (every[::2], every[1::2]):
        found, fallbacks = fit_heads(moments, recipe, dict.fromkeys(named, penalty), torch.float64)
        assert sorted(found) == sorted(named)
        assert fallbacks == ()
        fitted |= found
    whole = fit_linear(moments, recipe, penalty, dtype=torch.float64)
    joined = assembled(recipe, fitted, torch.float64)
    for kind in KINDS:
        torch.testing.assert_close(joined.weight[kind], whole.weight[kind], rtol=1e-11, atol=1e-11)
        torch.testing.assert_close(joined.bias[kind], whole.bias[kind], rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(("convention", "second"), [("absolute", 6.0), ("relative", 3.0)])
def test_duplicating_every_row_doubles_the_absolute_lambda_that_gives_the_same_map(
    convention: str, second: float
) -> None:
    source, target = pair_of_caches()["fit"]
    once, twice = moments_between(source, target), moments_between(source, target)
    twice.update("fit", source, target)
    for support in SUPPORTS:
        a, b = (
            fit_linear(moments, recipe_of(support), Penalty(own, convention=convention), dtype=torch.float64)
            for moments, own in ((once, 3.0), (twice, second))
        )
        for layer in range(2):
            torch.testing.assert_close(a.weight["key"][layer], b.weight["key"][layer], rtol=1e-11, atol=1e-12)
            torch.testing.assert_close(a.bias["key"][layer], b.bias["key"][layer], rtol=1e-10, atol=1e-11)


def damaged(kind: str) -> PairMoments:
    pairs = pair_of_caches()
    source, target = pairs["fit"]
    keys = [k.clone() for k in source.keys]
    if kind == "dead":
        keys[2][:, 1, :, 1] = 7.0
    else:
        keys[2][:, 1, :, 1] = keys[2][:, 1, :, 0]
    pairs["fit"] = (stripped(keys, list(source.values)), target)
    return moments_of(pairs)


@pytest.mark.parametrize("support", SUPPORTS)
@pytest.mark.parametrize("kind", ["dead", "duplicated"])
@pytest.mark.parametrize("ridge_lambda", [0.0, 1e-8])
def test_dead_and_duplicated_channels_give_finite_maps_with_a_recorded_fallback(
    support: str, kind: str, ridge_lambda: float
) -> None:
    moments = damaged(kind)
    fit = fit_linear(moments, recipe_of(support), Penalty(ridge_lambda))
    assert all(bool(torch.isfinite(w).all()) for w in (*fit.weight["key"], *fit.bias["key"]))
    assert bool((r2_of(fit, moments, "fit")["key"] > 0).all())
    if ridge_lambda == 0:
        head, rank = (1, 5) if support == "head_local" else (None, 11)
        solver = "scaled_cholesky" if kind == "dead" else "eigh"
        assert fit.fallbacks == (Fallback("key", 0, head, solver, rank),)


@pytest.mark.parametrize("support", SUPPORTS)
def test_fewer_rows_than_features_are_refused_unless_allowed(support: str) -> None:
    source, target = (kv.select_rows([0]).slice_tokens(0, 6) for kv in pair_of_caches()["fit"])
    moments = moments_between(source, target)
    recipe = recipe_of(support)
    p = 6 if support == "head_local" else 12
    with pytest.raises(TooFewRows, match=f"6 calibration rows for {p} features"):
        fit_linear(moments, recipe, Penalty())
    with pytest.warns(FewRowsWarning):
        fit = fit_linear(moments, recipe, Penalty(0.0), allow_few_rows=True, dtype=torch.float64)
    assert {fallback.kind for fallback in fit.fallbacks} == {"key", "value"}
    x = regressors(recipe, source, target, "key", 0, 1)
    y = head_rows(target, "key", 0, 1)
    # 6 rows, 5 degrees of freedom after centring: the minimum-norm solution meets every row
    np.testing.assert_allclose(
        x @ fit.weight["key"][0][1].numpy() + fit.bias["key"][0][1].numpy(), y, atol=1e-9
    )


def test_near_p_rows_the_held_out_r2_tells_what_the_fit_r2_hides() -> None:
    generator = torch.Generator().manual_seed(0)
    source, target = (random_cache(shape, 1, 40, generator) for shape in (SOURCE_SHAPE, TARGET_SHAPE))
    moments = moments_between(source.slice_tokens(0, 20), target.slice_tokens(0, 20))
    moments.update("held_out", source.slice_tokens(20, 40), target.slice_tokens(20, 40))
    with pytest.warns(FewRowsWarning):
        fit = fit_linear(moments, recipe_of(selection=ALL), Penalty())
    assert float(r2_of(fit, moments, "fit")["key"].mean()) > 0.8
    assert float(r2_of(fit, moments, "held_out")["key"].mean()) < 0


@pytest.mark.parametrize("support", SUPPORTS)
def test_sink_rows_left_out_do_not_move_the_fit_of_ordinary_tokens(support: str) -> None:
    source, target = pair_of_caches()["fit"]
    wild = [k.clone() for k in target.keys]
    for key in wild:
        key[:, :, 0] *= 300
    with_sink = stripped(wild, list(target.values))
    fits = []
    for image, head in ((target, 1), (with_sink, 1), (with_sink, 0)):
        rows = calibration_rows(source.mask, native_head=head)
        moments = moments_between(source, image, rows)
        fits.append(fit_linear(moments, recipe_of(support, ALL), Penalty()).weight["key"][0])
    assert torch.equal(fits[0], fits[1])
    assert float((fits[2] - fits[0]).abs().max()) > 1


def test_one_source_channel_300_times_larger_leaves_ordinary_predictions_as_they_were() -> None:
    source, target = pair_of_caches()["fit"]
    keys = [k.clone() for k in source.keys]
    keys[0][:, 0, :, 0] = 300 * keys[0][:, 0, :, 0] + 4000
    loud = stripped(keys, list(source.values))
    r2 = []
    for kv in (source, loud):
        moments = moments_between(kv, target)
        r2.append(r2_of(fit_linear(moments, recipe_of(selection=ALL), Penalty()), moments, "fit")["key"])
    # the same information on another scale; λ = 0.01 weighs on one channel 300² times less, and the weights
    # are rounded to float32 against an offset of 4,000
    torch.testing.assert_close(r2[0], r2[1], atol=1e-5, rtol=0)


@pytest.mark.parametrize("support", SUPPORTS)
@pytest.mark.parametrize("offset", [500.0, 1e6])
def test_rounded_weights_keep_the_means_of_the_outputs(support: str, offset: float) -> None:
    source, target = pair_of_caches()["fit"]
    loud = stripped([k + offset for k in source.keys], list(source.values))
    moments = moments_between(loud, target)
    recipe = recipe_of(support, ALL)
    fit = fit_linear(moments, recipe, Penalty(0.01, BAND_PENALTY[support]), dtype=torch.bfloat16)
    assert fit.weight["key"][0].dtype == torch.bfloat16
    assert fit.bias["key"][0].dtype == torch.float32
    for heads, cut in layer_cuts(moments, "fit", recipe, "key", 0):
        for place, head in enumerate(heads):
            outputs = cut.mean_x @ fit.weight["key"][0][head].double() + fit.bias["key"][0][head].double()
            mean = cut.mean_y[4 * place : 4 * place + 4]
            # float32 rounding of a bias some times the offset
            torch.testing.assert_close(outputs, mean, atol=4e-6 * offset, rtol=0)


def test_an_offset_of_a_million_costs_the_fit_no_digits_that_the_rows_have() -> None:
    source, target = pair_of_caches()["fit"]
    far = stripped([k + 1e6 for k in source.keys], [v - 1e6 for v in source.values])
    for support in SUPPORTS:
        near_fit, far_fit = (
            fit_linear(moments_between(kv, target), recipe_of(support), Penalty(), dtype=torch.float64)
            for kv in (source, far)
        )
        for kind, layer in product(KINDS, range(2)):
            # the rows themselves are rounded to 1e6 · 2⁻⁵³ ≈ 1e-10
            torch.testing.assert_close(
                far_fit.weight[kind][layer], near_fit.weight[kind][layer], rtol=0, atol=1e-8
            )


def test_output_variance_is_that_of_the_mapped_rows() -> None:
    pairs = pair_of_caches(GROUPED_TARGET_SHAPE)
    source, target = pairs["fit"]
    for support, native in product(SUPPORTS, (0, 1)):
        recipe = recipe_of(support, shape=GROUPED_TARGET_SHAPE, native=native)
        moments = moments_of(pairs, native)
        fit = fit_linear(moments, recipe, Penalty(), dtype=torch.float64)
        found = output_variance(fit, moments, "value", 1)
        for head in range(4):
            x = regressors(recipe, source, target, "value", 1, head)
            expected = (x @ fit.weight["value"][1][head].numpy()).var(0)
            np.testing.assert_allclose(found[head].numpy(), expected, rtol=1e-10)


@pytest.mark.parametrize("native", [0, 1])
def test_copying_weights_are_the_copy(native: int) -> None:
    generator = torch.Generator().manual_seed(0)
    source = random_cache(SOURCE_SHAPE, 2, 11, generator)
    target = stripped([source.keys[2], source.keys[0]], [source.values[2], source.values[0]])
    shape = SOURCE_SHAPE[:2]
    weights = copying_weights(((2,), (0,)), SOURCE_SHAPE, shape, native)
    moments = moments_of({"fit": (source, target)}, native)
    r2 = r2_of(weights, moments, "fit")
    for kind in KINDS:
        torch.testing.assert_close(r2[kind][native:], torch.ones(2 - native, 2, dtype=torch.float64))
        assert bool(r2[kind][:native].isnan().all())


def test_mistakes_are_refused_by_name() -> None:
    moments = moments_of(pair_of_caches())
    with pytest.raises(RidgeError, match="-1"):
        fit_linear(moments, recipe_of(), Penalty(-1))
    with pytest.raises(UnknownName, match="relative"):
        fit_linear(moments, recipe_of(), Penalty(convention="relativ"))
    value = moments.table_of(moments.layout.kind_features("value"), moments.layout.targets("value"))
    fit = moments.tables[value].splits["fit"]
    fit.s_xy[0, 7 + 4] = float("nan")  # target layer 1, head 0
    with pytest.raises(
        RidgeError, match=r"value map of target layers \[0, 1\], heads \[0, 1\] is not finite"
    ):
        fit_linear(moments, recipe_of(selection=ALL), Penalty())
    with pytest.raises(RidgeError, match=r"value map of target layers \[1\], heads \[0\] is not finite"):
        fit_linear(moments, recipe_of("head_local", ((1,), (0,))), Penalty())
    fit.s_xx[0, 0] = float("nan")
    with pytest.raises(
        RidgeError, match=r"value map of target layers \[1\], heads \[0\]: the second moments"
    ):
        fit_linear(moments, recipe_of("head_local", ((1,), (0,))), Penalty())


def test_weights_too_large_for_their_dtype_are_refused() -> None:
    source, target = pair_of_caches()["fit"]
    loud = stripped([k * 1e6 for k in target.keys], list(target.values))
    with pytest.raises(RidgeError, match=r"key map .* is not finite in torch\.float16"):
        fit_linear(moments_between(source, loud), recipe_of(), Penalty(), dtype=torch.float16)


def test_a_map_is_judged_on_its_own_pair_only() -> None:
    moments = moments_of(pair_of_caches())
    fit = fit_linear(moments, recipe_of(selection=ALL), Penalty())
    other = moments_of(pair_of_caches(GROUPED_TARGET_SHAPE))
    with pytest.raises(MomentsError, match="the map reads"):
        r2_of(fit, other, "fit")


def test_an_image_without_noise_is_found_exactly() -> None:
    source, _ = pair_of_caches()["fit"]
    target = linear_image(source, TARGET_SHAPE, seed=1, noise=0.0)
    moments = moments_between(source, target)
    r2 = r2_of(
        fit_linear(moments, recipe_of(selection=ALL), Penalty(0.0), dtype=torch.float64), moments, "fit"
    )
    torch.testing.assert_close(r2["key"], torch.ones_like(r2["key"]), atol=1e-12, rtol=0)


def test_all_layers_native_leaves_nothing_to_fit() -> None:
    moments = moments_of(pair_of_caches(), 2)
    fit = fit_linear(moments, recipe_of(native=2), Penalty())
    assert all(weight.shape == (2, 0, 4) for kind in KINDS for weight in fit.weight[kind])
    assert bool(r2_of(fit, moments, "fit")["key"].isnan().all())
