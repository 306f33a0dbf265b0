"""What the operation `map_cache` is given and where it writes: plain tensors, no mapper and no model.

For every target layer, kind (key or value) and head h, at every column with position t:

    ŷ_h = R_target(t) ( Σ_s R_s(t)⁻¹ x_s W_{s,h} + b_h )

with x_s what the cache of a source layer (or of a native layer) holds, R the rotary rotations (none for
values), W the ridge weights and b the biases ([H] §3.4, [C] §3.2).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from kvmap.errors import KvmapError
from kvmap.models.rope import Rotation

KINDS = ("key", "value")
Rotations: TypeAlias = Sequence[Rotation | None] | None
"""What keys carry or shall carry, layer by layer; None: nothing, in any layer."""


class KernelError(KvmapError):
    """Tensors that `map_cache` cannot work on, or a path that cannot serve them."""


class Slot(NamedTuple):
    """One layer's channels among the features of a product.

    Attributes:
        origin: "source", or "native" for the target's own first layers.
        kind: "key" or "value".
        layer: of the origin's model.
    """

    origin: str
    kind: str
    layer: int


@dataclass(frozen=True, eq=False)
class Product:
    """The map of one kind of one target layer. Rows of the weights follow the slots, each in the order (head,
    channel); by head, a slot gives the channels of one head alone.

    Attributes:
        slots: what is read, in the order of the features.
        weight: (p, H_t·d_t) where all heads read the same features, else (H_t, p, d_t); float32, float64,
            bfloat16, float16 or float8_e4m3fn.
        bias: (H_t, d_t), at least float32.
        scale: (H_t, d_t) float32, by which a float8 product is multiplied; None beside other weights.
    """

    slots: tuple[Slot, ...]
    weight: Tensor
    bias: Tensor
    scale: Tensor | None = None

    @property
    def shared(self) -> bool:
        """Whether all heads read the same features."""
        return self.weight.ndim == 2

    @property
    def compute_dtype(self) -> torch.dtype:
        """What the factors of the product are rounded to: that of the weights, bfloat16 for float8 ones."""
        return torch.bfloat16 if self.scale is not None else self.weight.dtype

    @property
    def n_features(self) -> int:
        """p, of one head."""
        return self.weight.shape[-2]

    def head_of(self, slot_heads: int, head: int) -> int:
        """Head of a slot of so many that a target head reads by head, `⌊h · H_s / H_t⌋` ([C] §3.2)."""
        return head * slot_heads // self.bias.shape[0]


@dataclass(frozen=True, eq=False)
class CacheMap:
    """A linear map as tables of weights.

    Attributes:
        products: by kind and mapped target layer.
    """

    products: Mapping[str, Mapping[int, Product]]

    @property
    def layers(self) -> tuple[int, ...]:
        """The target layers that are mapped, in ascending order."""
        return tuple(sorted(self.products["key"]))

    def needs(self, layer: int) -> int:
        """The last source layer that a target layer reads; −1 where it reads native ones alone."""
        slots = (slot for kind in KINDS for slot in self.products[kind][layer].slots)
        return max((slot.layer for slot in slots if slot.origin == "source"), default=-1)

    def flops(self, n_tokens: int) -> int:
        """Floating-point operations of all products: two for each weight and token."""
        weights = sum(p.weight.numel() for layers in self.products.values() for p in layers.values())
        return 2 * weights * n_tokens

    @property
    def nbytes(self) -> int:
        """Bytes of weights, scales and biases."""
        return sum(
            tensor.numel() * tensor.element_size()
            for layers in self.products.values()
            for product in layers.values()
            for tensor in (product.weight, product.bias, product.scale)
            if tensor is not None
        )


class _Layers:
    """Keys and values layer by layer, whichever side they are on."""

    keys: Sequence[Tensor] | Mapping[int, Tensor]
    values: Sequence[Tensor] | Mapping[int, Tensor]
    rotations: Rotations

    def tensor(self, kind: str, layer: int) -> Tensor:
        """Keys or values of a layer."""
        return (self.keys if kind == "key" else self.values)[layer]

    def rotation(self, kind: str, layer: int) -> Rotation | None:
        """What the keys of a layer carry or get; None for values."""
        return None if kind == "value" or self.rotations is None else self.rotations[layer]

    def dtype(self, kind: str, layer: int) -> torch.dtype:
        """That of keys or values of a layer."""
        return self.tensor(kind, layer).dtype


@dataclass(frozen=True, eq=False)
class Side(_Layers):
    """One model's layers as its cache holds them.

    Attributes:
        keys: per layer (batch, heads, tokens, head_dim), of any strides.
        values: likewise.
        rotations: what the keys carry and is to be undone; None leaves every key as it is.
    """

    keys: Sequence[Tensor]
    values: Sequence[Tensor]
    rotations: Rotations = None

    def slice_tokens(self, start: int, stop: int) -> Side:
        """Columns start:stop."""
        return Side(
            tuple(key[:, :, start:stop] for key in self.keys),
            tuple(value[:, :, start:stop] for value in self.values),
            self.rotations,
        )


@dataclass(frozen=True, eq=False)
class Inputs:
    """What is mapped.

    Attributes:
        source: the source's cache.
        positions: (batch, tokens) int64, of every column, for source and target alike.
        native: the target's own first layers over the same columns; None where the map reads none.
        keep: (batch, tokens) bool: zeros are written where it is False; None: every column is mapped.
    """

    source: Side
    positions: Tensor
    native: Side | None = None
    keep: Tensor | None = None

    def side(self, origin: str) -> Side:
        """The layers of an origin.

        Raises:
            KernelError: native layers that are not given.
        """
        if origin == "source":
            return self.source
        if self.native is None:
            raise KernelError("this map reads native layers, and none were given: pass native=Side(...)")
        return self.native

    def slice_tokens(self, start: int, stop: int) -> Inputs:
        """Columns start:stop."""
        return Inputs(
            self.source.slice_tokens(start, stop),
            self.positions[:, start:stop],
            None if self.native is None else self.native.slice_tokens(start, stop),
            None if self.keep is None else self.keep[:, start:stop],
        )


@dataclass(frozen=True, eq=False)
class Columns(_Layers):
    """A target cache as whole tensors, written in place.

    Attributes:
        keys: by target layer (batch, H_t, tokens, d_t), of any strides, in the target's dtype.
        values: likewise.
        rotations: what each target layer's keys get; None leaves content keys.
    """

    keys: Mapping[int, Tensor]
    values: Mapping[int, Tensor]
    rotations: Rotations = None

    def write(self, kind: str, layer: int, start: int, columns: Tensor) -> None:
        """(batch, H_t, n, d_t) into columns start:start + n."""
        self.tensor(kind, layer)[:, :, start : start + columns.shape[2]].copy_(columns)


@dataclass(frozen=True, eq=False)
class Pages(_Layers):
    """A target cache as a serving engine keeps it, in blocks of tokens; written in place.

    Token i of row b stands in slot `(first[b] + i) % block_size` of block
    `block_table[b, (first[b] + i) // block_size]`.

    Attributes:
        keys: by target layer (n_blocks, block_size, H_t, d_t), of any strides, in the target's dtype.
        values: likewise.
        block_table: (batch, blocks a row) int32 or int64; no block may be written by two rows.
        first: (batch,) int64, the place of each row's first column; None: 0.
        rotations: as of `Columns`.
    """

    keys: Mapping[int, Tensor]
    values: Mapping[int, Tensor]
    block_table: Tensor
    first: Tensor | None = None
    rotations: Rotations = None
    _places: dict[tuple[int, int], tuple[Tensor, Tensor]] = field(default_factory=dict, repr=False)

    def write(self, kind: str, layer: int, start: int, columns: Tensor) -> None:
        """(batch, H_t, n, d_t) as tokens start:start + n of each row."""
        pool = self.tensor(kind, layer)
        blocks, slots = self.places(start, start + columns.shape[2], pool.shape[1])
        pool[blocks, slots] = columns.transpose(1, 2).to(pool.dtype)

    def places(self, start: int, stop: int, block_size: int) -> tuple[Tensor, Tensor]:
        """Block and slot of tokens start:stop, each (batch, n) int64; kept: all layers ask alike."""
        if (start, stop) not in self._places:
            index = torch.arange(start, stop, device=self.block_table.device).unsqueeze(0)
            if self.first is not None:
                index = index + self.first.unsqueeze(1).to(index.device)
            index = index.expand(len(self.block_table), -1)
            block = self.block_table.long().gather(1, index // block_size)
            self._places.clear()  # the last chunk's are of no more use
            self._places[start, stop] = (block, index % block_size)
        return self._places[start, stop]


Output: TypeAlias = Columns | Pages
