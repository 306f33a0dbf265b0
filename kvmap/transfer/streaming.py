"""Mapping while the source still reads: each target layer as soon as the last layer it needs is cached."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvmap.fit.features import geometry_shape
from kvmap.kernels.map_cache import KINDS, CacheMap, Side, Slot
from kvmap.mappers.base import Mapper
from kvmap.models.cache import KVCache
from kvmap.models.capture import prefill
from kvmap.models.pair import LoadedModel
from kvmap.transfer.context import check_mapper, read_context
from kvmap.transfer.handoff import HandOff, TransferOptions, begin, complete, native
from kvmap.transfer.mapping import Filling
from kvmap.transfer.oracle import OwnKind


def prefill_and_transfer(
    source: LoadedModel,
    mapper: Mapper,
    target: LoadedModel,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    *,
    native_prefix: KVCache | None = None,
    own_kind: OwnKind | None = None,
    every_column: bool = False,
    **options: Any,
) -> tuple[HandOff, KVCache]:
    """Let the source read a context and hand it over, mapping layers while the source goes on.

    The same, bit for bit, as `prefill` and then `transfer` on the same path of `kvmap.kernels.map_cache`.
    The target runs its own head and native layers first. Where the mapper's weights are on a CUDA device,
    layers are mapped on a stream of their own, beside the source's prefill; on a CPU in turn with it. On path
    "batched" a source layer's keys are un-rotated anew for every group of target layers that reads it.

    A mapper without tables (`Mapper.cache_map`) maps when the source has read everything.

    Args:
        source: the model that reads.
        mapper: of this pair and strategy.
        target: the model that goes on.
        input_ids: (batch, tokens) the context; attention_mask: (batch, tokens), left padding only, or None.
        native_prefix, own_kind, every_column: see `transfer`.
        options: fields of `TransferOptions`.

    Returns:
        The hand-off, and the source's own cache of the context.

    Raises:
        TransferError, MapperMismatch, UnsupportedModel: see `transfer`; mismatches before anything is run.
    """
    asked = TransferOptions(**options)
    context = read_context(target, input_ids, attention_mask, asked.hold_back)
    check_mapper(mapper, source.identity, geometry_shape(source.geometry), target, asked.rope)
    begun = begin(mapper, target, context, asked, native_prefix, every_column)
    if begun is None:
        source_kv = prefill(source, input_ids, attention_mask)
        return native(target, input_ids, attention_mask, hold_back=asked.hold_back), source_kv
    cache_map = mapper.cache_map()
    if cache_map is None or not begun.any_wanted:
        source_kv = prefill(source, input_ids, attention_mask)
        if begun.any_wanted:
            begun.filling.map_all(source_kv)
    else:
        stream = _Stream(source, begun.filling, cache_map)
        with stream.joined():
            source_kv = prefill(source, input_ids, attention_mask, on_layer=stream.on_layer)
    return complete(begun, own_kind), source_kv


@dataclass(eq=False)
class _Stream:
    """Target layers on their way, mapped when their sources come.

    Attributes:
        source: the model that reads.
        filling: the target's cache.
        cache_map: the mapper's.
    """

    source: LoadedModel
    filling: Filling
    cache_map: CacheMap
    _keys: list[Tensor] = field(init=False)
    _values: list[Tensor] = field(init=False)
    _side: Side | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self._device = self.filling.mapper.device or self.filling.target.device
        columns = self.filling.columns
        batch, n_tokens = columns.context.mask.shape[0], columns.context.n_columns - columns.start
        # what is not there yet looks as it will, in no memory: the path is chosen by all layers
        one = torch.empty(1, dtype=self.source.dtype, device=self._device)
        self._keys = [
            one.expand(batch, n_heads, n_tokens, width)
            for n_heads, width in geometry_shape(self.source.geometry)
        ]
        self._values = list(self._keys)
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        self._ready: dict[int, list[int]] = defaultdict(list)
        for layer in self.cache_map.layers:
            self._ready[max(self.cache_map.needs(layer), 0)].append(layer)
        self._read = {
            slot
            for kind in KINDS
            for product in self.cache_map.products[kind].values()
            for slot in product.slots
        }

    def on_layer(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """A source layer is cached: map the target layers that waited for it."""
        if self._side is None:
            coupled = self.filling.rope == "coupled"
            rotations = None if coupled else self.source.current_rotations()
            self._side = Side(self._keys, self._values, rotations)
        with self._on_own_stream(keys.device):
            for kind, layers, whole in (("key", self._keys, keys), ("value", self._values, values)):
                if Slot("source", kind, layer) in self._read:
                    layers[layer] = self._taken(whole)
            if self._ready[layer]:
                self.filling.map_layers(self.cache_map, self._side, self._ready[layer])

    @contextmanager
    def joined(self) -> Iterator[None]:
        """Mapping begins after what the target was given to do, and ends before what it is given next."""
        if self._stream is None:
            yield
            return
        target = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(target)
        try:
            yield
        finally:
            # also after an error: the cache being written goes back to the target's stream
            target.wait_stream(self._stream)

    @contextmanager
    def _on_own_stream(self, source: torch.device) -> Iterator[None]:
        """After what the source's stream has been given so far."""
        if self._stream is None:
            yield
            return
        if source.type == "cuda":
            self._stream.wait_stream(torch.cuda.current_stream(source))
        with torch.cuda.stream(self._stream):
            yield

    def _taken(self, whole: Tensor) -> Tensor:
        """The columns that are mapped, on the map's device."""
        columns = self.filling.columns
        part = whole[:, :, columns.start : columns.context.n_columns]
        if self._stream is not None and whole.device.type == "cuda":
            whole.record_stream(self._stream)
        return part.to(self._device)
