"""Models and a map between them that is wrong everywhere, so that what is recomputed shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Self

import torch
from torch import Tensor

from kvmap.fit.features import geometry_shape
from kvmap.mappers import Mapper
from kvmap.models.loaded import LoadedModel
from tests.tiny_random_models import build

N_LAYERS = 3


@cache
def source_model() -> LoadedModel:
    return LoadedModel.from_model(build("llama", seed=1, n_layers=2), name="source")


@cache
def target_model(family: str = "llama_llama3", attention: str = "sdpa") -> LoadedModel:
    if family == "gemma2":  # transformers gives it eager attention alone
        attention = "eager"
    model = build(family, seed=2, n_layers=N_LAYERS, attn_implementation=attention)
    return LoadedModel.from_model(model, name=family)


class NoisyMap(Mapper):
    """Fixed random projections of the source's first keys and values, times `scale`."""

    kind = "noisy"

    def __init__(self, target: LoadedModel, native_layers: int = 0, scale: float = 1.0) -> None:
        super().__init__(geometry_shape(source_model().geometry), geometry_shape(target.geometry))
        self.native_layers = native_layers
        generator = torch.Generator().manual_seed(3)
        read = self.source_shape[0][0] * self.source_shape[0][1]
        self.weights = {
            f"{kind}.{layer}.weight": torch.randn(read, heads * width, generator=generator) * scale
            for layer, (heads, width) in enumerate(self.target_shape)
            for kind in ("key", "value")
            if layer >= native_layers
        }

    def map_layer(
        self,
        layer: int,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
        native_keys: Sequence[Tensor] = (),
        native_values: Sequence[Tensor] = (),
    ) -> tuple[Tensor, Tensor]:
        def projected(kind: str, part: Tensor) -> Tensor:
            rows = part.transpose(1, 2).flatten(2) @ self.weights[f"{kind}.{layer}.weight"]
            return rows.unflatten(2, self.target_shape[layer]).transpose(1, 2)

        return projected("key", keys[0]), projected("value", values[0])

    def settings(self) -> dict[str, Any]:
        return {}

    def tensors(self) -> dict[str, Tensor]:
        return dict(self.weights)

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Self:
        return self

    @classmethod
    def from_state(cls, settings: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Self:
        raise AssertionError("nothing here is saved")
