from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from kvmap.fit.low_rank import (
    LowRankError,
    choose_rank,
    principal_outputs,
    reduce_heads,
    sse_by_rank,
)
from kvmap.fit.moments import Moments

HEADS, P, D = 3, 10, 4


def rows_of(n: int, seed: int = 0, shift: float = 0.0) -> Tensor:
    """(n, p) rows of correlated features of unlike size, about a mean that is not zero."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(P, P, generator=torch.Generator().manual_seed(99), dtype=torch.float64)
    rows = torch.randn(n, P, generator=generator, dtype=torch.float64) + shift
    return (rows * torch.logspace(0, -1.5, P, dtype=torch.float64)) @ mix + 2


def outputs_of(x: Tensor, rank: int = D, noise: float = 0.5, seed: int = 0) -> Tensor:
    """(H, n, d) outputs of a law of the given rank, and noise."""
    law = torch.Generator().manual_seed(7)
    left = torch.randn(HEADS, P, rank, generator=law, dtype=torch.float64)
    right = torch.randn(HEADS, rank, D, generator=law, dtype=torch.float64)
    disturbance = torch.Generator().manual_seed(100 + seed)
    y = x @ left @ right + 1
    return y + noise * torch.randn(y.shape, generator=disturbance, dtype=torch.float64)


def moments_of(x: Tensor, y: Tensor) -> Moments:
    return Moments.zeros(P, HEADS * D).update(x, torch.cat(list(y), dim=1))


def least_squares(x: Tensor, y: Tensor) -> Tensor:
    """(H, p, d), head by head, with an intercept that is left out."""
    centred = (x - x.mean(0)).numpy()
    solved = [np.linalg.lstsq(centred, (one - one.mean(0)).numpy(), rcond=None)[0] for one in y]
    return torch.tensor(np.stack(solved))


@pytest.fixture(scope="module")
def task():
    """Rows of both splits (the held-out ones about another mean), their moments and a fitted map."""
    fit_x, held_x = rows_of(60), rows_of(25, seed=1, shift=0.4)
    fit_y, held_y = outputs_of(fit_x), outputs_of(held_x, seed=1)
    return {
        "rows": (fit_x, fit_y, held_x, held_y),
        "fit": moments_of(fit_x, fit_y),
        "held_out": moments_of(held_x, held_y),
        "weight": least_squares(fit_x, fit_y),
    }


def low_rank(weight: Tensor, basis: Tensor, rank: int) -> Tensor:
    return weight @ basis[..., :rank] @ basis[..., :rank].transpose(-1, -2)


@pytest.mark.parametrize("rank", range(D + 1))
def test_the_reduced_map_is_the_truncated_svd_of_the_mapped_rows(task, rank: int) -> None:
    x, weight = task["rows"][0], task["weight"]
    basis, energy = principal_outputs(weight, task["fit"].s_xx)
    reduced = low_rank(weight, basis, rank)
    for head in range(HEADS):
        centred = x - x.mean(0)
        full = (centred @ weight[head]).numpy()
        u, s, vt = np.linalg.svd(full, full_matrices=False)
        best = (u[:, :rank] * s[:rank]) @ vt[:rank]
        # float64, conditions of about 1e3
        np.testing.assert_allclose((centred @ reduced[head]).numpy(), best, atol=1e-9 * s[0])
        np.testing.assert_allclose(energy[head].numpy(), s**2, atol=1e-10 * s[0] ** 2)
        missed = ((full - best) ** 2).sum()
        assert float(energy[head, rank:].sum()) == pytest.approx(missed, rel=1e-8, abs=1e-9 * s[0] ** 2)


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_no_other_map_of_that_rank_comes_as_near(task, rank: int) -> None:
    x, weight = task["rows"][0], task["weight"]
    basis, energy = principal_outputs(weight, task["fit"].s_xx)
    generator = torch.Generator().manual_seed(rank)
    for head in range(HEADS):
        centred = x - x.mean(0)
        best = float(energy[head, rank:].sum())
        plain = torch.linalg.svd(weight[head], full_matrices=False)  # optimal for W itself, not for its rows
        others = [(plain.U[:, :rank] * plain.S[:rank]) @ plain.Vh[:rank]]
        near = low_rank(weight, basis, rank)[head]
        for _ in range(20):
            left, right = (
                torch.randn(shape, generator=generator, dtype=torch.float64)
                for shape in ((P, rank), (rank, D))
            )
            others += [left @ right, near + 1e-3 * left @ torch.linalg.pinv(left) @ near]
        assert all(float((centred @ (weight[head] - o)).square().sum()) >= best for o in others)


def test_the_error_of_every_rank_is_that_of_the_rows(task) -> None:
    fit_x, fit_y, *_ = task["rows"]
    basis, _ = principal_outputs(task["weight"], task["fit"].s_xx)
    for split, x, y in (("fit", *task["rows"][:2]), ("held_out", *task["rows"][2:])):
        found = sse_by_rank(task["weight"], basis, task["fit"], task[split])
        assert found.shape == (HEADS, D + 1)
        for rank in range(D + 1):
            reduced = low_rank(task["weight"], basis, rank)
            bias = fit_y.mean(1, keepdim=True) - fit_x.mean(0, keepdim=True) @ reduced
            expected = (y - x @ reduced - bias).square().sum((1, 2))
            torch.testing.assert_close(found[:, rank], expected, rtol=1e-9, atol=1e-9)  # float64, other sums


def test_more_rank_never_fits_worse(task) -> None:
    basis, energy = principal_outputs(task["weight"], task["fit"].s_xx)
    assert bool((energy.diff(dim=-1) <= 0).all())
    errors = sse_by_rank(task["weight"], basis, task["fit"], task["fit"])
    assert bool((errors.diff(dim=-1) <= 1e-9 * errors[:, :1]).all())
    # of a least-squares map the error grows by just what the reduction misses
    missed = energy.flip(-1).cumsum(-1).flip(-1)
    torch.testing.assert_close(errors[:, :-1] - errors[:, -1:], missed, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("tolerance", [0.0, 0.01, 0.1, 1.0, 1e3])
def test_the_rank_is_the_smallest_within_the_tolerance_on_the_held_out_rows(task, tolerance: float) -> None:
    fit_x, fit_y, x, y = task["rows"]
    heads = reduce_heads(task["weight"], task["fit"], task["held_out"], tolerance)
    basis, _ = principal_outputs(task["weight"], task["fit"].s_xx)
    saving = [r for r in range(D + 1) if r * (P + D) < P * D]
    assert saving == [0, 1, 2]
    for head, found in enumerate(heads):

        def error(rank: int, head: int = head) -> float:
            w = low_rank(task["weight"], basis, rank)[head]
            bias = fit_y[head].mean(0) - fit_x.mean(0) @ w
            return float((y[head] - x @ w - bias).square().sum())

        within = [r for r in saving if error(r) <= (1 + tolerance) * error(D)]
        assert found.rank == (within[0] if within else None)
        if found.up is None:
            assert torch.equal(found.down, task["weight"][head])
        else:
            rank = found.up.shape[0]
            assert (found.down.shape, found.up.shape) == ((P, rank), (rank, D))
            torch.testing.assert_close(found.up @ found.up.T, torch.eye(rank, dtype=torch.float64))
            reduced = low_rank(task["weight"], basis, rank)[head]
            torch.testing.assert_close(found.down @ found.up, reduced, rtol=1e-10, atol=1e-10)


def test_tolerances_reach_full_reduced_and_empty_heads(task) -> None:
    ranks = [
        {head.rank for head in reduce_heads(task["weight"], task["fit"], task["held_out"], tolerance)}
        for tolerance in (0.0, 1e6)
    ]
    assert None in ranks[0]
    assert ranks[1] == {0}


@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_a_law_of_low_rank_is_found_at_its_rank(noise: float) -> None:
    """Also without noise, where both errors are rounding alone and neither is the smaller by right."""
    x, held_x = rows_of(400), rows_of(200, seed=1)
    y, held_y = outputs_of(x, 2, noise), outputs_of(held_x, 2, noise, seed=1)
    weight = least_squares(x, y)
    heads = reduce_heads(weight, moments_of(x, y), moments_of(held_x, held_y), 0.01)
    assert [head.rank for head in heads] == [2] * HEADS


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_factors_come_in_the_dtype_of_the_weights(task, dtype: torch.dtype) -> None:
    for head in reduce_heads(task["weight"].to(dtype), task["fit"], task["held_out"], 1.0):
        assert head.down.dtype == dtype
        assert head.up is None or head.up.dtype == dtype


def test_dead_outputs_and_dead_features_are_no_trouble(task) -> None:
    weight = task["weight"].clone()
    weight[0] = 0
    weight[1, :, 2:] = 0
    heads = reduce_heads(weight, task["fit"], task["held_out"], 0.0)
    assert heads[0].rank == 0
    assert all(bool(torch.isfinite(head.down).all()) for head in heads)


@pytest.mark.parametrize(
    ("sse", "tolerance", "p", "expected"),
    [
        ([9.0, 4.0, 2.0, 1.0], 1.0, 100, 2),
        ([9.0, 4.0, 2.0, 1.0], 0.5, 100, None),
        ([9.0, 4.0, 2.0, 1.0], 8.0, 100, 0),
        ([9.0, 0.9, 2.0, 1.0], 0.0, 100, 1),  # held-out error may rise with rank
        ([9.0, 4.0, 1.0, 1.0], 0.0, 6, None),  # 2 (6 + 3) = 6 · 3 saves nothing
        ([9.0, 4.0, 1.0, 1.0], 0.0, 7, 2),
        ([9.0, 1e-14, 3e-14, 0.0], 0.5, 100, None),
    ],
)
def test_a_rank_is_chosen_only_where_it_serves_and_saves(sse, tolerance, p, expected) -> None:
    assert choose_rank(torch.tensor(sse, dtype=torch.float64), tolerance, p) == expected


def test_an_error_of_rounding_is_no_error() -> None:
    sse = torch.tensor([9.0, 1e-14, 3e-14, 0.0], dtype=torch.float64)
    assert choose_rank(sse, 0.0, 100, noise=2e-14) == 1


@pytest.mark.parametrize("tolerance", [-0.1, float("nan"), float("inf")])
def test_a_tolerance_that_makes_no_sense_is_refused(task, tolerance: float) -> None:
    with pytest.raises(LowRankError, match="expected a finite number >= 0"):
        reduce_heads(task["weight"], task["fit"], task["held_out"], tolerance)


def test_weights_that_are_not_finite_are_refused(task) -> None:
    bad = task["weight"].clone()
    bad[1, 0, 0] = float("nan")
    with pytest.raises(LowRankError, match="NaN"):
        reduce_heads(bad, task["fit"], task["held_out"], 0.1)


def test_no_rows_to_choose_on_is_said(task) -> None:
    nothing = Moments.zeros(P, HEADS * D)
    with pytest.raises(LowRankError, match="no held-out rows"):
        reduce_heads(task["weight"], task["fit"], nothing, 0.1)
