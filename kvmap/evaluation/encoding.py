"""Items to token ids, by lm-eval's joint-encoding rule, with one truncation for both models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvmap.errors import KvmapError
from kvmap.evaluation.items import Item


@dataclass(frozen=True)
class EncodedItem:
    """Token ids of one item.

    Attributes:
        context_ids: what every arm reads, truncated on the left where it was too long.
        choice_ids: per choice, the continuation's ids.
        n_truncated: context tokens cut off; the same for every arm and both models.
    """

    context_ids: tuple[int, ...]
    choice_ids: tuple[tuple[int, ...], ...]
    n_truncated: int = 0


def encode_item(tokenizer: Any, item: Item, max_tokens: int, reserve: int = 0) -> EncodedItem:
    """Encodes context and choices together, so that words at the seam become the tokens they would in text.

    lm-eval's rule: white space at the end of the context moves to the continuation; context + choice is
    encoded as one, and the choice's ids are those past the length of the context's own.

    Args:
        tokenizer: the one tokenizer of the pair.
        item: the question.
        max_tokens: room for context and longest choice together: the smaller of what both models take.
        reserve: tokens to keep free after the context, where a generated answer may be longer than a choice.

    Raises:
        KvmapError: a choice has no tokens of its own, or the continuations alone do not fit.
    """
    kept = item.context.rstrip()
    moved = item.context[len(kept) :]
    context_ids = _encode(tokenizer, kept)
    choice_ids = tuple(
        tuple(_encode(tokenizer, kept + moved + choice)[len(context_ids) :]) for choice in item.choices
    )
    for choice, ids in zip(item.choices, choice_ids, strict=True):
        if not ids:
            raise KvmapError(
                f"{item.task}, {item.id}: choice {choice!r} has no token of its own after the context; "
                "start it with a space, or drop the item"
            )
    room = max_tokens - max(reserve, *(len(ids) for ids in choice_ids))
    if room < 1 or not context_ids:
        raise KvmapError(
            f"{item.task}, {item.id}: {len(context_ids)} context tokens and continuations of up to "
            f"{max_tokens - room} do not fit max_tokens={max_tokens}; at least one context token must"
        )
    n_truncated = max(0, len(context_ids) - room)
    return EncodedItem(tuple(context_ids[n_truncated:]), choice_ids, n_truncated)


def left_pad(rows: Sequence[Sequence[int]], pad_id: int) -> tuple[Tensor, Tensor]:
    """Token ids of unequal length as one batch, padded on the left.

    Returns:
        input_ids: (batch, longest) int64.
        attention_mask: (batch, longest) bool, True at real tokens.
    """
    longest = max(len(row) for row in rows)
    ids = torch.full((len(rows), longest), pad_id, dtype=torch.int64)
    mask = torch.zeros((len(rows), longest), dtype=torch.bool)
    for index, row in enumerate(rows):
        ids[index, longest - len(row) :] = torch.tensor(row, dtype=torch.int64)
        mask[index, longest - len(row) :] = True
    return ids, mask


def _encode(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, verbose=False)["input_ids"])
