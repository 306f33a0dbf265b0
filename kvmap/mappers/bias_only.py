"""The mean cache: what ridge becomes as λ → ∞, and the least a mapper must beat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from kvmap.fit.features import KINDS, CacheShape, Recipe, both
from kvmap.fit.linear import LinearWeights
from kvmap.fit.pair_moments import PairMoments
from kvmap.mappers.base import Mapper, register, shape_settings, shapes_from


@register("bias_only")
class BiasOnlyMapper(Mapper):
    """`k̂ = k̄`, `v̂ = v̄`: each column gets the mean of the calibration rows, whatever the source holds."""

    def __init__(
        self,
        source_shape: CacheShape,
        target_shape: CacheShape,
        bias: Mapping[str, Sequence[Tensor]],
        native_layers: int = 0,
    ) -> None:
        """Args: the shapes; by kind, per target layer, the mean (n_kv_heads, head_dim); first layers that the
        target computes itself.
        """
        super().__init__(source_shape, target_shape)
        self.native_layers = native_layers
        self._bias = {kind: tuple(bias[kind]) for kind in KINDS}

    @classmethod
    def from_moments(
        cls, moments: PairMoments, native_layers: int = 0, dtype: torch.dtype = torch.float32
    ) -> Self:
        """The means of the fit split; zeros for the native layers, of which no moments need to be held."""
        bias = {
            kind: [
                moments.mean_target("fit", kind, layer).view(shape).to(dtype)
                if layer >= native_layers
                else torch.zeros(shape, dtype=dtype)
                for layer, shape in enumerate(moments.target_shape)
            ]
            for kind in KINDS
        }
        return cls(moments.source_shape, moments.target_shape, bias, native_layers)

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

        def spread(kind: str) -> Tensor:
            return self._bias[kind][layer][None, :, None, :].expand(batch, -1, tokens, -1)

        return spread("key"), spread("value")

    def linear_weights(self) -> LinearWeights:
        """The same map as weights over no source features, for `kvmap.fit.linear.r2_of`; zeros over native
        ones.
        """
        nothing = both(((),) * len(self.target_shape))
        # head by head, so that moments of any mode hold it
        recipe = Recipe(
            self.source_shape, self.target_shape, "head_local", nothing, native_layers=self.native_layers
        )
        weight = {
            kind: tuple(
                bias.new_zeros(
                    bias.shape[0],
                    recipe.n_features(kind, layer) if layer in recipe.mapped_layers else 0,
                    bias.shape[1],
                )
                for layer, bias in enumerate(self._bias[kind])
            )
            for kind in KINDS
        }
        return LinearWeights(recipe, weight, self._bias)

    def settings(self) -> dict[str, Any]:
        """See `Mapper.settings`."""
        return {**shape_settings(self), "native_layers": self.native_layers}

    def tensors(self) -> dict[str, Tensor]:
        """`{kind}.{layer}.bias`, (n_kv_heads, head_dim)."""
        return {f"{kind}.{i}.bias": bias for kind in KINDS for i, bias in enumerate(self._bias[kind])}

    @classmethod
    def from_state(cls, settings: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Self:
        """See `Mapper.from_state`."""
        source_shape, target_shape = shapes_from(settings)
        bias = {kind: [tensors[f"{kind}.{i}.bias"] for i in range(len(target_shape))] for kind in KINDS}
        return cls(source_shape, target_shape, bias, settings.get("native_layers", 0))
