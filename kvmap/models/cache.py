"""The KV cache as kvmap passes it around, and its conversion from and to transformers' own (only here)."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from kvmap.errors import KvmapError
from kvmap.models.rope import Rotation, apply_rotation, strip_rotation

if TYPE_CHECKING:
    from transformers import DynamicCache, PreTrainedModel

    from kvmap.models.identity import ModelIdentity


OnLayer: TypeAlias = Callable[[int, Tensor, Tensor], None]
"""What is told of a layer as soon as it is cached: its number, keys and values."""


class InvalidCache(KvmapError):
    """A KV cache that cannot be used the way it was asked to be."""


@dataclass(frozen=True, eq=False)
class KVCache:
    """Keys and values of every layer for a batch of contexts. Nothing in it ever grows or changes in place.

    Attributes:
        keys: per layer (batch, n_kv_heads, tokens, head_dim).
        values: per layer (batch, n_kv_heads, tokens, head_dim).
        positions: (batch, tokens) int64, the position each column was (or will be) rotated to; 0 at left
            padding.
        mask: (batch, tokens) bool, True where a real token stands; padding may stand on the left.
        rotations: what the keys carry, per layer (None: that layer has no rotation). None as a whole: the
            keys are stripped content keys.
        exact: False as soon as any column was mapped; such a cache must never be kept as an exact prefix.
        owner: the model whose own forward filled it; None where that is not one model.
        mixed: columns carry different rotations (a dynamic or longrope model crossed its threshold while
            decoding): the model can go on from it, but it cannot be stripped.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    positions: Tensor
    mask: Tensor
    rotations: tuple[Rotation | None, ...] | None
    exact: bool = True
    owner: ModelIdentity | None = None
    mixed: bool = False

    def __post_init__(self) -> None:
        """Refuse parts that do not fit together.

        Raises:
            InvalidCache: naming the layer and the shapes.
        """
        if not self.keys or len(self.keys) != len(self.values):
            raise InvalidCache(
                f"a KV cache needs as many values as keys, got {len(self.values)} and {len(self.keys)}"
            )
        if self.rotations is not None and len(self.rotations) != len(self.keys):
            raise InvalidCache(f"{len(self.rotations)} rotations for {len(self.keys)} layers")
        rows = tuple(self.positions.shape)
        if self.positions.ndim != 2 or tuple(self.mask.shape) != rows or self.mask.dtype != torch.bool:
            raise InvalidCache(
                f"positions (batch, tokens) and a bool mask of the same shape expected, got {rows} and "
                f"{tuple(self.mask.shape)} {self.mask.dtype}"
            )
        for layer, (key, value) in enumerate(zip(self.keys, self.values, strict=True)):
            if key.ndim != 4 or key.shape != value.shape or (key.shape[0], key.shape[2]) != rows:
                raise InvalidCache(
                    f"layer {layer}: keys {tuple(key.shape)} and values {tuple(value.shape)}; expected both "
                    f"as (batch, n_kv_heads, tokens, head_dim) with (batch, tokens) = {rows}"
                )

    @property
    def n_layers(self) -> int:
        """How many layers there are."""
        return len(self.keys)

    @property
    def n_tokens(self) -> int:
        """Columns of the cache, padding included."""
        return self.positions.shape[1]

    @property
    def batch_size(self) -> int:
        """Rows of the cache."""
        return self.positions.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values."""
        return sum(t.numel() * t.element_size() for t in (*self.keys, *self.values))

    @property
    def stripped(self) -> bool:
        """Whether the keys are content keys, without rotation."""
        return self.rotations is None

    def strip(self) -> KVCache:
        """Content keys ``R(position)⁻¹ k`` and the values, both float32 (float64 stays). A stripped cache
        comes back.

        Raises:
            InvalidCache: if columns carry different rotations.
        """
        if self.rotations is None:
            return self
        if self.mixed:
            raise InvalidCache(
                "this cache crossed a length where the model changes its rotary frequencies, so its "
                "columns carry different ones and cannot be stripped: prefill the whole context in one "
                "call instead"
            )
        keys = tuple(
            strip_rotation(key, self.positions, rotation)
            for key, rotation in zip(self.keys, self.rotations, strict=True)
        )
        values = tuple(value if value.dtype == torch.float64 else value.float() for value in self.values)
        return replace(self, keys=keys, values=values, rotations=None)

    def rotate(self, rotations: Sequence[Rotation | None], dtype: torch.dtype | None = None) -> KVCache:
        """Content keys turned to their positions by `rotations` (one a layer); keys and values in `dtype`.

        Raises:
            InvalidCache: if the keys carry a rotation already, or the number of layers differs.
        """
        if self.rotations is not None:
            raise InvalidCache("the keys carry a rotation already; strip() them before rotate()")
        if len(rotations) != self.n_layers:
            raise InvalidCache(f"{len(rotations)} rotations for {self.n_layers} layers")
        keys = tuple(
            apply_rotation(key, self.positions, rotation)
            for key, rotation in zip(self.keys, rotations, strict=True)
        )
        return replace(self, keys=keys, rotations=tuple(rotations)).to(dtype=dtype)

    def slice_tokens(self, start: int, stop: int | None) -> KVCache:
        """Columns start:stop, with the positions they had."""
        return replace(
            self,
            keys=tuple(key[:, :, start:stop] for key in self.keys),
            values=tuple(value[:, :, start:stop] for value in self.values),
            positions=self.positions[:, start:stop],
            mask=self.mask[:, start:stop],
        )

    def first_layers(self, n_layers: int) -> KVCache:
        """The first `n_layers` layers, over all columns."""
        return replace(
            self,
            keys=self.keys[:n_layers],
            values=self.values[:n_layers],
            rotations=None if self.rotations is None else self.rotations[:n_layers],
        )

    def select_rows(self, index: Tensor | Sequence[int]) -> KVCache:
        """Rows `index` of the batch, in that order; a row may be taken more than once."""
        rows = torch.as_tensor(index, dtype=torch.long)
        return replace(
            self,
            keys=tuple(key[rows.to(key.device)] for key in self.keys),
            values=tuple(value[rows.to(value.device)] for value in self.values),
            positions=self.positions[rows.to(self.positions.device)],
            mask=self.mask[rows.to(self.mask.device)],
        )

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> KVCache:
        """The same cache elsewhere; `dtype` is for keys and values.

        Raises:
            InvalidCache: if a finite entry would become infinite in `dtype` (float16 ends at 65,504).
        """
        return replace(
            self,
            keys=tuple(_cast(key, device, dtype, f"keys of layer {i}") for i, key in enumerate(self.keys)),
            values=tuple(
                _cast(value, device, dtype, f"values of layer {i}") for i, value in enumerate(self.values)
            ),
            positions=self.positions.to(device=device),
            mask=self.mask.to(device=device),
        )


def _cast(tensor: Tensor, device: torch.device | str | None, dtype: torch.dtype | None, what: str) -> Tensor:
    # Of the dtypes models run in, float16 alone ends where keys and values can reach.
    if dtype == torch.float16 and tensor.dtype != dtype and tensor.numel():
        largest, limit = tensor.abs().amax().item(), torch.finfo(dtype).max
        if limit < largest < float("inf"):
            raise InvalidCache(
                f"{what}: {largest:.6g} does not fit {dtype} (largest {limit:.6g}); clamp them first, or run "
                "the model in bfloat16"
            )
    return tensor.to(device=device, dtype=dtype)


def from_transformers(
    cache: Any, positions: Tensor, mask: Tensor, rotations: tuple[Rotation | None, ...] | None
) -> KVCache:
    """Our cache, from the one a model's forward has filled.

    Args:
        cache: transformers' DynamicCache, built without a config so that windowed layers keep every token.
        positions: (batch, tokens) int64, the position ids of every column.
        mask: (batch, tokens), 1 or True at real tokens.
        rotations: what that forward rotated the keys by.

    Raises:
        InvalidCache: if a layer holds nothing of its own, or fewer tokens than there are positions.
    """
    for layer, entry in enumerate(cache.layers):
        if entry.keys is None or entry.keys.numel() == 0:
            raise InvalidCache(f"layer {layer} put no keys into the cache: it has no KV of its own")
    return KVCache(
        keys=tuple(entry.keys for entry in cache.layers),
        values=tuple(entry.values for entry in cache.layers),
        positions=positions,
        mask=mask.bool(),
        rotations=rotations,
    )


def to_transformers(kv: KVCache | None) -> DynamicCache:
    """A fresh transformers cache over the same storage; its growth makes new tensors, so `kv` never changes.

    It is built without a config: every layer is dynamic and keeps every token; the model masks windowed
    layers. None or a cache without tokens gives an empty one.
    """
    from transformers.cache_utils import DynamicCache, DynamicLayer

    cache = DynamicCache()
    if kv is None or kv.n_tokens == 0:
        return cache
    for key, value in zip(kv.keys, kv.values, strict=True):
        layer = DynamicLayer()
        layer.lazy_initialization(key, value)
        layer.keys, layer.values = key, value
        cache.layers.append(layer)
    return cache


def growing_cache(kv: KVCache, room: KVCache) -> DynamicCache:
    """A transformers cache over `kv` that writes what a model computes into the columns behind it in `room`.

    Nothing of `kv` is copied; whatever stood in those columns of `room` is lost.

    Args:
        kv: keys and values in the model's dtype, on the devices of its layers: the first columns of `room`.
        room: keys and values with columns to spare.
    """
    layers = zip(to_transformers(kv).layers, room.keys, room.values, strict=True)
    return _growing_class()([_growing_layer_class()(*layer) for layer in layers])


@functools.cache
def _growing_class() -> type[DynamicCache]:
    """Made once, when it is first needed, as `_first_layers_class`."""
    from transformers.cache_utils import DynamicCache

    class GrowingCache(DynamicCache):
        def __init__(self, layers: list[Any]) -> None:
            super().__init__()
            self.layers = layers

    return GrowingCache


@functools.cache
def _growing_layer_class() -> Any:
    from transformers.cache_utils import DynamicLayer

    class GrowingLayer(DynamicLayer):
        def __init__(self, held: Any, keys: Tensor, values: Tensor) -> None:
            super().__init__()
            self.lazy_initialization(held.keys, held.values)
            self.keys, self.values = held.keys, held.values
            self.room = (keys, values)

        def update(
            self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
        ) -> tuple[Tensor, Tensor]:
            start = self.keys.shape[2]
            stop = start + key_states.shape[2]
            for whole, new in zip(self.room, (key_states, value_states), strict=True):
                whole[:, :, start:stop] = new
            self.keys, self.values = (whole[:, :, :stop] for whole in self.room)
            return self.keys, self.values

    return GrowingLayer


def overwriting_cache(kv: KVCache, columns: Tensor, kept: Tensor) -> DynamicCache:
    """A transformers cache that stays as long as `kv`: what a model computes replaces columns of it.

    A layer's new keys and values are in place before its attention reads the whole of that layer. `kv` never
    changes. The model must be given the mask of who sees whom: transformers would take the cache for a past.

    Args:
        kv: keys and values in the model's dtype, on the devices of its layers.
        columns: (batch, n) int64, the column that each of the tokens to be run stands in.
        kept: (batch, n) bool, False at tokens that are run for nothing; they replace no column.
    """
    rows, tokens = kept.nonzero(as_tuple=True)
    return _overwriting_class()(to_transformers(kv).layers, (rows, columns[rows, tokens], tokens))


@functools.cache
def _overwriting_class() -> type[DynamicCache]:
    """Made once, when it is first needed, as `_first_layers_class`."""
    from transformers.cache_utils import DynamicCache

    class OverwritingCache(DynamicCache):
        def __init__(self, layers: list[Any], places: tuple[Tensor, Tensor, Tensor]) -> None:
            super().__init__()
            self.layers, self.places = layers, places

        def update(
            self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
        ) -> tuple[Tensor, Tensor]:
            layer = self.layers[layer_idx]
            rows, columns, tokens = (index.to(key_states.device) for index in self.places)
            whole: list[Tensor] = []
            for old, new in ((layer.keys, key_states), (layer.values, value_states)):
                copy = old.clone()
                copy[rows, :, columns] = new[rows, :, tokens].to(copy)
                whole.append(copy)
            layer.keys, layer.values = whole
            return whole[0], whole[1]

    return OverwritingCache


@contextmanager
def first_layers_cache(n_layers: int) -> Iterator[DynamicCache]:
    """An empty transformers cache that ends the forward it is given to once `n_layers` layers are in it.

    A forward within this context runs n_layers − 1 decoder layers and, of the next, what comes before its
    attention: its keys and values are cached, and nothing is computed that no entry of the cache depends on.
    A model of no more than `n_layers` − 1 layers runs to its end.
    """
    with suppress(_LayersFilled):
        yield _first_layers_class()(n_layers)


class _LayersFilled(Exception):
    """Leaves the forward that has filled the layers asked for. Not an error; never seen from outside."""


@functools.cache
def _first_layers_class() -> type[DynamicCache]:
    """Made once, when it is first needed: transformers' cache is imported late, as in all of this file."""
    from transformers.cache_utils import DynamicCache

    class FirstLayersCache(DynamicCache):
        def __init__(self, n_layers: int) -> None:
            super().__init__()
            self.n_wanted = n_layers

        def update(
            self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
        ) -> tuple[Tensor, Tensor]:
            entry = super().update(key_states, value_states, layer_idx, *args, **kwargs)
            if layer_idx + 1 >= self.n_wanted:
                raise _LayersFilled
            return entry

    return FirstLayersCache


def announcing_cache(on_layer: OnLayer) -> DynamicCache:
    """An empty transformers cache that tells `on_layer` of each layer as soon as it is cached.

    That is before the layer's attention, in the order of the layers. It is given the cache's own storage.
    """
    return _announcing_class()(on_layer)


@functools.cache
def _announcing_class() -> type[DynamicCache]:
    """Made once, when it is first needed, as `_first_layers_class`."""
    from transformers.cache_utils import DynamicCache

    class AnnouncingCache(DynamicCache):
        def __init__(self, on_layer: OnLayer) -> None:
            super().__init__()
            self.on_layer = on_layer

        def update(
            self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
        ) -> tuple[Tensor, Tensor]:
            keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
            self.on_layer(layer_idx, keys, values)
            return keys, values

    return AnnouncingCache


def cache_argument(model: PreTrainedModel) -> str:
    """What this model's forward calls its cache: "cache" (transformers 5.24) or "past_key_values" (5.17).

    Raises:
        InvalidCache: if it takes neither.
    """
    parameters = inspect.signature(model.forward).parameters
    for name in ("cache", "past_key_values"):
        if name in parameters:
            return name
    raise InvalidCache(f"{type(model).__name__}.forward takes no cache; is it a decoder with use_cache?")
