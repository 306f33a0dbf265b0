"""Which kind a token is of: the first of its context, a newline or punctuation, a rare one, or another."""

from __future__ import annotations

import unicodedata
from typing import Any

import torch
from torch import Tensor

from kvmap.errors import KvmapError

TOKEN_KINDS = ("first", "newline_punctuation", "rare", "rest")
"""The first of these that a token is counts."""
FIRST, NEWLINE_PUNCTUATION, RARE, REST = range(len(TOKEN_KINDS))

RARE_SHARE = 0.05

_UNDECODED = "\ufffd"  # what part of a character decodes to


class TokenKinds:
    """Sorts token ids into `TOKEN_KINDS`.

    * first: at position 0, whatever it is; attention sinks there.
    * newline_punctuation: decodes to white space with a newline in it, or to punctuation and symbols alone.
    * rare: one of the ids that the calibration text holds least often and that make up at most `rare_share`
      of it together, or not in it at all. Ids as frequent as each other are all rare or none of them.
    * rest: any other.
    """

    def __init__(self, tokenizer: Any, calibration_ids: Tensor, rare_share: float = RARE_SHARE) -> None:
        """Count the calibration text.

        Args:
            tokenizer: of the pair; only `decode` is called. None: no token is a newline or punctuation.
            calibration_ids: int64 of any shape.
            rare_share: share of these tokens, 0 ≤ rare_share < 1.

        Raises:
            KvmapError: another share.
        """
        if not 0 <= rare_share < 1:
            raise KvmapError(
                f"rare_share={rare_share}: expected a share of the calibration tokens, from 0 and below 1"
            )
        self.tokenizer = tokenizer
        self._frequent = _frequent_ids(calibration_ids, rare_share)
        self._is_punctuation: dict[int, bool] = {}

    def of(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """Index into `TOKEN_KINDS` of each token: int64 of the shape of ids and positions, on the CPU."""
        ids, positions = input_ids.cpu(), positions.cpu()
        distinct, places = ids.unique(return_inverse=True)
        kinds = torch.tensor([self._of_id(number) for number in distinct.tolist()], dtype=torch.int64)
        return kinds[places].masked_fill(positions == 0, FIRST)

    def _of_id(self, number: int) -> int:
        if number not in self._is_punctuation:
            text = "" if self.tokenizer is None else self.tokenizer.decode([number])
            self._is_punctuation[number] = is_newline_or_punctuation(text)
        if self._is_punctuation[number]:
            return NEWLINE_PUNCTUATION
        return REST if number in self._frequent else RARE


def is_newline_or_punctuation(text: str) -> bool:
    """Whether a token is white space with a newline, or punctuation and symbols with or without spaces.

    Part of a character, which decodes to U+FFFD, is neither.
    """
    if not text.strip():
        return "\n" in text
    return all(
        character.isspace() or (unicodedata.category(character)[0] in "PS" and character != _UNDECODED)
        for character in text
    )


def _frequent_ids(calibration_ids: Tensor, rare_share: float) -> frozenset[int]:
    """Ids of the calibration text that are not rare."""
    ids, counts = calibration_ids.cpu().unique(return_counts=True)
    levels, n_ids = counts.unique(return_counts=True)
    # tokens of ids that occur at most so often
    held = (levels * n_ids).cumsum(0)
    rare_levels = levels[held <= rare_share * calibration_ids.numel()]
    most = int(rare_levels[-1]) if len(rare_levels) else 0
    return frozenset(ids[counts > most].tolist())
