"""Content keys of token prefixes: what a published cache is found by."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Sequence
from dataclasses import asdict

from kvmap.models.identity import ModelIdentity

#: tokens from one key to the next
BLOCK_TOKENS = 32

_HEX_DIGITS = 32


def namespace(source: ModelIdentity, salt: str | None = None) -> str:
    """What separates caches that must never be mistaken for one another, whatever their tokens.

    Args:
        source: the model that computed them; its name does not count.
        salt: of the request (vLLM's `cache_salt`); requests with another salt, or none, find nothing of it.

    Returns:
        64 hex digits.
    """
    parts = {name: value for name, value in asdict(source).items() if name != "name"}
    return hashlib.sha256(json.dumps([parts, salt], sort_keys=True).encode()).hexdigest()


def block_keys(name: str, token_ids: Sequence[int], block_tokens: int = BLOCK_TOKENS) -> list[str]:
    """One key for each full block: ``key_i = hash(key_{i−1}, ids of block i)``, ``key_{−1}`` = `name`.

    Two prompts have key i in common exactly when they have their first (i + 1) · `block_tokens` ids in
    common, and the namespace.

    Args:
        name: of `namespace`.
        token_ids: the prompt; what is left beyond the last full block has no key.
        block_tokens: tokens of a block.

    Returns:
        Keys of 32 hex digits (128 bits), one for each full block.
    """
    state, keys = bytes.fromhex(name), []
    for start in range(0, len(token_ids) - block_tokens + 1, block_tokens):
        block = token_ids[start : start + block_tokens]
        state = hashlib.sha256(state + struct.pack(f"<{block_tokens}q", *block)).digest()
        keys.append(state.hex()[:_HEX_DIGITS])
    return keys


def whole_key(name: str, token_ids: Sequence[int]) -> str:
    """The key of a prefix as a whole, whatever its length: 32 hex digits."""
    ids = struct.pack(f"<{len(token_ids)}q", *token_ids)
    return hashlib.sha256(bytes.fromhex(name) + b"whole" + ids).hexdigest()[:_HEX_DIGITS]


def common_length(a: Sequence[object], b: Sequence[object]) -> int:
    """How many first elements two sequences of one type have in common."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
