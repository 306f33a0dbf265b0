"""On from a hand-off: greedy tokens, or the log-probabilities of given ones."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from kvmap.models.capture import forward
from kvmap.models.pair import LoadedModel
from kvmap.transfer.context import TransferError
from kvmap.transfer.handoff import HandOff


def continue_greedy(
    target: LoadedModel, handoff: HandOff, max_new_tokens: int, stop_ids: Collection[int] = ()
) -> list[list[int]]:
    """The likeliest next token, again and again, from a hand-off that stays as it is.

    Frequencies that depend on the length (dynamic, longrope) are what the target itself uses at each step;
    mapped keys keep those of the context's length, as the target's own cached keys do. Nothing is read again.

    Returns:
        For each row its new ids, up to `max_new_tokens`, ended by the first of `stop_ids`, which is left
        out. A row that has stopped does not stop the others.

    Raises:
        TransferError: `max_new_tokens` < 0.
    """
    if max_new_tokens < 0:
        raise TransferError(f"max_new_tokens={max_new_tokens}: expected 0 or more")
    stop = frozenset(stop_ids)
    rows: list[list[int]] = [[] for _ in range(handoff.logits.shape[0])]
    running = set(range(len(rows)))
    logits, kv = handoff.logits, handoff.kv
    for step in range(max_new_tokens):
        chosen = logits.argmax(-1)
        for row, token in enumerate(chosen.tolist()):
            if token in stop:
                running.discard(row)
            if row in running:
                rows[row].append(token)
        if not running or step == max_new_tokens - 1:
            break
        # stopped rows are fed on and ignored: rows do not see each other
        step_logits, kv = forward(target, chosen.unsqueeze(1), kv)
        logits = step_logits[:, -1]
    return rows


def score_continuations(
    target: LoadedModel, handoff: HandOff, continuations: Sequence[Sequence[int]]
) -> list[Tensor]:
    """Log-probability of each token of one continuation a row, in nats; the hand-off stays as it is.

    The first token is judged by the hand-off's own logits, the others in one forward.

    Args:
        target: the model of the hand-off.
        handoff: see `HandOff.select_rows` for several continuations of one context.
        continuations: one list of ids for each row, of any length, empty ones too.

    Returns:
        For each row (n,) float32.

    Raises:
        TransferError: another number of continuations than rows.
    """
    if len(continuations) != handoff.logits.shape[0]:
        raise TransferError(
            f"{len(continuations)} continuations for a hand-off of {handoff.logits.shape[0]} rows: expected "
            f"one a row; repeat rows with HandOff.select_rows"
        )
    lengths = [len(continuation) for continuation in continuations]
    longest = max(lengths, default=0)
    device = handoff.logits.device
    if longest == 0:
        return [torch.empty(0, device=device) for _ in continuations]
    ids = torch.zeros(len(lengths), longest, dtype=torch.long, device=device)
    real = torch.zeros_like(ids, dtype=torch.bool)
    for row, continuation in enumerate(continuations):
        ids[row, : lengths[row]] = torch.as_tensor(continuation, dtype=torch.long, device=device)
        real[row, : lengths[row]] = True
    logits = handoff.logits.unsqueeze(1)
    if longest > 1:
        later, _ = forward(target, ids[:, :-1], handoff.kv, real[:, :-1])
        logits = torch.cat([logits, later.to(device)], dim=1)
    scores = logits.float().log_softmax(-1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)
    return [scores[row, :length] for row, length in enumerate(lengths)]
