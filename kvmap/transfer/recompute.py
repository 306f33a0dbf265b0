"""Selective recompute: the target reads a few of the mapped tokens itself, over the cache that was mapped."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from kvmap.models.cache import KVCache
from kvmap.models.capture import forward, prefill
from kvmap.models.pair import LoadedModel
from kvmap.models.queries import attention_scores, attention_weights, observe_attention, visible_columns
from kvmap.models.recompute_cache import recompute_columns
from kvmap.transfer.columns import Columns

RECOMPUTE_RULES = ("attention", "map_error", "random")


@dataclass(frozen=True, eq=False)
class Handed:
    """What a rule looks at to tell which mapped tokens are worth recomputing.

    Attributes:
        target: the model that goes on.
        columns: the context before its held-back end.
        kv: the target's cache over these columns, mapped ones among them.
        native_layers: first layers of which no column was mapped.
        turned: whether mapped keys carry the target's rotation.
        seed: of the rule `random`.
    """

    target: LoadedModel
    columns: Columns
    kv: KVCache
    native_layers: int
    turned: bool
    seed: int

    @property
    def candidates(self) -> Tensor:
        """(batch, columns) bool, the mapped tokens."""
        return self.columns.mask & ~self.columns.is_own


Rule: TypeAlias = Callable[[Handed], Tensor]
"""(batch, columns) float scores, the highest first; those of mapped tokens alone count."""


def count_recomputed(n_mapped: int, share: float) -> int:
    """Tokens recomputed of `n_mapped` at a share r: r·n_mapped to the nearest, at least one where r > 0."""
    if share == 0 or n_mapped == 0:
        return 0
    return max(1, math.floor(share * n_mapped + 0.5))


def recompute(handed: Handed, share: float, rule: str) -> tuple[KVCache, tuple[int, ...]]:
    """Let the target recompute a share of each row's mapped tokens, those that a rule puts first.

    Tokens that score alike come in the order of their positions. Where all are recomputed the rule is not
    asked.

    Args:
        handed: the hand-off before its held-back tokens are run.
        share: r in [0, 1] of the mapped tokens of each row, see `count_recomputed`.
        rule: one of `RECOMPUTE_RULES`.

    Returns:
        The cache with the recomputed columns in place, and how many they are row by row.
    """
    candidates = handed.candidates
    counts = [count_recomputed(n, share) for n in candidates.sum(-1).tolist()]
    if not any(counts):
        return handed.kv, tuple(counts)
    chosen = candidates
    if share < 1:
        chosen = _highest(RULES[rule](handed), candidates, counts)
    context = handed.columns.context
    ids = context.ids[:, : context.n_columns]
    kv = recompute_columns(handed.target, ids, handed.kv, chosen, length=context.length)
    return kv, tuple(counts)


def _highest(scores: Tensor, candidates: Tensor, counts: list[int]) -> Tensor:
    """(batch, columns) bool, the `counts` best of each row's candidates."""
    scores = scores.to(candidates.device).masked_fill(~candidates, -math.inf)
    order = scores.argsort(dim=-1, descending=True, stable=True)
    wanted = torch.arange(order.shape[1]) < torch.tensor(counts).unsqueeze(1)
    return torch.zeros_like(candidates).scatter(1, order, wanted.to(candidates.device)) & candidates


def attention_received(handed: Handed) -> Tensor:
    """How much of the held-back tokens' attention each column gets, Σ over layers, heads and these tokens.

    The held-back tokens are run once on the cache as it was mapped, for nothing else.

    Returns:
        (batch, columns) float32; a row sums to less than layers · heads · held-back tokens.
    """
    context = handed.columns.context
    n_columns, tail = context.n_columns, slice(context.n_columns, None)
    real = context.mask[:, tail]
    layers = handed.target.geometry.layers
    held_back = torch.arange(n_columns, context.mask.shape[1], device=real.device)
    visible = {w: visible_columns(context.mask, held_back, w) for w in {layer.window for layer in layers}}
    received = torch.zeros(real.shape[0], n_columns, device=real.device)

    def on_layer(
        layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, softcap: float | None
    ) -> None:
        scores = attention_scores(query.float(), key.float(), scaling, softcap)
        seen = visible[layers[layer].window]
        weights = attention_weights(scores, seen.to(scores.device)).sum((1, 2))
        counted = weights.masked_fill(~real.to(scores.device).unsqueeze(2), 0.0).sum(1)
        received.add_(counted[:, :n_columns].to(received.device))

    with observe_attention(handed.target, on_layer), torch.no_grad():
        forward(handed.target, context.ids[:, tail], handed.kv, real)
    return received


def map_error(handed: Handed) -> Tensor:
    """How far the map is off in the first layer it writes, where the target's own is cheapest to have.

    That layer is m = `native_layers`. For m = 0 its keys and values depend on the token ids alone: embedding,
    norm and projection, no attention. For m > 0 the target runs m layers over the whole context once more.

    ``error_i = ‖k̂_i − k_i‖² / Σ_j ‖k_j − k̄‖² + ‖v̂_i − v_i‖² / Σ_j ‖v_j − v̄‖²``, all heads together, j over
    the mapped tokens of the row.

    Returns:
        (batch, columns) float32.
    """
    context, layer = handed.columns.context, handed.native_layers
    # columns that are pads in every row are not read: a windowed layer would count them
    first = int(context.first.min())
    read = slice(first, context.n_columns)
    own = prefill(
        handed.target, context.ids[:, read], context.mask[:, read], length=context.length, n_layers=layer + 1
    )
    if not handed.turned:
        own = own.strip()
    candidates = handed.candidates[:, read]
    error = torch.zeros(handed.kv.mask.shape, device=candidates.device)
    for mapped, true in (
        (handed.kv.keys[layer], own.keys[layer]),
        (handed.kv.values[layer], own.values[layer]),
    ):
        off, spread = (
            part.float().square().sum((1, 3)).to(error.device)
            for part in (mapped[:, :, read] - true, true - _mean(true, candidates))
        )
        total = spread.masked_fill(~candidates, 0.0).sum(-1, keepdim=True)
        error[:, read] += off / total.clamp(min=torch.finfo(total.dtype).tiny)
    return error


def _mean(x: Tensor, counted: Tensor) -> Tensor:
    """(batch, n_kv_heads, 1, head_dim) of x (batch, n_kv_heads, n, head_dim) over `counted` (batch, n)."""
    weight = counted[:, None, :, None].to(x.device, torch.float32)
    return (x.float() * weight).sum(2, keepdim=True) / weight.sum(2, keepdim=True).clamp(min=1.0)


def at_random(handed: Handed) -> Tensor:
    """The control: numbers that a row's own token ids and the seed determine, whatever batch it stands in."""
    context = handed.columns.context
    scores = torch.zeros(handed.kv.mask.shape)
    for row, (ids, mask) in enumerate(zip(context.ids.cpu(), context.mask.cpu(), strict=True)):
        content = repr((handed.seed, ids[mask].tolist())).encode()
        drawn = int.from_bytes(hashlib.sha256(content).digest()[:8], "big", signed=True)
        generator = torch.Generator().manual_seed(drawn)
        real = mask[: context.n_columns]
        scores[row, real] = torch.rand(int(real.sum()), generator=generator)
    return scores


RULES: Mapping[str, Rule] = {"attention": attention_received, "map_error": map_error, "random": at_random}
