"""Mapping some columns of a source's cache into some of the target's layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvmap.kernels import map_cache as kernel
from kvmap.kernels.map_cache.reference import saturated
from kvmap.kernels.settings import current
from kvmap.mappers import Mapper
from kvmap.models.rope import Rotation, apply_rotation, strip_rotation

Rotations = Sequence[Rotation | None]


@dataclass(frozen=True, eq=False)
class Mapped:
    """Some columns of target layers.

    Attributes:
        keys: by layer (1, n_kv_heads, tokens, width), in the order of memory (1, tokens, heads, width).
        values: likewise.
        n_bad: numbers that are not finite.
        n_clamped: numbers that did not fit the dtype.
    """

    keys: dict[int, Tensor]
    values: dict[int, Tensor]
    n_bad: int
    n_clamped: int


class ColumnMap:
    """A mapper with what it needs to know of both engines."""

    def __init__(
        self, mapper: Mapper, rope: str, source: Rotations, target: Rotations, dtype: torch.dtype
    ) -> None:
        """A map for caches that carry these rotations.

        Args:
            mapper: of this pair.
            rope: its strategy; "strip", "coupled" or "no_rerotate".
            source: what the source's keys carry.
            target: what the target's keys are to carry.
            dtype: of the target's pages.
        """
        self._mapper, self._source, self._target, self._dtype = mapper, source, target, dtype
        self._strips, self._turns = rope != "coupled", rope == "strip"

    @property
    def layers(self) -> range:
        """The target layers that are mapped."""
        return range(self._mapper.native_layers, len(self._mapper.target_shape))

    def needs(self, layer: int) -> int:
        """How many of the source's first layers a target layer cannot be mapped without."""
        return self._mapper.needs(layer)

    def map(
        self,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
        first: int,
        native: Sequence[tuple[Tensor, Tensor]] = (),
        layers: Sequence[int] | None = None,
    ) -> Mapped:
        """Map some columns.

        Args:
            keys: of the source's first layers, as many as are needed, as the cache holds them: each (1,
                n_kv_heads, tokens, head_dim).
            values: likewise.
            first: position of the first of these columns.
            native: keys and values of the target's first `native_layers` layers over the same columns.
            layers: target layers; None: all that are mapped.
        """
        wanted = self.layers if layers is None else layers
        n = keys[0].shape[2]
        device = keys[0].device
        positions = torch.arange(first, first + n, device=device).unsqueeze(0)
        cache_map = self._mapper.cache_map()
        if cache_map is None:
            return self._by_layer(keys, values, positions, native, wanted)
        mapped = self._empty(n, device, wanted)
        rotations = self._source if self._strips else None
        side = kernel.Side(list(keys), list(values), rotations)
        own = None
        if native:
            turned = self._target if self._strips else None
            own = kernel.Side([k for k, _ in native], [v for _, v in native], turned)
        output = kernel.Columns(*mapped, self._target if self._turns else None)
        counts = kernel.map_cache(
            cache_map,
            kernel.Inputs(side, positions, own),
            output,
            wanted,
            chunk_tokens=current().chunk_tokens,
        )
        n_bad, n_clamped = counts.sum((0, 1)).tolist() if len(counts) else (0, 0)
        return Mapped(*mapped, n_bad, n_clamped)

    def _empty(
        self, n: int, device: torch.device, layers: Sequence[int]
    ) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
        found: tuple[dict[int, Tensor], dict[int, Tensor]] = ({}, {})
        for layer in layers:
            n_heads, width = self._mapper.target_shape[layer]
            for parts in found:
                parts[layer] = torch.empty(1, n, n_heads, width, dtype=self._dtype, device=device).transpose(
                    1, 2
                )
        return found

    def _by_layer(
        self,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
        positions: Tensor,
        native: Sequence[tuple[Tensor, Tensor]],
        layers: Sequence[int],
    ) -> Mapped:
        """With a mapper that has no tables of weights."""
        features = [self._seen(keys, positions, self._source), [v.float() for v in values]]
        if native:
            features += [
                self._seen([k for k, _ in native], positions, self._target),
                [v.float() for _, v in native],
            ]
        found: tuple[dict[int, Tensor], dict[int, Tensor]] = ({}, {})
        counts = torch.zeros(2, dtype=torch.int64, device=positions.device)
        for layer in layers:
            key, value = self._mapper.map_layer(layer, *features)
            key = apply_rotation(key, positions, self._target[layer] if self._turns else None)
            for parts, part in zip(found, (key, value), strict=True):
                cast, check = saturated(part, self._dtype)
                parts[layer] = cast
                counts += check
        return Mapped(*found, int(counts[0]), int(counts[1]))

    def _seen(self, keys: Sequence[Tensor], positions: Tensor, rotations: Rotations) -> list[Tensor]:
        if not self._strips:
            return [key.float() for key in keys]
        return [strip_rotation(key, positions, r) for key, r in zip(keys, rotations, strict=False)]
