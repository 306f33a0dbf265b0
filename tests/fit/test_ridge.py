from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from sklearn.linear_model import Ridge

from kvmap.errors import UnknownName
from kvmap.fit.moments import Moments
from kvmap.fit.ridge import (
    FewRowsWarning,
    RidgeError,
    TooFewRows,
    check_rows,
    factor_ridge,
    intercept,
    penalty_vector,
    r2_score,
    solve_ridge,
    sse,
    sse_with_bias,
)


def problem(n: int = 80, p: int = 6, q: int = 4, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, p)) + rng.normal(size=p)
    y = x @ rng.normal(size=(p, q)) + rng.normal(size=q) + 0.5 * rng.normal(size=(n, q))
    return x, y


def moments_from(x: np.ndarray, y: np.ndarray, w: np.ndarray | None = None) -> Moments:
    weights = None if w is None else torch.from_numpy(w)
    moments = Moments.zeros(x.shape[1], y.shape[1])
    return moments.update(torch.from_numpy(x), torch.from_numpy(y), weights)


def fitted(m: Moments, penalty: float | torch.Tensor) -> tuple[np.ndarray, np.ndarray, str]:
    solution = solve_ridge(m.s_xx, m.s_xy, penalty)
    bias = intercept(solution.weight, m.mean_x, m.mean_y)
    return solution.weight.numpy(), bias.numpy(), solution.solver[0]


@pytest.mark.parametrize("ridge_lambda", [1e-8, 0.01, 1.0, 1e3])
@pytest.mark.parametrize("weighted", [False, True])
def test_ridge_equals_scikit_learn(ridge_lambda: float, weighted: bool) -> None:
    x, y = problem()
    w = np.random.default_rng(1).gamma(1.0, size=len(x)) if weighted else None
    oracle = Ridge(alpha=ridge_lambda, solver="svd").fit(x, y, sample_weight=w)
    weight, bias, solver = fitted(moments_from(x, y, w), ridge_lambda)
    # normal equations of a well-conditioned problem against an SVD: a few hundred float64 roundings
    np.testing.assert_allclose(weight, oracle.coef_.T, rtol=1e-10, atol=1e-11)
    np.testing.assert_allclose(bias, oracle.intercept_, rtol=1e-10, atol=1e-11)
    assert solver == "cholesky"


def test_duplicating_every_row_halves_lambda_because_it_is_absolute() -> None:
    x, y = problem()
    twice = moments_from(np.repeat(x, 2, 0), np.repeat(y, 2, 0))
    weight, bias, _ = fitted(moments_from(x, y), 5.0)
    weight_twice, bias_twice, _ = fitted(twice, 10.0)
    np.testing.assert_allclose(weight_twice, weight, rtol=1e-12)
    np.testing.assert_allclose(bias_twice, bias, rtol=1e-11)
    assert np.abs(fitted(twice, 5.0)[0] - weight).max() > 1e-3


@pytest.mark.parametrize("ridge_lambda", [0.01, 1e6])
def test_the_intercept_is_never_penalised(ridge_lambda: float) -> None:
    x, y = problem()
    weight, bias, _ = fitted(moments_from(x, y), ridge_lambda)
    moved_weight, moved_bias, _ = fitted(moments_from(x, y + 1000), ridge_lambda)
    np.testing.assert_allclose(moved_weight, weight, atol=1e-9)
    np.testing.assert_allclose(moved_bias - bias, 1000, rtol=1e-10)


@pytest.mark.parametrize("weighted", [False, True])
def test_banded_ridge_equals_scikit_learn_on_rescaled_features(weighted: bool) -> None:
    x, y = problem()
    w = np.random.default_rng(1).gamma(1.0, size=len(x)) if weighted else None
    lambdas = np.array([0.01, 30.0, 2.0, 30.0, 0.01, 500.0])
    # w'_j = w_j √λ_j turns Σ λ_j w_j² into ‖w'‖²
    oracle = Ridge(alpha=1.0, solver="svd").fit(x / np.sqrt(lambdas), y, sample_weight=w)
    weight, bias, solver = fitted(moments_from(x, y, w), torch.from_numpy(lambdas))
    np.testing.assert_allclose(weight, (oracle.coef_ / np.sqrt(lambdas)).T, rtol=1e-10, atol=1e-11)
    np.testing.assert_allclose(bias, oracle.intercept_, rtol=1e-10, atol=1e-11)
    assert solver == "cholesky"


def test_equal_penalties_of_all_features_are_one_lambda() -> None:
    m = moments_from(*problem())
    one, each = (factor_ridge(m.s_xx, penalty).solve(m.s_xy) for penalty in (3.0, torch.full((6,), 3.0)))
    assert torch.equal(one.weight, each.weight)


@pytest.mark.parametrize("ridge_lambda", [0.0, 0.01, 100.0])
def test_a_feature_of_infinite_penalty_is_left_out_exactly(ridge_lambda: float) -> None:
    x, y = problem()
    read = [0, 2, 5]
    penalty = torch.full((6,), float("inf"), dtype=torch.float64)
    penalty[read] = ridge_lambda
    weight, _, solver = fitted(moments_from(x, y), penalty)
    expected, _, _ = fitted(moments_from(x[:, read], y), ridge_lambda)
    assert (weight[[1, 3, 4]] == 0).all()
    np.testing.assert_allclose(weight[read], expected, rtol=1e-12)
    assert solver == "cholesky"
    nearly = torch.where(torch.isinf(penalty), 1e14, penalty)
    # what is left of the others is of the order of S_xx/λ = 1e-12
    np.testing.assert_allclose(fitted(moments_from(x, y), nearly)[0], weight, atol=1e-10)


def test_an_infinite_penalty_for_all_features_gives_the_mean_alone() -> None:
    x, y = problem()
    weight, bias, _ = fitted(moments_from(x, y), torch.full((6,), float("inf")))
    assert (weight == 0).all()
    np.testing.assert_allclose(bias, y.mean(0), rtol=1e-13)


def test_features_left_out_do_not_count_in_a_singular_system() -> None:
    x, y = problem()
    x = np.hstack([x, x[:, :1], np.ones((len(x), 1))])
    penalty = torch.tensor([0, 0, float("inf"), 0, 0, 0, 0, 0])
    solution = solve_ridge(*(getattr(moments_from(x, y), name) for name in ("s_xx", "s_xy")), penalty)
    expected = np.linalg.pinv((x - x.mean(0))[:, [0, 1, 3, 4, 5, 6]], rcond=1e-10) @ (y - y.mean(0))
    np.testing.assert_allclose(solution.weight.numpy()[[0, 1, 3, 4, 5, 6]], expected, atol=1e-10)
    assert (solution.weight.numpy()[[2, 7]] == 0).all()
    assert (solution.solver, solution.rank) == (("eigh",), (5,))


def test_heads_that_share_moments_may_each_have_their_own_penalties() -> None:
    m = moments_from(*problem())
    penalty = torch.rand(2, 3, 6, generator=torch.Generator().manual_seed(0)) * 50
    penalty[1, 2, 4] = float("inf")
    solution = factor_ridge(m.s_xx, penalty).solve(m.s_xy.expand(2, 3, 6, 4))
    for i, j in np.ndindex(2, 3):
        alone = solve_ridge(m.s_xx, m.s_xy, penalty[i, j]).weight
        torch.testing.assert_close(solution.weight[i, j], alone, rtol=1e-12, atol=1e-13)


DAMAGE = {
    "a dead channel": lambda x: np.where(np.arange(x.shape[1]) == 2, 3.0, x),
    "two equal channels": lambda x: x[:, [0, 1, 2, 3, 4, 1]],
    "fewer rows than features": lambda x: x[:4],
    "one row": lambda x: x[:1],
    "no variance at all": lambda x: np.ones_like(x),
}


NEEDS = {
    "a dead channel": "scaled_cholesky",
    "two equal channels": "eigh",
    "fewer rows than features": "eigh",
    "one row": "scaled_cholesky",
    "no variance at all": "scaled_cholesky",
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("ridge_lambda", [0.0, 1e-8, 0.01])
def test_singular_systems_give_the_predictions_of_scikit_learn(damage: str, ridge_lambda: float) -> None:
    x, y = problem()
    x = DAMAGE[damage](x)
    y = y[: len(x)]
    weight, bias, solver = fitted(moments_from(x, y), ridge_lambda)
    assert np.isfinite(weight).all()
    if ridge_lambda == 0:
        assert solver == NEEDS[damage]
        xc, yc = x - x.mean(0), y - y.mean(0)
        np.testing.assert_allclose(weight, np.linalg.pinv(xc, rcond=1e-10) @ yc, atol=1e-8)
    else:
        oracle = Ridge(alpha=ridge_lambda, solver="svd").fit(x, y)
        # λ = 1e-8 leaves a condition number of 1e10, hence 1e-6 of 1e-16
        np.testing.assert_allclose(x @ weight + bias, oracle.predict(x), atol=1e-6)


def test_a_tiny_lambda_on_a_large_duplicated_channel_falls_back_and_stays_right() -> None:
    x, y = problem()
    x = np.hstack([x, x[:, :1]]) * 3000
    weight, bias, solver = fitted(moments_from(x, y), 1e-8)
    assert solver == "eigh"
    oracle = Ridge(alpha=1e-8, solver="svd").fit(x, y)
    np.testing.assert_allclose(x @ weight + bias, oracle.predict(x), atol=1e-8)


def test_a_tiny_penalty_shares_equal_channels_out_in_inverse_proportion_to_it() -> None:
    x, y = problem()
    x = np.hstack([x, x[:, :1]]) * 3000
    weight, _, solver = fitted(
        moments_from(x, y), torch.tensor([1e-9, 1e-9, 1, 1, 1, 1, 3e-9], dtype=torch.float64)
    )
    assert solver == "eigh"
    # the limit of two equal features is one of 1/λ = 1/λ₁ + 1/λ₂, shared as 3 : 1
    joined, _, _ = fitted(
        moments_from(x[:, :6], y), torch.tensor([0.75e-9, 1e-9, 1, 1, 1, 1], dtype=torch.float64)
    )
    np.testing.assert_allclose(weight[0], 0.75 * joined[0], rtol=1e-9)
    np.testing.assert_allclose(weight[6], 0.25 * joined[0], rtol=1e-9)


def test_of_two_equal_channels_the_one_without_a_penalty_carries_all() -> None:
    x, y = problem()
    x = np.hstack([x, x[:, :1]]) * 3000
    weight, _, solver = fitted(moments_from(x, y), torch.tensor([0, 0, 0, 0, 0, 0, 1e-9]))
    assert solver == "eigh"
    expected, _, _ = fitted(moments_from(x[:, :6], y), 0.0)
    np.testing.assert_allclose(weight[:6], expected, rtol=1e-7)
    assert np.abs(weight[6]).max() < 1e-7 * np.abs(expected).max()


def test_features_of_wildly_different_scales_need_no_fallback() -> None:
    x, y = problem()
    scales = np.array([1e-6, 1e6, 1.0, 300.0, 1e-3, 1e3])
    weight, bias, solver = fitted(moments_from(x * scales, y), 0.0)
    assert solver == "cholesky"
    # of a condition number of 1e24, which a pivot does not see: Cholesky commutes with the scaling
    expected, expected_bias, _ = fitted(moments_from(x, y), 0.0)
    np.testing.assert_allclose(weight * scales[:, None], expected, rtol=1e-9)
    np.testing.assert_allclose(bias, expected_bias, rtol=1e-9)


@pytest.mark.parametrize("ridge_lambda", [0.0, 1e-9])
def test_a_large_duplicated_channel_does_not_drown_small_channels(ridge_lambda: float) -> None:
    x, y = problem()
    scales = np.array([1e6, 1.0, 1e-3, 1.0, 1.0, 1e-3, 1e6])
    doubled = np.hstack([x, x[:, :1]])
    solution = solve_ridge(
        *(getattr(moments_from(doubled * scales, y), name) for name in ("s_xx", "s_xy")), ridge_lambda
    )
    assert (solution.solver, solution.rank) == (("eigh",), (6,))
    # the duplicates have one scale, so the least norm shares them out equally with and without scales;
    # λ = 1e-9 against a variance of 80 · 1e-6 is 1e-5, of which the share of one channel is seen
    expected = np.linalg.pinv(doubled - doubled.mean(0), rcond=1e-10) @ (y - y.mean(0))
    tolerance = 1e-8 if ridge_lambda == 0 else 1e-4
    np.testing.assert_allclose(solution.weight.numpy() * scales[:, None], expected, atol=tolerance)


def test_least_squares_of_a_singular_system_is_the_solution_of_least_norm_unscaled() -> None:
    x, y = problem()
    x = np.hstack([x, 40 * x[:, :1], x[:, 1:2] - 3 * x[:, 2:3]])
    weight, _, solver = fitted(moments_from(x, y), 0.0)
    assert solver == "eigh"
    expected, *_ = np.linalg.lstsq(x - x.mean(0), y - y.mean(0), rcond=None)
    np.testing.assert_allclose(weight, expected, atol=1e-10)


@pytest.mark.parametrize("ridge_lambda", [0.0, 0.01, 10.0])
def test_a_mean_a_million_deviations_away_costs_only_the_digits_of_the_data(ridge_lambda: float) -> None:
    x, y = problem(n=200)
    x, y = x + 1e6, y - 1e6
    weight, bias, solver = fitted(moments_from(x, y), ridge_lambda)
    oracle = Ridge(alpha=ridge_lambda, solver="svd").fit(x - x.mean(0), y - y.mean(0))
    # rows hold 16 digits of which 6 are the mean
    np.testing.assert_allclose(weight, oracle.coef_.T, atol=1e-9)
    np.testing.assert_allclose(x @ weight + bias, oracle.predict(x - x.mean(0)) + y.mean(0), atol=1e-8)
    assert solver == "cholesky"


def test_each_system_of_a_batch_takes_the_fallback_it_needs_and_its_rank_is_recorded() -> None:
    x, y = problem()
    batch = [
        moments_from(DAMAGE[d](x) if d else x, y) for d in ("", "two equal channels", "a dead channel", "")
    ]
    s_xx, s_xy = torch.stack([m.s_xx for m in batch]), torch.stack([m.s_xy for m in batch])
    solution = solve_ridge(s_xx, s_xy, 0.0)
    assert solution.solver == ("cholesky", "eigh", "scaled_cholesky", "cholesky")
    assert solution.rank == (6, 5, 5, 6)
    for i, m in enumerate(batch):
        torch.testing.assert_close(solution.weight[i], solve_ridge(m.s_xx, m.s_xy, 0.0).weight)


def test_a_constant_whose_variance_is_rounding_is_dead() -> None:
    x, y = problem()
    m = moments_from(x, y)
    m.s_xx[2], m.s_xx[:, 2], m.s_xx[2, 2], m.s_xy[2] = 0.0, 0.0, 1e-29, 1e-14
    solution = solve_ridge(m.s_xx, m.s_xy, 0.0)
    assert (solution.weight[2] == 0).all()
    assert solution.solver == ("scaled_cholesky",)


def test_an_eigendecomposition_that_does_not_converge_names_its_system(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(matrix: torch.Tensor) -> None:
        raise torch.linalg.LinAlgError("the algorithm failed to converge")

    monkeypatch.setattr(torch.linalg, "eigh", fail)
    x, y = problem()
    good, bad = moments_from(x, y).s_xx, moments_from(DAMAGE["two equal channels"](x), y).s_xx
    with pytest.raises(RidgeError, match=r"system 1 has no eigendecomposition: raise ridge_lambda"):
        factor_ridge(torch.stack([good, bad]), 0.0)


def test_one_factor_serves_many_right_hand_sides_and_leading_dims_are_kept() -> None:
    m = moments_from(*problem())
    factor = factor_ridge(m.s_xx.expand(2, 3, 6, 6), 0.5)
    rhs = torch.randn(2, 3, 6, 5, dtype=torch.float64)
    solution = factor.solve(rhs)
    expected = torch.from_numpy(np.linalg.solve(m.s_xx.numpy() + 0.5 * np.eye(6), rhs.numpy()))
    torch.testing.assert_close(solution.weight, expected, rtol=1e-10, atol=1e-12)


def test_the_gram_matrix_given_is_left_as_it_was() -> None:
    m = moments_from(*problem())
    before = m.s_xx.clone()
    solve_ridge(m.s_xx, m.s_xy, 7.0)
    assert torch.equal(m.s_xx, before)


@pytest.mark.parametrize("bad", [-1e-9, float("nan"), float("inf")])
def test_a_penalty_that_makes_no_sense_is_refused(bad: float) -> None:
    m = moments_from(*problem())
    with pytest.raises(RidgeError, match=r"ridge_lambda=.*expected a finite number >= 0"):
        solve_ridge(m.s_xx, m.s_xy, bad)


@pytest.mark.parametrize(
    ("penalty", "message"),
    [
        (torch.tensor([1, 1, -2.0, 1, 1, 1]), r"the penalty at \(2,\) is -2.0: expected a number >= 0"),
        (torch.full((2, 6), float("nan")), r"the penalty at \(0, 0\) is nan"),
        (torch.ones(5), r"shape \(5,\): expected one for each of 6 features"),
        (torch.ones(3, 6), r"shape \(3, 6\): its leading dims do not broadcast .* \(2, 6, 6\)"),
    ],
)
def test_penalties_that_make_no_sense_are_refused(penalty: torch.Tensor, message: str) -> None:
    s_xx = moments_from(*problem()).s_xx.expand(2, 6, 6)
    with pytest.raises(RidgeError, match=message):
        factor_ridge(s_xx, penalty)


BANDS = torch.tensor([0, 1, 1, 2, 0, 1], dtype=torch.int32)


@pytest.mark.parametrize("convention", ["absolute", "relative"])
@pytest.mark.parametrize("lambdas", [(0.5, 20.0, 3.0), (0.5, float("inf"), 3.0)])
def test_twice_the_rows_halve_an_absolute_penalty_and_leave_a_relative_one(
    convention: str, lambdas: tuple[float, float, float]
) -> None:
    x, y = problem()
    once, twice = moments_from(x, y), moments_from(np.repeat(x, 2, 0), np.repeat(y, 2, 0))

    def weight(m: Moments, factor: float) -> np.ndarray:
        scaled = [factor * value for value in lambdas]
        return fitted(m, penalty_vector(convention, BANDS, scaled, m.s_xx.diagonal()))[0]

    doubled = 2.0 if convention == "absolute" else 1.0
    np.testing.assert_allclose(weight(twice, doubled), weight(once, 1.0), rtol=1e-11)
    assert np.abs(weight(twice, 3 - doubled) - weight(once, 1.0)).max() > 1e-3


def test_a_relative_penalty_is_in_units_of_the_mean_variance_of_what_is_read() -> None:
    diagonal = torch.tensor([[1.0, 2, 3, 4, 5, 6], [2, 2, 2, 2, 2, 2]])
    infinite = float("inf")
    got = penalty_vector("relative", BANDS, (1.0, infinite, 0.1), diagonal)
    mean = (1 + 5 + 4) / 3
    expected = [
        [mean, infinite, infinite, 0.1 * mean, mean, infinite],
        [2, infinite, infinite, 0.2, 2, infinite],
    ]
    torch.testing.assert_close(got, torch.tensor(expected, dtype=torch.float64))
    got = penalty_vector("absolute", BANDS, (1.0, infinite, 0.1), diagonal)
    assert got[0].tolist() == [1.0, infinite, infinite, 0.1, 1.0, infinite]
    nothing = penalty_vector("relative", BANDS, (infinite,) * 3, diagonal)
    assert torch.isinf(nothing).all()


def test_a_penalty_vector_of_unknown_bands_or_lambdas_is_refused() -> None:
    diagonal = torch.ones(6)
    with pytest.raises(UnknownName, match="relative"):
        penalty_vector("relativ", BANDS, (1, 1, 1), diagonal)
    with pytest.raises(
        RidgeError, match=r"lambdas=\(1, -1, 1\): expected a number >= 0 for each of own, cross"
    ):
        penalty_vector("absolute", BANDS, (1, -1, 1), diagonal)
    with pytest.raises(RidgeError, match="for each of own, cross, native"):
        penalty_vector("absolute", BANDS, (1, 1), diagonal)
    with pytest.raises(RidgeError, match="bands from 0 to 3: expected 0 to 2"):
        penalty_vector("absolute", torch.tensor([0, 3]), (1, 1, 1), diagonal[:2])


def test_moments_that_are_not_finite_are_refused() -> None:
    m = moments_from(*problem())
    m.s_xx[0, 0] = float("nan")
    with pytest.raises(RidgeError, match="NaN or infinite"):
        solve_ridge(m.s_xx, m.s_xy, 0.01)
    m = moments_from(*problem())
    m.s_xy[0, 0] = float("inf")
    with pytest.raises(RidgeError, match="not finite"):
        solve_ridge(m.s_xx, m.s_xy, 0.01)


@pytest.mark.parametrize("weighted", [False, True])
def test_errors_from_moments_equal_errors_from_rows(weighted: bool) -> None:
    x, y = problem(seed=0)
    x_new, y_new = problem(n=33, seed=5)
    w = np.random.default_rng(1).gamma(1.0, size=33) if weighted else None
    weight, bias, _ = fitted(moments_from(x, y), 0.01)
    m = moments_from(x_new, y_new, w)
    got = sse_with_bias(
        torch.from_numpy(weight),
        torch.from_numpy(bias),
        m.s_xx,
        m.s_xy,
        m.s_yy,
        m.mean_x,
        m.mean_y,
        m.weight,
    )
    residual = y_new - x_new @ weight - bias
    expected = ((np.ones(33) if w is None else w)[:, None] * residual**2).sum(0)
    # a difference of sums that are about a hundred times larger
    np.testing.assert_allclose(got.numpy(), expected, rtol=1e-10)


def test_the_error_about_fitted_means_is_that_of_centred_rows() -> None:
    x, y = problem()
    m = moments_from(x, y)
    weight = np.random.default_rng(2).normal(size=(6, 4))
    centred = (y - y.mean(0)) - (x - x.mean(0)) @ weight
    got = sse(torch.from_numpy(weight), m.s_xx, m.s_xy, m.s_yy)
    np.testing.assert_allclose(got.numpy(), (centred**2).sum(0), rtol=1e-11)


def test_r2_of_a_head_that_never_varies_is_1_when_met_and_0_when_not() -> None:
    total = torch.tensor([[0.0, 0.0], [0.0, 0.0], [2.0, 2.0]])
    error = torch.tensor([[0.0, 0.0], [1.0, 0.0], [1.0, 0.0]])
    assert r2_score(error, total).tolist() == [1.0, 0.0, 0.75]


def test_too_few_rows_are_refused_and_few_rows_warned_about() -> None:
    with pytest.raises(TooFewRows, match=r"100 calibration rows for 100 features.*better 200") as refused:
        check_rows(100, 100)
    for remedy in (
        "calibration.n_sequences",
        "mapper.top_k",
        "mapper=head_local",
        "mapper.allow_few_rows=true",
    ):
        assert remedy in str(refused.value)
    with pytest.warns(FewRowsWarning, match="199 calibration rows"):
        check_rows(199, 100)
    with pytest.warns(FewRowsWarning):
        check_rows(50, 100, allow_few_rows=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_rows(200, 100)
