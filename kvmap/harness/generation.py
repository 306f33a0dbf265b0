"""Greedy answers to several requests at once, each of which ends where it would end alone."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor

from kvmap.evaluation.choices import end_of_text_ids
from kvmap.harness.requests import Generate
from kvmap.models.capture import forward
from kvmap.models.pair import LoadedModel
from kvmap.transfer import HandOff

NOT_APPLIED = ("no_repeat_ngram_size", "bad_words_ids", "suppress_tokens", "min_length", "min_new_tokens")
"""Settings of a model's generation config that transformers' greedy decoding heeds and this one does not."""

_logger = logging.getLogger(__name__)


@dataclass
class _Answer:
    """One row's request, and what it has written."""

    asked: Generate
    read: Sequence[int]
    penalty: float
    lookback: int
    """tokens whose text can hold a whole stop, if each of them were a single byte"""
    ids: list[int] = field(default_factory=list)

    def is_over(self, tokenizer: Any) -> bool:
        if len(self.ids) >= self.asked.max_new_tokens:
            return True
        if not self.lookback:
            return False
        # special tokens are kept: a stop may be one, such as <|im_end|>
        tail = tokenizer.decode(self.ids[-self.lookback :], skip_special_tokens=False)
        return any(stop in tail for stop in self.asked.stop if stop)


@torch.no_grad()
def generate(
    model: LoadedModel,
    tokenizer: Any,
    hand_off: HandOff,
    requests: Sequence[Generate],
    contexts: Sequence[Sequence[int]],
) -> list[list[int]]:
    """The likeliest next token, again and again, one request a row; the hand-off stays as it is.

    A row ends at an end-of-text id (left out), once its text holds one of its own stops (kept: text is cut by
    who reads it), or at its own number of tokens, and leaves the batch. So an answer does not depend on the
    rows beside it but for the rounding of a batch's arithmetic.

    Args:
        model: the model that continues.
        tokenizer: the one of the pair.
        hand_off: its cache and first logits, one row per request.
        requests: what is asked of each row.
        contexts: ids that each row has read, for a repetition penalty.

    Returns:
        Per row, the new ids.
    """
    ends = end_of_text_ids(model, tokenizer)
    answers = [_answer(model, request, read) for request, read in zip(requests, contexts, strict=True)]
    running = list(answers)
    logits, kv = hand_off.logits, hand_off.kv
    while running:
        chosen = _penalised(logits, running).argmax(-1)
        going = [
            place
            for place, (answer, token) in enumerate(zip(running, chosen.tolist(), strict=True))
            if _goes_on(answer, token, ends, tokenizer)
        ]
        if len(going) < len(running):
            running = [running[place] for place in going]
            kv, chosen = kv.select_rows(going), chosen[going]
        if running:
            step, kv = forward(model, chosen.unsqueeze(1), kv)
            logits = step[:, -1]
    return [answer.ids for answer in answers]


def _answer(model: LoadedModel, request: Generate, read: Sequence[int]) -> _Answer:
    config = getattr(model.model, "generation_config", None)
    if unheeded := [name for name in NOT_APPLIED if getattr(config, name, None)]:
        _warn(model.identity.name, ", ".join(unheeded))
    penalty = request.repetition_penalty
    if penalty is None:
        penalty = getattr(config, "repetition_penalty", None) or 1.0
    longest = max((len(stop.encode()) for stop in request.stop), default=0)
    return _Answer(request, read, penalty, longest + 2 if longest else 0)


@cache
def _warn(name: str, settings: str) -> None:
    """Once, however many requests there are."""
    _logger.warning("%s: its generation config sets %s, which kvmap does not apply", name, settings)


def _goes_on(answer: _Answer, token: int, ends: Collection[int], tokenizer: Any) -> bool:
    """Take a row's next token; whether it has one after that."""
    if token in ends:
        return False
    answer.ids.append(token)
    return not answer.is_over(tokenizer)


def _penalised(logits: Tensor, answers: Sequence[_Answer]) -> Tensor:
    """Logits (batch, vocabulary), those of ids seen before divided by the row's penalty (times it if < 0)."""
    if all(answer.penalty == 1.0 for answer in answers):
        return logits
    logits = logits.clone()
    for row, answer in enumerate(answers):
        seen = torch.tensor(sorted({*answer.read, *answer.ids}), device=logits.device)
        values = logits[row, seen]
        logits[row, seen] = torch.where(values < 0, values * answer.penalty, values / answer.penalty)
    return logits
