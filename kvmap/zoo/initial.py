"""Initial weights that already recall: the first layer looks back, the others match and copy.

Every fact of the world is told within four words (`the ball is in rome`: the place stands three words after
the thing), and a question ends as the fact began (`… the ball is in`). Recalling is therefore an n-gram
induction: the last word's n-th word back must match an earlier word's (n + 1)-th word back, and that earlier
word is the answer. From random weights models of this size stay on a plateau (a guess among the answers in
sight) for far longer than their whole training; from these they leave it within fifty steps. What is laid
down knows no word of the vocabulary and no kind of question, and every weight is trained.

The residual stream starts in four orthogonal parts: one direction that is the same for every token, the
histories of one, two and three words back, and the rest, which says what the token itself is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention

N_HISTORIES = 3
N_FAST = 5  # the fastest rotary pairs tell neighbouring distances apart
SLOW = 0.02  # radians a token: pairs slower than this match across a whole context
LOOK_BACK_NATS = 3.0  # by which the distance looked at beats its neighbour
MATCH_NATS = 8.0  # by which a matching history beats an unrelated one
NOISE = 0.2  # what is kept of the random weights, of the outputs half of that


@dataclass(frozen=True)
class _Stream:
    """The parts of the residual stream.

    Attributes:
        scale: embeddings have the norm scale · √hidden_size.
        histories: of one, two, three words back; orthonormal columns, (hidden_size, r).
        identity: orthonormal columns, (hidden_size, n).
        code: what a history keeps of a token; orthonormal rows within `identity`, (r, hidden_size).
        slow: the head channels of slow rotary pairs; r is two less than their number.
    """

    scale: float
    histories: list[Tensor]
    identity: Tensor
    code: Tensor
    slow: list[int]


@torch.no_grad()
def recall_from_the_start(model: LlamaForCausalLM) -> None:
    """Replace the weights of a freshly initialised model, in place; what is random is torch's."""
    stream = _divide(model)
    _embed(model.model.embed_tokens.weight, stream)
    for number, layer in enumerate(model.model.layers):
        attention = layer.self_attn
        for projection in (attention.q_proj, attention.k_proj, attention.v_proj):
            projection.weight.mul_(NOISE)
        for projection in (attention.o_proj, layer.mlp.down_proj):
            projection.weight.mul_(NOISE / 2)
        for projection in (
            attention.q_proj,
            attention.k_proj,
            attention.v_proj,
            layer.mlp.gate_proj,
            layer.mlp.up_proj,
        ):
            projection.weight.sub_(
                projection.weight.mean(dim=1, keepdim=True)
            )  # blind to the common direction
        if number == 0:
            _look_back(attention, stream, model.model.rotary_emb.inv_freq)
        else:
            _match_and_copy(attention, stream)


def _divide(model: LlamaForCausalLM) -> _Stream:
    config = model.config
    size, half = config.hidden_size, config.head_dim // 2
    pairs = [pair for pair in range(half) if model.model.rotary_emb.inv_freq[pair] < SLOW]
    slow = [*pairs, *(pair + half for pair in pairs)]
    r = len(slow) - 2
    basis = torch.linalg.qr(torch.cat([torch.ones(size, 1), torch.randn(size, size - 1)], dim=1)).Q
    histories = list(basis[:, 1 : 1 + N_HISTORIES * r].split(r, dim=1))
    identity = basis[:, 1 + N_HISTORIES * r :]
    return _Stream(config.initializer_range, histories, identity, _rows(identity, r), slow)


def _rows(identity: Tensor, n: int) -> Tensor:
    """`n` random orthonormal rows within the identity part, (n, hidden_size)."""
    return torch.linalg.qr(torch.randn(identity.shape[1], n)).Q.T @ identity.T


def _embed(embedding: Tensor, stream: _Stream) -> None:
    """Tokens half in the identity part, half in the common direction: x · 1 = size / √2 after the norm."""
    own = embedding @ stream.identity @ stream.identity.T
    own *= stream.scale * math.sqrt(embedding.shape[1]) / own.norm(dim=1, keepdim=True).clamp(min=1e-6)
    embedding.copy_(own + stream.scale)


def _heads(attention: LlamaAttention) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Views by head: Q, K and V (heads or KV heads, head_dim, size), O (size, heads, head_dim)."""
    size, d = attention.o_proj.weight.shape[0], attention.head_dim
    return (
        attention.q_proj.weight.view(-1, d, size),
        attention.k_proj.weight.view(-1, d, size),
        attention.v_proj.weight.view(-1, d, size),
        attention.o_proj.weight.view(size, -1, d),
    )


def _look_back(attention: LlamaAttention, stream: _Stream, inv_freq: Tensor) -> None:
    """Head j attends δ = 1 + j mod 3 tokens back and writes the code of what it finds into history δ.

    On the common direction K is k = a · (1, 0) in the fastest pairs and Q is R(−δ) k: the score
    a² Σ_i cos((Δ − δ) ω_i) / √head_dim is highest at a distance of Δ = δ.
    A history gets an embedding's norm.
    """
    queries, keys, values, outputs = _heads(attention)
    n_heads, head_dim, size = queries.shape
    r, n = stream.code.shape[0], stream.identity.shape[1]
    fast = inv_freq[:N_FAST].float()
    height = math.sqrt(LOOK_BACK_NATS * math.sqrt(head_dim) / float((1 - fast.cos()).sum()))
    height *= math.sqrt(2) / size
    keys[:, :N_FAST] += height
    values[:, :r] += stream.code
    distances = [1 + head % N_HISTORIES for head in range(n_heads)]
    strength = stream.scale * math.sqrt(2 * n / r)
    for head, distance in enumerate(distances):
        queries[head, :N_FAST] += height * (distance * fast).cos()[:, None]
        queries[head, head_dim // 2 : head_dim // 2 + N_FAST] -= height * (distance * fast).sin()[:, None]
        outputs[:, head, :r] += strength / distances.count(distance) * stream.histories[distance - 1]


def _match_and_copy(attention: LlamaAttention, stream: _Stream) -> None:
    """A KV group's keys show history n + 1 (n = 1, 2 by turns); its heads look for it and copy from there.

    Of a group's heads the first, third, … look for their own history n; the others for what they
    hold themselves, which chains facts: from the person a thing is with to the place of that person.
    """
    queries, keys, values, outputs = _heads(attention)
    (n_heads, head_dim, size), n_groups = queries.shape, keys.shape[0]
    r, n = stream.code.shape[0], stream.identity.shape[1]
    group_size = n_heads // n_groups
    # The norm leaves each of five equal parts (token, common, three histories) a squared norm of size / 5.
    height = math.sqrt(MATCH_NATS * math.sqrt(head_dim) / (size / 5))
    for group in range(n_groups):
        history = 1 + group % (N_HISTORIES - 1)
        channels = torch.zeros(head_dim, r)
        channels[stream.slow] = torch.linalg.qr(torch.randn(len(stream.slow), r)).Q
        keys[group] += height * channels @ stream.histories[history].T
        copied = _rows(stream.identity, min(head_dim, n))
        values[group, : len(copied)] += copied
        for head in range(group_size):
            sought = (
                stream.histories[history - 1].T if head % 2 == 0 else math.sqrt(n / (2 * r)) * stream.code
            )
            queries[group * group_size + head] += height * channels @ sought
            outputs[:, group * group_size + head, : len(copied)] += stream.scale * copied.T
