"""The source's cache handed over untouched: the control that says whether mapping does anything."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

from torch import Tensor

from kvmap.fit.linear import LinearWeights, copying_weights
from kvmap.fit.moments import CacheShape
from kvmap.fit.selection import proportional_layer
from kvmap.mappers.base import Mapper, Unavailable, register, shape_settings, shapes_from


@register("raw")
class RawMapper(Mapper):
    """Target layer ℓ takes source layer `round(ℓ · L_s / L_t)` as it is. Only where their shapes match."""

    def __init__(self, source_shape: CacheShape, target_shape: CacheShape) -> None:
        """Args: `(n_kv_heads, head_dim)` of each layer of source and target.

        Raises:
            Unavailable: a target layer whose source layer has another shape.
        """
        super().__init__(source_shape, target_shape)
        n_source, n_target = len(source_shape), len(target_shape)
        self.layers = tuple(proportional_layer(layer, n_source, n_target) for layer in range(n_target))
        for layer, source in enumerate(self.layers):
            if source_shape[source] != target_shape[layer]:
                raise Unavailable(
                    f"a raw copy needs equal shapes: source layer {source} has {source_shape[source]} and "
                    f"target layer {layer} {target_shape[layer]} (heads, head_dim): leave this control out"
                )

    def map_layer(
        self, layer: int, keys: Sequence[Tensor], values: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """See `Mapper.map_layer`."""
        return keys[self.layers[layer]], values[self.layers[layer]]

    def linear_weights(self) -> LinearWeights:
        """The same map as explicit weights, for `kvmap.fit.linear.r2_of`."""
        return copying_weights(tuple((s,) for s in self.layers), self.source_shape, self.target_shape)

    def settings(self) -> dict[str, Any]:
        """See `Mapper.settings`."""
        return shape_settings(self)

    def tensors(self) -> dict[str, Tensor]:
        """None."""
        return {}

    @classmethod
    def from_state(cls, settings: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Self:
        """See `Mapper.from_state`."""
        return cls(*shapes_from(settings))
