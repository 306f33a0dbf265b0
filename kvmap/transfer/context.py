"""The context of a hand-off, and what must agree with it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvmap.errors import KvmapError
from kvmap.fit.features import CacheShape, cache_shape, geometry_shape
from kvmap.mappers.base import Mapper, MapperMismatch, check_shape
from kvmap.models.cache import KVCache
from kvmap.models.capture import positions_from_mask
from kvmap.models.identity import ModelIdentity
from kvmap.models.pair import LoadedModel


class TransferError(KvmapError):
    """A hand-off that cannot be made: caches, ids and masks that disagree, or a map that is not finite."""


@dataclass(frozen=True, eq=False)
class Context:
    """Ids (batch, tokens) on the target's device, the mask, and where rows are cut for the held-back end."""

    ids: Tensor
    mask: Tensor
    positions: Tensor
    n_columns: int
    """columns before the held-back ones"""
    n_cut: Tensor
    """(batch,) real tokens among them"""

    @property
    def length(self) -> int:
        """Tokens of the longest row, which is what length-dependent frequencies go by."""
        return int(self.mask.sum(-1).max())

    @property
    def first(self) -> Tensor:
        """(batch,) column of each row's first real token."""
        return self.mask.shape[1] - self.mask.sum(-1)


def read_context(
    target: LoadedModel, input_ids: Tensor, attention_mask: Tensor | None, hold_back: int
) -> Context:
    if input_ids.ndim != 2 or input_ids.shape[1] == 0:
        raise TransferError(
            f"input_ids have shape {tuple(input_ids.shape)}: expected (batch, tokens), tokens >= 1"
        )
    ids = input_ids.to(target.device)
    mask = (
        torch.ones_like(ids, dtype=torch.bool)
        if attention_mask is None
        else attention_mask.to(ids.device).bool()
    )
    if mask.shape != ids.shape:
        raise TransferError(f"attention_mask has shape {tuple(mask.shape)}; input_ids {tuple(ids.shape)}")
    if not bool(mask[:, -1].all()) or bool((mask[:, :-1] & ~mask[:, 1:]).any()):
        raise TransferError(
            "attention_mask: expected left padding, zeros and then at least one 1 in each row"
        )
    n_columns = max(ids.shape[1] - hold_back, 0)
    return Context(ids, mask, positions_from_mask(mask), n_columns, mask[:, :n_columns].sum(-1))


def check_columns(what: str, kv: KVCache, context: Context) -> None:
    """Refuse a cache that does not hold the context's rows, columns and pads."""
    if kv.mask.shape != context.mask.shape:
        raise TransferError(
            f"the {what} cache holds {kv.batch_size} rows of {kv.n_tokens} columns; input_ids "
            f"are {tuple(context.ids.shape)}: prefill these very ids"
        )
    if not torch.equal(kv.mask.cpu(), context.mask.cpu()):
        raise TransferError(
            f"the {what} cache has pads elsewhere than attention_mask: prefill it with this mask"
        )


def check_own_cache(cache: KVCache, model: LoadedModel, context: Context) -> None:
    check_columns("given", cache, context)
    if cache.owner is not None and (mismatches := cache.owner.mismatches(model.identity)):
        raise TransferError("the given cache is another model's: " + "; ".join(mismatches))
    if cache.stripped or not cache.exact:
        raise TransferError("the given cache was stripped or mapped: give the model's own, as captured")


def check_parts(source_kv: KVCache, mapper: Mapper, target: LoadedModel, context: Context, rope: str) -> None:
    check_columns("source", source_kv, context)
    if rope == "coupled" and source_kv.stripped:
        raise TransferError(
            "rope='coupled' maps rotated keys; the source cache was stripped: give it as captured"
        )
    check_mapper(mapper, source_kv.owner, cache_shape(source_kv), target, rope)


def check_mapper(
    mapper: Mapper,
    source: ModelIdentity | None,
    source_shape: CacheShape,
    target: LoadedModel,
    rope: str,
) -> None:
    """Refuse a mapper of other models, shapes or strategy; the source's identity may be unknown."""
    mapper.check_models(source, target.identity, rope)
    check_shape("source cache", source_shape, mapper.source_shape)
    check_shape("target model", geometry_shape(target.geometry), mapper.target_shape)
    if not 0 <= mapper.native_layers <= len(mapper.target_shape):
        raise MapperMismatch(
            f"the mapper's native_layers={mapper.native_layers}: the target has {len(mapper.target_shape)} "
            f"layers; expected 0 to {len(mapper.target_shape)}"
        )


def prepare_prefix(prefix: KVCache | None, target: LoadedModel, context: Context) -> KVCache | None:
    """The given prefix, one row for each context, checked as far as a cache without ids can be."""
    if prefix is None or prefix.n_tokens == 0:
        return None
    n_rows = context.ids.shape[0]
    if prefix.batch_size == 1 and n_rows > 1:
        prefix = prefix.select_rows([0] * n_rows)
    if prefix.batch_size != n_rows:
        raise TransferError(
            f"native_prefix has {prefix.batch_size} rows; the context has {n_rows}: give 1 or {n_rows}"
        )
    check_shape("native_prefix", cache_shape(prefix), geometry_shape(target.geometry))
    if prefix.owner is not None and (mismatches := prefix.owner.mismatches(target.identity)):
        raise TransferError("native_prefix is another model's cache: " + "; ".join(mismatches))
    counted = positions_from_mask(prefix.mask)
    if bool((prefix.positions != counted)[prefix.mask].any()):
        raise TransferError(
            "native_prefix does not start at position 0: it must hold the first tokens of each row"
        )
    return prefix.to(device=target.device)
