"""Running a model: token ids to KV cache, and on from a KV cache to logits."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, TypeGuard

import torch
from torch import Tensor

from kvmap.errors import KvmapError
from kvmap.models.alignment import AlignmentError, take_columns
from kvmap.models.cache import (
    InvalidCache,
    KVCache,
    OnLayer,
    announcing_cache,
    cache_argument,
    first_layers_cache,
    from_transformers,
    growing_cache,
    to_transformers,
)
from kvmap.models.geometry import UnsupportedModel
from kvmap.models.loaded import LoadedModel
from kvmap.models.rope import same_rotations


class CacheMismatch(KvmapError):
    """A cache of another model."""


def positions_from_mask(mask: Tensor) -> Tensor:
    """Positions (batch, tokens) of a mask (batch, tokens): real tokens count from 0, padding before them is
    at 0.
    """
    return (mask.long().cumsum(-1) - 1).clamp(min=0)


@torch.no_grad()
def prefill(
    loaded: LoadedModel,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    *,
    length: int | None = None,
    n_layers: int | None = None,
    on_layer: OnLayer | None = None,
) -> KVCache:
    """Read contexts and keep every layer's keys and values. Runs the decoder body only: no logits are made.

    With `n_layers` = m the model stops once its layer m − 1 has cached its keys and values: m − 1 layers and
    one projection are run, and what comes out is the first m layers of the whole prefill, bit for bit.

    Args:
        loaded: the model.
        input_ids: (batch, tokens) int64, padded on the left where rows differ in length.
        attention_mask: (batch, tokens), 1 or True at real tokens; None: all are.
        length: tokens of the longest whole context whose beginnings these are: dynamic and longrope models
            then use the frequencies of a context of that length. None: these are the whole contexts.
        n_layers: how many layers, counted from the first; None: all, each of them run to its end.
        on_layer: called with the number, keys and values of each layer as soon as these are cached, while the
            model has yet to run the rest; `loaded.current_rotations()` then says what the keys carry. It must
            change neither. Not beside `n_layers` or `length`.

    Returns:
        The cache, in the model's dtype; keys are rotated, and `rotations` holds what this very prefill used.
        Of `n_layers` layers it is no cache that the model could continue from.

    A source with another tokenizer (`LoadedModel.alignment`) is given the target's ids, reads their text, and
    its cache comes out over the target's columns; see `kvmap.models.alignment`.

    Raises:
        UnsupportedModel: if rows have padding between their tokens, and a windowed layer, among those asked
            for or not, would count it.
        InvalidCache: if there are no tokens, or the model has no such number of layers; or if `on_layer`
            stands beside what it cannot serve.
        AlignmentError: another tokenizer's ids that cannot be aligned.
    """
    _check_layers(loaded, n_layers)
    if on_layer is not None and (n_layers is not None or length is not None):
        raise InvalidCache(
            "on_layer tells of a whole prefill of whole contexts: leave n_layers and length out"
        )
    input_ids, mask = _inputs(loaded, input_ids, attention_mask)
    if input_ids.shape[1] == 0:
        raise InvalidCache("prefill needs at least one token a row")
    if loaded.alignment is not None:
        if (length, n_layers, on_layer) != (None, None, None):
            raise AlignmentError(
                "a source with another tokenizer reads whole contexts through all its layers at once: leave "
                "length, n_layers and on_layer out"
            )
        aligned = loaded.alignment.align(input_ids, mask)
        own = prefill(replace(loaded, alignment=None), aligned.ids, aligned.mask)
        return take_columns(own, aligned, positions_from_mask(mask), mask)
    _check_windows(loaded, mask)
    positions = positions_from_mask(mask)
    n_columns = input_ids.shape[1]
    if _beyond(length, positions, loaded):
        input_ids, mask, positions = _with_last_position(input_ids, mask, positions, length)
    with _empty_cache(n_layers, on_layer) as cache:
        loaded.body(
            input_ids=input_ids,
            attention_mask=mask.long(),
            position_ids=positions,
            use_cache=True,
            **{cache_argument(loaded.body): cache},
        )
    rotations = loaded.current_rotations()[:n_layers]
    kv = from_transformers(cache, positions, mask, rotations).slice_tokens(0, n_columns)
    return replace(kv, owner=loaded.identity)


@torch.no_grad()
def forward(
    loaded: LoadedModel,
    input_ids: Tensor,
    kv: KVCache | None,
    attention_mask: Tensor | None = None,
    *,
    length: int | None = None,
    room: KVCache | None = None,
) -> tuple[Tensor, KVCache]:
    """Run new tokens after a cache. The cache given is left as it was.

    Unlike `generate`, which re-reads a prompt whose cache is as long as itself or crosses a longrope
    threshold, this never computes a cached column again.

    Args:
        loaded: the model.
        input_ids: (batch, n) int64, the tokens that follow the cache.
        kv: what came before, keys rotated; None or without tokens: nothing.
        attention_mask: (batch, n) of the new tokens; None: all are real.
        length: as for `prefill`, where cache and new tokens are the beginnings of longer contexts.
        room: a cache of which `kv` is the first columns, over the same storage, with as many more as there
            are new tokens: these are overwritten, and nothing is copied. None: all columns are copied. Not
            beside `length`.

    Returns:
        Logits (batch, n, vocab_size) float32 of every new token, and the cache of old and new columns.
        Where the model has changed its rotary frequencies since the first columns, that cache is `mixed`.

    Raises:
        CacheMismatch: if `kv` is an exact cache of another model.
        AlignmentError: a source that was given the ids of another tokenizer: its logits are of other tokens.
        InvalidCache: if `kv` is stripped or its batch or layers do not fit.
        UnsupportedModel: if a row has padding between its tokens that a windowed layer would count.
    """
    if loaded.alignment is not None:
        raise AlignmentError(
            f"{loaded.identity.name} reads the target's text with its own tokenizer: it can be read for its "
            "cache, but cannot go on from it or score the target's tokens; leave the arm source out, or take "
            "two models of one tokenizer"
        )
    input_ids, new_mask = _inputs(loaded, input_ids, attention_mask)
    if kv is not None:
        _check_continues(loaded, input_ids, kv)
        kv = _placed(loaded, kv)
    if input_ids.shape[1] == 0:
        if kv is None:
            raise InvalidCache("forward needs a token or a cache")
        return torch.zeros(input_ids.shape[0], 0, loaded.geometry.vocab_size, device=loaded.device), kv
    past = torch.zeros_like(new_mask[:, :0]) if kv is None else kv.mask
    mask = torch.cat((past, new_mask), dim=1)
    _check_windows(loaded, mask)
    new_positions = positions_from_mask(mask)[:, past.shape[1] :]
    n_new, n_columns = input_ids.shape[1], mask.shape[1]
    if _beyond(length, new_positions, loaded):
        input_ids, mask, new_positions = _with_last_position(input_ids, mask, new_positions, length)
    cache = to_transformers(kv) if kv is None or room is None else growing_cache(kv, room)
    output = loaded.model(
        input_ids=input_ids,
        attention_mask=mask.long(),
        position_ids=new_positions,
        use_cache=True,
        **{cache_argument(loaded.model): cache},
    )
    positions = new_positions if kv is None else torch.cat((kv.positions, new_positions), dim=1)
    rotations = loaded.current_rotations()
    grown = from_transformers(cache, positions, mask, rotations).slice_tokens(0, n_columns)
    grown = replace(grown, owner=loaded.identity)
    if kv is not None and kv.n_tokens:
        same = kv.rotations is not None and same_rotations(kv.rotations, rotations)
        grown = replace(grown, exact=kv.exact, owner=kv.owner, mixed=kv.mixed or not same)
    return output.logits[:, :n_new].float(), grown


def _empty_cache(n_layers: int | None, on_layer: OnLayer | None) -> AbstractContextManager[Any]:
    if n_layers is not None:
        return first_layers_cache(n_layers)
    return nullcontext(to_transformers(None) if on_layer is None else announcing_cache(on_layer))


def _check_layers(loaded: LoadedModel, n_layers: int | None) -> None:
    if n_layers is not None and not 1 <= n_layers <= loaded.geometry.n_layers:
        raise InvalidCache(
            f"n_layers={n_layers}: {loaded.identity.name} has {loaded.geometry.n_layers} layers; expected "
            f"1 to {loaded.geometry.n_layers}, or None for all"
        )


def _beyond(length: int | None, positions: Tensor, loaded: LoadedModel) -> TypeGuard[int]:
    """Whether a context of `length` tokens goes beyond `positions`, and the model chooses its frequencies by
    the largest position it is called with.
    """
    return (
        length is not None
        and any(layer.rope_type in ("dynamic", "longrope") for layer in loaded.geometry.layers)
        and length - 1 > int(positions.max())
    )


def _with_last_position(
    input_ids: Tensor, mask: Tensor, positions: Tensor, length: int
) -> tuple[Tensor, Tensor, Tensor]:
    """One more column at the last position of a context of `length` tokens. No earlier column attends to it,
    but its position makes the model choose the frequencies of that length.
    """
    return (
        torch.cat((input_ids, input_ids[:, -1:]), dim=1),
        torch.cat((mask, torch.ones_like(mask[:, -1:])), dim=1),
        torch.cat((positions, torch.full_like(positions[:, -1:], length - 1)), dim=1),
    )


def _inputs(loaded: LoadedModel, input_ids: Tensor, attention_mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Ids and a bool mask of the same shape, both where the model takes its inputs."""
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    if input_ids.ndim != 2 or mask.shape != input_ids.shape:
        raise InvalidCache(
            f"input ids (batch, tokens) and a mask of the same shape expected, got {tuple(input_ids.shape)} "
            f"and {tuple(mask.shape)}"
        )
    return input_ids.to(loaded.device), mask.to(loaded.device).bool()


def _check_windows(loaded: LoadedModel, mask: Tensor) -> None:
    """Refuse rows whose windows would be counted wrongly.

    transformers counts a window in columns. That is right where a row's real tokens lie side by side, however
    long it is: padding before and after them is no query's past. Padding between them takes the place of
    tokens that the row alone would see, as soon as the row is longer than the window.
    """
    windows = loaded.geometry.windows
    if not windows:
        return
    n_columns = mask.shape[1]
    first, last = mask.int().argmax(-1), n_columns - 1 - mask.int().flip(-1).argmax(-1)
    spans, lengths = last - first + 1, mask.sum(-1)
    wrong = (spans > lengths) & (spans > windows[0])
    if bool(wrong.any()):
        row = int(wrong.int().argmax())
        raise UnsupportedModel(
            f"{loaded.identity.name} has layers that see a window of {windows[0]} tokens, and row {row} has "
            f"{int(spans[row] - lengths[row])} columns of padding between its {int(lengths[row])} tokens, "
            "which would count towards it: run rows of unequal continuations one at a time, or keep them "
            f"within {windows[0]} columns"
        )


def _placed(loaded: LoadedModel, kv: KVCache) -> KVCache:
    """The cache in the model's dtype, each layer on that layer's device."""
    kv = kv.to(dtype=loaded.dtype)
    devices = loaded.layer_devices
    return replace(
        kv,
        keys=tuple(key.to(device) for key, device in zip(kv.keys, devices, strict=True)),
        values=tuple(value.to(device) for value, device in zip(kv.values, devices, strict=True)),
        positions=kv.positions.to(loaded.device),
        mask=kv.mask.to(loaded.device),
    )


def _check_continues(loaded: LoadedModel, input_ids: Tensor, kv: KVCache) -> None:
    if kv.exact and kv.owner is not None:
        mismatches = kv.owner.mismatches(loaded.identity)
        if mismatches:
            raise CacheMismatch(
                f"the cache of {kv.owner.name} cannot continue in {loaded.identity.name}; map it first. "
                + "; ".join(mismatches)
            )
    if kv.stripped:
        raise InvalidCache(
            "the cache holds stripped keys: rotate() them by the model's rotations before forward"
        )
    if kv.batch_size != input_ids.shape[0]:
        raise InvalidCache(
            f"a cache of {kv.batch_size} rows cannot continue with {input_ids.shape[0]} rows of tokens"
        )
    wanted = [(layer.n_kv_heads, layer.head_dim) for layer in loaded.geometry.layers]
    got = [(key.shape[1], key.shape[3]) for key in kv.keys]
    if got != wanted:
        layer = next((i for i, pair in enumerate(zip(got, wanted, strict=False)) if pair[0] != pair[1]), None)
        where = (
            f"{len(got)} layers, not {len(wanted)}"
            if layer is None
            else f"layer {layer}: {got[layer]}, not {wanted[layer]}"
        )
        raise InvalidCache(f"the cache does not fit {loaded.identity.name} (KV heads, head_dim): {where}")
