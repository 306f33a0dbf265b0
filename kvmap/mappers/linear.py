"""The closed-form linear mapper: ridge weights, applied as one matrix product a layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple
from functools import cached_property
from typing import Any, Self

import torch
from torch import Tensor

from kvmap.errors import UnknownName
from kvmap.fit.features import KINDS, SUPPORTS, CacheShape, Recipe, SelectionError, n_channels
from kvmap.fit.linear import Fallback, LinearWeights
from kvmap.kernels.map_cache import CacheMap, Product, Slot
from kvmap.mappers.base import Mapper, register


@register("linear")
class LinearMapper(Mapper):
    """`k̂ = k W_K + b_K`, `v̂ = v W_V + b_V` for each target layer and head ([H] §3.4, [C] §3.2).

    Where all heads of a layer read the same features (full-head and banded support) one product serves
    them all, native layers' features included; with head-local support it is batched over heads. Products
    run in the weights' dtype, biases are added in float32.
    """

    def __init__(self, weights: LinearWeights) -> None:
        """Args: fitted weights (`kvmap.fit.linear.fit_linear`).

        Raises:
            SelectionError: a mapped layer that reads nothing.
        """
        super().__init__(weights.source_shape, weights.target_shape)
        self.recipe = weights.recipe
        self.native_layers = weights.recipe.native_layers
        for kind in KINDS:
            for layer in self.recipe.mapped_layers:
                if not self.recipe.sources(kind, layer):
                    raise SelectionError(
                        f"target layer {layer} selects no source layer for its {kind}s; use bias_only for a "
                        f"map that reads none"
                    )
        self.fallbacks = weights.fallbacks
        self._bias = weights.bias
        self._weight = {
            kind: tuple(packed(weight, self.recipe) for weight in weights.weight[kind]) for kind in KINDS
        }

    def linear_weights(self) -> LinearWeights:
        """The map as `kvmap.fit.linear.r2_of` reads it, over the same storage."""
        weight = {
            kind: tuple(
                unpacked(tensor, self.recipe, layer) for layer, tensor in enumerate(self._weight[kind])
            )
            for kind in KINDS
        }
        return LinearWeights(self.recipe, weight, self._bias, self.fallbacks)

    def map_layer(
        self,
        layer: int,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
        native_keys: Sequence[Tensor] = (),
        native_values: Sequence[Tensor] = (),
    ) -> tuple[Tensor, Tensor]:
        """See `Mapper.map_layer`."""
        batch, _, tokens, _ = keys[0].shape

        def mapped(kind: str) -> Tensor:
            rows = self.recipe.gather(kind, layer, keys, values, native_keys, native_values)
            outputs = product(rows, self._weight[kind][layer], self._bias[kind][layer])
            return outputs.view(-1, batch, tokens, outputs.shape[-1]).transpose(0, 1)

        return mapped("key"), mapped("value")

    def cache_map(self) -> CacheMap | None:
        """See `Mapper.cache_map`. None for a subclass that maps in its own way."""
        return self._cache_map if type(self).map_layer is LinearMapper.map_layer else None

    @cached_property
    def _cache_map(self) -> CacheMap:
        return CacheMap(
            {
                kind: {
                    layer: Product(
                        slots_of(self.recipe, kind, layer), self._weight[kind][layer], self._bias[kind][layer]
                    )
                    for layer in self.recipe.mapped_layers
                }
                for kind in KINDS
            }
        )

    def settings(self) -> dict[str, Any]:
        """See `Mapper.settings`."""
        return {"recipe": self.recipe.to_json(), "fallbacks": [list(astuple(f)) for f in self.fallbacks]}

    def tensors(self) -> dict[str, Tensor]:
        """`{kind}.{layer}.weight`: (p, H_t·d_t) where heads share features, else (H_t, p, d_t); `.bias`:
        (H_t, d_t). Mapped layers alone.
        """
        return {
            f"{kind}.{layer}.{name}": stored[layer]
            for kind in KINDS
            for name, stored in (("weight", self._weight[kind]), ("bias", self._bias[kind]))
            for layer in self.recipe.mapped_layers
        }

    @classmethod
    def from_state(cls, settings: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Self:
        """See `Mapper.from_state`."""
        recipe = Recipe.from_json(settings["recipe"])
        weight: dict[str, tuple[Tensor, ...]] = {}
        bias: dict[str, tuple[Tensor, ...]] = {}
        for kind in KINDS:
            weights, biases = [], []
            for layer, (n_heads, width) in enumerate(recipe.target_shape):
                if layer in recipe.mapped_layers:
                    weights.append(unpacked(tensors[f"{kind}.{layer}.weight"], recipe, layer))
                    biases.append(tensors[f"{kind}.{layer}.bias"])
                else:
                    weights.append(torch.zeros(n_heads, 0, width))
                    biases.append(torch.zeros(n_heads, width))
            weight[kind], bias[kind] = tuple(weights), tuple(biases)
        fallbacks = tuple(Fallback(*entry) for entry in settings["fallbacks"])
        return cls(LinearWeights(recipe, weight, bias, fallbacks))


def product(rows: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Rows times packed weights, bias added in its own dtype.

    Args:
        rows: (1, n, p) with weight (p, H_t·d_t), or (H_t, n, p) with weight (H_t, p, d_t).
        bias: (H_t, d_t).

    Returns:
        (H_t, n, d_t).
    """
    if weight.ndim == 3:
        return torch.bmm(rows.to(weight.dtype), weight).to(bias.dtype) + bias.unsqueeze(1)
    outputs = (rows[0].to(weight.dtype) @ weight).to(bias.dtype) + bias.flatten()
    return outputs.unflatten(1, bias.shape).transpose(0, 1)


def packed(weight: Tensor, recipe: Recipe) -> Tensor:
    """(H_t, p, d_t) as the product wants it: (p, H_t·d_t) where all heads read the same features."""
    return weight.transpose(0, 1).flatten(1).contiguous() if recipe.shared else weight.contiguous()


def unpacked(tensor: Tensor, recipe: Recipe, layer: int) -> Tensor:
    """Inverse of `packed`, over the same storage."""
    return tensor.unflatten(1, recipe.target_shape[layer]).transpose(0, 1) if recipe.shared else tensor


def slots_of(recipe: Recipe, kind: str, layer: int) -> tuple[Slot, ...]:
    """Layers that a target layer reads, in the order of its features."""
    return tuple(Slot(*source) for source in recipe.sources(kind, layer))


def linear_feature_count(
    source_shape: CacheShape,
    target_shape: CacheShape,
    top_k: int,
    support: str,
    regressors: str = "own_kind",
    native_layers: int = 0,
) -> int:
    """Features p that a linear mapper reads for one target head, before it is fitted.

    Args:
        source_shape: `(n_kv_heads, head_dim)` of each source layer. Where layers differ, the k widest are
            counted: the selection is not known yet, and none has more.
        target_shape: the same of each target layer; of the native ones the first are read.
        top_k: source layers per target layer, at most all of them.
        support: "full_head" and "banded" (p = k·H_s·d_s) or "head_local" (p = k·d_s).
        regressors: "both_kinds" doubles p.
        native_layers: whose channels are read too.

    Raises:
        UnknownName: another support.
    """
    if support not in SUPPORTS:
        raise UnknownName("support", support, SUPPORTS)
    local = support == "head_local"
    widths = sorted(dim if local else heads * dim for heads, dim in source_shape)
    native = sum(dim if local else heads * dim for heads, dim in target_shape[:native_layers])
    return (sum(widths[-top_k:]) + native) * (2 if regressors == "both_kinds" else 1)


def linear_weight_count(
    source_shape: CacheShape,
    target_shape: CacheShape,
    top_k: int,
    support: str,
    regressors: str = "own_kind",
    native_layers: int = 0,
) -> int:
    """Weights of a linear mapper before it is fitted, keys and values, biases not counted ([H] §3.3).

    `2 · p · Σ_ℓ H_t,ℓ · d_t,ℓ` over the mapped target layers, which is `2 · L_t · H_t · p · d_t` where they
    are alike and none is native.

    Args: see `linear_feature_count`.
    """
    p = linear_feature_count(source_shape, target_shape, top_k, support, regressors, native_layers)
    return 2 * p * n_channels(target_shape[native_layers:])
