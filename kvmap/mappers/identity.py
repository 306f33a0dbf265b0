"""The map of a model onto itself: the oracle that any transfer must pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

from torch import Tensor

from kvmap.fit.features import CacheShape
from kvmap.fit.linear import LinearWeights, copying_weights
from kvmap.mappers.base import Mapper, Unavailable, register, shape_settings, shapes_from


@register("identity")
class IdentityMapper(Mapper):
    """Every layer as it is. With source = target it must reproduce the native logits and generations."""

    def __init__(self, source_shape: CacheShape, target_shape: CacheShape | None = None) -> None:
        """Args: the shape of the model; `target_shape` may repeat it.

        Raises:
            Unavailable: two shapes that differ.
        """
        target_shape = source_shape if target_shape is None else target_shape
        if source_shape != target_shape:
            raise Unavailable(
                f"the identity map needs source and target of one shape; got {source_shape} and "
                f"{target_shape} (heads, head_dim for each layer)"
            )
        super().__init__(source_shape, target_shape)

    def map_layer(
        self,
        layer: int,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
        native_keys: Sequence[Tensor] = (),
        native_values: Sequence[Tensor] = (),
    ) -> tuple[Tensor, Tensor]:
        """See `Mapper.map_layer`."""
        return keys[layer], values[layer]

    def needs(self, layer: int) -> int:
        """See `Mapper.needs`."""
        return layer + 1

    def linear_weights(self) -> LinearWeights:
        """The same map as explicit weights, for `kvmap.fit.linear.r2_of`."""
        selection = tuple((layer,) for layer in range(len(self.target_shape)))
        return copying_weights(selection, self.source_shape, self.target_shape)

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
