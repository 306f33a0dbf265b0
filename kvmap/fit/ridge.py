"""Ridge regression on moments: pure solvers of tensors.

The penalty is one number λ, or one λ_j for each feature: λ_j = 0 leaves its weights free, λ_j = ∞ leaves it
out. Under the convention "absolute" it is added as it is to a Gram matrix that is a sum over rows, not
divided by their number, so doubling every row halves the effect of a given λ ([H] §3.3); under "relative" it
is in units of the mean diagonal of that matrix, so doubling every row changes nothing. The intercept is never
penalised.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvmap.errors import KvmapError, UnknownName

SOLVERS = ("cholesky", "scaled_cholesky", "eigh")
"""From the one that serves nearly every system to the last resort."""

CONVENTIONS = ("absolute", "relative")
BANDS = ("own", "cross", "native")
"""What the numbers 0, 1, 2 of a banded system's features stand for: the target head's own source head,
another source head, a feature that the target computes itself."""

_EPS = torch.finfo(torch.float64).eps


class RidgeError(KvmapError):
    """A system that has no finite solution, or a penalty that makes no sense."""


class TooFewRows(KvmapError):
    """No more calibration rows than features: the fit would only memorise them."""


class FewRowsWarning(UserWarning):
    """Fewer than two calibration rows for each feature: in-sample and held-out R² will differ widely."""


@dataclass(frozen=True, eq=False)
class RidgeSolution:
    """Solution of `(S_xx + diag(λ)) W = S_xy`.

    Attributes:
        weight: (..., p, m) float64.
        solver: one of `SOLVERS` for each system, flattened over the leading dims (`factor_ridge`).
        rank: directions solved for in each system: p, less features left out and null directions.
    """

    weight: Tensor
    solver: tuple[str, ...]
    rank: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class RidgeFactor:
    """Factorised `S_xx + diag(λ)` of n_systems systems, which serve any number of right-hand sides.

    Attributes:
        leading: the dims that n_systems flattens.
        cholesky: (n_systems, p, p), L of `D (S_xx + diag(λ)) D = LLᵀ`; I where `minimum_norm` serves.
        scale: (n_systems, p), the diagonal of D, 0 for a feature that is left out;
            None where D = I throughout.
        minimum_norm: by system, `e⁻¹` (r,) and Z (p, r) with `W = Z diag(e⁻¹) Zᵀ S_xy`.
        solver: one of `SOLVERS` for each system.
        rank: directions solved for in each system.
    """

    leading: torch.Size
    cholesky: Tensor
    scale: Tensor | None
    minimum_norm: dict[int, tuple[Tensor, Tensor]]
    solver: tuple[str, ...]
    rank: tuple[int, ...]

    def solve(self, s_xy: Tensor) -> RidgeSolution:
        """Solve for (..., p, m), with the leading dims of the system."""
        rhs = s_xy.double().reshape(self.cholesky.shape[0], *s_xy.shape[-2:])
        if self.scale is None:
            weight = torch.cholesky_solve(rhs, self.cholesky)
        else:
            scale = self.scale.unsqueeze(-1)
            weight = torch.cholesky_solve(rhs * scale, self.cholesky).mul_(scale)
        for i, (inverse_eigenvalues, z) in self.minimum_norm.items():
            weight[i] = z @ (inverse_eigenvalues.unsqueeze(1) * (z.T @ rhs[i]))
        return RidgeSolution(weight.reshape(*self.leading, *s_xy.shape[-2:]), self.solver, self.rank)


def factor_ridge(s_xx: Tensor, penalty: float | Tensor) -> RidgeFactor:
    """Factorise `S_xx + diag(λ)` in float64, by the first of these that a system allows:

    1. "cholesky": no pivot vanishes against its own diagonal entry. Neither that test nor the accuracy of the
       factor depends on the scale of single features (Cholesky commutes with a diagonal scaling), so a
       channel hundreds of times larger than the rest, or a wide range of λ_j, needs nothing more.
    2. "scaled_cholesky": dead features get weight 0 (no penalty, and a deviation within a few roundings of
       the widest feature's); the others, scaled to a unit diagonal, have a Cholesky factor.
    3. "eigh": duplicated features, fewer rows than features, λ too small to matter. An eigendecomposition of
       the system scaled to a unit diagonal, so that what counts as null does not depend on the scale of
       single features; null directions are dropped. S_xy has no component there, and of the solutions that
       remain the one of least `Σ λ_j w_j²` is taken, the exact limit: with λ = 0 the least `‖w‖²`, as of
       `numpy.linalg.lstsq`; where only some λ_j are 0, the weights of those count next to nothing.

    Args:
        s_xx: (..., p, p) centred second moments; leading dims are independent systems.
        penalty: λ ≥ 0, or (..., p) of λ_j ≥ 0, whose leading dims broadcast with those of s_xx. A feature
            with λ_j = ∞ is left out: weight 0, and for the others what the system without it gives.

    Raises:
        RidgeError: a penalty that is negative, NaN or of the wrong shape, or one number ∞; moments that are
            not finite; a system that has no eigendecomposition.
    """
    gram, lambdas, leading = penalised_systems(s_xx, penalty)
    p = gram.shape[-1]
    excluded = torch.isinf(lambdas)
    diagonal = torch.diagonal(gram, dim1=-2, dim2=-1)
    variance = diagonal.clone()
    if bool(excluded.any()):
        gram.masked_fill_(excluded.unsqueeze(-1) | excluded.unsqueeze(-2), 0.0)
        variance.masked_fill_(excluded, 0.0)
        lambdas = torch.where(excluded, 1.0, lambdas)
    diagonal += lambdas
    widest = variance.amax(-1, keepdim=True)
    dead = diagonal <= (16 * _EPS) ** 2 * widest
    cholesky, info = torch.linalg.cholesky_ex(gram)
    pivots = torch.diagonal(cholesky, dim1=-2, dim2=-1).square()
    healthy = (info == 0) & (pivots > singular_tolerance(p) * diagonal).all(-1) & ~dead.any(-1)
    scale = (~excluded).double()
    solver, rank = ["cholesky"] * len(gram), (p - excluded.sum(-1)).tolist()
    minimum_norm = {}
    for i in (~healthy).nonzero().flatten().tolist():
        left_out = excluded[i] | dead[i]
        scale[i] = torch.where(left_out, 0.0, diagonal[i].rsqrt())
        unit = _unit_diagonal(gram[i], scale[i])
        cholesky[i], solved = _checked_cholesky(unit)
        solver[i], rank[i] = "scaled_cholesky", p - int(left_out.sum())
        if not solved:
            minimum_norm[i] = _minimum_norm(unit, scale[i], torch.where(left_out, 0.0, lambdas[i]), i)
            solver[i], rank[i] = "eigh", len(minimum_norm[i][0]) - int(left_out.sum())
            cholesky[i] = torch.eye(p, dtype=torch.float64, device=gram.device)
    plain = bool((scale == 1).all())
    return RidgeFactor(leading, cholesky, None if plain else scale, minimum_norm, tuple(solver), tuple(rank))


def solve_ridge(s_xx: Tensor, s_xy: Tensor, penalty: float | Tensor) -> RidgeSolution:
    """`W = (S_xx + diag(λ))⁻¹ S_xy`, the minimiser of `‖Y − XW‖² + Σ_j λ_j ‖W_j‖²`, rows centred ([H] §3.3).

    Args:
        s_xx: (..., p, p); s_xy: (..., p, m), same leading dims.
        penalty: λ ≥ 0, or (..., p) of λ_j ≥ 0, absolute: not divided by the number of rows.

    Raises:
        RidgeError: as `factor_ridge`, or a solution that is not finite.
    """
    solution = factor_ridge(s_xx, penalty).solve(s_xy)
    if not bool(torch.isfinite(solution.weight).all()):
        raise RidgeError(
            "the ridge solution is not finite: calibrate again with finite caches, or raise ridge_lambda"
        )
    return solution


def penalty_vector(convention: str, bands: Tensor, lambdas: Sequence[float], s_xx_diagonal: Tensor) -> Tensor:
    """The λ_j of each feature of a system, absolute, for `factor_ridge`.

    `λ_j = λ_band(j)` ("absolute"), or `λ_band(j) · mean_i S_ii` ("relative"), the mean over the features that
    the system reads: those whose λ is finite. So λ_cross = ∞ gives head-local support under both conventions.

    Args:
        convention: one of `CONVENTIONS`.
        bands: (..., p) integers, positions in `BANDS`.
        lambdas: one λ ≥ 0 for each of `BANDS`; ∞ leaves the band out.
        s_xx_diagonal: (..., p), the diagonal of S_xx.

    Returns:
        (..., p) float64, broadcast.

    Raises:
        RidgeError: a λ that is negative or NaN, not one for each band, or a band that there is not.
        UnknownName: another convention.
    """
    if convention not in CONVENTIONS:
        raise UnknownName("penalty convention", convention, CONVENTIONS)
    if len(lambdas) != len(BANDS) or not all(value >= 0 for value in lambdas):
        raise RidgeError(f"lambdas={tuple(lambdas)}: expected a number >= 0 for each of {', '.join(BANDS)}")
    if bool(((bands < 0) | (bands >= len(BANDS))).any()):
        raise RidgeError(
            f"bands from {int(bands.min())} to {int(bands.max())}: expected 0 to {len(BANDS) - 1}, positions "
            f"in {BANDS}"
        )
    diagonal = s_xx_diagonal.double()
    of_band = torch.tensor(lambdas, dtype=torch.float64, device=diagonal.device)
    penalty = of_band[bands.to(diagonal.device, torch.int64)]
    penalty, diagonal = torch.broadcast_tensors(penalty, diagonal)
    if convention == "absolute":
        return penalty.clone()
    read = torch.isfinite(penalty)
    mean = torch.where(read, diagonal, 0.0).sum(-1, keepdim=True) / read.sum(-1, keepdim=True).clamp(min=1)
    return torch.where(read, penalty * mean, penalty)


def eigendecomposition(matrix: Tensor, what: str) -> tuple[Tensor, Tensor]:
    """Eigenvalues, ascending, and eigenvectors of one symmetric matrix, (p,) and (p, p).

    Raises:
        RidgeError: the iteration does not converge; `what` names the system.
    """
    try:
        eigenvalues, vectors = torch.linalg.eigh(matrix)
    except torch.linalg.LinAlgError as error:
        raise RidgeError(f"{what} has no eigendecomposition: raise ridge_lambda ({error})") from error
    return eigenvalues, vectors


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


def penalised_systems(s_xx: Tensor, penalty: float | Tensor) -> tuple[Tensor, Tensor, torch.Size]:
    """Gram matrices (n, p, p), a copy, and penalties (n, p), float64, and the dims that n flattens."""
    p = s_xx.shape[-1]
    lambdas = _checked_penalty(penalty, p).to(s_xx.device)
    try:
        leading = torch.broadcast_shapes(s_xx.shape[:-2], lambdas.shape[:-1])
    except RuntimeError as error:
        raise RidgeError(
            f"the penalty has shape {tuple(lambdas.shape)}: its leading dims do not broadcast with those of "
            f"the second moments, {tuple(s_xx.shape)}"
        ) from error
    gram = s_xx.double().expand(*leading, p, p).reshape(-1, p, p).clone()
    if not bool(torch.isfinite(gram).all()):
        raise RidgeError("the second moments hold NaN or infinite values: calibrate again with finite caches")
    return gram, lambdas.expand(*leading, p).reshape(-1, p), leading


def _checked_penalty(penalty: float | Tensor, p: int) -> Tensor:
    """A penalty as (p,) or (..., p) float64, or an error that names what is wrong with it."""
    if not isinstance(penalty, Tensor) or penalty.ndim == 0:
        if not 0 <= float(penalty) < float("inf"):
            raise RidgeError(
                f"ridge_lambda={float(penalty)}: expected a finite number >= 0 (0 is least squares; for "
                f"λ → ∞ use bias_only)"
            )
        return torch.full((p,), float(penalty), dtype=torch.float64)
    if penalty.shape[-1] != p:
        raise RidgeError(
            f"the penalty has shape {tuple(penalty.shape)}: expected one for each of {p} features"
        )
    wrong = (~(penalty >= 0)).nonzero()
    if len(wrong):
        at = tuple(wrong[0].tolist())
        raise RidgeError(
            f"the penalty at {at} is {float(penalty[at])}: expected a number >= 0 (inf leaves a feature out)"
        )
    return penalty.double()


def _unit_diagonal(gram: Tensor, scale: Tensor) -> Tensor:
    """`D A D` of one system with a diagonal of exactly 1, also where a scale of 0 leaves a feature out."""
    unit = scale.unsqueeze(1) * gram * scale
    unit.fill_diagonal_(1.0)
    return unit


def _checked_cholesky(unit: Tensor) -> tuple[Tensor, bool]:
    """Cholesky factor of a matrix with unit diagonal, and whether none of its pivots vanished."""
    cholesky, info = torch.linalg.cholesky_ex(unit)
    pivots = cholesky.diagonal().square()
    return cholesky, int(info) == 0 and bool((pivots > singular_tolerance(len(unit))).all())


def _minimum_norm(unit: Tensor, scale: Tensor, lambdas: Tensor, system: int) -> tuple[Tensor, Tensor]:
    """`e⁻¹` (r,) and Z (p, r): `Z diag(e⁻¹) Zᵀ S_xy` solves a singular system with the least `Σ λ_j w_j²`.

    With `D A D = V diag(e) Vᵀ`, `DV` over the kept directions solves the system, and `N = DV` over the others
    spans its null space; Z is the former without its component along N in the metric of the penalty.
    """
    eigenvalues, vectors = eigendecomposition(unit, f"system {system}")
    tolerance = singular_tolerance(len(unit))
    kept = eigenvalues > tolerance * eigenvalues[-1]
    # a rounding error in the share of a small feature, whose weight is large, would decide for a large one
    scaled = scale.unsqueeze(1) * torch.where(vectors.abs() > tolerance, vectors, 0.0)
    root = _norm_weights(lambdas).sqrt().unsqueeze(1)
    basis, _ = torch.linalg.qr(root * scaled[:, ~kept])
    z = root * scaled[:, kept]
    z = (z - basis @ (basis.T @ z)) / root
    return 1 / eigenvalues[kept], z


def _norm_weights(lambdas: Tensor) -> Tensor:
    """What each squared weight counts for: in proportion to λ_j; all the same, and not 0, where λ_j = 0."""
    penalised = lambdas > 0
    if not bool(penalised.any()):
        return torch.ones_like(lambdas)
    least = lambdas[penalised].min()
    return torch.where(penalised, lambdas / least, 1e-8)


def singular_tolerance(p: int) -> float:
    """A pivot or eigenvalue below this share of its scale is float64 rounding, not data."""
    return 16 * max(p, 1) * _EPS
