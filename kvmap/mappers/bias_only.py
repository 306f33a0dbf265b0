"""The mean cache: what ridge becomes as λ → ∞, and the least a mapper must beat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from kvmap.fit.linear import LinearWeights
from kvmap.fit.moments import KINDS, CacheShape, PairMoments
from kvmap.mappers.base import Mapper, register, shape_settings, shapes_from


@register("bias_only")
class BiasOnlyMapper(Mapper):
    """`k̂ = k̄`, `v̂ = v̄`: each column gets the mean of the calibration rows, whatever the source holds."""

    def __init__(
        self, source_shape: CacheShape, target_shape: CacheShape, bias: Mapping[str, Sequence[Tensor]]
    ) -> None:
        """Args: the shapes, and by kind, per target layer, the mean (n_kv_heads, head_dim)."""
        super().__init__(source_shape, target_shape)
        self._bias = {kind: tuple(bias[kind]) for kind in KINDS}

    @classmethod
    def from_moments(cls, moments: PairMoments, dtype: torch.dtype = torch.float32) -> Self:
        """The means of the fit split."""
        bias = {
            kind: [
                moments.tables[kind, "fit"].mean_y[moments.target_slice(layer)].view(shape).to(dtype)
                for layer, shape in enumerate(moments.target_shape)
            ]
            for kind in KINDS
        }
        return cls(moments.source_shape, moments.target_shape, bias)

    def map_layer(
        self, layer: int, keys: Sequence[Tensor], values: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """See `Mapper.map_layer`."""
        batch, _, tokens, _ = keys[0].shape

        def spread(kind: str) -> Tensor:
            return self._bias[kind][layer][None, :, None, :].expand(batch, -1, tokens, -1)

        return spread("key"), spread("value")

    def linear_weights(self) -> LinearWeights:
        """The same map as weights over no features, for `kvmap.fit.linear.r2_of`."""
        weight = {
            kind: tuple(bias.new_zeros(bias.shape[0], 0, bias.shape[1]) for bias in self._bias[kind])
            for kind in KINDS
        }
        selection: tuple[tuple[int, ...], ...] = ((),) * len(self.target_shape)
        return LinearWeights("full_head", selection, self.source_shape, self.target_shape, weight, self._bias)

    def settings(self) -> dict[str, Any]:
        """See `Mapper.settings`."""
        return shape_settings(self)

    def tensors(self) -> dict[str, Tensor]:
        """`{kind}.{layer}.bias`, (n_kv_heads, head_dim)."""
        return {f"{kind}.{i}.bias": bias for kind in KINDS for i, bias in enumerate(self._bias[kind])}

    @classmethod
    def from_state(cls, settings: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Self:
        """See `Mapper.from_state`."""
        source_shape, target_shape = shapes_from(settings)
        bias = {kind: [tensors[f"{kind}.{i}.bias"] for i in range(len(target_shape))] for kind in KINDS}
        return cls(source_shape, target_shape, bias)
