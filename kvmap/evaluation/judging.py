"""What an arm said of an item, and whether that is right."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvmap.evaluation.answers import CONTENT_CHARACTERS, item_key
from kvmap.evaluation.encoding import EncodedItem
from kvmap.evaluation.items import Item


@dataclass(frozen=True)
class ItemResult:
    """One item under one arm.

    Attributes:
        task: the item's task.
        id: the item's id; results of different arms and runs are paired by (task, id).
        arm: which arm.
        answer: index of the right choice.
        logliks: per choice, the summed log-likelihood of its tokens, nats.
        predicted: the likeliest choice; −1 where a log-likelihood is not a number.
        correct: whether that is the answer.
        predicted_norm: the likeliest per character, as lm-eval's acc_norm.
        correct_norm: whether that is the answer.
        generated: the greedy continuation up to the item's stop; None where none was asked for.
        generated_correct: whether it starts with the right choice; None where none was asked for.
        n_context: context tokens read.
        n_truncated: context tokens cut off on the left, the same for every arm.
        n_mapped: context tokens that were mapped; 0 where the model read all of them itself, also under an
            arm with a mapper if `native_head` and `hold_back` cover this context.
        content: hash of what the item asks, see `item_content`: two results of one task and id are of one
            item only if they agree in it.
    """

    task: str
    id: str
    arm: str
    answer: int
    logliks: tuple[float, ...]
    predicted: int
    correct: bool
    predicted_norm: int
    correct_norm: bool
    generated: str | None
    generated_correct: bool | None
    n_context: int
    n_truncated: int
    n_mapped: int = 0
    content: str = ""

    def row(self) -> dict[str, Any]:
        """The result as one row of a table; log-likelihoods joined by spaces."""
        fields = dict(self.__dict__)
        fields["logliks"] = " ".join(f"{value:.6f}" for value in self.logliks)
        return fields


def item_content(item: Item) -> str:
    """Hash of an item's context, choices and answer as text: the same for every model and tokenizer."""
    return item_key(item.context, item.choices, item.answer)[:CONTENT_CHARACTERS]


def judge(
    arm: str,
    item: Item,
    encoded: EncodedItem,
    logliks: tuple[float, ...],
    text: str | None,
    n_mapped: int = 0,
) -> ItemResult:
    """What an arm said of an item, held against its answer.

    Args:
        arm: which arm.
        item: the question.
        encoded: its ids.
        logliks: per choice, the summed log-likelihood of its tokens, nats.
        text: the greedy answer; None where none was asked for.
        n_mapped: context tokens that were mapped.
    """
    predicted = _likeliest(logliks)
    per_character = [
        score / max(1, len(choice.strip())) for score, choice in zip(logliks, item.choices, strict=True)
    ]
    predicted_norm = _likeliest(per_character)
    return ItemResult(
        task=item.task,
        id=item.id,
        arm=arm,
        answer=item.answer,
        logliks=logliks,
        predicted=predicted,
        correct=predicted == item.answer,
        predicted_norm=predicted_norm,
        correct_norm=predicted_norm == item.answer,
        generated=text,
        generated_correct=None if text is None else starts_with_answer(text, item.choices, item.answer),
        n_context=len(encoded.context_ids),
        n_truncated=encoded.n_truncated,
        n_mapped=n_mapped,
        content=item_content(item),
    )


def _likeliest(scores: Sequence[float]) -> int:
    """Index of the highest score, the first of equals; −1 where one is not a number."""
    if any(math.isnan(score) for score in scores):
        return -1
    return max(range(len(scores)), key=lambda number: scores[number])


def starts_with_answer(text: str, choices: Sequence[str], answer: int) -> bool:
    """Whether a generated text starts with the right choice.

    White space counts as single spaces. The choice must end where a word ends, and where the text starts
    with several choices (`two`, `two hours`) the longest of them is meant.
    """
    said = " ".join(text.split())
    plain = [" ".join(choice.split()) for choice in choices]
    begun = [
        number
        for number, choice in enumerate(plain)
        if said.startswith(choice)
        and not (said[len(choice) : len(choice) + 1].isalnum() and choice[-1:].isalnum())
    ]
    return bool(begun) and plain[max(begun, key=lambda number: len(plain[number]))] == plain[answer]
