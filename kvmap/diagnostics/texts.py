"""What the streaming diagnostics read: token ids of a named text, in batches padded on the left."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvmap.errors import KvmapError

TEXTS = ("held_out", "evaluation", "questions")
"""Names of the texts that a run may have."""


@dataclass(frozen=True)
class Text:
    """Contexts that are read alike.

    Attributes:
        name: what its numbers are filed under.
        contexts: token ids of each.
        halved: the first half of each is handed over and the second half predicted from it; False: all of
            it is handed over, and the one token after it predicted.
        n_predicted: tokens of second halves that are predicted, from their beginning; None: all.
    """

    name: str
    contexts: tuple[tuple[int, ...], ...]
    halved: bool = False
    n_predicted: int | None = None

    @classmethod
    def of_sequences(cls, name: str, input_ids: Tensor, n_predicted: int | None = None) -> Text:
        """Sequences (n, tokens) of one length, halved."""
        return cls(name, tuple(tuple(row) for row in input_ids.tolist()), True, n_predicted)

    @classmethod
    def of_contexts(cls, name: str, contexts: Iterable[Sequence[int]]) -> Text:
        """Contexts of any lengths, each handed over whole."""
        return cls(name, tuple(tuple(context) for context in contexts))

    @property
    def longest(self) -> int:
        """Tokens of the longest context."""
        return max((len(context) for context in self.contexts), default=0)

    def check(self, n_own: int) -> None:
        """Refuse what cannot be diagnosed.

        Args:
            n_own: tokens of a context that the target reads itself: the native head.

        Raises:
            KvmapError: no contexts, an empty one, none that leaves anything to map, or sequences to be halved
                that differ in length, or a number of predicted tokens below 1.
        """
        if not self.contexts or not all(self.contexts):
            raise KvmapError(
                f"text {self.name!r}: {len(self.contexts)} contexts, the shortest of "
                f"{min(map(len, self.contexts), default=0)} tokens: expected one or more, none empty"
            )
        if self.n_predicted is not None and self.n_predicted < 1:
            raise KvmapError(
                f"text {self.name!r}: n_predicted={self.n_predicted}: expected 1 or more, or None"
            )
        if self.longest - 1 <= n_own:
            raise KvmapError(
                f"text {self.name!r}: contexts of {self.longest} tokens leave nothing to map: the last token "
                f"and native_head={n_own} are the target's own; give longer ones"
            )
        if self.halved and len({len(context) for context in self.contexts}) > 1:
            raise KvmapError(
                f"text {self.name!r}: sequences of {min(map(len, self.contexts))} to {self.longest} tokens: "
                "expected equal lengths, as all are halved at one column"
            )

    def batches(self, batch_size: int) -> list[TextBatch]:
        """Contexts of like length together, the longest first: little is padding, and memory fails early."""
        ordered = sorted(self.contexts, key=len, reverse=True)
        return [
            TextBatch(
                self.name, self.halved, *_left_padded(ordered[start : start + batch_size]), self.n_predicted
            )
            for start in range(0, len(ordered), batch_size)
        ]


@dataclass(frozen=True, eq=False)
class TextBatch:
    """Contexts of one text: ids (batch, tokens) int64 and mask (batch, tokens) bool, padded on the left."""

    text: str
    halved: bool
    ids: Tensor
    mask: Tensor
    n_predicted: int | None = None

    @property
    def half(self) -> int:
        """Tokens of a first half."""
        return self.ids.shape[1] // 2

    @property
    def end(self) -> int:
        """Column behind the last token that is predicted of a second half."""
        tokens = self.ids.shape[1]
        return tokens if self.n_predicted is None else min(tokens, self.half + self.n_predicted)


def _left_padded(rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    longest = max(len(row) for row in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.int64)
    mask = torch.zeros(len(rows), longest, dtype=torch.bool)
    for number, row in enumerate(rows):
        ids[number, longest - len(row) :] = torch.tensor(row, dtype=torch.int64)
        mask[number, longest - len(row) :] = True
    return ids, mask


def evenly(n: int, wanted: int) -> list[int]:
    """Up to `wanted` of the numbers 0 … n − 1, spread evenly: of questions sorted by kind, some of each."""
    count = min(n, wanted)
    return [number * n // count for number in range(count)]
