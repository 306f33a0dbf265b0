"""Ridge regression on moments: pure solvers of tensors.

The penalty is absolute: the Gram matrix is a sum over rows and is not divided by their number, so
doubling every row halves the effect of a given λ. The intercept is never penalised.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch
from torch import Tensor

from kvmap.errors import KvmapError

_EPS = torch.finfo(torch.float64).eps


class RidgeError(KvmapError):
    """A system that has no finite solution, or a penalty that makes no sense."""


class TooFewRows(KvmapError):
    """No more calibration rows than features: the fit would only memorise them."""


class FewRowsWarning(UserWarning):
    """Fewer than two calibration rows for each feature: in-sample and held-out R² will differ widely."""


@dataclass(frozen=True, eq=False)
class RidgeSolution:
    """Solution of `(S_xx + λI) W = S_xy`.

    Attributes:
        weight: (..., p, m) float64.
        solver: one name for each system, flattened over the leading dims: "cholesky", or "eigh" where
            the system was singular to float64 rounding and the minimum-norm solution was taken.
        rank: numerical rank of each system.
    """

    weight: Tensor
    solver: tuple[str, ...]
    rank: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class RidgeFactor:
    """A factorised `S_xx + λI`, (n_systems, p, p), that serves any number of right-hand sides."""

    leading: torch.Size
    cholesky: Tensor
    minimum_norm: dict[int, tuple[Tensor, Tensor]]
    rank: tuple[int, ...]

    def solve(self, s_xy: Tensor) -> RidgeSolution:
        """Solve for (..., p, m), with the leading dims of the Gram matrix."""
        rhs = s_xy.double().reshape(self.cholesky.shape[0], *s_xy.shape[-2:])
        weight = torch.cholesky_solve(rhs, self.cholesky)
        for i, (inverse_eigenvalues, vectors) in self.minimum_norm.items():
            weight[i] = vectors @ (inverse_eigenvalues.unsqueeze(1) * (vectors.T @ rhs[i]))
        solver = tuple("eigh" if i in self.minimum_norm else "cholesky" for i in range(len(self.rank)))
        return RidgeSolution(weight.reshape(*self.leading, *s_xy.shape[-2:]), solver, self.rank)


def factor_ridge(s_xx: Tensor, ridge_lambda: float) -> RidgeFactor:
    """Factorise `S_xx + λI` in float64.

    Cholesky, and where a pivot vanishes against its own diagonal entry (dead or duplicated channels,
    fewer rows than features, λ too small to matter) an eigendecomposition instead, whose null directions
    are dropped: S_xy has no component there, so this is the exact limit, the minimum-norm solution.

    Args:
        s_xx: (..., p, p) centred second moments; leading dims are independent systems.
        ridge_lambda: λ ≥ 0, absolute.

    Raises:
        RidgeError: λ negative or not finite, or moments that are not finite.
    """
    if not 0 <= ridge_lambda < float("inf"):
        raise RidgeError(
            f"ridge_lambda={ridge_lambda}: expected a finite number >= 0 (0 is least squares; for λ → ∞ use "
            f"bias_only)"
        )
    leading, p = s_xx.shape[:-2], s_xx.shape[-1]
    gram = s_xx.double().reshape(-1, p, p).clone()
    if not bool(torch.isfinite(gram).all()):
        raise RidgeError("the second moments hold NaN or infinite values: calibrate again with finite caches")
    diagonal = torch.diagonal(gram, dim1=-2, dim2=-1)
    diagonal += ridge_lambda
    cholesky, info = torch.linalg.cholesky_ex(gram)
    pivots = torch.diagonal(cholesky, dim1=-2, dim2=-1).square()
    tolerance = _singular_tolerance(p)
    healthy = (info == 0) & (pivots > tolerance * diagonal).all(-1)
    minimum_norm, rank = {}, [p] * gram.shape[0]
    for i in (~healthy).nonzero().flatten().tolist():
        try:
            eigenvalues, vectors = torch.linalg.eigh(gram[i])
        except torch.linalg.LinAlgError as error:
            raise RidgeError(f"system {i} has no eigendecomposition: raise ridge_lambda ({error})") from error
        kept = eigenvalues - ridge_lambda > tolerance * eigenvalues.abs().max()
        inverse = torch.where(kept, 1 / torch.where(kept, eigenvalues, 1.0), 0.0)
        minimum_norm[i], rank[i] = (inverse, vectors), int(kept.sum())
        cholesky[i] = torch.eye(p, dtype=torch.float64, device=gram.device)
    return RidgeFactor(leading, cholesky, minimum_norm, tuple(rank))


def solve_ridge(s_xx: Tensor, s_xy: Tensor, ridge_lambda: float) -> RidgeSolution:
    """`W = (S_xx + λI)⁻¹ S_xy`, the minimiser of `‖Y − XW‖² + λ‖W‖²` over centred rows ([H] §3.3).

    Args:
        s_xx: (..., p, p); s_xy: (..., p, m), same leading dims.
        ridge_lambda: λ ≥ 0, absolute: not divided by the number of rows.

    Raises:
        RidgeError: λ < 0, or a solution that is not finite.
    """
    solution = factor_ridge(s_xx, ridge_lambda).solve(s_xy)
    if not bool(torch.isfinite(solution.weight).all()):
        raise RidgeError(
            "the ridge solution is not finite: calibrate again with finite caches, or raise ridge_lambda"
        )
    return solution


def intercept(weight: Tensor, mean_x: Tensor, mean_y: Tensor) -> Tensor:
    """`b = ȳ − x̄W`, float64: weight (..., p, m), mean_x (..., p), mean_y (..., m) → (..., m)."""
    return mean_y.double() - (mean_x.double().unsqueeze(-2) @ weight.double()).squeeze(-2)


def sse(weight: Tensor, s_xx: Tensor, s_xy: Tensor, s_yy: Tensor) -> Tensor:
    """Sum of squared errors of each output about the fitted means, from moments alone, float64.

    `SSE(W) = s_yy − 2 diag(WᵀS_xy) + diag(WᵀS_xx W)`

    Args:
        weight: (..., p, m); s_xx: (..., p, p), or (1, p, p) shared by all; s_xy: (..., p, m); s_yy: (..., m).

    Returns:
        (..., m).
    """
    weight = weight.double()
    quadratic = (weight * gram_times(s_xx, weight)).sum(-2)
    return s_yy - 2 * (weight * s_xy).sum(-2) + quadratic


def gram_times(s_xx: Tensor, weight: Tensor) -> Tensor:
    """`S_xx W`, (..., p, m); one (1, p, p) matrix for many weights is not copied for each of them."""
    if weight.ndim == 3 and s_xx.ndim == 3 and s_xx.shape[0] == 1:
        joined = weight.transpose(0, 1).flatten(1)  # (p, n · m)
        return (s_xx[0] @ joined).unflatten(1, weight.shape[::2]).transpose(0, 1)
    return s_xx @ weight


def sse_with_bias(
    weight: Tensor,
    bias: Tensor,
    s_xx: Tensor,
    s_xy: Tensor,
    s_yy: Tensor,
    mean_x: Tensor,
    mean_y: Tensor,
    total_weight: float,
) -> Tensor:
    """`Σ w (y − xW − b)²` of each output, from the moments of any split, float64.

    A split's own means are not those the bias was fitted on, which adds `Σw · (ȳ − x̄W − b)²` to `sse`.
    Rounding can leave a perfect fit a hair below zero; it is returned as 0.
    """
    shift = intercept(weight, mean_x, mean_y) - bias.double()
    return (sse(weight, s_xx, s_xy, s_yy) + total_weight * shift.square()).clamp(min=0)


def r2_score(squared_error: Tensor, total: Tensor) -> Tensor:
    """`1 − ΣSSE/ΣSST` over the last dim (one head's channels), (..., m) → (...).

    A head that never varies gives 1 when it is met to float64 rounding and 0 otherwise.
    """
    error, spread = squared_error.sum(-1), total.sum(-1)
    constant = torch.where(error > 0, torch.zeros_like(error), torch.ones_like(error))
    return torch.where(spread > 0, 1 - error / torch.where(spread > 0, spread, 1.0), constant)


def check_rows(n_rows: int, n_features: int, allow_few_rows: bool = False) -> None:
    """Refuse a fit with N ≤ p, warn below N = 2p (in-sample R² .96 with held-out .10 has been seen there).

    Raises:
        TooFewRows: N ≤ p, unless `allow_few_rows`.
    """
    found = f"{n_rows:,} calibration rows for {n_features:,} features"
    remedy = (
        "calibrate on more or longer sequences (calibration.n_sequences, calibration.sequence_length), keep "
        "more of their tokens (a lower calibration.token_stride), read fewer source layers (a lower "
        "mapper.top_k) or one head of each (mapper=head_local)"
    )
    if n_rows <= n_features and not allow_few_rows:
        raise TooFewRows(
            f"{found}: expected more than {n_features:,}, better {2 * n_features:,}. To mend it, {remedy}; "
            f"to fit all the same, set mapper.allow_few_rows=true (from Python: allow_few_rows=True)"
        )
    if n_rows < 2 * n_features:
        warnings.warn(
            f"{found}: fewer than two for each. Trust the held-out R² alone, or {remedy}",
            FewRowsWarning,
            stacklevel=2,
        )


def _singular_tolerance(p: int) -> float:
    """A pivot or eigenvalue below this share of its scale is float64 rounding, not data."""
    return 16 * max(p, 1) * _EPS
