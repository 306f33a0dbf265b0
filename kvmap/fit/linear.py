"""Fit the linear map of every target layer and head from moments, and judge it on either split."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from kvmap.fit.features import KINDS, CacheShape, Recipe, Selection, both
from kvmap.fit.moments import Moments, MomentsError
from kvmap.fit.pair_moments import PairMoments
from kvmap.fit.ridge import (
    RidgeError,
    check_rows,
    factor_ridge,
    intercept,
    penalty_vector,
    r2_score,
    sse_with_bias,
)
from kvmap.progress import track

Head = tuple[str, int, int]
"""Kind, target layer, head."""


@dataclass(frozen=True)
class Penalty:
    """How strongly each band of a head's features is penalised.

    Attributes:
        own: λ of the matched source heads' features; with full-head support of all source features.
        cross: λ of the other heads' features; None: as `own` ([H]); infinite: they are not read ([C]).
        native: λ of the target's native layers' features; None: as `own`.
        convention: "absolute": added to the Gram matrix, which is a sum over rows, as published;
            "relative": times the mean of its diagonal.
    """

    own: float = 0.01
    cross: float | None = None
    native: float | None = None
    convention: str = "absolute"

    def vector(self, bands: Tensor, diagonal: Tensor) -> Tensor:
        """λ of each feature, (p,) float64; see `kvmap.fit.ridge.penalty_vector`."""
        cross = self.own if self.cross is None else self.cross
        native = self.own if self.native is None else self.native
        return penalty_vector(self.convention, bands, (self.own, cross, native), diagonal)

    @property
    def by_band(self) -> bool:
        """Whether bands differ, so that heads that read the same features still need their own systems."""
        return self.cross not in (None, self.own)


Penalties = Penalty | Mapping[Head, Penalty]


@dataclass(frozen=True)
class Fallback:
    """A system that plain Cholesky could not solve.

    Attributes:
        kind, layer: of the target; head: None for all heads at once.
        solver: what solved it instead, see `kvmap.fit.ridge.factor_ridge`.
        rank: numerical rank.
    """

    kind: str
    layer: int
    head: int | None
    solver: str
    rank: int


@dataclass(frozen=True, eq=False)
class LinearWeights:
    """A linear map from source caches to target caches, layer by layer, for keys and values.

    Attributes:
        recipe: which features each head reads.
        weight: by kind, per target layer, (H_t, p, d_t); p = 0 for a native layer, which is not mapped.
        bias: by kind, per target layer, (H_t, d_t).
        fallbacks: every system that plain Cholesky could not solve.
    """

    recipe: Recipe
    weight: dict[str, tuple[Tensor, ...]]
    bias: dict[str, tuple[Tensor, ...]]
    fallbacks: tuple[Fallback, ...] = ()

    @property
    def source_shape(self) -> CacheShape:
        """`(n_kv_heads, head_dim)` of each source layer."""
        return self.recipe.source_shape

    @property
    def target_shape(self) -> CacheShape:
        """`(n_kv_heads, head_dim)` of each target layer."""
        return self.recipe.target_shape


class HasLinearWeights(Protocol):
    """A mapper that is linear in the source cache."""

    def linear_weights(self) -> LinearWeights: ...


@dataclass(frozen=True, eq=False)
class System:
    """One set of normal equations and the heads it serves: they read the same features, penalised alike.

    Attributes:
        kind: of the target.
        heads: (target layer, head) of each.
        features: (p,) numbers of the moments' layout.
        targets: numbers of all its heads' channels, in the order of `heads`.
        bands: (p,), see `kvmap.fit.features.Recipe.bands`; of its first head.
        penalty: of all of them.
    """

    kind: str
    heads: tuple[tuple[int, int], ...]
    features: Tensor
    targets: Tensor
    bands: Tensor
    penalty: Penalty

    @property
    def name(self) -> str:
        """What its errors are about."""
        layers = sorted({layer for layer, _ in self.heads})
        heads = sorted({head for _, head in self.heads})
        return f"{self.kind} map of target layers {layers}, heads {heads}"


def systems(moments: PairMoments, recipe: Recipe, penalties: Penalties) -> list[System]:
    """The fewest systems that give every head its map; heads that `penalties` does not name get none.

    A full-head system serves all heads of all target layers that select the same source layers, as long as
    they are penalised alike; a banded or head-local one serves those heads of them that match the same source
    heads; rows that carry weights of each head allow no sharing.
    """
    found: dict[tuple[object, ...], tuple[System, list[tuple[int, int]]]] = {}
    for kind in KINDS:
        for layer in recipe.mapped_layers:
            columns = recipe.columns(kind, layer, moments.layout)
            for head in range(recipe.target_shape[layer][0]):
                penalty = penalties if isinstance(penalties, Penalty) else penalties.get((kind, layer, head))
                if penalty is None:
                    continue
                features = columns[0 if recipe.shared else head]
                bands = recipe.bands(kind, layer, head)
                # not the head's number: layers of other head counts match other source heads
                alike = bands.numpy().tobytes() if penalty.by_band else None
                table = moments.table_of(features, moments.layout.targets(kind, layer, head))
                key = (kind, features.numpy().tobytes(), penalty, alike, table)
                if key not in found:
                    found[key] = System(kind, (), features, features, bands, penalty), []
                found[key][1].append((layer, head))
    return [_serving(moments, system, heads) for system, heads in found.values()]


def _serving(moments: PairMoments, system: System, heads: list[tuple[int, int]]) -> System:
    targets = [moments.layout.targets(system.kind, layer, head) for layer, head in heads]
    return replace(system, heads=tuple(heads), targets=torch.cat(targets))


def fit_linear(
    moments: PairMoments,
    recipe: Recipe,
    penalties: Penalties,
    *,
    dtype: torch.dtype = torch.float32,
    allow_few_rows: bool = False,
) -> LinearWeights:
    """Ridge for each target layer and head, keys and values apart ([H] §3.3, [C] §3.2).

    `W = (S_xx + diag(λ))⁻¹ S_xy`, `b = ȳ − x̄W`, solved in float64 and stored in `dtype`. The bias is taken
    with the stored, rounded weights, so that rounding never moves the mean of an output.

    Args:
        moments: only the fit split is read.
        recipe: what each head reads.
        penalties: one for all heads, or one for each.
        dtype: of the weights; biases are at least float32.
        allow_few_rows: fit even with N ≤ p.

    Raises:
        TooFewRows: N ≤ p for some target layer.
        RidgeError: λ < 0, or no finite solution, naming the kind, layers and heads.
        MomentsError: moments that do not hold what the recipe reads.
    """
    p = max((recipe.n_features(kind, layer) for kind in KINDS for layer in recipe.mapped_layers), default=0)
    if p:
        check_rows(moments.n_rows("fit"), p, allow_few_rows)
    fitted, fallbacks = fit_heads(moments, recipe, penalties, dtype)
    return assembled(recipe, fitted, dtype, fallbacks)


def fit_heads(
    moments: PairMoments, recipe: Recipe, penalties: Penalties, dtype: torch.dtype = torch.float32
) -> tuple[dict[Head, tuple[Tensor, Tensor]], tuple[Fallback, ...]]:
    """Weight (p, d_t) in `dtype` and bias (d_t,) float64 of each head that `penalties` names.

    Raises:
        RidgeError, MomentsError: as `fit_linear`.
    """
    found = systems(moments, recipe, penalties)
    fitted: dict[Head, tuple[Tensor, Tensor]] = {}
    fallbacks: list[Fallback] = []
    for system in track(found, len(found), "fit: maps of target layers"):
        cut = moments.cut("fit", system.features, system.targets)
        weight, fallback = _solve(system, cut, dtype)
        bias = intercept(weight, cut.mean_x, cut.mean_y)
        widths = [recipe.target_shape[layer][1] for layer, _ in system.heads]
        parts = zip(system.heads, weight.split(widths, 1), bias.split(widths), strict=True)
        fitted |= {(system.kind, layer, head): (w, b) for (layer, head), w, b in parts}
        fallbacks += fallback
    return fitted, tuple(fallbacks)


def r2_of(weights: LinearWeights | HasLinearWeights, moments: PairMoments, split: str) -> dict[str, Tensor]:
    """Exact R² of a linear map on one split, from moments, bias included.

    Args:
        weights: a map, or a mapper that has one (`linear_weights`).
        split: "fit" or "held_out". The total sum of squares is about that split's own mean.

    Returns:
        By kind, (n_target_layers, n_heads) float64; NaN past a layer's own number of heads, and for native
        layers, which are not mapped.
    """
    if not isinstance(weights, LinearWeights):
        weights = weights.linear_weights()
    if (weights.source_shape, weights.target_shape) != (moments.source_shape, moments.target_shape):
        raise MomentsError(
            f"the map reads {weights.source_shape} and writes {weights.target_shape} (heads, head_dim); the "
            f"moments are of {moments.source_shape} and {moments.target_shape}"
        )
    recipe = weights.recipe
    n_heads = max(heads for heads, _ in recipe.target_shape)
    result = {}
    for kind in KINDS:
        table = torch.full((len(recipe.target_shape), n_heads), float("nan"), dtype=torch.float64)
        for layer in recipe.mapped_layers:
            for heads, cut in layer_cuts(moments, split, recipe, kind, layer):
                table[layer, heads] = _r2(weights, kind, layer, heads, cut)
        result[kind] = table
    return result


def layer_cuts(
    moments: PairMoments, split: str, recipe: Recipe, kind: str, layer: int
) -> Iterator[tuple[list[int], Moments]]:
    """Heads of one target layer and their moments: together where they read the same features and rows."""
    columns = recipe.columns(kind, layer, moments.layout)
    targets = [moments.layout.targets(kind, layer, head) for head in range(recipe.target_shape[layer][0])]
    groups: dict[tuple[int, int | None], list[int]] = {}
    for head, own in enumerate(targets):
        row = 0 if recipe.shared else head
        groups.setdefault((row, moments.table_of(columns[row], own)), []).append(head)
    for (row, _), heads in groups.items():
        yield heads, moments.cut(split, columns[row], torch.cat([targets[head] for head in heads]))


def copying_weights(
    selection: Selection, source_shape: CacheShape, target_shape: CacheShape, native_layers: int = 0
) -> LinearWeights:
    """Explicit weights of a map that copies one source layer of the same shape into each target layer."""
    recipe = Recipe(source_shape, target_shape, "head_local", both(selection), native_layers=native_layers)
    # the native features come last and count nothing
    weight = tuple(
        torch.eye(recipe.n_features("key", layer) if layer >= native_layers else 0, width).expand(
            heads, -1, -1
        )
        for layer, (heads, width) in enumerate(target_shape)
    )
    bias = tuple(torch.zeros(shape) for shape in target_shape)
    return LinearWeights(recipe, dict.fromkeys(KINDS, weight), dict.fromkeys(KINDS, bias))


def joined(weight: Tensor) -> Tensor:
    """(heads, p, d) as one matrix (p, heads · d)."""
    return weight.transpose(0, 1).flatten(1)


def output_variance(weights: LinearWeights, moments: PairMoments, kind: str, layer: int) -> Tensor:
    """Variance of each mapped channel on the fit split, `diag(WᵀS_xx W)/Σw`, (H_t, d_t) float64."""
    variance = torch.zeros(weights.target_shape[layer], dtype=torch.float64)
    for heads, cut in layer_cuts(moments, "fit", weights.recipe, kind, layer):
        w = joined(weights.weight[kind][layer][heads]).to(cut.s_xx)
        variance[heads] = ((w * (cut.s_xx @ w)).sum(0) / max(cut.weight, 1.0)).view(len(heads), -1).cpu()
    return variance


def _solve(system: System, cut: Moments, dtype: torch.dtype) -> tuple[Tensor, list[Fallback]]:
    """Weights (p, m) as they are stored, and the fallback that gave them."""
    penalty = system.penalty.vector(system.bands.to(cut.s_xx.device), cut.s_xx.diagonal())
    try:
        solution = factor_ridge(cut.s_xx, penalty).solve(cut.s_xy)
    except RidgeError as error:
        raise RidgeError(f"the {system.name}: {error}") from error
    weight = solution.weight.to(dtype)
    if not bool(torch.isfinite(weight).all()):
        raise RidgeError(
            f"the {system.name} is not finite in {dtype}: raise ridge_lambda, or calibrate again with finite "
            f"caches"
        )
    if solution.solver[0] == "cholesky":
        return weight, []
    shared = len({head for _, head in system.heads}) > 1
    places = dict.fromkeys((layer, None if shared else head) for layer, head in system.heads)
    name, rank = solution.solver[0], solution.rank[0]
    return weight, [Fallback(system.kind, layer, head, name, rank) for layer, head in places]


def assembled(
    recipe: Recipe,
    fitted: Mapping[Head, tuple[Tensor, Tensor]],
    dtype: torch.dtype = torch.float32,
    fallbacks: tuple[Fallback, ...] = (),
) -> LinearWeights:
    """Fitted heads put together layer by layer; native layers get maps of no features."""
    bias_dtype = torch.promote_types(dtype, torch.float32)
    weight: dict[str, tuple[Tensor, ...]] = {}
    bias: dict[str, tuple[Tensor, ...]] = {}
    for kind in KINDS:
        weights, biases = [], []
        for layer, (n_heads, width) in enumerate(recipe.target_shape):
            if layer in recipe.mapped_layers:
                heads = [fitted[kind, layer, head] for head in range(n_heads)]
                weights.append(torch.stack([w for w, _ in heads]))
                biases.append(torch.stack([b for _, b in heads]).to(bias_dtype))
            else:
                weights.append(torch.zeros(n_heads, 0, width, dtype=dtype))
                biases.append(torch.zeros(n_heads, width, dtype=bias_dtype))
        weight[kind], bias[kind] = tuple(weights), tuple(biases)
    return LinearWeights(recipe, weight, bias, fallbacks)


def _r2(weights: LinearWeights, kind: str, layer: int, heads: list[int], cut: Moments) -> Tensor:
    """R² of some heads of a layer, (heads,) float64."""
    w = joined(weights.weight[kind][layer][heads]).to(cut.s_xx)
    b = weights.bias[kind][layer][heads].flatten().to(cut.s_xx)
    error = sse_with_bias(w, b, cut.s_xx, cut.s_xy, cut.s_yy, cut.mean_x, cut.mean_y, cut.weight)
    shape = (len(heads), -1)
    return r2_score(error.view(shape), cut.s_yy.view(shape)).cpu()
