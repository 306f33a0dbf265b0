"""How far the target predicts from a mapped cache otherwise than from its own: KL and top-1 agreement."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any, TypeAlias

import torch
from torch import Tensor

from kvmap.diagnostics.token_groups import bin_bounds, n_bins, position_bins
from kvmap.diagnostics.token_kinds import TOKEN_KINDS
from kvmap.metrics import Metric
from kvmap.models.cache import KVCache
from kvmap.models.capture import forward, prefill
from kvmap.models.loaded import LoadedModel
from kvmap.models.logits import keep_hidden_states, logits_of

Row: TypeAlias = dict[str, Any]

ROWS_AT_ONCE = 64
"""Predictions compared at once: a vocabulary of 150,000 makes 40 MB of float32 logits of each 64."""
TOKENS_AT_ONCE = 256
"""Tokens of all rows that the target continues with at once."""


@dataclass(frozen=True, eq=False)
class Predicted:
    """Predictions of one batch, from the mapped cache against native.

    Attributes:
        kl: (batch, n) float64 nats, KL(native ‖ mapped).
        same: (batch, n) bool, whether both have the same likeliest token.
        kinds: (batch, n) int64, kind of the token that is predicted (see `TokenKinds`); None: not known.
    """

    kl: Tensor
    same: Tensor
    kinds: Tensor | None = None


def kl_divergence(native: Tensor, mapped: Tensor) -> Tensor:
    """`Σ p (log p − log q)`, nats, of native and mapped logits (rows, vocab_size): (rows,) float64.

    In the dtype given, float32 or float64; never below 0.
    """
    p, q = native.log_softmax(-1), mapped.log_softmax(-1)
    difference = p - q
    # in place: logits of a large vocabulary are the larger part of the memory, and of the time
    return torch.linalg.vecdot(p.exp_(), difference).double().clamp(min=0)


def compare(target: LoadedModel, hidden: Tensor, mapped: Tensor) -> tuple[Tensor, Tensor]:
    """KL (batch, n) float64 and agreement (batch, n) bool of some predictions, on the CPU.

    Args:
        hidden: (batch, n, hidden_size), native last hidden states; their logits are made block by block.
        mapped: (batch, n, vocab_size) float32 logits.
    """
    kls, sames = [], []
    blocks = zip(
        hidden.flatten(0, 1).split(ROWS_AT_ONCE), mapped.flatten(0, 1).split(ROWS_AT_ONCE), strict=True
    )
    for states, other in blocks:
        native = logits_of(target, states.unsqueeze(0))[0].to(other.device)
        kls.append(kl_divergence(native, other))
        sames.append(native.argmax(-1) == other.argmax(-1))
    shape = mapped.shape[:2]
    return torch.cat(kls).cpu().unflatten(0, shape), torch.cat(sames).cpu().unflatten(0, shape)


def compare_continuation(
    target: LoadedModel, kv: KVCache, hidden: Tensor, read_on: Tensor
) -> tuple[Tensor, Tensor]:
    """KL and agreement of what the target predicts after each token that it reads on top of a mapped cache.

    Args:
        kv: what was handed over, less the column of the first token to be read; it stays as it is.
        hidden: (batch, n, hidden_size), the native states of the n tokens.
        read_on: (batch, n) int64, the last token of the context and those after it.

    Returns:
        (batch, n) float64 nats and (batch, n) bool.
    """
    parts, done = [], 0
    for logits in _continued(target, kv, read_on):
        parts.append(compare(target, hidden[:, done : done + logits.shape[1]], logits))
        done += logits.shape[1]
    kl, same = (torch.cat(columns, dim=1) for columns in zip(*parts, strict=True))
    return kl, same


def continued_states(target: LoadedModel, context: Tensor, read_on: Tensor) -> Tensor:
    """Native last hidden states (batch, n, hidden_size) of the n tokens that are read on after a context.

    As a mapped cache is continued: the context (batch, tokens) is read, and its last token, the first of
    `read_on` (batch, n), again on top of the others. For models whose frequencies depend on what is read at
    once.
    """
    kv = prefill(target, context).slice_tokens(0, context.shape[1] - 1)
    with keep_hidden_states(target) as states:
        for _ in _continued(target, kv, read_on):
            pass
    return torch.cat(states, dim=1)


def _continued(target: LoadedModel, kv: KVCache, ids: Tensor) -> Iterator[Tensor]:
    """Logits (batch, some, vocab_size) after each of the ids, in order."""
    step = max(1, TOKENS_AT_ONCE // ids.shape[0])
    for start in range(0, ids.shape[1], step):
        logits, kv = forward(target, ids[:, start : start + step], kv)
        yield logits


def next_token_rows(text: str, predicted: Sequence[Predicted]) -> list[Row]:
    """Rows {text, low, high, token_kind, kl_nats, top1_agreement, n}, means over n predictions.

    Once by place: tokens low to high after the context that was handed over, 1 the first, both within, each
    bin twice as wide as the one before; `token_kind` is None. And once by kind of the predicted token, where
    that is known; `low` and `high` are None.
    """
    if not predicted:
        return []
    kl = torch.cat([part.kl.flatten() for part in predicted])
    same = torch.cat([part.same.flatten() for part in predicted])
    places = [torch.arange(1, part.kl.shape[1] + 1).expand(part.kl.shape) for part in predicted]
    bins = position_bins(torch.cat([place.flatten() for place in places]))
    found: list[tuple[Row, Tensor]] = []
    for number in range(1, n_bins(max(place.shape[1] for place in places) + 1)):
        low, high = bin_bounds(number)
        found.append(({"low": low, "high": high, "token_kind": None}, bins == number))
    if all(part.kinds is not None for part in predicted):
        kinds = torch.cat([part.kinds.flatten() for part in predicted if part.kinds is not None])
        for number, kind in enumerate(TOKEN_KINDS):
            found.append(({"low": None, "high": None, "token_kind": kind}, kinds == number))
    return [
        {"text": text, **named}
        | {"kl_nats": float(kl[chosen].mean()), "top1_agreement": float(same[chosen].double().mean())}
        | {"n": int(chosen.sum())}
        for named, chosen in found
        if bool(chosen.any())
    ]


def next_token_metrics(text: str, predicted: Sequence[Predicted], arm: str = "mapped") -> dict[str, Metric]:
    """Means over all predictions, `diagnose/<text>/<arm>/{kl_nats,top1_agreement}`; n counts predictions.

    The standard error is over contexts.
    """
    if not predicted:
        return {}
    values = {
        "kl_nats": [row for part in predicted for row in part.kl.mean(1).tolist()],
        "top1_agreement": [row for part in predicted for row in part.same.double().mean(1).tolist()],
    }
    n = sum(part.kl.numel() for part in predicted)
    return {
        f"diagnose/{text}/{arm}/{name}": Metric(
            fmean(rows), n, stdev(rows) / math.sqrt(len(rows)) if len(rows) > 1 else None
        )
        for name, rows in values.items()
    }
