"""λ, its bands and k chosen on the held-out split, from moments: per pair, or per layer, head and kind."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor

from kvmap.fit.features import KINDS, Recipe, Selection
from kvmap.fit.linear import (
    Fallback,
    Head,
    LinearWeights,
    Penalty,
    System,
    assembled,
    fit_heads,
    fit_linear,
    systems,
)
from kvmap.fit.moments import Moments
from kvmap.fit.pair_moments import PairMoments
from kvmap.fit.ridge import check_rows, penalty_vector
from kvmap.fit.ridge_path import ridge_path
from kvmap.progress import track

SCOPES = ("pair", "head")


@dataclass(frozen=True)
class Grid:
    """What is tried; every combination is.

    Attributes:
        top_k: numbers of source layers, ascending.
        ridge_lambda: λ of the matched heads' features (of all source features with other supports).
        cross: λ of the other heads' features over that λ, ∞ included; (1,) without bands.
        native: λ of the native layers' features over it.
        convention: of the penalties, see `Penalty`.
    """

    top_k: tuple[int, ...]
    ridge_lambda: tuple[float, ...]
    cross: tuple[float, ...] = (1.0,)
    native: tuple[float, ...] = (1.0,)
    convention: str = "absolute"


@dataclass(frozen=True)
class Choice:
    """One point of the grid."""

    top_k: int
    ridge_lambda: float
    cross: float = 1.0
    native: float = 1.0

    def penalty(self, convention: str) -> Penalty:
        """The penalties it stands for."""
        own = self.ridge_lambda
        return Penalty(own, _times(own, self.cross), _times(own, self.native), convention)


@dataclass(frozen=True, eq=False)
class Tuned:
    """What the held-out split chose.

    Attributes:
        choices: of each head; all alike where one was made for the pair.
        r2: mean held-out R² over heads, keys and values, for every point of the grid.
        head_r2: held-out R² of each head at its own choice.
    """

    choices: Mapping[Head, Choice]
    r2: Mapping[Choice, float]
    head_r2: Mapping[Head, float]

    def rows(self) -> list[dict[str, Any]]:
        """The grid as rows of a table: mean held-out R², and how many heads chose each point.

        An infinite ratio stands as "inf": JSON has no such number.
        """
        chosen = list(self.choices.values())
        return [
            {
                "top_k": choice.top_k,
                "ridge_lambda": choice.ridge_lambda,
                "cross_ratio": _named(choice.cross),
                "native_ratio": _named(choice.native),
                "held_out_r2": r2,
                "n_heads": chosen.count(choice),
            }
            for choice, r2 in self.r2.items()
        ]


def recipe_for(base: Recipe, ranked: Mapping[str, Selection], top_k: int) -> Recipe:
    """The recipe that reads the first k of each target layer's ranked source layers, in ascending order, so
    that target layers with one choice share a system.
    """
    selection = {kind: tuple(tuple(sorted(layers[:top_k])) for layers in ranked[kind]) for kind in KINDS}
    return Recipe(
        base.source_shape, base.target_shape, base.support, selection, base.regressors, base.native_layers
    )


def tune(
    moments: PairMoments, base: Recipe, ranked: Mapping[str, Selection], grid: Grid, per: str = "pair"
) -> Tuned:
    """Fit every point of the grid on the fit split, and choose by held-out R².

    R² of a head is 1 − SSE/SST over its channels, with the bias of the fit split; a pair's is the mean over
    heads, keys and values. Of equal points the first wins: fewest layers, then the largest λ.
    Each support, k and band ratio is one factorisation, which serves every λ (`kvmap.fit.ridge_path`).

    Args:
        moments: of both splits.
        base: support, regressors and native layers; its selection is not read.
        ranked: source layers of each target layer, the best first.
        grid: what to try.
        per: "pair", or "head" for each (layer, head, kind) its own.
    """
    scores: dict[Choice, dict[Head, float]] = {}
    points = list(product(grid.top_k, grid.cross, grid.native))
    for top_k, cross, native in track(points, len(points), "tune: supports and numbers of layers"):
        recipe = recipe_for(base, ranked, top_k)
        unit = Choice(top_k, 1.0, cross, native).penalty("absolute")
        for system in systems(moments, recipe, unit):
            lambdas = sorted(grid.ridge_lambda, reverse=True)
            found = _path_r2(moments, system, recipe, lambdas, grid.convention)
            for position, ridge_lambda in enumerate(lambdas):
                by_head = scores.setdefault(Choice(top_k, ridge_lambda, cross, native), {})
                by_head |= {head: values[position] for head, values in found.items()}
    means = {choice: math.fsum(by_head.values()) / len(by_head) for choice, by_head in scores.items()}
    heads = next(iter(scores.values()))
    if per == "pair":
        best = max(means, key=means.__getitem__)
        choices = dict.fromkeys(heads, best)
    else:
        choices = {head: max(scores, key=lambda choice: scores[choice][head]) for head in heads}
    return Tuned(choices, means, {head: scores[choice][head] for head, choice in choices.items()})


def fit_tuned(
    moments: PairMoments,
    base: Recipe,
    ranked: Mapping[str, Selection],
    tuned: Tuned,
    convention: str,
    *,
    dtype: torch.dtype = torch.float32,
    allow_few_rows: bool = False,
) -> LinearWeights:
    """The map of the chosen points.

    Where heads of one layer chose different k, the layer reads the largest and heads of fewer have zeros.

    Raises:
        TooFewRows, RidgeError: as `kvmap.fit.linear.fit_linear`.
    """
    penalties = {head: choice.penalty(convention) for head, choice in tuned.choices.items()}
    largest = {choice.top_k for choice in tuned.choices.values()}
    if len(largest) == 1:
        recipe = recipe_for(base, ranked, largest.pop())
        return fit_linear(moments, recipe, penalties, dtype=dtype, allow_few_rows=allow_few_rows)
    whole = _union(base, ranked, tuned.choices)
    p = max(whole.n_features(kind, layer) for kind in KINDS for layer in whole.mapped_layers)
    check_rows(moments.n_rows("fit"), p, allow_few_rows)
    fitted: dict[Head, tuple[Tensor, Tensor]] = {}
    fallbacks: list[Fallback] = []
    for top_k in sorted(largest):
        recipe = recipe_for(base, ranked, top_k)
        chosen = {head: penalties[head] for head, choice in tuned.choices.items() if choice.top_k == top_k}
        found, fell_back = fit_heads(moments, recipe, chosen, dtype)
        fitted |= {
            head: (_embedded(weight, recipe, whole, head), bias) for head, (weight, bias) in found.items()
        }
        fallbacks += fell_back
    return assembled(whole, fitted, dtype, tuple(fallbacks))


def _times(own: float, ratio: float) -> float:
    return math.inf if math.isinf(ratio) else own * ratio


def _named(ratio: float) -> float | str:
    return "inf" if math.isinf(ratio) else ratio


def _path_r2(
    moments: PairMoments, system: System, recipe: Recipe, lambdas: Sequence[float], convention: str
) -> dict[Head, list[float]]:
    """Held-out R² of each head of a system at each λ."""
    ratio = system.penalty.vector(system.bands, torch.ones(len(system.bands)))
    found: dict[Head, list[float]] = {}
    for heads, targets in _by_width(moments, system, recipe):
        fit = moments.cut("fit", system.features, targets)
        held_out = moments.cut("held_out", system.features, targets)
        scale = _scale(fit, ratio, convention)
        path = ridge_path(fit, [scale * value for value in lambdas], ratio=ratio.to(fit.s_xx.device))
        error = path.sse(held_out, len(heads)).held_out.cpu()
        spread = held_out.s_yy.view(len(heads), -1).sum(1).cpu()
        r2 = torch.where(spread > 0, 1 - error / torch.where(spread > 0, spread, 1.0), (error <= 0).double())
        found |= {(system.kind, *head): r2[:, i].tolist() for i, head in enumerate(heads)}
    return found


def _scale(fit: Moments, ratio: Tensor, convention: str) -> float:
    """What "relative" λ are times of: the mean diagonal over the features that are read."""
    if convention == "absolute":
        return 1.0
    bands = torch.where(torch.isinf(ratio), 1, 0)
    vector = penalty_vector(convention, bands, (1.0, math.inf, 1.0), fit.s_xx.diagonal().cpu())
    return float(vector[torch.isfinite(vector)].max())


def _by_width(
    moments: PairMoments, system: System, recipe: Recipe
) -> Iterator[tuple[list[tuple[int, int]], Tensor]]:
    """The heads of a system by their width, with their targets: a path takes groups of equal width."""
    by_width: dict[int, list[tuple[int, int]]] = {}
    for layer, head in system.heads:
        by_width.setdefault(recipe.target_shape[layer][1], []).append((layer, head))
    for heads in by_width.values():
        targets = [moments.layout.targets(system.kind, layer, head) for layer, head in heads]
        yield heads, torch.cat(targets)


def _union(base: Recipe, ranked: Mapping[str, Selection], choices: Mapping[Head, Choice]) -> Recipe:
    """The recipe that reads, for each target layer and kind, what its hungriest head reads."""
    largest: dict[tuple[str, int], int] = {}
    for (kind, layer, _), choice in choices.items():
        largest[kind, layer] = max(largest.get((kind, layer), 0), choice.top_k)
    selection = {
        kind: tuple(
            tuple(sorted(layers[: largest.get((kind, layer), 0)]))
            for layer, layers in enumerate(ranked[kind])
        )
        for kind in KINDS
    }
    return Recipe(
        base.source_shape, base.target_shape, base.support, selection, base.regressors, base.native_layers
    )


def _embedded(weight: Tensor, recipe: Recipe, whole: Recipe, head: Head) -> Tensor:
    """A head's weights over the features of a recipe that reads more, zero for what it does not read."""
    kind, layer, number = head
    row = 0 if recipe.shared else number
    part, features = recipe.columns(kind, layer)[row], whole.columns(kind, layer)[row]
    place = {int(feature): position for position, feature in enumerate(features.tolist())}
    index = torch.tensor([place[feature] for feature in part.tolist()], dtype=torch.int64)
    embedded = weight.new_zeros(len(features), weight.shape[1])
    embedded[index.to(weight.device)] = weight
    return embedded
