"""A text in windows, each token scored once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

Window = tuple[list[int], list[int]]
"""Ids that are read, at least one, and ids that are scored after them."""


def rolling_windows(ids: Sequence[int], prefix: int, max_length: int, context: int = 1) -> Iterator[Window]:
    """Windows of context and scored ids, of at most `max_length` ids that are read (the last is scored only).

    With `context` = 1 these are lm-eval's: after the prefix the first `max_length` ids, then as many again,
    each after the last id before them; what is left at the end is read with as much before it as fits.
    With `context` = c > 1 only the first c ids follow the prefix alone, and every later window has exactly c
    ids before it, so that a cache of c tokens can be mapped for it.

    Args:
        ids: of the text; none: no windows.
        prefix: what the first id follows.
        max_length: ids read in one window at most.
        context: ids before each window, less than `max_length`.
    """
    n = len(ids)
    first = min(n, max_length if context == 1 else context)
    if first:
        yield [prefix], list(ids[:first])
    step = max_length - context + 1
    for start in range(first, n, step):
        stop = min(start + step, n)
        begin = max(0, stop - max_length - 1) if context == 1 else start - context
        yield list(ids[begin:start]), list(ids[start:stop])
