"""The closed-form linear mapper: ridge weights, applied as one matrix product a layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from kvmap.errors import UnknownName
from kvmap.fit.linear import SUPPORTS, LinearWeights, check_selection
from kvmap.fit.moments import KINDS, CacheShape
from kvmap.fit.selection import Selection, SelectionError, head_map
from kvmap.mappers.base import Mapper, register, shape_settings, shapes_from


@register("linear")
class LinearMapper(Mapper):
    """`k̂ = k W_K + b_K`, `v̂ = v W_V + b_V` for each target layer and head ([H] §3.4, [C] §3.2).

    Full-head support reads all heads of the selected source layers in one product for all target heads;
    head-local support reads head `a(h)` of each, batched over heads. Products run in the weights' dtype,
    biases are added in float32.
    """

    def __init__(self, weights: LinearWeights) -> None:
        """Args: fitted weights (`kvmap.fit.linear.fit_linear`).

        Raises:
            SelectionError: a selection that is empty or not the pair's.
        """
        super().__init__(weights.source_shape, weights.target_shape)
        check_selection(weights.selection, weights.source_shape, weights.target_shape)
        if any(not layers for layers in weights.selection):
            raise SelectionError(
                "a target layer selects no source layer; use bias_only for a map that reads none"
            )
        self.support = weights.support
        self.selection = weights.selection
        self.fallbacks = weights.fallbacks
        self._bias = weights.bias
        self._weight = {
            kind: tuple(_packed(weight, self.support) for weight in weights.weight[kind]) for kind in KINDS
        }

    def linear_weights(self) -> LinearWeights:
        """The map as `kvmap.fit.linear.r2_of` reads it, over the same storage."""
        weight = {
            kind: tuple(
                _unpacked(packed, self.support, self.target_shape[layer])
                for layer, packed in enumerate(self._weight[kind])
            )
            for kind in KINDS
        }
        return LinearWeights(
            self.support,
            self.selection,
            self.source_shape,
            self.target_shape,
            weight,
            self._bias,
            self.fallbacks,
        )

    def map_layer(
        self, layer: int, keys: Sequence[Tensor], values: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """See `Mapper.map_layer`."""
        apply = self._full_head if self.support == "full_head" else self._head_local
        chosen = self.selection[layer]
        return (
            apply("key", layer, [keys[source] for source in chosen]),
            apply("value", layer, [values[source] for source in chosen]),
        )

    def _full_head(self, kind: str, layer: int, sources: list[Tensor]) -> Tensor:
        weight, bias = self._weight[kind][layer], self._bias[kind][layer]
        batch, _, tokens, _ = sources[0].shape
        features = torch.cat([source.transpose(1, 2).flatten(2) for source in sources], dim=-1)
        mapped = features.flatten(0, 1).to(weight.dtype) @ weight  # (batch · tokens, H_t · d_t)
        mapped = mapped.to(bias.dtype) + bias.flatten()
        return mapped.view(batch, tokens, *bias.shape).transpose(1, 2)

    def _head_local(self, kind: str, layer: int, sources: list[Tensor]) -> Tensor:
        weight, bias = self._weight[kind][layer], self._bias[kind][layer]
        batch, _, tokens, _ = sources[0].shape
        n_heads = weight.shape[0]
        features = torch.cat([_matched_heads(source, n_heads) for source in sources], dim=-1)
        rows = features.transpose(0, 1).flatten(1, 2).to(weight.dtype)  # (H_t, batch · tokens, p)
        mapped = torch.bmm(rows, weight).to(bias.dtype) + bias.unsqueeze(1)
        return mapped.view(n_heads, batch, tokens, -1).transpose(0, 1)

    def settings(self) -> dict[str, Any]:
        """See `Mapper.settings`."""
        return {
            **shape_settings(self),
            "support": self.support,
            "selection": [list(layers) for layers in self.selection],
            "fallbacks": [list(fallback) for fallback in self.fallbacks],
        }

    def tensors(self) -> dict[str, Tensor]:
        """`{kind}.{layer}.weight`: (p, H_t·d_t) full-head, (H_t, p, d_t) head-local; `.bias`: (H_t, d_t)."""
        return {
            f"{kind}.{layer}.{name}": tensor
            for kind in KINDS
            for name, stored in (("weight", self._weight[kind]), ("bias", self._bias[kind]))
            for layer, tensor in enumerate(stored)
        }

    @classmethod
    def from_state(cls, settings: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Self:
        """See `Mapper.from_state`."""
        source_shape, target_shape = shapes_from(settings)
        support = settings["support"]
        layers = range(len(target_shape))
        weight = {
            kind: tuple(_unpacked(tensors[f"{kind}.{i}.weight"], support, target_shape[i]) for i in layers)
            for kind in KINDS
        }
        bias = {kind: tuple(tensors[f"{kind}.{i}.bias"] for i in layers) for kind in KINDS}
        selection: Selection = tuple(tuple(int(s) for s in chosen) for chosen in settings["selection"])
        fallbacks = tuple((kind, layer, head, rank) for kind, layer, head, rank in settings["fallbacks"])
        return cls(LinearWeights(support, selection, source_shape, target_shape, weight, bias, fallbacks))


def linear_feature_count(source_shape: CacheShape, top_k: int, support: str) -> int:
    """Features p that a linear mapper reads for one target head, before it is fitted.

    Args:
        source_shape: `(n_kv_heads, head_dim)` of each source layer. Where layers differ, the k widest are
            counted: the selection is not known yet, and none has more.
        top_k: source layers per target layer, at most all of them.
        support: "full_head" (p = k·H_s·d_s) or "head_local" (p = k·d_s).

    Raises:
        UnknownName: another support.
    """
    if support not in SUPPORTS:
        raise UnknownName("support", support, SUPPORTS)
    widths = sorted((heads * dim if support == "full_head" else dim for heads, dim in source_shape))
    return sum(widths[-top_k:])


def linear_weight_count(source_shape: CacheShape, target_shape: CacheShape, top_k: int, support: str) -> int:
    """Weights of a linear mapper before it is fitted, keys and values, biases not counted ([H] §3.3).

    `2 · p · Σ_ℓ H_t,ℓ · d_t,ℓ` over the target layers, which is `2 · L_t · H_t · p · d_t` where they are
    alike.

    Args:
        source_shape, top_k, support: see `linear_feature_count`.
        target_shape: `(n_kv_heads, head_dim)` of each target layer.
    """
    outputs = sum(heads * dim for heads, dim in target_shape)
    return 2 * linear_feature_count(source_shape, top_k, support) * outputs


def _packed(weight: Tensor, support: str) -> Tensor:
    """(H_t, p, d_t) as the product wants it: (p, H_t·d_t) where all heads read the same features."""
    return weight.transpose(0, 1).flatten(1).contiguous() if support == "full_head" else weight.contiguous()


def _unpacked(packed: Tensor, support: str, shape: tuple[int, int]) -> Tensor:
    return packed.unflatten(1, shape).transpose(0, 1) if support == "full_head" else packed


def _matched_heads(source: Tensor, n_heads: int) -> Tensor:
    """Source head `a(h)` for each target head: (batch, H_t, tokens, d_s)."""
    heads = head_map(source.shape[1], n_heads)
    if heads == tuple(range(source.shape[1])):
        return source
    return source[:, list(heads)]
