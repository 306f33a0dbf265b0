"""Log-likelihoods of continuations, and whether greedy decoding would write them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvmap.models.cache import KVCache
from kvmap.models.capture import forward
from kvmap.models.pair import LoadedModel
from kvmap.transfer import HandOff

LOGITS_AT_ONCE = 2**26
"""Numbers in the logits of one forward, 256 MB of float32; a window of 2,048 tokens over 150,000 ids would
take 1.2 GB at once."""


@dataclass
class ScoredContinuation:
    """One continuation.

    Attributes:
        loglikelihood: Σ log p(token | context, earlier tokens), nats; each term float32, their sum float64.
        greedy: whether every token is the likeliest at its place.
    """

    loglikelihood: float
    greedy: bool


def score(
    model: LoadedModel, hand_off: HandOff, continuations: Sequence[Sequence[Sequence[int]]]
) -> list[list[ScoredContinuation]]:
    """Scores all continuations of every row from one hand-off, which stays as it is.

    The first token of each is judged by the hand-off's logits alone, so continuations of one token cost
    nothing; longer ones take one forward for each rank: all rows' longest together, then all rows' next.

    Args:
        model: the model that continues.
        hand_off: its cache and first logits, one row per context.
        continuations: per row, per continuation, at least one id.
    """
    first = hand_off.logits.float().log_softmax(-1).cpu()  # one copy, not one for each number that is read
    top = first.argmax(-1).tolist()
    scored = [
        [ScoredContinuation(float(first[row, ids[0]]), top[row] == ids[0]) for ids in asked]
        for row, asked in enumerate(continuations)
    ]
    longer = [_longest_first(asked) for asked in continuations]
    for rank in range(max((len(numbers) for numbers in longer), default=0)):
        rows = [row for row, numbers in enumerate(longer) if rank < len(numbers)]
        kv = hand_off.kv if len(rows) == len(longer) else hand_off.kv.select_rows(rows)
        ids = [continuations[row][longer[row][rank]] for row in rows]
        for row, rest in zip(rows, _later(model, kv, ids), strict=True):
            whole = scored[row][longer[row][rank]]
            whole.loglikelihood += rest.loglikelihood
            whole.greedy = whole.greedy and rest.greedy
    return scored


def _longest_first(asked: Sequence[Sequence[int]]) -> list[int]:
    """Numbers of the continuations of more than one token: of like lengths, ranks need little padding."""
    longer = [number for number, ids in enumerate(asked) if len(ids) > 1]
    return sorted(longer, key=lambda number: -len(asked[number]))


def _later(
    model: LoadedModel, kv: KVCache | None, continuations: Sequence[Sequence[int]]
) -> list[ScoredContinuation]:
    """Each row's tokens after its first, in as many forwards as their logits need."""
    ids, real = _right_pad(continuations)
    sums = torch.zeros(len(continuations), dtype=torch.float64)
    greedy = torch.ones(len(continuations), dtype=torch.bool)
    chunk = max(1, LOGITS_AT_ONCE // (len(continuations) * model.geometry.vocab_size))
    for start in range(0, ids.shape[1] - 1, chunk):
        fed = slice(start, min(start + chunk, ids.shape[1] - 1))
        true = slice(fed.start + 1, fed.stop + 1)
        logits, kv = forward(model, ids[:, fed], kv, real[:, fed])
        wanted = ids[:, true].to(logits.device)
        log_probs = logits.log_softmax(-1).gather(-1, wanted.unsqueeze(-1)).squeeze(-1).cpu()
        same = (logits.argmax(-1) == wanted).cpu()
        sums += torch.where(real[:, true], log_probs, 0.0).double().sum(1)
        greedy &= (same | ~real[:, true]).all(1)
    return [ScoredContinuation(*pair) for pair in zip(sums.tolist(), greedy.tolist(), strict=True)]


def _right_pad(rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Ids (batch, longest) int64, padded on the right with 0, and where real ones stand."""
    longest = max(len(row) for row in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.int64)
    real = torch.zeros(len(rows), longest, dtype=torch.bool)
    for number, row in enumerate(rows):
        ids[number, : len(row)] = torch.tensor(row, dtype=torch.int64)
        real[number, : len(row)] = True
    return ids, real
