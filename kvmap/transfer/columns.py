"""The columns of a context before its held-back ones: whose they are, and the cache they are put in."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from kvmap.fit.features import geometry_shape
from kvmap.models.cache import KVCache
from kvmap.models.capture import forward, prefill
from kvmap.models.pair import LoadedModel
from kvmap.models.rope import Rotation, same_rotations
from kvmap.transfer.context import Context

Rotations = tuple[Rotation | None, ...]


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
    def keep(self) -> Tensor | None:
        """(batch, columns from `start` on) bool, False at pads and own tokens; None where there are none."""
        keep = (self.mask & ~self.is_own)[:, self.start :]
        return None if bool(keep.all()) else keep


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


def first_layers(target: LoadedModel, columns: Columns, n_layers: int) -> KVCache | None:
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


def unfilled_cache(target: LoadedModel, columns: Columns, rotations: Rotations) -> KVCache:
    """The target's cache over all columns of the context, to be filled before anyone sees it.

    Each layer is one tensor in the order (batch, column, head, channel), 0 before `columns.start`; what
    stands in the columns from there on is arbitrary.

    Args:
        rotations: of each target layer, for a context of this length.
    """
    keys: list[Tensor] = []
    values: list[Tensor] = []
    for (n_heads, width), device in zip(geometry_shape(target.geometry), target.layer_devices, strict=True):
        for parts in (keys, values):
            whole = torch.empty(
                (*columns.context.mask.shape, n_heads, width), dtype=target.dtype, device=device
            )
            whole[:, : columns.start] = 0
            parts.append(whole.transpose(1, 2))
    context = columns.context
    return KVCache(tuple(keys), tuple(values), context.positions, context.mask, rotations)


def put_own_columns(kv: KVCache, columns: Columns, head: KVCache) -> None:
    """Write each row's own tokens, which `head` begins with, into the cache that is being filled."""
    assert kv.rotations is not None
    head = _with_rotations(head, kv.rotations)
    taken = head.mask & (head.mask.cumsum(-1) <= columns.own.unsqueeze(1))
    for whole, held in zip((*kv.keys, *kv.values), (*head.keys, *head.values), strict=True):
        own = held.transpose(1, 2)[taken.to(held.device)]
        whole.transpose(1, 2)[columns.is_own.to(whole.device)] = own.to(whole)


def _with_rotations(kv: KVCache, rotations: Rotations) -> KVCache:
    """The same cache under the frequencies of the whole context: a short prefill may have used others."""
    if kv.rotations is not None and same_rotations(kv.rotations, rotations):
        return kv
    return kv.strip().rotate(rotations, dtype=kv.keys[0].dtype)
