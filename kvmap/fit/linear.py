"""Fit the linear map of every target layer and head from moments, and judge it on either split."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from kvmap.errors import UnknownName
from kvmap.fit.moments import KINDS, CacheShape, Moments, MomentsError, PairMoments
from kvmap.fit.ridge import (
    RidgeError,
    RidgeFactor,
    check_rows,
    factor_ridge,
    gram_times,
    intercept,
    r2_score,
    sse_with_bias,
)
from kvmap.fit.selection import Selection, SelectionError, head_map
from kvmap.progress import track

Support = Literal["full_head", "head_local"]
SUPPORTS = ("full_head", "head_local")


@dataclass(frozen=True, eq=False)
class LinearWeights:
    """A linear map from source caches to target caches, layer by layer, for keys and values.

    Attributes:
        support: "full_head": every head reads all heads of the selected layers, p = k·H_s·d_s features in
            the order (layer, head, channel). "head_local": target head h reads source head `a(h)` of each,
            p = k·d_s features in the order (layer, channel).
        selection: source layers of each target layer.
        weight: by kind, per target layer, (H_t, p, d_t).
        bias: by kind, per target layer, (H_t, d_t).
        fallbacks: (kind, target layer, head or None for all heads, rank) of every singular system.
    """

    support: str
    selection: Selection
    source_shape: CacheShape
    target_shape: CacheShape
    weight: dict[str, tuple[Tensor, ...]]
    bias: dict[str, tuple[Tensor, ...]]
    fallbacks: tuple[tuple[str, int, int | None, int], ...] = ()


class HasLinearWeights(Protocol):
    """A mapper that is linear in the source cache."""

    def linear_weights(self) -> LinearWeights: ...


def fit_linear(
    moments: PairMoments,
    selection: Selection,
    support: str,
    ridge_lambda: float,
    *,
    dtype: torch.dtype = torch.float32,
    allow_few_rows: bool = False,
) -> LinearWeights:
    """Ridge for each target layer and head, keys and values apart ([H] §3.3, [C] §3.2).

    `W = (S_xx + λI)⁻¹ S_xy`, `b = ȳ − x̄W`, solved in float64 and stored in `dtype`. The bias is taken
    with the stored, rounded weights, so that rounding never moves the mean of an output.
    A full-head system is factorised once for all heads, and any system once for all target layers that share
    its features.

    Args:
        moments: only the fit split is read.
        selection: source layers of each target layer.
        support: "full_head" or "head_local".
        ridge_lambda: λ ≥ 0, absolute.
        dtype: of the weights; biases are at least float32.
        allow_few_rows: fit even with N ≤ p.

    Raises:
        TooFewRows: N ≤ p for some target layer.
        RidgeError: λ < 0, or no finite solution, naming the kind, layer and head.
        SelectionError: a selection that does not belong to this pair.
    """
    if support not in SUPPORTS:
        raise UnknownName("support", support, SUPPORTS)
    check_selection(selection, moments.source_shape, moments.target_shape)
    n_rows = min(moments.tables[kind, "fit"].n_rows for kind in KINDS)
    n_features = max(_n_features(moments.source_shape, layers, support) for layers in selection)
    check_rows(n_rows, n_features, allow_few_rows)
    weight: dict[str, tuple[Tensor, ...]] = {}
    bias: dict[str, tuple[Tensor, ...]] = {}
    fallbacks: list[tuple[str, int, int | None, int]] = []
    for kind in KINDS:
        weights, singular = _fit_kind(moments, kind, selection, support, ridge_lambda, dtype)
        weight[kind] = weights
        bias[kind] = tuple(
            _bias(moments, kind, support, layers, layer, weights[layer])
            for layer, layers in enumerate(selection)
        )
        fallbacks += singular
    return LinearWeights(
        support, selection, moments.source_shape, moments.target_shape, weight, bias, tuple(fallbacks)
    )


def r2_of(weights: LinearWeights | HasLinearWeights, moments: PairMoments, split: str) -> dict[str, Tensor]:
    """Exact R² of a linear map on one split, from moments, bias included.

    Args:
        weights: a map, or a mapper that has one (`linear_weights`).
        split: "fit" or "held_out". The total sum of squares is about that split's own mean.

    Returns:
        By kind, (n_target_layers, n_heads) float64; NaN past a layer's own number of heads.
    """
    if not isinstance(weights, LinearWeights):
        weights = weights.linear_weights()
    if (weights.source_shape, weights.target_shape) != (moments.source_shape, moments.target_shape):
        raise MomentsError(
            f"the map reads {weights.source_shape} and writes {weights.target_shape} (heads, head_dim); the "
            f"moments are of {moments.source_shape} and {moments.target_shape}"
        )
    n_heads = max(heads for heads, _ in weights.target_shape)
    result = {}
    for kind in KINDS:
        table = torch.full((len(weights.target_shape), n_heads), float("nan"), dtype=torch.float64)
        for layer, (heads, _) in enumerate(weights.target_shape):
            table[layer, :heads] = _r2_layer(weights, moments, kind, split, layer).cpu()
        result[kind] = table
    return result


def copying_weights(
    selection: Selection, source_shape: CacheShape, target_shape: CacheShape
) -> LinearWeights:
    """Explicit weights of a map that copies one source layer of the same shape into each target layer."""
    check_selection(selection, source_shape, target_shape)
    weight = tuple(torch.eye(width).expand(heads, -1, -1) for heads, width in target_shape)
    bias = tuple(torch.zeros(shape) for shape in target_shape)
    both = dict.fromkeys(KINDS, weight)
    return LinearWeights(
        "head_local", selection, source_shape, target_shape, both, dict.fromkeys(KINDS, bias)
    )


def output_variance(weights: LinearWeights, moments: PairMoments, kind: str, layer: int) -> Tensor:
    """Variance of each mapped channel on the fit split, `diag(WᵀS_xx W)/Σw`, (H_t, d_t) float64."""
    table = moments.tables[kind, "fit"]
    blocks = head_blocks(moments, table, weights.support, weights.selection[layer], layer)
    w = weights.weight[kind][layer].to(blocks.s_xx.device, torch.float64)
    return (w * gram_times(blocks.s_xx, w)).sum(-2) / max(table.weight, 1.0)


@dataclass(frozen=True, eq=False)
class HeadBlocks:
    """Moments of one target layer: s_xx (H_t or 1, p, p), s_xy (H_t, p, d_t), s_yy and mean_y (H_t, d_t)."""

    s_xx: Tensor
    s_xy: Tensor
    s_yy: Tensor
    mean_x: Tensor
    mean_y: Tensor


def head_blocks(
    moments: PairMoments, table: Moments, support: str, layers: tuple[int, ...], target_layer: int
) -> HeadBlocks:
    """Cut from a table what the heads of one target layer need.

    With full-head support all heads share one S_xx, which comes with a leading dim of 1.
    """
    n_heads, width = moments.target_shape[target_layer]
    span = moments.target_slice(target_layer)
    rows = _head_rows(moments, support, layers, n_heads).to(table.s_xx.device)
    if rows.shape[0] == 1:
        s_xx = _square(table.s_xx, rows[0]).unsqueeze(0)
        s_xy = table.s_xy[:, span][rows[0]].unflatten(1, (n_heads, width)).transpose(0, 1)
    else:
        s_xx = table.s_xx[rows.unsqueeze(2), rows.unsqueeze(1)]
        columns = torch.arange(span.start, span.stop, device=rows.device).view(n_heads, 1, width)
        s_xy = table.s_xy[rows.unsqueeze(2), columns]
    s_yy = table.s_yy[span].view(n_heads, width)
    return HeadBlocks(s_xx, s_xy, s_yy, table.mean_x[rows], table.mean_y[span].view(n_heads, width))


def check_selection(selection: Selection, source_shape: CacheShape, target_shape: CacheShape) -> None:
    """Refuse a selection that names layers the source lacks, or serves another number of target layers."""
    if len(selection) != len(target_shape):
        raise SelectionError(
            f"the selection serves {len(selection)} target layers; the target has {len(target_shape)}"
        )
    for target_layer, layers in enumerate(selection):
        if any(not 0 <= layer < len(source_shape) for layer in layers) or len(set(layers)) != len(layers):
            raise SelectionError(
                f"target layer {target_layer} selects source layers {layers}: expected distinct layers "
                f"from 0 to {len(source_shape) - 1}"
            )


def _n_features(source_shape: CacheShape, layers: tuple[int, ...], support: str) -> int:
    heads = {"full_head": lambda n: n, "head_local": lambda n: 1}[support]
    return sum(heads(source_shape[layer][0]) * source_shape[layer][1] for layer in layers)


def _head_rows(moments: PairMoments, support: str, layers: tuple[int, ...], n_heads: int) -> Tensor:
    """Feature columns that each target head reads: (1, p) when all heads read the same, else (n_heads, p)."""
    if support == "full_head":
        return moments.feature_index(layers).unsqueeze(0)
    rows = []
    for head in range(n_heads):
        own = [
            moments.feature_index((s,), head_map(moments.source_shape[s][0], n_heads)[head]) for s in layers
        ]
        rows.append(torch.cat(own) if own else torch.zeros(0, dtype=torch.int64))
    return torch.stack(rows)


def _square(table: Tensor, index: Tensor) -> Tensor:
    """Rows and columns of a symmetric table; the table itself when all are wanted: it is large."""
    if torch.equal(index, torch.arange(table.shape[0], device=index.device)):
        return table
    return table[index][:, index]


def _fit_kind(
    moments: PairMoments,
    kind: str,
    selection: Selection,
    support: str,
    ridge_lambda: float,
    dtype: torch.dtype,
) -> tuple[tuple[Tensor, ...], list[tuple[str, int, int | None, int]]]:
    """Weights of all target layers, and (kind, layer, head, rank) of the singular systems.

    Target layers that read the same features share one factorisation: of one system for all heads with
    full-head support, of one for each head, in a batch, with head-local support.
    """
    table = moments.tables[kind, "fit"]
    weights: list[Tensor] = [torch.empty(0)] * len(selection)
    singular: list[tuple[str, int, int | None, int]] = []
    factor: RidgeFactor | None = None
    groups = _sharing_targets(moments, selection, support)
    steps = [(targets, target) for targets in groups for target in targets]
    for targets, target in track(steps, len(steps), f"fit: {kind} maps of target layers"):
        if target == targets[0]:
            factor = None  # given up before the next is made: they are large
        blocks = head_blocks(moments, table, support, selection[target], target)
        if factor is None:
            factor = _factor(blocks.s_xx, ridge_lambda, f"{kind} map of target layers {targets}")
        weight = _solve(factor, blocks.s_xy)
        weights[target] = _stored(weight, dtype, kind, target)
        heads: list[int | None] = [None] if support == "full_head" else list(range(len(factor.rank)))
        singular += [(kind, target, heads[i], factor.rank[i]) for i in factor.minimum_norm]
    return tuple(weights), singular


def _sharing_targets(moments: PairMoments, selection: Selection, support: str) -> list[list[int]]:
    """Target layers grouped by the features they read: by selection, and head-local by their heads too."""
    groups: dict[tuple[tuple[int, ...], int], list[int]] = {}
    for target, layers in enumerate(selection):
        heads = 1 if support == "full_head" else moments.target_shape[target][0]
        groups.setdefault((layers, heads), []).append(target)
    return list(groups.values())


def _factor(s_xx: Tensor, ridge_lambda: float, what: str) -> RidgeFactor:
    """`factor_ridge`, with the name of the map in its errors."""
    try:
        return factor_ridge(s_xx, ridge_lambda)
    except RidgeError as error:
        bad = [head for head in range(len(s_xx)) if not bool(torch.isfinite(s_xx[head]).all())]
        heads = f"heads {bad}" if bad and len(s_xx) > 1 else "all heads"
        raise RidgeError(f"the {what}, {heads}: {error}") from error


def _solve(factor: RidgeFactor, s_xy: Tensor) -> Tensor:
    """Weights (H_t, p, d_t), from one system for all heads or one for each."""
    if factor.leading[0] == s_xy.shape[0]:
        return factor.solve(s_xy).weight
    joined = s_xy.transpose(0, 1).flatten(1)  # (p, H_t · d_t)
    return factor.solve(joined.unsqueeze(0)).weight[0].unflatten(1, s_xy.shape[::2]).transpose(0, 1)


def _stored(weight: Tensor, dtype: torch.dtype, kind: str, layer: int) -> Tensor:
    """The weights in the dtype they are kept in, refused when a head's are not finite there."""
    stored = weight.to(dtype)
    finite = torch.isfinite(stored).flatten(1).all(1)
    if not bool(finite.all()):
        head = int((~finite).nonzero()[0])
        raise RidgeError(
            f"the {kind} map of target layer {layer}, head {head}, is not finite in {dtype}: raise "
            f"ridge_lambda, or calibrate again with finite caches"
        )
    return stored


def _bias(
    moments: PairMoments, kind: str, support: str, layers: tuple[int, ...], target: int, weight: Tensor
) -> Tensor:
    table = moments.tables[kind, "fit"]
    n_heads, width = moments.target_shape[target]
    mean_x = table.mean_x[_head_rows(moments, support, layers, n_heads).to(table.mean_x.device)]
    mean_y = table.mean_y[moments.target_slice(target)].view(n_heads, width)
    bias = intercept(weight, mean_x.expand(n_heads, -1), mean_y)
    return bias.to(torch.promote_types(weight.dtype, torch.float32))


def _r2_layer(weights: LinearWeights, moments: PairMoments, kind: str, split: str, layer: int) -> Tensor:
    table = moments.tables[kind, split]
    blocks = head_blocks(moments, table, weights.support, weights.selection[layer], layer)
    device = blocks.s_xx.device
    w, b = weights.weight[kind][layer].to(device), weights.bias[kind][layer].to(device)
    error = sse_with_bias(
        w, b, blocks.s_xx, blocks.s_xy, blocks.s_yy, blocks.mean_x, blocks.mean_y, table.weight
    )
    return r2_score(error, blocks.s_yy)
