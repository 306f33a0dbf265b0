from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from sklearn.linear_model import Ridge

from kvmap.fit.moments import Moments
from kvmap.fit.ridge import (
    FewRowsWarning,
    RidgeError,
    TooFewRows,
    check_rows,
    factor_ridge,
    intercept,
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


def fitted(m: Moments, ridge_lambda: float) -> tuple[np.ndarray, np.ndarray, str]:
    solution = solve_ridge(m.s_xx, m.s_xy, ridge_lambda)
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


DAMAGE = {
    "a dead channel": lambda x: np.where(np.arange(x.shape[1]) == 2, 3.0, x),
    "two equal channels": lambda x: x[:, [0, 1, 2, 3, 4, 1]],
    "fewer rows than features": lambda x: x[:4],
    "one row": lambda x: x[:1],
    "no variance at all": lambda x: np.ones_like(x),
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
        assert solver == "eigh"
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


def test_only_the_singular_systems_of_a_batch_fall_back_and_their_rank_is_recorded() -> None:
    x, y = problem()
    good, bad = moments_from(x, y), moments_from(DAMAGE["two equal channels"](x), y)
    s_xx, s_xy = torch.stack([good.s_xx, bad.s_xx, good.s_xx]), torch.stack([good.s_xy, bad.s_xy, good.s_xy])
    solution = solve_ridge(s_xx, s_xy, 0.0)
    assert solution.solver == ("cholesky", "eigh", "cholesky")
    assert solution.rank == (6, 5, 6)
    torch.testing.assert_close(solution.weight[0], solve_ridge(good.s_xx, good.s_xy, 0.0).weight)
    torch.testing.assert_close(solution.weight[1], solve_ridge(bad.s_xx, bad.s_xy, 0.0).weight)


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
