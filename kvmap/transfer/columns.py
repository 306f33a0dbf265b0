"""Where the columns before the held-back ones come from: the target itself, wholly or in its first layers, or
the map.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from kvmap.fit.features import geometry_shape
from kvmap.fit.view import cache_view
from kvmap.mappers.base import Mapper
from kvmap.models.cache import KVCache
from kvmap.models.capture import forward, prefill
from kvmap.models.pair import LoadedModel
from kvmap.models.rope import Rotation, apply_rotation, same_rotations
from kvmap.transfer.context import Context, TransferError

Rotations = tuple[Rotation | None, ...]
LayerColumns = list[tuple[Tensor, Tensor]]
"""Keys and values of each layer, (batch, n_kv_heads, columns, head_dim) in the target's dtype."""


@dataclass(frozen=True, eq=False)
class Columns:
    """The columns of a context before its held-back ones, and whose they are.

    Attributes:
        context: what they are columns of.
        own: (batch,) leading real tokens of each row that are the target's own in every layer.
        mask: (batch, columns) bool, real tokens.
        positions: (batch, columns) int64.
        is_own: (batch, columns) bool, the `own` tokens.
        start: the first column that is real and not own in some row; the number of columns where none is.
    """

    context: Context
    own: Tensor
    mask: Tensor
    positions: Tensor
    is_own: Tensor
    start: int

    @cached_property
    def _rest(self) -> Tensor | None:
        """(batch, 1, columns from `start` on, 1) bool, pads and own tokens; None where there are none."""
        rest = (~self.mask | self.is_own)[:, None, self.start :, None]
        return rest if bool(rest.any()) else None

    def without_rest(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values (batch, n_kv_heads, columns from `start` on, head_dim), 0 at pads and own ones."""
        if self._rest is None:
            return keys, values
        rest = self._rest.to(keys.device)
        return keys.masked_fill(rest, 0.0), values.masked_fill(rest, 0.0)


def split_columns(context: Context, own: Tensor) -> Columns:
    """The columns before the held-back ones; the first `own` (batch,) real tokens of each row are apart."""
    mask, positions = context.mask[:, : context.n_columns], context.positions[:, : context.n_columns]
    is_own = mask & (positions < own.unsqueeze(1))
    some_wanted = (mask & ~is_own).any(0)
    start = int(some_wanted.int().argmax()) if bool(some_wanted.any()) else context.n_columns
    return Columns(context, own, mask, positions, is_own, start)


def own_counts(context: Context, native_head: int, prefix: KVCache | None) -> Tensor:
    """(batch,) leading tokens of each row that need no map, never more than lie before its held-back end."""
    wanted = torch.full_like(context.n_cut, native_head)
    if prefix is not None:
        wanted = wanted.maximum(prefix.mask.sum(-1))
    return wanted.minimum(context.n_cut)


def extend_head(
    target: LoadedModel, context: Context, prefix: KVCache | None, wanted: Tensor
) -> KVCache | None:
    """Let the target run each row's leading tokens, up to `wanted` (batch,), that the prefix does not hold.

    Rows may need different numbers: the block of new tokens is padded on its left.
    """
    held = torch.zeros_like(wanted) if prefix is None else prefix.mask.sum(-1)
    n_new = int((wanted - held).clamp(min=0).max())
    if n_new == 0:
        return prefix
    index = wanted.unsqueeze(1) - n_new + torch.arange(n_new, device=wanted.device)
    real = index >= held.unsqueeze(1)
    columns = (context.first.unsqueeze(1) + index).clamp(min=0)
    ids = context.ids.gather(1, columns)
    if prefix is None:
        return prefill(target, ids, real, length=context.length)
    prefix = _with_rotations(prefix, target.rotations(context.length))
    return forward(target, ids, prefix, real, length=context.length)[1]


def map_columns(
    source_kv: KVCache,
    mapper: Mapper,
    target: LoadedModel,
    columns: Columns,
    rope: str,
    rotations: Rotations,
) -> tuple[LayerColumns, int]:
    """Every target layer over the columns from `columns.start` on: the native ones, and the mapped above.

    Args:
        source_kv: all columns of the context.
        rope: the strategy; native layers are seen by the mapper as it sees the source, but keep in the cache
            the keys that the target itself would have cached.
        rotations: of each target layer, for a context of this length.

    Returns:
        Keys and values of each layer, 0 at pads and own tokens, and how many mapped numbers were clamped to
        the target's dtype. No layers where no column is wanted.

    Raises:
        TransferError: mapped keys or values that are not finite, by layer.
    """
    start, stop = columns.start, columns.context.n_columns
    if start == stop:
        return [], 0
    first = _first_layers(target, columns, mapper.native_layers)
    view = cache_view(source_kv.slice_tokens(start, stop), rope).to(device=mapper.device)
    turned = rotations if rope == "strip" else (None,) * len(rotations)
    features: tuple[tuple[Tensor, ...], ...] = (view.keys, view.values)
    made: LayerColumns = []
    if first is not None:
        native = cache_view(first, rope).to(device=mapper.device)
        features += (native.keys, native.values)
        made = [columns.without_rest(*layer) for layer in zip(first.keys, first.values, strict=True)]
    mapped, n_clamped = _map_layers(features, mapper, target, columns, turned)
    return made + mapped, n_clamped


def _first_layers(target: LoadedModel, columns: Columns, n_layers: int) -> KVCache | None:
    """The target's first layers over the columns from `columns.start` on, as it caches them itself.

    They attend to everything before, so the target reads every real column once more in these layers, those
    of a head or prefix included.
    """
    if n_layers == 0:
        return None
    context = columns.context
    # columns that are pads in every row are not read: a windowed layer would count them
    first = int(context.first.min())
    read = slice(first, context.n_columns)
    kv = prefill(
        target, context.ids[:, read], context.mask[:, read], length=context.length, n_layers=n_layers
    )
    return kv.slice_tokens(columns.start - first, None)


def _map_layers(
    features: tuple[tuple[Tensor, ...], ...],
    mapper: Mapper,
    target: LoadedModel,
    columns: Columns,
    rotations: Rotations,
) -> tuple[LayerColumns, int]:
    """Mapped keys and values of the layers above the native ones, and how many numbers were clamped.

    Args:
        features: what `Mapper.map_layer` reads: keys and values of the source's layers, and of the native
            ones where the mapper has any.
        rotations: what each layer's mapped keys are turned by; None leaves them as they are.
    """
    layers = range(mapper.native_layers, len(mapper.target_shape))
    positions = columns.positions[:, columns.start :]
    mapped, checks = [], []
    for layer in layers:
        key, value = (part.to(target.device) for part in mapper.map_layer(layer, *features))
        key = apply_rotation(key, positions, rotations[layer])
        key, value = columns.without_rest(key, value)
        cast_key, key_check = _cast(key, target.dtype)
        cast_value, value_check = _cast(value, target.dtype)
        mapped.append((cast_key, cast_value))
        checks.append(torch.stack([key_check, value_check]))
    # one read of all checks: on a GPU each would otherwise wait for its layer
    counts = torch.stack(checks).tolist()
    for layer, (key_counts, value_counts) in zip(layers, counts, strict=True):
        for kind, (n_bad, _) in (("keys", key_counts), ("values", value_counts)):
            if n_bad:
                raise TransferError(
                    f"{n_bad} mapped {kind} of target layer {layer} are NaN or infinite: the source cache or "
                    f"the mapper is damaged; capture the source in bfloat16 or float32, or fit again"
                )
    return mapped, sum(part[1] for layer_counts in counts for part in layer_counts)


def _cast(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """To the target's dtype, clamped to its finite range; and int64 (numbers not finite, numbers clamped)."""
    largest = torch.finfo(dtype).max
    n_bad = (~torch.isfinite(x)).sum()
    if largest >= torch.finfo(x.dtype).max:
        return x.to(dtype), torch.stack([n_bad, torch.zeros_like(n_bad)])
    n_clamped = (x.abs() > largest).sum() - torch.isinf(x).sum()
    return x.clamp(-largest, largest).to(dtype), torch.stack([n_bad, n_clamped])


def join_columns(
    target: LoadedModel, columns: Columns, head: KVCache | None, made: LayerColumns, rotations: Rotations
) -> KVCache:
    """The target's cache over the columns before the held-back ones: own columns first, those made after.

    Args:
        head: a cache that begins with each row's own tokens; None where there are none.
        made: see `map_columns`.
        rotations: of each target layer, for a context of this length.
    """
    own = [] if head is None else _own_columns(_with_rotations(head, rotations), columns.own)
    keys: list[Tensor] = []
    values: list[Tensor] = []
    for layer, (n_heads, width) in enumerate(geometry_shape(target.geometry)):
        device = target.layer_devices[layer]
        for kind, parts in enumerate((keys, values)):
            whole = torch.zeros((*columns.mask.shape, n_heads, width), dtype=target.dtype, device=device)
            if made:
                whole[:, columns.start :] = made[layer][kind].transpose(1, 2).to(device)
            if own:
                whole[columns.is_own.to(device)] = own[layer][kind].to(whole)
            parts.append(whole.transpose(1, 2))
    return KVCache(tuple(keys), tuple(values), columns.positions, columns.mask, rotations)


def _own_columns(head: KVCache, own: Tensor) -> LayerColumns:
    """The first `own` (batch,) real tokens of the rows, joined: per layer (Σ own, n_kv_heads, head_dim)."""
    taken = head.mask & (head.mask.cumsum(-1) <= own.unsqueeze(1))
    keys, values = (
        [layer.transpose(1, 2)[taken.to(layer.device)] for layer in layers]
        for layers in (head.keys, head.values)
    )
    return list(zip(keys, values, strict=True))


def _with_rotations(kv: KVCache, rotations: Rotations) -> KVCache:
    """The same cache under the frequencies of the whole context: a short prefill may have used others."""
    if kv.rotations is not None and same_rotations(kv.rotations, rotations):
        return kv
    return kv.strip().rotate(rotations, dtype=kv.keys[0].dtype)
