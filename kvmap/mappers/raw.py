"""The source's cache handed over untouched: the control that says whether mapping does anything."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

from torch import Tensor

from kvmap.fit.features import CacheShape
from kvmap.fit.linear import LinearWeights, copying_weights
from kvmap.fit.selection import proportional_layer
from kvmap.mappers.base import Mapper, Unavailable, register, shape_settings, shapes_from


@register("raw")
class RawMapper(Mapper):
    """Target layer ℓ takes source layer `round(ℓ · L_s / L_t)` as it is. Only where their shapes match."""

    def __init__(self, source_shape: CacheShape, target_shape: CacheShape, native_layers: int = 0) -> None:
        """Args: `(n_kv_heads, head_dim)` of each layer of both; first layers that the target computes itself.

        Raises:
            Unavailable: a target layer whose source layer has another shape.
        """
        super().__init__(source_shape, target_shape)
        self.native_layers = native_layers
        n_source, n_target = len(source_shape), len(target_shape)
        self.layers = tuple(proportional_layer(layer, n_source, n_target) for layer in range(n_target))
        for layer, source in enumerate(self.layers):
            if source_shape[source] != target_shape[layer]:
                raise Unavailable(
                    f"a raw copy needs equal shapes: source layer {source} has {source_shape[source]} and "
                    f"target layer {layer} {target_shape[layer]} (heads, head_dim): leave this control out"
                )

    def map_layer(
        self,
        layer: int,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
        native_keys: Sequence[Tensor] = (),
        native_values: Sequence[Tensor] = (),
    ) -> tuple[Tensor, Tensor]:
        """See `Mapper.map_layer`."""
        return keys[self.layers[layer]], values[self.layers[layer]]

    def needs(self, layer: int) -> int:
        """See `Mapper.needs`."""
        return self.layers[layer] + 1

    def linear_weights(self) -> LinearWeights:
        """The same map as explicit weights, for `kvmap.fit.linear.r2_of`."""
        selection = tuple((layer,) for layer in self.layers)
        return copying_weights(selection, self.source_shape, self.target_shape, self.native_layers)

    def settings(self) -> dict[str, Any]:
        """See `Mapper.settings`."""
        return {**shape_settings(self), "native_layers": self.native_layers}

    def tensors(self) -> dict[str, Tensor]:
        """None."""
        return {}

    @classmethod
    def from_state(cls, settings: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Self:
        """See `Mapper.from_state`."""
        return cls(*shapes_from(settings), settings.get("native_layers", 0))
