"""Reduced-rank regression: the best map of few dimensions in place of a fitted one, from moments alone."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kvmap.errors import KvmapError
from kvmap.fit.linear import LinearWeights, joined, layer_cuts
from kvmap.fit.moments import Moments
from kvmap.fit.pair_moments import PairMoments

_ROUNDING = 64 * torch.finfo(torch.float64).eps


class LowRankError(KvmapError):
    """A reduction that cannot be judged, or a tolerance that makes no sense."""


@dataclass(frozen=True, eq=False)
class HeadFactors:
    """`W_r = down · up` of one head.

    Attributes:
        down: (p, r), or the whole (p, d) of a head that stays as it is.
        up: (r, d) with orthonormal rows, or None for a head that stays as it is.
    """

    down: Tensor
    up: Tensor | None

    @property
    def rank(self) -> int | None:
        """r, or None for a head that stays as it is."""
        return None if self.up is None else self.up.shape[0]


def reduce_layer(
    weights: LinearWeights, moments: PairMoments, kind: str, layer: int, tolerance: float
) -> list[HeadFactors]:
    """Each head of one target layer at the rank that its held-out error asks for; see `reduce_heads`."""
    weight = weights.weight[kind][layer]
    heads: dict[int, HeadFactors] = {}
    cuts = (layer_cuts(moments, split, weights.recipe, kind, layer) for split in ("fit", "held_out"))
    for (numbers, fit), (_, held_out) in zip(*cuts, strict=True):
        heads |= zip(numbers, reduce_heads(weight[numbers], fit, held_out, tolerance), strict=True)
    return [heads[head] for head in range(len(weight))]


def reduce_heads(weight: Tensor, fit: Moments, held_out: Moments, tolerance: float) -> list[HeadFactors]:
    """Each of some heads that read the same features at the rank that its held-out error asks for.

    The directions are those of the fit split (`principal_outputs`), the rank is chosen on the held-out one
    (`choose_rank`), so that neither is judged on the rows it was made of.

    Args:
        weight: (H, p, d), any floating dtype; the factors are in it too.
        fit: moments of the p features and the heads' H · d targets, over the rows the map was fitted on.
        held_out: the same over others.
        tolerance: see `choose_rank`.

    Raises:
        LowRankError: no held-out rows, or weights that are not finite.
    """
    if held_out.weight <= 0:
        raise LowRankError(
            "there are no held-out rows to choose a rank on: calibrate with held-out sequences "
            "(calibration.held_out_share)"
        )
    if not bool(torch.isfinite(weight).all()):
        raise LowRankError("the weights hold NaN or infinite values: fit the mapper again")
    n_heads, p, width = weight.shape
    basis, _ = principal_outputs(weight, fit.s_xx)
    sse = sse_by_rank(weight, basis, fit, held_out)
    noise = _ROUNDING * held_out.s_yy.view(n_heads, width).sum(-1)
    heads = []
    for head, full in enumerate(weight):
        rank = choose_rank(sse[head], tolerance, p, float(noise[head]))
        if rank is None:
            heads.append(HeadFactors(full, None))
        else:
            up = basis[head, :, :rank].to(weight.device)
            heads.append(HeadFactors((full.double() @ up).to(weight.dtype), up.T.to(weight.dtype)))
    return heads


def principal_outputs(weight: Tensor, s_xx: Tensor) -> tuple[Tensor, Tensor]:
    """Directions of a map's output, by how much of the mapped rows' variance lies along each.

    The eigenvectors Q of `WᵀS_xxW`. With centred rows X, `S_xx = XᵀX`, the rank-r map nearest to W on them is
    `W_r = W Q_r Q_rᵀ` (Eckart-Young on XW, whose right singular vectors are Q), and misses
    `‖XW − XW_r‖² = Σ_{i>r} energy_i`. Only d × d matrices are decomposed, not p × p ones.

    Args:
        weight: (H, p, d); s_xx: (p, p). Products in float64, where the moments are.

    Returns:
        basis (H, d, d), one direction a column, and energy (H, d) ≥ 0, falling.
    """
    wide = weight.to(s_xx)
    gram = wide.transpose(-1, -2) @ _shared_times(s_xx, wide)
    energy, basis = torch.linalg.eigh((gram + gram.transpose(-1, -2)) / 2)
    return basis.flip(-1), energy.flip(-1).clamp(min=0)


def sse_by_rank(weight: Tensor, basis: Tensor, fit: Moments, judge: Moments) -> Tensor:
    """Sum of squared errors of every rank at once, exact from moments, float64.

    With `P = WQ` every term of `SSE(W_r) = tr(S_yy) − 2 tr(W_rᵀS_xy) + tr(W_rᵀS_xxW_r) + Σw‖ȳ − x̄W_r − b_r‖²`
    is a sum over the first r columns of P and Q. The bias belongs to each rank, `b_r = ȳ_fit − x̄_fit W_r`.

    Args:
        weight: (H, p, d); basis: (H, d, d) of `principal_outputs`.
        fit: where the bias is taken.
        judge: where the errors are; the same or another split.

    Returns:
        (H, d + 1), at ranks 0 to d, summed over channels; a perfect fit is 0, not a hair below.
    """
    n_heads, _, width = weight.shape
    projected = weight.to(basis) @ basis  # P, (H, p, d)
    s_xy = judge.s_xy.unflatten(1, (n_heads, width)).transpose(0, 1)
    explained = (projected * (s_xy @ basis)).sum(-2)
    quadratic = (projected * _shared_times(judge.s_xx, projected)).sum(-2)
    moved_x = (judge.mean_x - fit.mean_x) @ projected
    moved_y = ((judge.mean_y - fit.mean_y).view(n_heads, 1, width) @ basis).squeeze(1)
    shift = judge.weight * ((moved_y - moved_x).square() - moved_y.square())
    at_zero = judge.s_yy.view(n_heads, width) + judge.weight * moved_y.square()
    steps = torch.cat([at_zero.sum(-1, keepdim=True), quadratic - 2 * explained + shift], dim=-1)
    return steps.cumsum(-1).clamp(min=0)


def choose_rank(sse: Tensor, tolerance: float, n_features: int, noise: float = 0.0) -> int | None:
    """The smallest rank that costs a head at most a share `tolerance` of its error, where it saves weights.

    Args:
        sse: (d + 1,) at ranks 0 to d; the last is the map as it is.
        tolerance: the error may grow to `(1 + tolerance)` times that of the map as it is.
        n_features: p. Rank r takes `r (p + d)` weights; it must be fewer than the p · d there are.
        noise: what rounding alone may make of an error of zero.

    Returns:
        r, 0 for a head whose bias alone does as well, or None where no rank serves.

    Raises:
        LowRankError: a tolerance that is negative or not finite.
    """
    if not 0 <= tolerance < math.inf:
        raise LowRankError(
            f"tolerance={tolerance}: expected a finite number >= 0, such as 0.01 for 1 % more error"
        )
    width = sse.shape[0] - 1
    allowed = (1 + tolerance) * float(sse[-1]) + noise
    for rank, error in enumerate(sse.tolist()):
        if rank * (n_features + width) >= n_features * width:
            return None
        if error <= allowed:
            return rank
    return None


def _shared_times(s_xx: Tensor, matrices: Tensor) -> Tensor:
    """`S_xx` (p, p) times each of (H, p, m), in one product."""
    return (s_xx @ joined(matrices)).unflatten(1, matrices.shape[::2]).transpose(0, 1)
