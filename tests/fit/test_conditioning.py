from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from kvmap.fit.conditioning import conditioning
from kvmap.fit.ridge import RidgeError


def rows(n: int = 50, p: int = 7) -> np.ndarray:
    x = np.random.default_rng(0).normal(size=(n, p)) * np.arange(1, p + 1)
    return x - x.mean(0)


def gram_of(x: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(x.T @ x)


PENALTIES = {
    "least squares": np.zeros(7),
    "one λ": np.full(7, 30.0),
    "banded": np.array([0.1, 0.1, 400, 400, 0, 3, 3]),
}


@pytest.mark.parametrize("penalty", PENALTIES.values(), ids=PENALTIES)
def test_degrees_of_freedom_are_the_trace_of_the_hat_matrix_of_rows(penalty: np.ndarray) -> None:
    x = rows()
    hat = x @ np.linalg.solve(x.T @ x + np.diag(penalty), x.T)
    got = conditioning(gram_of(x), torch.from_numpy(penalty))
    np.testing.assert_allclose(float(got.degrees_of_freedom), np.trace(hat), rtol=1e-12)
    np.testing.assert_allclose(
        float(got.condition_number), np.linalg.cond(x.T @ x + np.diag(penalty)), rtol=1e-10
    )
    assert int(got.rank) == 7


def test_one_number_is_the_penalty_of_all_features() -> None:
    gram = gram_of(rows())
    one, each = conditioning(gram, 2.5), conditioning(gram, torch.full((7,), 2.5))
    assert one.degrees_of_freedom == each.degrees_of_freedom
    assert one.condition_number == each.condition_number


@pytest.mark.parametrize("ridge_lambda", [0.0, 5.0])
def test_features_left_out_have_no_part(ridge_lambda: float) -> None:
    x, read = rows(), [0, 3, 4]
    penalty = torch.full((7,), float("inf"), dtype=torch.float64)
    penalty[read] = ridge_lambda
    got, expected = conditioning(gram_of(x), penalty), conditioning(gram_of(x[:, read]), ridge_lambda)
    for name in ("condition_number", "degrees_of_freedom", "rank"):
        torch.testing.assert_close(getattr(got, name), getattr(expected, name), rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    ("damage", "rank"),
    [
        (lambda x: np.hstack([x, x[:, :2]]), 7),
        (lambda x: np.hstack([x, np.zeros((len(x), 1))]), 7),
        (lambda x: x[:5] - x[:5].mean(0), 4),
        (lambda x: np.zeros_like(x), 0),
    ],
    ids=["duplicates", "a dead feature", "few rows", "no variance"],
)
def test_singular_systems_have_a_rank_and_infinite_condition(
    damage: Callable[[np.ndarray], np.ndarray], rank: int
) -> None:
    x = damage(rows())
    got = conditioning(gram_of(x), 0.0)
    assert int(got.rank) == rank == np.linalg.matrix_rank(x)
    assert float(got.condition_number) == float("inf")
    np.testing.assert_allclose(float(got.degrees_of_freedom), rank, atol=1e-10)
    mended = conditioning(gram_of(x), 0.5)
    assert int(mended.rank) == rank
    expected = np.trace(x @ np.linalg.solve(x.T @ x + 0.5 * np.eye(x.shape[1]), x.T))
    np.testing.assert_allclose(float(mended.degrees_of_freedom), expected, atol=1e-10)
    np.testing.assert_allclose(
        float(mended.condition_number), np.linalg.cond(x.T @ x + 0.5 * np.eye(x.shape[1])), rtol=1e-10
    )


def test_the_rank_does_not_depend_on_the_scale_of_single_features() -> None:
    x = rows() * 10.0 ** np.arange(-9, 12, 3)
    assert int(conditioning(gram_of(x), 0.0).rank) == 7
    assert int(conditioning(gram_of(np.hstack([x, x[:, :1]])), 0.0).rank) == 7


def test_systems_of_a_batch_are_judged_each_for_itself() -> None:
    x = rows()
    singular = np.hstack([x[:, :6], x[:, :1]])
    gram = torch.stack([gram_of(x), gram_of(singular)]).view(2, 1, 7, 7)
    penalty = torch.tensor([[0.0], [3.0], [50.0]], dtype=torch.float64).expand(3, 7)
    got = conditioning(gram, penalty)
    assert got.rank.tolist() == [[7] * 3, [6] * 3]
    for i, j in np.ndindex(2, 3):
        alone = conditioning(gram[i, 0], penalty[j])
        torch.testing.assert_close(got.condition_number[i, j], alone.condition_number, rtol=1e-9, atol=0)
        torch.testing.assert_close(got.degrees_of_freedom[i, j], alone.degrees_of_freedom, rtol=1e-11, atol=0)
    assert got.condition_number.dtype == got.degrees_of_freedom.dtype == torch.float64


def test_the_moments_given_are_left_as_they_were_and_bad_ones_refused() -> None:
    gram = gram_of(rows())
    before = gram.clone()
    conditioning(gram, torch.tensor([1, 2, float("inf"), 0, 1, 1, 1]))
    assert torch.equal(gram, before)
    with pytest.raises(RidgeError, match="NaN or infinite"):
        conditioning(gram * float("nan"), 1.0)
    with pytest.raises(RidgeError, match="ridge_lambda=-1"):
        conditioning(gram, -1.0)
