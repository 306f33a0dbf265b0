"""How well a ridge system is posed: condition number, effective degrees of freedom, numerical rank."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvmap.fit.ridge import RidgeError, factor_ridge, penalised_systems, singular_tolerance


@dataclass(frozen=True, eq=False)
class Conditioning:
    """What a system and its penalty make of each other; features that a penalty of ∞ leaves out have no part.

    Attributes:
        condition_number: (...,) float64, largest over smallest eigenvalue of `S_xx + diag(λ)`; ∞ where it is
            singular to float64 rounding.
        degrees_of_freedom: (...,) float64, `tr(S_xx (S_xx + diag(λ))⁻¹)`, the trace of the hat matrix without
            the intercept: p (or the rank, if lower) at λ = 0, 0 as λ → ∞.
        rank: (...,) int64, of S_xx alone: how many independent directions the rows show, whatever the scale
            of single features.
    """

    condition_number: Tensor
    degrees_of_freedom: Tensor
    rank: Tensor


def conditioning(s_xx: Tensor, penalty: float | Tensor) -> Conditioning:
    """Condition number, degrees of freedom and rank of each system, float64.

    Two sets of eigenvalues and one solve with p right-hand sides, about `12 p³` operations a system.

    Args:
        s_xx: (..., p, p) centred second moments; leading dims are independent systems.
        penalty: λ ≥ 0, or (..., p) of λ_j ≥ 0, as `factor_ridge` takes it.

    Raises:
        RidgeError: as `factor_ridge`, or eigenvalues that do not converge.
    """
    gram, lambdas, leading = penalised_systems(s_xx, penalty)
    out = torch.isinf(lambdas)
    gram.masked_fill_(out.unsqueeze(-1) | out.unsqueeze(-2), 0.0)
    weight = factor_ridge(gram, lambdas).solve(gram).weight
    freedom = torch.diagonal(weight, dim1=-2, dim2=-1).sum(-1)
    rank = _scaled_rank(gram)
    condition = _condition_number(gram, torch.where(out, 0.0, lambdas), out)
    return Conditioning(condition.view(leading), freedom.view(leading), rank.view(leading))


def _condition_number(gram: Tensor, lambdas: Tensor, out: Tensor) -> Tensor:
    """Condition number among the features that are read, (n,); `gram` is overwritten."""
    diagonal = torch.diagonal(gram, dim1=-2, dim2=-1)
    diagonal += lambdas
    # an entry of the diagonal lies between the extreme eigenvalues: there, a feature left out changes neither
    diagonal += torch.where(out, diagonal.amax(-1, keepdim=True), 0.0)
    eigenvalues = _eigenvalues(gram)
    least, largest = eigenvalues[:, 0], eigenvalues[:, -1]
    singular = least <= torch.finfo(torch.float64).eps * gram.shape[-1] * largest
    return torch.where(singular, float("inf"), largest / torch.where(singular, 1.0, least))


def _scaled_rank(gram: Tensor) -> Tensor:
    """Rank of each Gram matrix scaled to a unit diagonal, (n,); features without variance have none."""
    diagonal = torch.diagonal(gram, dim1=-2, dim2=-1)
    scale = torch.where(diagonal > 0, diagonal, 1.0).rsqrt()
    eigenvalues = _eigenvalues(scale.unsqueeze(-1) * gram * scale.unsqueeze(-2))
    return (eigenvalues > singular_tolerance(gram.shape[-1]) * eigenvalues[:, -1:]).sum(-1)


def _eigenvalues(matrices: Tensor) -> Tensor:
    try:
        return torch.linalg.eigvalsh(matrices)
    except torch.linalg.LinAlgError as error:
        raise RidgeError(f"a system has no eigenvalues: raise ridge_lambda ({error})") from error
