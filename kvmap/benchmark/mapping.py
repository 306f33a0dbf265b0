"""Mapping alone: a source's cache to the target's keys and values, with nothing run by either model."""

from __future__ import annotations

from collections.abc import Mapping as Table
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from kvmap.benchmark.timing import Call
from kvmap.fit.features import CacheShape, geometry_shape
from kvmap.kernels.map_cache import KINDS, PATHS, CacheMap, Columns, Inputs, Product, Side, Slot, map_cache
from kvmap.mappers import Mapper
from kvmap.models.cache import KVCache
from kvmap.models.pair import LoadedModel
from kvmap.models.rope import Rotation, apply_rotation, strip_rotation

MAPPING_PATHS = (*PATHS, "per_head", "per_head_stripped")
"""Those of `map_cache`, and the loops over heads that they are held against."""
BY_LAYER = "by_layer"
"""What a map that is no table of weights takes instead: its own `map_layer`, layer by layer."""


@dataclass(frozen=True, eq=False)
class Mapping:
    """One cache to be mapped, and where it goes.

    Attributes:
        mapper: of the pair, on the device of the target.
        source: the source's cache, rotated as its prefill left it, on that device too.
        native: the target's own first layers over the same columns, where the mapper reads any.
        output: the target's keys and values, written in place.
    """

    mapper: Mapper
    source: KVCache
    native: KVCache | None
    output: Columns

    @property
    def cache_map(self) -> CacheMap | None:
        """The mapper as tables of weights; None for one that is none."""
        return self.mapper.cache_map()

    @property
    def inputs(self) -> Inputs:
        """The caches as `map_cache` takes them."""
        native = None if self.native is None else _side(self.native)
        return Inputs(_side(self.source), self.source.positions, native)

    @property
    def nbytes(self) -> int:
        """Bytes of source and output."""
        written = (*self.output.keys.values(), *self.output.values.values())
        return self.source.nbytes + sum(tensor.nbytes for tensor in written)

    def copy(self) -> Mapping:
        """The same in other memory."""
        source, native = copied(self.source), None if self.native is None else copied(self.native)
        keys, values = (
            {layer: torch.empty_like(tensor) for layer, tensor in tensors.items()}
            for tensors in (self.output.keys, self.output.values)
        )
        return Mapping(self.mapper, source, native, Columns(keys, values, self.output.rotations))

    def call(self, path: str = "auto") -> Call:
        """A call that maps it.

        Args:
            path: one of `MAPPING_PATHS`; a mapper that is no table of weights takes `BY_LAYER`, whatever is
                asked.
        """
        cache_map = self.cache_map
        if cache_map is None:
            return partial(map_by_layer, self)
        if path in ("per_head", "per_head_stripped"):
            once = path == "per_head_stripped"
            return partial(map_per_head, cache_map, self.inputs, self.output, stripped_once=once)
        return partial(map_cache, cache_map, self.inputs, self.output, path=path)


def prepare_mapping(
    mapper: Mapper, source_kv: KVCache, target: LoadedModel, native: KVCache | None = None
) -> Mapping:
    """All columns of a cache, to be mapped for a target.

    Args:
        mapper: of this pair.
        source_kv: the source's cache.
        target: whose dtype, device and rotations the output has.
        native: the target's first `mapper.native_layers` layers over the same columns.
    """
    rotations = target.rotations(source_kv.n_tokens)
    output = empty_columns(
        geometry_shape(target.geometry),
        range(mapper.native_layers, target.geometry.n_layers),
        (source_kv.batch_size, source_kv.n_tokens),
        dtype=target.dtype,
        device=target.device,
        rotations=rotations,
    )
    return Mapping(mapper, source_kv.to(device=target.device), native, output)


def empty_columns(
    shape: CacheShape,
    layers: Sequence[int],
    rows: tuple[int, int],
    *,
    dtype: torch.dtype,
    device: torch.device,
    rotations: Sequence[Rotation | None] | None,
) -> Columns:
    """A target cache that is still to be written, its memory laid out by (row, token, head, channel).

    Args:
        shape: `(n_kv_heads, head_dim)` of each target layer.
        layers: those that are to be written.
        rows: (batch, tokens).
        dtype, device: of the tensors.
        rotations: what each layer's keys get.
    """

    def empty(layer: int) -> Tensor:
        return torch.empty(*rows, *shape[layer], dtype=dtype, device=device).transpose(1, 2)

    return Columns(
        {layer: empty(layer) for layer in layers}, {layer: empty(layer) for layer in layers}, rotations
    )


def map_per_head(
    cache_map: CacheMap, inputs: Inputs, output: Columns, *, stripped_once: bool = False
) -> None:
    """A loop over layers, kinds and heads, each head on its own: what `map_cache` is held against.

    A head gathers the channels it reads, un-rotates them in float32, rounds them to the weights' dtype,
    multiplies in it, adds its bias and is rotated and written. Nothing is shared between heads, no rotation
    is kept, and no number is looked at, so that the loop gets its saturating cast for nothing.

    Args:
        cache_map, inputs, output: as of `map_cache`.
        stripped_once: every source layer is un-rotated once, before the loop that reads it, and kept.
    """
    kept: dict[Slot, Tensor] = {}
    for layer in cache_map.layers:
        for kind in KINDS:
            product, target = cache_map.products[kind][layer], output.tensor(kind, layer)
            if stripped_once:
                for slot in product.slots:
                    if slot not in kept:
                        kept[slot] = _stripped(inputs, slot, inputs.side(slot.origin).tensor(*slot[1:]))
            for head in range(product.bias.shape[0]):
                mapped = _one_head(product, inputs, kept, head)
                turned = apply_rotation(mapped, inputs.positions, output.rotation(kind, layer))
                target[:, head : head + 1].copy_(turned)


def _one_head(product: Product, inputs: Inputs, kept: Table[Slot, Tensor], head: int) -> Tensor:
    """(batch, 1, tokens, d_t) of one target head, before its rotation."""
    width, read = product.bias.shape[1], []
    for slot in product.slots:
        held = kept[slot] if slot in kept else inputs.side(slot.origin).tensor(*slot[1:])
        own = product.head_of(held.shape[1], head)
        for source_head in range(held.shape[1]) if product.shared else [own]:
            part = held[:, source_head : source_head + 1]
            read.append(part if slot in kept else _stripped(inputs, slot, part))
    columns = product.weight[:, head * width : (head + 1) * width]
    weight = columns if product.shared else product.weight[head]
    features = torch.cat(read, dim=-1).to(product.compute_dtype)
    found = (features @ weight.to(product.compute_dtype)).to(product.bias.dtype)
    if product.scale is not None:
        found = found * product.scale[head]
    return found + product.bias[head]


def _stripped(inputs: Inputs, slot: Slot, held: Tensor) -> Tensor:
    rotation = inputs.side(slot.origin).rotation(slot.kind, slot.layer)
    return strip_rotation(held, inputs.positions, rotation)


def map_by_layer(mapping: Mapping) -> None:
    """`Mapper.map_layer` for every layer, in float32 or better, then rotated and written."""
    source, native = mapping.source.strip(), mapping.native
    extra: tuple[tuple[Tensor, ...], ...] = ()
    if native is not None:
        stripped = native.strip()
        extra = (stripped.keys, stripped.values)
    for layer in mapping.output.keys:
        found = mapping.mapper.map_layer(layer, source.keys, source.values, *extra)
        for kind, content in zip(KINDS, found, strict=True):
            rotation = mapping.output.rotation(kind, layer)
            mapping.output.write(kind, layer, 0, apply_rotation(content, source.positions, rotation))


def _side(kv: KVCache) -> Side:
    return Side(kv.keys, kv.values, kv.rotations)


def copied(kv: KVCache) -> KVCache:
    """A cache in other memory."""
    keys, values = (tuple(tensor.clone() for tensor in tensors) for tensors in (kv.keys, kv.values))
    return replace(kv, keys=keys, values=values)
