"""Hashes of mapped pages: no other request has them, and what lies before keeps its own."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import pytest

from kvmap.serving.vllm.salting import salt_blocks

BLOCK = 4


class Request:
    """What salting touches of vLLM's."""

    def __init__(self, tokens: list[int], hasher: Callable[[Any], list[bytes]] | None) -> None:
        self.tokens, self.block_hashes, self._block_hasher = list(tokens), [], hasher
        self.update_block_hashes()

    def update_block_hashes(self) -> None:
        if self._block_hasher is not None:
            self.block_hashes.extend(self._block_hasher(self))

    def append(self, tokens: list[int]) -> None:
        self.tokens += tokens
        self.update_block_hashes()


def chained(request: Request) -> list[bytes]:
    """As vLLM does it: of the blocks that have none yet, each on top of the one before."""
    found: list[bytes] = []
    for start in range(len(request.block_hashes) * BLOCK, len(request.tokens) - BLOCK + 1, BLOCK):
        parent = (request.block_hashes + found or [b"none"])[-1]
        found.append(hashlib.sha256(parent + bytes(request.tokens[start : start + BLOCK])).digest())
    return found


def plain(tokens: list[int]) -> list[bytes]:
    return list(Request(tokens, chained).block_hashes)


TOKENS = list(range(1, 19))


@pytest.mark.parametrize("n_own", [0, 4, 12, 16])
def test_blocks_from_the_first_mapped_one_on_are_the_requests_own(n_own: int) -> None:
    request, twin = Request(TOKENS, chained), Request(TOKENS, chained)
    salt_blocks(request, n_own, BLOCK)
    salt_blocks(twin, n_own, BLOCK)
    for one in (request, twin):
        one.append(list(range(20, 33)))
    everything = [*TOKENS, *range(20, 33)]
    first = n_own // BLOCK
    assert len(request.block_hashes) == len(everything) // BLOCK
    assert request.block_hashes[:first] == plain(everything)[:first]
    known = {*plain(everything), *twin.block_hashes[first:]}
    assert not known & set(request.block_hashes[first:])


def test_undone_the_hashes_are_plain_again() -> None:
    request = Request(TOKENS, chained)
    undo = salt_blocks(request, 8, BLOCK)
    undo()
    request.append([5, 5, 5, 5])
    assert request.block_hashes == plain([*TOKENS, 5, 5, 5, 5])


def test_an_engine_that_keeps_no_prefixes_has_nothing_to_salt() -> None:
    request = Request(TOKENS, None)
    salt_blocks(request, 0, BLOCK)()
    assert request.block_hashes == []
