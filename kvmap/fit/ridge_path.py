"""The errors of a ridge fit for many λ at once, on both splits, from one system's moments.

The penalty of a path is `λ · diag(r)`: one number λ runs, and the ratios r of the features stay. With
features and weights rescaled, `x'_j = x_j/√r_j` and `w'_j = √r_j w_j`, it is `λI` again: banded ridge is no
other case.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvmap.errors import UnknownName
from kvmap.fit.moments import Moments
from kvmap.fit.ridge import (
    RidgeError,
    eigendecomposition,
    singular_tolerance,
    solve_ridge,
)

METHODS = ("auto", "eigen", "cholesky")

# Time of each step, in floating-point operations at the rate of a large float64 matmul (which takes 2 p³ or
# 2 p² m), over p³ or p² m. Measured on one Xeon thread (torch 2.13, MKL) at p = 256, 1,024 and 3,072 and
# m = 256 and 7,168, and on one AMD EPYC thread (the same libraries) at p = 512, 1,024, 1,536 and 3,072. An
# eigendecomposition took 7 to 11 p³ at p = 1,024 and 11 to 16 p³ at p = 3,072.
_EIGENDECOMPOSITION = 11.0
_CONGRUENCE = 3.2
_EIGEN_PER_OUTPUT = 5.4
_CHOLESKY = 0.9
_CHOLESKY_PER_OUTPUT = 4.5

# Rows and columns of symmetric products that are formed at a time, on and above the diagonal.
_TILE = 256

# Variances further apart than this, and the rounding of the largest eigenvalue hides the smallest features.
_WIDEST_SPREAD = 1e8


@dataclass(frozen=True, eq=False)
class PathErrors:
    """Sums of squared errors for every λ of a path and every group of outputs, bias included.

    Attributes:
        fit: (n_lambdas, n_groups) float64, on the rows fitted.
        held_out: (n_lambdas, n_groups) float64, on other rows, with the bias of the rows fitted.
    """

    fit: Tensor
    held_out: Tensor


@dataclass(frozen=True, eq=False)
class EigenPath:
    """One eigendecomposition that serves every λ: `R⁻¹ S_xx R⁻¹ = V diag(e) Vᵀ` with `R = diag(√r)`.

    Attributes:
        fit: moments of the rows fitted.
        lambdas: (n_lambdas,) float64.
        z: (p, n), `R⁻¹V`.
        c: (n, m), `Zᵀ S_xy`.
        shrunk: (n_lambdas, n), `1/(e + λ)`; 0 for a direction that is null to float64 rounding.
    """

    fit: Moments
    lambdas: Tensor
    z: Tensor
    c: Tensor
    shrunk: Tensor

    @property
    def singular(self) -> bool:
        """Whether a direction is null at some λ, so that its solution is the limit of larger ones."""
        return bool((self.shrunk == 0).any())

    def sse(self, held_out: Moments, n_groups: int) -> PathErrors:
        """Errors of groups of m/n_groups neighbouring outputs, without forming the weights of any λ.

        With `D = diag(1/(e + λ))`, `W = Z D C`, `M = Zᵀ S Z` and `L = Zᵀ S_xy` of the held-out rows about the
        means fitted, for the outputs g of a group::

            SSE_fit(λ)  = s_yy − Σ_i d_i (1 + λ d_i) ‖C_ig‖²
            SSE_held(λ) = s_yy − 2 Σ_i d_i ⟨C_ig, L_ig⟩ + dᵀ (M ∘ C_g C_gᵀ) d

        Raises:
            RidgeError: n_groups does not divide m, or held-out moments of another shape.
        """
        width = _group_width(self.fit, held_out, n_groups)
        d, c = self.shrunk, self.c
        m, linear, s_yy = self._rotated(held_out)
        by_group = (-1, n_groups, width)
        explained = (d + self.lambdas.unsqueeze(1) * d.square()) @ c.square().view(by_group).sum(-1)
        fit = self.fit.s_yy.view(n_groups, width).sum(-1) - explained
        error = s_yy.view(n_groups, width).sum(-1) - 2 * (d @ (c * linear).view(by_group).sum(-1))
        error += self._quadratic(m, c.view(by_group).transpose(0, 1).contiguous())
        return PathErrors(fit.clamp(min=0), error.clamp(min=0))

    def _quadratic(self, m: Tensor, c: Tensor) -> Tensor:
        """`dᵀ (M ∘ C_g C_gᵀ) d` of each λ and group, (n_lambdas, n_groups): c (n_groups, n, width).

        Tile by tile on and above the diagonal, so that the products of all groups stay in the cache.
        """
        n = len(m)
        total = m.new_zeros(len(self.lambdas), len(c))
        for start in range(0, n, _TILE):
            rows = slice(start, min(start + _TILE, n))
            for column in range(start, n, _TILE):
                columns = slice(column, min(column + _TILE, n))
                scale = self.shrunk[:, rows, None] * self.shrunk[:, None, columns] * m[rows, columns]
                products = torch.bmm(c[:, rows], c[:, columns].mT)
                total.addmm_(scale.flatten(1), products.flatten(1).T, alpha=1 if column == start else 2)
        return total

    def weights(self, chosen: int | Tensor) -> Tensor:
        """`W = Z D C`, (p, m) float64, at one position in the path, or one for each group of outputs."""
        chosen = torch.as_tensor(chosen, device=self.shrunk.device)
        if chosen.ndim == 0:
            return self.z @ (self.shrunk[chosen].unsqueeze(1) * self.c)
        return self.z @ (self.shrunk[_of_outputs(chosen, self.fit.n_targets)].T * self.c)

    def _rotated(self, held_out: Moments) -> tuple[Tensor, Tensor, Tensor]:
        """M (n, n), L (n, m) and s_yy (m,) of held-out rows about the fitted means.

        A shift of the means adds `Σw δδᵀ` to second moments: the error of the bias is in them. Of M only the
        tiles on and above its diagonal are formed.
        """
        shift_x = self.z.T @ (held_out.mean_x - self.fit.mean_x)
        shift_y = held_out.mean_y - self.fit.mean_y
        m = _congruence(held_out.s_xx, self.z)
        m.addr_(shift_x, shift_x, alpha=held_out.weight)
        linear = (self.z.T @ held_out.s_xy).addr_(shift_x, shift_y, alpha=held_out.weight)
        return m, linear, held_out.s_yy + held_out.weight * shift_y.square()


@dataclass(frozen=True, eq=False)
class CholeskyPath:
    """One Cholesky factorisation, and the weights, for each λ: cheaper for few outputs, safe for any system.

    Attributes:
        fit: moments of the rows fitted.
        lambdas: (n_lambdas,) float64.
        ratio: (p,) float64, r ≥ 0.
    """

    fit: Moments
    lambdas: Tensor
    ratio: Tensor

    def sse(self, held_out: Moments, n_groups: int) -> PathErrors:
        """Errors of groups of m/n_groups neighbouring outputs; as `EigenPath.sse`.

        On the rows fitted, `SSE = s_yy − ⟨W, S_xy⟩ − Σ_j λ r_j ‖W_j‖²`; on the others as
        `kvmap.fit.ridge.sse_with_bias`.
        """
        width = _group_width(self.fit, held_out, n_groups)
        read = torch.isfinite(self.ratio).nonzero().flatten()
        if 0 < len(read) < len(self.ratio):
            outputs = torch.arange(self.fit.n_targets, device=read.device)
            left = CholeskyPath(self.fit.cut(read, outputs), self.lambdas, self.ratio[read])
            return left.sse(held_out.cut(read, outputs), n_groups)
        fit, error = [], []
        shift_x, shift_y = held_out.mean_x - self.fit.mean_x, held_out.mean_y - self.fit.mean_y
        for ridge_lambda in self.lambdas:
            weight = self._solve(ridge_lambda, self.fit.s_xy)
            penalty = torch.where(torch.isinf(self.ratio), 0.0, ridge_lambda * self.ratio)
            explained = (weight * self.fit.s_xy).sum(0) + penalty @ weight.square()
            fit.append((self.fit.s_yy - explained).view(n_groups, width).sum(-1))
            shift = shift_y - shift_x @ weight
            squared = held_out.s_yy - 2 * (weight * held_out.s_xy).sum(0) + held_out.weight * shift.square()
            squared += _quadratic_form(held_out.s_xx, weight)
            error.append(squared.clamp(min=0).view(n_groups, width).sum(-1))
        return PathErrors(torch.stack(fit).clamp(min=0), torch.stack(error))

    def weights(self, chosen: int | Tensor) -> Tensor:
        """W, (p, m) float64, at one position in the path, or one for each group of outputs."""
        chosen = torch.as_tensor(chosen, device=self.lambdas.device)
        if chosen.ndim == 0:
            return self._solve(self.lambdas[chosen], self.fit.s_xy)
        weight = torch.empty_like(self.fit.s_xy)
        of_output = _of_outputs(chosen, self.fit.n_targets)
        for position in chosen.unique():
            outputs = of_output == position
            weight[:, outputs] = self._solve(self.lambdas[position], self.fit.s_xy[:, outputs])
        return weight

    def _solve(self, ridge_lambda: Tensor, s_xy: Tensor) -> Tensor:
        # 0 · ∞ would be NaN, and a feature of ratio ∞ is left out also where λ = 0
        penalty = torch.where(torch.isinf(self.ratio), self.ratio, ridge_lambda * self.ratio)
        weight = _plainly_solved(self.fit.s_xx, s_xy, penalty)
        return solve_ridge(self.fit.s_xx, s_xy, penalty).weight.contiguous() if weight is None else weight


def ridge_path(
    fit: Moments, lambdas: Sequence[float], *, ratio: Tensor | None = None, method: str = "auto"
) -> EigenPath | CholeskyPath:
    """Prepare a path of ridge fits to one system, all outputs m, with penalties `λ · diag(r)`.

    "auto" compares the counts of operations, n_λ for the number of λ: `(13 + 4) p³ + 7 p² m` for "eigen",
    `n_λ (p³ + 5.5 p² m)` for "cholesky" (a matmul counts 2 p³; constants measured on a CPU, see above). It
    takes "cholesky" on other devices, for which nothing was measured; where features have a ratio of 0, which
    "eigen" cannot rescale; and where variances differ so widely that the smallest features would drown in the
    rounding of the largest eigenvalue.

    Args:
        fit: moments of the rows to fit.
        lambdas: λ ≥ 0, finite.
        ratio: (p,), r ≥ 0; ∞ leaves a feature out; None for all ones.
        method: one of `METHODS`.

    Raises:
        RidgeError: a λ or ratio that makes no sense, a ratio of 0 with "eigen", no eigendecomposition.
        UnknownName: another method.
    """
    if method not in METHODS:
        raise UnknownName("path method", method, METHODS)
    path = _checked_lambdas(lambdas, fit.s_xx.device)
    ratio = _checked_ratio(ratio, fit)
    if method == "auto":
        method = _cheaper_method(fit, path, ratio)
    return _eigen_path(fit, path, ratio) if method == "eigen" else CholeskyPath(fit, path, ratio)


def path_sse(
    fit: Moments,
    held_out: Moments,
    lambdas: Sequence[float],
    n_groups: int,
    *,
    ratio: Tensor | None = None,
    method: str = "auto",
) -> PathErrors:
    """Errors on both splits for every λ and every group of m/n_groups outputs: `ridge_path(...).sse(...)`."""
    return ridge_path(fit, lambdas, ratio=ratio, method=method).sse(held_out, n_groups)


def path_weights(
    fit: Moments, ridge_lambda: float, *, ratio: Tensor | None = None, method: str = "auto"
) -> Tensor:
    """W, (p, m) float64, for one λ. To pick from a path that is there, use its `weights`."""
    return ridge_path(fit, [ridge_lambda], ratio=ratio, method=method).weights(0)


def _plainly_solved(s_xx: Tensor, s_xy: Tensor, penalty: Tensor) -> Tensor | None:
    """What `solve_ridge` finds by its first solver, without its checks; None where that does not serve."""
    gram = s_xx.clone()
    gram.diagonal().add_(penalty)
    cholesky, info = torch.linalg.cholesky_ex(gram)
    pivots, diagonal = cholesky.diagonal().square(), gram.diagonal()
    dead = singular_tolerance(1) ** 2 * s_xx.diagonal().max()
    # comparisons with NaN are false too
    healthy = (info == 0) & ((pivots > singular_tolerance(len(gram)) * diagonal) & (diagonal > dead)).all()
    weight = torch.cholesky_solve(s_xy, cholesky).contiguous() if bool(healthy) else None
    return weight if weight is not None and bool(torch.isfinite(weight).all()) else None


def _quadratic_form(s_xx: Tensor, weight: Tensor) -> Tensor:
    """`diag(WᵀSW)`, (m,), from the blocks of S on and above its diagonal: half of the work."""
    total = weight.new_zeros(weight.shape[1])
    for start in range(0, len(weight), _TILE):
        stop = min(start + _TILE, len(weight))
        rows = slice(start, stop)
        product = torch.mm(s_xx[rows, stop:], weight[stop:]).mul_(2).addmm_(s_xx[rows, rows], weight[rows])
        total += (weight[rows] * product).sum(0)
    return total


def _congruence(s_xx: Tensor, z: Tensor) -> Tensor:
    """The blocks of `ZᵀSZ` on and above its diagonal, (n, n)."""
    right = s_xx @ z
    product = z.new_zeros(z.shape[1], z.shape[1])
    for start in range(0, len(product), _TILE):
        product[start : start + _TILE, start:] = z[:, start : start + _TILE].T @ right[:, start:]
    return product


def _eigen_path(fit: Moments, lambdas: Tensor, ratio: Tensor) -> EigenPath:
    if bool((ratio == 0).any()):
        raise RidgeError(
            f"feature {int((ratio == 0).nonzero()[0])} has a penalty ratio of 0: expected > 0 for the method "
            f"'eigen', which rescales by it; use 'cholesky' or 'auto'"
        )
    read = torch.isfinite(ratio)
    rescaled = ratio[read].rsqrt()
    gram = fit.s_xx if bool(read.all()) else fit.s_xx[read][:, read]
    gram = rescaled.unsqueeze(1) * gram * rescaled
    eigenvalues, vectors = eigendecomposition(gram, f"the system of {len(rescaled)} features")
    denominator = eigenvalues.clamp(min=0) + lambdas.unsqueeze(1)
    null = denominator <= singular_tolerance(len(rescaled)) * eigenvalues[-1:]
    shrunk = torch.where(null, 0.0, 1 / torch.where(null, 1.0, denominator))
    z = torch.zeros(len(ratio), len(rescaled), dtype=torch.float64, device=gram.device)
    z[read] = rescaled.unsqueeze(1) * vectors
    return EigenPath(fit, lambdas, z, z.T @ fit.s_xy, shrunk)


def _cheaper_method(fit: Moments, lambdas: Tensor, ratio: Tensor) -> str:
    read = torch.isfinite(ratio)
    if fit.s_xx.device.type != "cpu" or bool((ratio == 0).any()) or not bool(read.any()):
        return "cholesky"
    variance = fit.s_xx.diagonal()[read] / ratio[read] + lambdas.min()
    alive = variance[variance > 0]
    if len(alive) == 0 or bool(alive.max() > _WIDEST_SPREAD * alive.min()):
        return "cholesky"
    p, m = int(read.sum()), fit.n_targets
    eigen = (_EIGENDECOMPOSITION + _CONGRUENCE) * p + _EIGEN_PER_OUTPUT * m
    cholesky = len(lambdas) * (_CHOLESKY * p + _CHOLESKY_PER_OUTPUT * m)
    return "eigen" if eigen < cholesky else "cholesky"


def _checked_lambdas(lambdas: Sequence[float], device: torch.device) -> Tensor:
    wrong = [value for value in lambdas if not 0 <= value < float("inf")]
    if wrong or not lambdas:
        raise RidgeError(f"lambdas={list(lambdas)}: expected one or more finite numbers >= 0")
    return torch.tensor(lambdas, dtype=torch.float64, device=device)


def _checked_ratio(ratio: Tensor | None, fit: Moments) -> Tensor:
    p, device = fit.n_features, fit.s_xx.device
    if ratio is None:
        return torch.ones(p, dtype=torch.float64, device=device)
    if ratio.shape != (p,) or not bool((ratio >= 0).all()):
        raise RidgeError(
            f"the penalty ratios, {tuple(ratio.shape)}, from {float(ratio.min())} to {float(ratio.max())}: "
            f"expected ({p},), one number >= 0 for each feature (inf leaves it out)"
        )
    return ratio.to(device, torch.float64)


def _group_width(fit: Moments, held_out: Moments, n_groups: int) -> int:
    m = fit.n_targets
    if n_groups < 1 or m % n_groups:
        raise RidgeError(f"{m} outputs are no {n_groups} groups of one width")
    if held_out.s_xy.shape != fit.s_xy.shape:
        raise RidgeError(
            f"the held-out moments are of {held_out.n_features} features and {held_out.n_targets} outputs, "
            f"those fitted of {fit.n_features} and {m}"
        )
    return m // n_groups


def _of_outputs(chosen: Tensor, m: int) -> Tensor:
    """Of one entry for each group, one for each output, (m,)."""
    if chosen.ndim != 1 or not len(chosen) or m % len(chosen):
        raise RidgeError(f"{tuple(chosen.shape)} positions for {m} outputs: expected one for each group")
    return chosen.repeat_interleave(m // len(chosen))
