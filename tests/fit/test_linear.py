from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.linear_model import Ridge
from sklearn.metrics import r2_score as sklearn_r2

import kvmap.fit.linear as fit_linear_module
from kvmap.errors import UnknownName
from kvmap.fit.linear import LinearWeights, copying_weights, fit_linear, output_variance, r2_of
from kvmap.fit.moments import CacheShape, PairMoments, calibration_rows
from kvmap.fit.ridge import FewRowsWarning, RidgeError, TooFewRows
from kvmap.fit.selection import SelectionError
from kvmap.models.cache import KVCache
from tests.fit.caches import (
    GROUPED_TARGET_SHAPE,
    SOURCE_SHAPE,
    TARGET_SHAPE,
    kind_layers,
    linear_image,
    moments_of,
    pair_of_caches,
    random_cache,
    rows_of,
    stripped,
)

SELECTION = ((0, 2), (1,))
ALL = ((0, 1, 2),) * 2
SHAPES = [TARGET_SHAPE, GROUPED_TARGET_SHAPE, ((1, 5), (3, 2))]
SUPPORTS = ["full_head", "head_local"]


def head_rows(kv: KVCache, kind: str, layer: int, head: int) -> np.ndarray:
    return rows_of((kind_layers(kv, kind)[layer][:, head : head + 1],))


def regressors(
    kv: KVCache, kind: str, layers: tuple[int, ...], support: str, head: int, n: int
) -> np.ndarray:
    """X as METHOD says it: all heads of the selected layers, or head a(h) of each."""
    chosen = [kind_layers(kv, kind)[layer] for layer in layers]
    if support == "head_local":
        chosen = [layer[:, (a := head * layer.shape[1] // n) : a + 1] for layer in chosen]
    return rows_of(tuple(chosen))


@pytest.mark.parametrize("selection", [SELECTION, ALL])
def test_a_fast_fit_says_one_line_for_keys_and_one_for_values(
    caplog: pytest.LogCaptureFixture, selection: tuple[tuple[int, ...], ...]
) -> None:
    moments = moments_of(pair_of_caches())
    with caplog.at_level("INFO", "kvmap.progress"):
        fit_linear(moments, selection, "full_head", 0.01)
    assert [line.split(" done")[0] for line in caplog.messages] == [
        f"fit: {kind} maps of target layers: 2" for kind in ("key", "value")
    ]


@pytest.mark.parametrize("support", SUPPORTS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("ridge_lambda", [0.01, 20.0])
@pytest.mark.parametrize("weighted", [False, True])
def test_every_head_equals_scikit_learns_ridge(
    support: str, shape: CacheShape, ridge_lambda: float, weighted: bool
) -> None:
    source, target = pair_of_caches(shape)["fit"]
    generator = torch.Generator().manual_seed(4)
    w = torch.rand(source.mask.shape, generator=generator, dtype=torch.float64) if weighted else None
    moments = PairMoments.zeros(SOURCE_SHAPE, shape).update("fit", source, target, weights=w)
    fit = fit_linear(moments, SELECTION, support, ridge_lambda, dtype=torch.float64)
    for kind in ("key", "value"):
        for layer, (heads, width) in enumerate(shape):
            assert fit.bias[kind][layer].shape == (heads, width)
            for head in range(heads):
                x = regressors(source, kind, SELECTION[layer], support, head, heads)
                y = head_rows(target, kind, layer, head)
                oracle = Ridge(alpha=ridge_lambda, solver="svd")
                oracle.fit(x, y, sample_weight=None if w is None else w.flatten().numpy())
                # normal equations against an SVD, condition numbers below 100
                np.testing.assert_allclose(fit.weight[kind][layer][head], oracle.coef_.T, atol=1e-10)
                np.testing.assert_allclose(fit.bias[kind][layer][head], oracle.intercept_, atol=1e-10)
    assert fit.fallbacks == ()


@pytest.mark.parametrize("support", SUPPORTS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_r2_from_moments_is_the_r2_of_the_rows_on_both_splits(
    support: str, shape: CacheShape, dtype: torch.dtype
) -> None:
    pairs = pair_of_caches(shape)
    moments = moments_of(pairs)
    fit = fit_linear(moments, SELECTION, support, 0.01, dtype=dtype)
    for split, (source, target) in pairs.items():
        r2 = r2_of(fit, moments, split)
        for kind in ("key", "value"):
            for layer, (heads, _) in enumerate(shape):
                for head in range(heads):
                    x = regressors(source, kind, SELECTION[layer], support, head, heads)
                    weight = fit.weight[kind][layer][head].double().numpy()
                    predicted = x @ weight + fit.bias[kind][layer][head].double().numpy()
                    y = head_rows(target, kind, layer, head)
                    # pooled over the head's channels: ΣSSE/ΣSST
                    expected = sklearn_r2(y, predicted, multioutput="variance_weighted")
                    assert float(r2[kind][layer, head]) == pytest.approx(expected, abs=1e-10)
                assert r2[kind][layer, heads:].isnan().all()


def test_the_held_out_error_counts_the_bias_of_the_fit_split() -> None:
    pairs = pair_of_caches()
    moments = moments_of(pairs)
    fit = fit_linear(moments, ALL, "full_head", 0.01, dtype=torch.float64)
    moved = {kind: tuple(b + 1.0 for b in fit.bias[kind]) for kind in ("key", "value")}
    shifted = LinearWeights(
        fit.support, fit.selection, fit.source_shape, fit.target_shape, fit.weight, moved, ()
    )
    assert bool((r2_of(shifted, moments, "held_out")["key"] < r2_of(fit, moments, "held_out")["key"]).all())


@pytest.mark.parametrize(("selection", "factors"), [(ALL, 2), (SELECTION, 4), (((1,), (1,)), 2)])
def test_one_factorisation_serves_all_heads_and_layers_of_one_selection(
    selection: tuple[tuple[int, ...], ...], factors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    original = fit_linear_module.factor_ridge
    monkeypatch.setattr(
        fit_linear_module, "factor_ridge", lambda s, lam: calls.append(s.shape) or original(s, lam)
    )
    fit_linear(moments_of(pair_of_caches()), selection, "full_head", 0.01)
    assert len(calls) == factors  # once for keys and once for values, for each distinct selection


def test_duplicating_every_row_doubles_the_lambda_that_gives_the_same_map() -> None:
    source, target = pair_of_caches()["fit"]
    once = PairMoments.zeros(SOURCE_SHAPE, TARGET_SHAPE).update("fit", source, target)
    twice = PairMoments.zeros(SOURCE_SHAPE, TARGET_SHAPE)
    twice.update("fit", source, target).update("fit", source, target)
    for support in SUPPORTS:
        a = fit_linear(once, SELECTION, support, 3.0, dtype=torch.float64)
        b = fit_linear(twice, SELECTION, support, 6.0, dtype=torch.float64)
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
    fit = fit_linear(moments, SELECTION, support, ridge_lambda)
    assert all(bool(torch.isfinite(w).all()) for w in (*fit.weight["key"], *fit.bias["key"]))
    assert bool((r2_of(fit, moments, "fit")["key"] > 0).all())
    if ridge_lambda == 0:
        head = None if support == "full_head" else 1
        rank = 11 if support == "full_head" else 5
        assert fit.fallbacks == (("key", 0, head, rank),)


@pytest.mark.parametrize("support", SUPPORTS)
def test_fewer_rows_than_features_are_refused_unless_allowed(support: str) -> None:
    source, target = (kv.select_rows([0]).slice_tokens(0, 6) for kv in pair_of_caches()["fit"])
    moments = PairMoments.zeros(SOURCE_SHAPE, TARGET_SHAPE).update("fit", source, target)
    p = 12 if support == "full_head" else 6
    with pytest.raises(TooFewRows, match=f"6 calibration rows for {p} features"):
        fit_linear(moments, SELECTION, support, 0.01)
    with pytest.warns(FewRowsWarning):
        fit = fit_linear(moments, SELECTION, support, 0.0, allow_few_rows=True, dtype=torch.float64)
    assert {fallback[0] for fallback in fit.fallbacks} == {"key", "value"}
    x = regressors(source, "key", SELECTION[0], support, 1, 2)
    y = head_rows(target, "key", 0, 1)
    # 6 rows, 5 degrees of freedom after centring: the minimum-norm solution meets every row
    np.testing.assert_allclose(
        x @ fit.weight["key"][0][1].numpy() + fit.bias["key"][0][1].numpy(), y, atol=1e-9
    )


def test_near_p_rows_the_held_out_r2_tells_what_the_fit_r2_hides() -> None:
    generator = torch.Generator().manual_seed(0)
    noise = [random_cache(shape, 1, 40, generator) for shape in (SOURCE_SHAPE, TARGET_SHAPE)]
    source, target = noise
    moments = PairMoments.zeros(SOURCE_SHAPE, TARGET_SHAPE)
    moments.update("fit", source.slice_tokens(0, 20), target.slice_tokens(0, 20))
    moments.update("held_out", source.slice_tokens(20, 40), target.slice_tokens(20, 40))
    with pytest.warns(FewRowsWarning):
        fit = fit_linear(moments, ALL, "full_head", 0.01)
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
        moments = PairMoments.zeros(SOURCE_SHAPE, TARGET_SHAPE).update("fit", source, image, rows)
        fits.append(fit_linear(moments, ALL, support, 0.01).weight["key"][0])
    assert torch.equal(fits[0], fits[1])
    assert float((fits[2] - fits[0]).abs().max()) > 1


def test_one_source_channel_300_times_larger_leaves_ordinary_predictions_as_they_were() -> None:
    source, target = pair_of_caches()["fit"]
    keys = [k.clone() for k in source.keys]
    keys[0][:, 0, :, 0] = 300 * keys[0][:, 0, :, 0] + 4000
    loud = stripped(keys, list(source.values))
    r2 = []
    for kv in (source, loud):
        moments = PairMoments.zeros(SOURCE_SHAPE, TARGET_SHAPE).update("fit", kv, target)
        r2.append(r2_of(fit_linear(moments, ALL, "full_head", 0.01), moments, "fit")["key"])
    # the same information on another scale; λ = 0.01 weighs on one channel 300² times less, and the weights
    # are rounded to float32 against an offset of 4,000
    torch.testing.assert_close(r2[0], r2[1], atol=1e-5, rtol=0)


def test_rounded_weights_keep_the_means_of_the_outputs() -> None:
    source, target = pair_of_caches()["fit"]
    loud = stripped([k + 500 for k in source.keys], list(source.values))
    moments = PairMoments.zeros(SOURCE_SHAPE, TARGET_SHAPE).update("fit", loud, target)
    fit = fit_linear(moments, ALL, "full_head", 0.01, dtype=torch.bfloat16)
    assert fit.weight["key"][0].dtype == torch.bfloat16
    assert fit.bias["key"][0].dtype == torch.float32
    table = moments.tables["key", "fit"]
    outputs = table.mean_x @ fit.weight["key"][0][0].double() + fit.bias["key"][0][0].double()
    # float32 rounding of a bias of some thousands
    torch.testing.assert_close(outputs, table.mean_y[moments.target_slice(0, 0)], atol=2e-3, rtol=0)


def test_output_variance_is_that_of_the_mapped_rows() -> None:
    pairs = pair_of_caches()
    moments = moments_of(pairs)
    for support in SUPPORTS:
        fit = fit_linear(moments, SELECTION, support, 0.01, dtype=torch.float64)
        x = regressors(pairs["fit"][0], "value", SELECTION[0], support, 1, 2)
        expected = (x @ fit.weight["value"][0][1].numpy()).var(0)
        np.testing.assert_allclose(output_variance(fit, moments, "value", 0)[1].numpy(), expected, rtol=1e-10)


def test_copying_weights_are_the_copy() -> None:
    generator = torch.Generator().manual_seed(0)
    source = random_cache(SOURCE_SHAPE, 2, 11, generator)
    target = stripped([source.keys[2], source.keys[0]], [source.values[2], source.values[0]])
    shape = SOURCE_SHAPE[:2]
    moments = PairMoments.zeros(SOURCE_SHAPE, shape).update("fit", source, target)
    r2 = r2_of(copying_weights(((2,), (0,)), SOURCE_SHAPE, shape), moments, "fit")
    torch.testing.assert_close(r2["value"], torch.ones(2, 2, dtype=torch.float64))


def test_mistakes_are_refused_by_name() -> None:
    moments = moments_of(pair_of_caches())
    with pytest.raises(RidgeError, match="ridge_lambda=-1"):
        fit_linear(moments, ALL, "full_head", -1)
    with pytest.raises(UnknownName, match="head_local"):
        fit_linear(moments, ALL, "head-local", 1)
    with pytest.raises(SelectionError, match=r"target layer 1 selects source layers \(3,\).*from 0 to 2"):
        fit_linear(moments, ((0,), (3,)), "full_head", 1)
    with pytest.raises(SelectionError, match="serves 1 target layers; the target has 2"):
        fit_linear(moments, ((0,),), "full_head", 1)
    moments.tables["value", "fit"].s_xy[0, moments.target_slice(1, 1)] = float("nan")
    with pytest.raises(RidgeError, match="value map of target layer 1, head 1"):
        fit_linear(moments, ALL, "full_head", 1)


def test_a_map_is_judged_on_its_own_pair_only() -> None:
    moments = moments_of(pair_of_caches())
    fit = fit_linear(moments, ALL, "full_head", 0.01)
    other = moments_of(pair_of_caches(GROUPED_TARGET_SHAPE))
    with pytest.raises(Exception, match="the map reads"):
        r2_of(fit, other, "fit")


def test_an_image_without_noise_is_found_exactly() -> None:
    source, _ = pair_of_caches()["fit"]
    target = linear_image(source, TARGET_SHAPE, seed=1, noise=0.0)
    moments = PairMoments.zeros(SOURCE_SHAPE, TARGET_SHAPE).update("fit", source, target)
    r2 = r2_of(fit_linear(moments, ALL, "full_head", 0.0, dtype=torch.float64), moments, "fit")
    torch.testing.assert_close(r2["key"], torch.ones_like(r2["key"]), atol=1e-12, rtol=0)
