"""Fit, held-out and evaluation data that share no document."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvmap.errors import KvmapError

if TYPE_CHECKING:
    from kvmap.data.blocks import TokenBlocks


class OverlappingData(KvmapError):
    """The same text on both sides of a split."""


def split_sequences(
    n: int,
    held_out_share: float,
    seed: int,
    documents: Sequence[Sequence[str]] | None = None,
) -> tuple[list[int], list[int]]:
    """Splits n sequences at random into fit and held-out, by sequence and never by token.

    Sequences that share a document go to the same side, together.

    Args:
        n: number of sequences.
        held_out_share: share of the sequences to hold out, 0 ≤ share < 1. Rounded, but at least one
            sequence is held out of every share > 0, and at least one is left to fit on.
        seed: which split.
        documents: per sequence, digests of its documents. None: no two sequences share any.

    Returns:
        Indices of the fit and of the held-out sequences, each in rising order.

    Raises:
        OverlappingData: every sequence comes from one and the same document.
        KvmapError: the share is out of range, or n is too small to split.
    """
    if not 0 <= held_out_share < 1:
        raise KvmapError(f"held_out_share={held_out_share}: expected 0 ≤ share < 1")
    if held_out_share == 0:
        return list(range(n)), []
    if n < 2:
        raise KvmapError(f"held_out_share={held_out_share} of {n} sequences: expected at least 2 sequences")
    groups = _groups(n, documents)
    if len(groups) == 1:
        raise OverlappingData(
            f"all {n} sequences come from one document, so none can be held out; give a corpus of several "
            "documents (a text file is one document), or packing=document"
        )
    random.Random(seed).shuffle(groups)
    n_held_out = min(max(1, round(held_out_share * n)), n - 1)
    held_out: list[int] = []
    for group in groups[:-1]:
        if len(held_out) + len(group) <= n_held_out:
            held_out += group
    if not held_out:
        smallest = min(groups, key=len)
        held_out += smallest
    chosen = set(held_out)
    return [index for index in range(n) if index not in chosen], sorted(held_out)


def check_disjoint(calibration: TokenBlocks, evaluation: TokenBlocks) -> None:
    """Refuses evaluation text that the mapper was fitted on.

    Raises:
        OverlappingData: names how many documents or sequences are on both sides, and the first digest.
    """
    ours = {digest for held in calibration.documents for digest in held} | set(calibration.text_digests)
    theirs = [digest for held in evaluation.documents for digest in held] + list(evaluation.text_digests)
    shared = list(dict.fromkeys(digest for digest in theirs if digest in ours))
    if not shared:
        return
    raise OverlappingData(
        f"{len(shared)} documents or sequences are in both the calibration ({calibration.source}) and the "
        f"evaluation ({evaluation.source}) text; the first is sha256 {shared[0]}. Scores on it would say "
        f"nothing. Calibration read {calibration.n_read} documents: let the evaluation skip at least that "
        "many of the same corpus, or give it another file, field value or seed"
    )


def _groups(n: int, documents: Sequence[Sequence[str]] | None) -> list[list[int]]:
    """Connected components of 'shares a document', in the order of their first sequence."""
    parent = list(range(n))

    def root(index: int) -> int:
        while parent[index] != index:
            parent[index] = parent[parent[index]]
            index = parent[index]
        return index

    first_holder: dict[str, int] = {}
    for index, held in enumerate(documents or ()):
        for digest in held:
            holder = first_holder.setdefault(digest, index)
            low, high = sorted((root(holder), root(index)))
            parent[high] = low
    groups: dict[int, list[int]] = {}
    for index in range(n):
        groups.setdefault(root(index), []).append(index)
    return list(groups.values())
