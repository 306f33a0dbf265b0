from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.linear_model import Ridge

from kvmap.errors import UnknownName
from kvmap.fit.moments import Moments
from kvmap.fit.ridge import RidgeError, solve_ridge
from kvmap.fit.ridge_path import CholeskyPath, EigenPath, path_sse, path_weights, ridge_path

LAMBDAS = [0.0, 1e-3, 0.5, 40.0, 3e4]
RATIO = np.array([1.0, 30.0, 0.2, 30.0, 1.0, 500.0])
GROUPS, WIDTH = 3, 2


class Rows:
    """Rows of both splits, whose means differ, and their moments."""

    def __init__(
        self, n: int = 80, p: int = 6, weighted: bool = False, mix: np.ndarray | None = None
    ) -> None:
        rng = np.random.default_rng(0)
        q = GROUPS * WIDTH
        map_, offset = rng.normal(size=(p, q)), rng.normal(size=q)
        self.x, self.y, self.w, self.moments = [], [], [], []
        for size, shift in ((n, 2.0), (37, -1.0)):
            x = rng.normal(size=(size, p)) + shift
            x = x if mix is None else x @ mix
            y = x @ (map_ if mix is None else np.linalg.pinv(mix) @ map_) + offset
            y = y + 0.5 * rng.normal(size=y.shape)
            w = rng.gamma(1.0, size=size) if weighted else np.ones(size)
            moments = Moments.zeros(x.shape[1], q)
            moments.update(torch.from_numpy(x), torch.from_numpy(y), torch.from_numpy(w))
            for kept, value in zip((self.x, self.y, self.w, self.moments), (x, y, w, moments), strict=True):
                kept.append(value)

    def errors(self, ridge_lambda: float, ratio: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Explicit residuals of scikit-learn's fit on rescaled features, summed by group: both splits."""
        read = np.isfinite(ratio)
        x = [rows[:, read] / np.sqrt(ratio[read]) for rows in self.x]
        if ridge_lambda == 0:
            root = np.sqrt(self.w[0])[:, None]
            mean_x, mean_y = (np.average(a, 0, self.w[0]) for a in (x[0], self.y[0]))
            coef, *_ = np.linalg.lstsq(root * (x[0] - mean_x), root * (self.y[0] - mean_y), rcond=1e-12)
            predicted = [(rows - mean_x) @ coef + mean_y for rows in x]
        else:
            model = Ridge(alpha=ridge_lambda, solver="svd").fit(x[0], self.y[0], sample_weight=self.w[0])
            predicted = [model.predict(rows) for rows in x]
        errors = [w @ np.square(y - f) for w, y, f in zip(self.w, self.y, predicted, strict=True)]
        return tuple(e.reshape(GROUPS, WIDTH).sum(1) for e in errors)  # type: ignore[return-value]


def assert_path_equals_rows(rows: Rows, ratio: np.ndarray | None, method: str, rtol: float) -> None:
    given = None if ratio is None else torch.from_numpy(ratio)
    got = path_sse(*rows.moments, LAMBDAS, GROUPS, ratio=given, method=method)
    assert got.fit.shape == got.held_out.shape == (len(LAMBDAS), GROUPS)
    for i, ridge_lambda in enumerate(LAMBDAS):
        fit, held_out = rows.errors(ridge_lambda, np.ones(rows.x[0].shape[1]) if ratio is None else ratio)
        np.testing.assert_allclose(got.fit[i], fit, rtol=rtol, atol=rtol * rows.y[0].size)
        np.testing.assert_allclose(got.held_out[i], held_out, rtol=rtol, atol=rtol * rows.y[1].size)


@pytest.mark.parametrize("method", ["eigen", "cholesky", "auto"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("ratio", [None, RATIO, np.where(RATIO == 30, np.inf, RATIO)])
def test_errors_of_every_lambda_equal_those_of_rows(
    method: str, weighted: bool, ratio: np.ndarray | None
) -> None:
    # differences of sums that are about a hundred times larger
    assert_path_equals_rows(Rows(weighted=weighted), ratio, method, rtol=1e-10)


DUPLICATED = np.hstack([np.eye(6), np.eye(6)[:, :2]])


@pytest.mark.parametrize("method", ["eigen", "cholesky", "auto"])
@pytest.mark.parametrize(
    ("n", "mix"), [(80, DUPLICATED), (5, None), (80, np.diag([0, 1.0, 1, 1, 1, 1])), (7, DUPLICATED)]
)
def test_singular_systems_give_the_errors_of_rows_too(n: int, mix: np.ndarray | None, method: str) -> None:
    # the smallest λ leaves a condition number of 1e6
    assert_path_equals_rows(Rows(n, mix=mix), None, method, rtol=1e-8)


@pytest.mark.parametrize("method", ["eigen", "cholesky"])
def test_an_ill_conditioned_system_keeps_six_digits(method: str) -> None:
    rotation, _ = np.linalg.qr(np.random.default_rng(3).normal(size=(6, 6)))
    rows = Rows(mix=rotation @ np.diag(10.0 ** np.arange(0, -6, -1)) @ rotation.T)
    # condition number of 1e10 of the moments, and float64
    assert_path_equals_rows(rows, None, method, rtol=1e-6)


def test_eigen_and_cholesky_agree_where_scales_differ_by_thousands() -> None:
    rows = Rows(mix=np.diag([1e3, 1, 1, 1, 1, 1e-1]))
    # variances a factor 1e8 apart, the most for which "auto" takes "eigen"
    assert_path_equals_rows(rows, None, "eigen", rtol=1e-7)
    assert_path_equals_rows(rows, None, "cholesky", rtol=1e-9)


@pytest.mark.parametrize("tile", [1, 4, 5])
@pytest.mark.parametrize("method", ["eigen", "cholesky"])
@pytest.mark.parametrize("ratio", [None, np.where(RATIO == 30, np.inf, RATIO)])
def test_symmetric_products_formed_in_tiles_are_whole(
    method: str, tile: int, ratio: np.ndarray | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvmap.fit.ridge_path._TILE", tile)
    assert_path_equals_rows(Rows(), ratio, method, rtol=1e-10)


def test_one_pass_serves_heads_of_all_outputs_or_of_one_each() -> None:
    rows = Rows()
    path = ridge_path(rows.moments[0], LAMBDAS, method="eigen")
    each, total = path.sse(rows.moments[1], GROUPS * WIDTH), path.sse(rows.moments[1], 1)
    torch.testing.assert_close(each.held_out.sum(1, keepdim=True), total.held_out)
    torch.testing.assert_close(each.fit.sum(1, keepdim=True), total.fit)


@pytest.mark.parametrize("method", ["eigen", "cholesky"])
@pytest.mark.parametrize("ratio", [None, RATIO, np.where(RATIO == 30, np.inf, RATIO)])
def test_weights_are_those_of_a_fit_with_that_lambda(method: str, ratio: np.ndarray | None) -> None:
    m = Rows().moments[0]
    given = None if ratio is None else torch.from_numpy(ratio)
    penalties = torch.ones(6, dtype=torch.float64) if given is None else given
    path = ridge_path(m, LAMBDAS, ratio=given, method=method)
    for i, ridge_lambda in enumerate(LAMBDAS):
        penalty = torch.where(torch.isinf(penalties), penalties, ridge_lambda * penalties)
        expected = solve_ridge(m.s_xx, m.s_xy, penalty).weight
        torch.testing.assert_close(path.weights(i), expected, rtol=1e-9, atol=1e-11)
        one = path_weights(m, ridge_lambda, ratio=given, method=method)
        torch.testing.assert_close(one, expected, rtol=1e-9, atol=1e-11)
    chosen = torch.tensor([3, 1, 3])
    got = path.weights(chosen)
    for group, i in enumerate(chosen.tolist()):
        columns = slice(group * WIDTH, (group + 1) * WIDTH)
        torch.testing.assert_close(got[:, columns], path.weights(i)[:, columns], rtol=1e-12, atol=1e-14)


def test_a_feature_left_out_has_weights_of_exactly_0() -> None:
    ratio = torch.tensor([1.0, float("inf"), 1, 1, 1, 1])
    for method in ("eigen", "cholesky"):
        path = ridge_path(Rows().moments[0], LAMBDAS, ratio=ratio, method=method)
        assert all((path.weights(i)[1] == 0).all() for i in range(len(LAMBDAS)))


def test_a_path_knows_whether_it_dropped_a_direction() -> None:
    duplicated = Rows(mix=DUPLICATED).moments[0]
    assert ridge_path(duplicated, [0.0, 1.0], method="eigen").singular
    assert not ridge_path(duplicated, [1.0], method="eigen").singular
    assert not ridge_path(Rows().moments[0], [0.0, 1.0], method="eigen").singular


def test_some_features_without_a_penalty_go_to_cholesky() -> None:
    rows, ratio = Rows(), np.array([0.0, 1, 1, 1, 0, 1])
    given = torch.from_numpy(ratio)
    assert isinstance(ridge_path(rows.moments[0], LAMBDAS, ratio=given), CholeskyPath)
    with pytest.raises(RidgeError, match=r"feature 0 has a penalty ratio of 0: .* use 'cholesky' or 'auto'"):
        ridge_path(rows.moments[0], LAMBDAS, ratio=given, method="eigen")
    got = path_sse(*rows.moments, LAMBDAS, GROUPS, ratio=given)
    nearly = path_sse(*rows.moments, LAMBDAS, GROUPS, ratio=given + 1e-12, method="cholesky")
    torch.testing.assert_close(got.held_out, nearly.held_out, rtol=1e-8, atol=0)


def moments_of(p: int, m: int, scale: float = 1.0) -> Moments:
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(2 * p, n, generator=generator, dtype=torch.float64) for n in (p, m))
    x[:, 0] *= scale
    return Moments.zeros(p, m).update(x, y)


def test_auto_takes_what_costs_less_and_never_drowns_small_features() -> None:
    assert isinstance(ridge_path(moments_of(16, 64), LAMBDAS), EigenPath)
    assert isinstance(ridge_path(moments_of(64, 8), LAMBDAS), CholeskyPath)
    assert isinstance(ridge_path(moments_of(16, 64), [1.0]), CholeskyPath)
    assert isinstance(ridge_path(moments_of(16, 64, scale=1e5), LAMBDAS), CholeskyPath)
    # the smallest λ lifts the small features
    assert isinstance(ridge_path(moments_of(16, 64, scale=1e5), [1e6] * 5), EigenPath)


def test_a_perfect_fit_has_no_negative_error() -> None:
    rng = np.random.default_rng(0)
    x = torch.from_numpy(rng.normal(size=(40, 6)))
    y = x @ torch.from_numpy(rng.normal(size=(6, 6)))
    m = Moments.zeros(6, 6).update(x, y)
    for method in ("eigen", "cholesky"):
        errors = path_sse(m, m, [0.0], 3, method=method)
        assert (errors.fit >= 0).all()
        assert (errors.held_out >= 0).all()
        assert float(errors.fit.max()) < 1e-11 * float(m.s_yy.max())


@pytest.mark.parametrize("method", ["eigen", "cholesky", "auto"])
def test_no_features_left_leave_the_mean(method: str) -> None:
    rows = Rows()
    got = path_sse(*rows.moments, [1.0], GROUPS, ratio=torch.full((6,), float("inf")), method=method)
    spread = rows.moments[0].s_yy.view(GROUPS, WIDTH).sum(1)
    torch.testing.assert_close(got.fit[0], spread)


@pytest.mark.parametrize("method", ["eigen", "cholesky"])
def test_what_makes_no_sense_is_refused(method: str) -> None:
    fit, held_out = Rows().moments
    for lambdas in ([], [-1.0], [float("nan")], [1.0, float("inf")]):
        with pytest.raises(RidgeError, match=r"lambdas=.*: expected one or more finite numbers >= 0"):
            ridge_path(fit, lambdas, method=method)
    for ratio in (torch.ones(5), -torch.ones(6), torch.full((6,), float("nan"))):
        with pytest.raises(RidgeError, match=r"expected \(6,\), one number >= 0 for each feature"):
            ridge_path(fit, [1.0], ratio=ratio, method=method)
    path = ridge_path(fit, [1.0], method=method)
    with pytest.raises(RidgeError, match="6 outputs are no 4 groups"):
        path.sse(held_out, 4)
    with pytest.raises(
        RidgeError, match="held-out moments are of 8 features and 6 outputs, those fitted of 6"
    ):
        path.sse(Rows(mix=DUPLICATED).moments[1], 3)
    with pytest.raises(RidgeError, match=r"\(4,\) positions for 6 outputs: expected one for each group"):
        path.weights(torch.zeros(4, dtype=torch.int64))
    with pytest.raises(UnknownName, match="cholesky"):
        ridge_path(fit, [1.0], method="choleski")
