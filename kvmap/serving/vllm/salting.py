"""Keeping mapped pages out of other requests' prefix cache."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable
from typing import Any


def salt_blocks(request: Any, n_tokens: int, hash_block_tokens: int) -> Callable[[], None]:
    """Give a request's blocks from `n_tokens` on hashes that no other request can have.

    vLLM finds pages by hashes that are chained over token ids. A salted hash is a hash of the plain one and
    random bytes, so the pages that hold it are found by this request alone (when it was preempted), and so
    are all that come later, whose hashes chain on it. The exact pages before stay as they are.

    Args:
        request: vLLM's, of which no page from `n_tokens` on is in the prefix cache yet.
        n_tokens: exact tokens before, full blocks.
        hash_block_tokens: tokens of a hash.

    Returns:
        What undoes it, for a request whose mapped pages came to nothing: to be called before any page from
        `n_tokens` on is cached.
    """
    hasher = request._block_hasher
    if hasher is None:
        return lambda: None
    salt, first = secrets.token_bytes(16), n_tokens // hash_block_tokens

    def salted(of: Any) -> list[Any]:
        return [hashlib.sha256(salt + bytes(plain)).digest() for plain in hasher(of)]

    def rehash(by: Any) -> None:
        request._block_hasher = by
        del request.block_hashes[first:]
        request.update_block_hashes()

    rehash(salted)
    return lambda: rehash(hasher)
