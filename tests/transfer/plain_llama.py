"""A Llama spelled out over its weights, token by token: what selective recompute has to come to."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

Columns = list[list[tuple[Tensor, Tensor]]]
"""Of each layer and position: its key and its value, (n_kv_heads, head_dim)."""


def recomputed(model: Any, ids: list[int], cache: Columns, chosen: list[int]) -> Columns:
    """The cache of one context after its `chosen` positions went through all layers over it."""
    cache = [list(layer) for layer in cache]
    hidden = {p: model.model.embed_tokens.weight[ids[p]] for p in chosen}
    for number, layer in enumerate(model.model.layers):
        for p in chosen:
            cache[number][p] = keys_and_values(model, layer, hidden[p], p)
        hidden = {p: through(model, layer, hidden[p], p, cache[number]) for p in chosen}
    return cache


def logits_after(model: Any, ids: list[int], cache: Columns, start: int) -> Tensor:
    """Logits of the last of the tokens from `start` on, run over a cache of those before."""
    grown = [[*layer[:start], *([None] * (len(ids) - start))] for layer in cache]
    tail = range(start, len(ids))
    hidden = {p: model.model.embed_tokens.weight[ids[p]] for p in tail}
    for number, layer in enumerate(model.model.layers):
        for p in tail:
            grown[number][p] = keys_and_values(model, layer, hidden[p], p)
        hidden = {p: through(model, layer, hidden[p], p, grown[number]) for p in tail}
    return model.lm_head.weight @ normed(hidden[len(ids) - 1], model.model.norm)


def keys_and_values(model: Any, layer: Any, hidden: Tensor, position: int) -> tuple[Tensor, Tensor]:
    x = normed(hidden, layer.input_layernorm)
    heads = model.config.num_key_value_heads
    key = (layer.self_attn.k_proj.weight @ x).view(heads, -1)
    return turned(model, key, position), (layer.self_attn.v_proj.weight @ x).view(heads, -1)


def through(model: Any, layer: Any, hidden: Tensor, position: int, columns: list[Any]) -> Tensor:
    """One decoder layer for one token that sees the columns up to its own."""
    config = model.config
    x = normed(hidden, layer.input_layernorm)
    query = (layer.self_attn.q_proj.weight @ x).view(config.num_attention_heads, -1)
    query = turned(model, query, position)
    group = config.num_attention_heads // config.num_key_value_heads
    outputs = []
    for head in range(config.num_attention_heads):
        seen = [(key[head // group], value[head // group]) for key, value in columns[: position + 1]]
        scores = torch.stack([query[head] @ key for key, _ in seen]) / math.sqrt(query.shape[1])
        outputs.append(sum(a * value for a, (_, value) in zip(scores.softmax(0), seen, strict=True)))
    hidden = hidden + layer.self_attn.o_proj.weight @ torch.cat(outputs)
    x = normed(hidden, layer.post_attention_layernorm)
    gate = layer.mlp.gate_proj.weight @ x
    return hidden + layer.mlp.down_proj.weight @ (gate * gate.sigmoid() * (layer.mlp.up_proj.weight @ x))


def normed(x: Tensor, norm: Any) -> Tensor:
    return norm.weight * x / (x.square().mean() + norm.variance_epsilon).sqrt()


def turned(model: Any, heads: Tensor, position: int) -> Tensor:
    """Each pair of channels (i, i + d/2) turned by its frequency times the position."""
    angle = position * model.model.rotary_emb.inv_freq
    turn = torch.polar(torch.ones_like(angle), angle)
    pairs = torch.complex(*heads.chunk(2, -1)) * turn
    return torch.cat((pairs.real, pairs.imag), -1)
