"""Running chosen columns of a cache through the model again, in place of what the cache holds for them."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from kvmap.models.cache import InvalidCache, KVCache, cache_argument, from_transformers, overwriting_cache
from kvmap.models.geometry import UnsupportedModel
from kvmap.models.loaded import LoadedModel

MASKED_ATTENTIONS = ("eager", "sdpa")
"""transformers' attentions that take a mask of who sees whom."""
BLOCK_TOKENS = 2048
"""Tokens run at once: their mask over 65,536 columns takes 512 MiB in float32."""


@torch.no_grad()
def recompute_columns(
    loaded: LoadedModel,
    input_ids: Tensor,
    kv: KVCache,
    chosen: Tensor,
    *,
    length: int | None = None,
    block_tokens: int = BLOCK_TOKENS,
) -> KVCache:
    """Run some columns' tokens through every layer again, over the whole cache as it is in that layer.

    The hidden states of the chosen tokens start at the embedding. In each layer their new keys and values
    take the place of those in the cache, and then each of them attends to all real columns up to its own:
    to new keys where those are chosen too, to the cache's elsewhere. With all columns chosen that is a
    prefill. The price is that of as many tokens of a prefill.

    Causal attention lets tokens be run block by block in the order of their positions, which is how the mask
    stays small; the result is the same.

    Args:
        loaded: the model.
        input_ids: (batch, columns) int64, the token of every column.
        kv: keys rotated by this model's rotations for a context of `length`; it stays as it is.
        chosen: (batch, columns) bool, real columns only; rows may differ in number.
        length: tokens of the longest whole context, as for `kvmap.models.capture.prefill`. None: the cache
            holds the whole contexts.
        block_tokens: tokens of a row run at once.

    Returns:
        The cache, its other columns untouched; `exact`, `owner` and `mixed` are as they were.

    Raises:
        UnsupportedModel: an attention implementation that takes no mask.
        InvalidCache: columns that are chosen and are pads, or shapes that do not fit the cache.
    """
    _check(loaded, input_ids, kv, chosen)
    chosen = chosen.to(loaded.device)
    n_chosen = chosen.sum(-1)
    most = int(n_chosen.max())
    if most == 0:
        return kv
    # of each row first its chosen columns, in order, then others that only fill the batch
    order = (~chosen).int().argsort(dim=-1, stable=True)[:, :most]
    for start in range(0, most, block_tokens):
        columns = order[:, start : start + block_tokens]
        kept = torch.arange(start, start + columns.shape[1], device=chosen.device) < n_chosen.unsqueeze(1)
        kv = _run(loaded, input_ids.to(loaded.device), kv, columns, kept, length)
    return kv


def _run(
    loaded: LoadedModel, input_ids: Tensor, kv: KVCache, columns: Tensor, kept: Tensor, length: int | None
) -> KVCache:
    """One block: `columns` (batch, n) are run, and replace the cache's where `kept` (batch, n)."""
    ids, positions = input_ids.gather(1, columns), kv.positions.gather(1, columns)
    last = (int(kv.positions.max()) + 1 if length is None else length) - 1
    if int(positions.max()) < last and _by_length(loaded):
        # a token at the end of the context, for nothing: it makes the model choose that length's frequencies
        ids, columns = (torch.cat((part, part[:, -1:]), 1) for part in (ids, columns))
        positions = torch.cat((positions, torch.full_like(positions[:, -1:], last)), 1)
        kept = torch.cat((kept, torch.zeros_like(kept[:, -1:])), 1)
    cache = overwriting_cache(kv, columns, kept)
    loaded.body(
        input_ids=ids,
        attention_mask=_masks(loaded, kv, positions),
        position_ids=positions,
        use_cache=True,
        **{cache_argument(loaded.body): cache},
    )
    new = from_transformers(cache, kv.positions, kv.mask, kv.rotations)
    return replace(new, exact=kv.exact, owner=kv.owner, mixed=kv.mixed)


def _by_length(loaded: LoadedModel) -> bool:
    """Whether the model chooses its frequencies by the largest position it is called with."""
    return any(layer.rope_type in ("dynamic", "longrope") for layer in loaded.geometry.layers)


def _masks(loaded: LoadedModel, kv: KVCache, positions: Tensor) -> Tensor | dict[str, Tensor]:
    """Who sees whom in every layer: one mask, or one for each type where windowed layers see less.

    Families with windows in some layers take a mask by `layer_types`; in the others all layers are alike.
    """
    masks = {
        window: _additive_mask(kv, positions, loaded.dtype, window)
        for window in {layer.window for layer in loaded.geometry.layers}
    }
    if len(masks) == 1:
        return next(iter(masks.values()))
    (window,) = loaded.geometry.windows
    return {"full_attention": masks[None], "sliding_attention": masks[window]}


def _additive_mask(kv: KVCache, positions: Tensor, dtype: torch.dtype, window: int | None) -> Tensor:
    """(batch, 1, n, columns): 0 where a query at `positions` (batch, n) sees a column, else the least."""
    own, columns = positions.unsqueeze(2), kv.positions.unsqueeze(1)
    seen = kv.mask.unsqueeze(1) & (columns <= own)
    if window is not None:
        seen &= columns > own - window
    mask = torch.zeros(seen.shape, dtype=dtype, device=positions.device)
    return mask.masked_fill(~seen, torch.finfo(dtype).min).unsqueeze(1)


def _check(loaded: LoadedModel, input_ids: Tensor, kv: KVCache, chosen: Tensor) -> None:
    if input_ids.shape != kv.mask.shape or chosen.shape != kv.mask.shape or chosen.dtype != torch.bool:
        raise InvalidCache(
            f"input ids and bool columns to recompute of shape {tuple(kv.mask.shape)} expected, as the cache "
            f"has; got {tuple(input_ids.shape)} and {tuple(chosen.shape)} {chosen.dtype}"
        )
    if bool((chosen.to(kv.mask.device) & ~kv.mask).any()):
        raise InvalidCache("columns to recompute are pads: choose real ones")
    wanted = [(layer.n_kv_heads, layer.head_dim) for layer in loaded.geometry.layers]
    if kv.stripped or [(key.shape[1], key.shape[3]) for key in kv.keys] != wanted:
        raise InvalidCache(f"the cache holds stripped keys, or not the layers of {loaded.identity.name}")
    attention = loaded.text_config._attn_implementation or "eager"
    if not attention.endswith(MASKED_ATTENTIONS):
        raise UnsupportedModel(
            f"{loaded.identity.name} runs {attention} attention, which takes no mask of who sees whom, and "
            f"recomputing chosen tokens needs one: load it with attn_implementation=sdpa or eager"
        )
