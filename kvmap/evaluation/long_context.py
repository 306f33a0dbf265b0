"""Which context lengths to ask about: multiples of the calibration length, as far as a pair goes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from kvmap.data import TokenBlocks
from kvmap.errors import KvmapError


def context_lengths(
    calibration_tokens: int, multiples: Sequence[float], *, limit: int, room: int
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Lengths in tokens, ascending, and what could not be had as asked.

    A multiple that does not fit becomes the longest length that does, so that what lies past the calibration
    length is seen as far as the pair goes; several such become one.

    Args:
        calibration_tokens: the length that the mapper was fitted at.
        multiples: of it, above 0.
        limit: tokens that both models take.
        room: tokens to leave free after a context, for what follows it.

    Returns:
        The lengths, each once; and one line for each multiple that was shortened or left out.

    Raises:
        KvmapError: a multiple that is not above 0, or a limit that leaves no token beside the room.
    """
    longest = limit - room
    if longest < 1:
        raise KvmapError(
            f"the pair takes {limit} tokens, and {room} are to follow the context: none is left for it; "
            "lower continuation_tokens or growth_tokens"
        )
    lengths: list[int] = []
    notes: list[str] = []
    for multiple in sorted(multiples):
        if not (multiple > 0 and math.isfinite(multiple)):
            raise KvmapError(f"multiples={list(multiples)}: expected finite numbers above 0")
        asked = max(1, round(multiple * calibration_tokens))
        length = min(asked, longest)
        if length in lengths:
            length = 0
        if length != asked:
            notes.append(
                f"{multiple:g} x the calibration length is {asked} tokens; the pair takes {limit}, less "
                f"{room} for what follows: " + (f"{length} are read instead" if length else "left out")
            )
        if length:
            lengths.append(length)
    return tuple(lengths), tuple(notes)


def first_tokens(blocks: TokenBlocks, length: int, rows: Sequence[int] | None = None) -> TokenBlocks:
    """The first `length` tokens of blocks, or of some of them.

    Raises:
        KvmapError: the blocks are shorter.
    """
    if length > blocks.length:
        raise KvmapError(f"length={length}: the blocks have {blocks.length} tokens")
    chosen = list(range(blocks.n_sequences)) if rows is None else list(rows)
    return replace(
        blocks,
        input_ids=blocks.input_ids[chosen, :length],
        text_digests=tuple(blocks.text_digests[row] for row in chosen),
        documents=tuple(blocks.documents[row] for row in chosen),
    )
