"""Which tokens of a prompt a target claims from the storage."""

from __future__ import annotations

import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from kvmap.errors import KvmapError
from kvmap.serving.asking import Asked
from kvmap.serving.compatibility import (
    EngineFacts,
    Incompatible,
    check_published,
    check_verdict,
    is_exact_copy,
)
from kvmap.serving.index import Match
from kvmap.serving.keys import namespace
from kvmap.serving.vllm.looking import Found, Looker, waited
from kvmap.serving.vllm.mapper_files import EngineMapper
from kvmap.serving.vllm.settings import Settings

#: a storage that answers at once is answered to at once
_AT_ONCE_SECONDS = 0.003
#: between two looks of a request that waits for a cache
_POLL_SECONDS = 0.01


@dataclass(frozen=True, eq=False)
class Claim:
    """Tokens to be filled from the storage.

    Attributes:
        match: the cache, published or being written.
        n_own: first tokens that the engine has itself, full pages.
        n_end: first tokens that are there when it is filled.
        wait_seconds: for what is not written yet.
    """

    match: Match
    n_own: int
    n_end: int
    wait_seconds: float = 0.0


@dataclass(eq=False)
class Search:
    """One request's search for a cache.

    Attributes:
        request: vLLM's.
        asked: what it asks for.
        begun: when it came.
        only_published: one that was being written has come to nothing: no other such will do.
    """

    request: Any
    asked: Asked
    begun: float = field(default_factory=time.monotonic)
    only_published: bool = False
    _look: Future[Found] | None = None
    _look_begun: float = 0.0
    _has_looked: bool = False
    _next: float = 0.0


class Claims:
    """Decides on searches."""

    def __init__(self, mapper: EngineMapper, facts: EngineFacts, looker: Looker, settings: Settings) -> None:
        """Args: the engine's mapper and facts; what looks at the storage; and the settings."""
        self._mapper, self._facts, self._looker, self._settings = mapper, facts, looker, settings

    def claim(self, search: Search, n_own: int) -> Claim | None:
        """What can be claimed beyond the engine's own tokens; None: ask again.

        Raises:
            Incompatible: nothing can.
        """
        check_verdict(self._mapper.mapper, search.asked.require, self._settings.allow_verdicts)
        if (why := unservable(search.request)) is not None:
            raise Incompatible("request", why)
        if search.request.num_output_tokens:
            raise Incompatible("failure", "the request was preempted after it had begun to answer")
        found = self._looked(search)
        return None if found is None else self._chosen(search, found, n_own)

    def _chosen(self, search: Search, found: Found, n_own: int) -> Claim | None:
        """The published cache or the one that is being written, whichever has more; None: ask again.

        Raises:
            Incompatible: neither will do.
        """
        asked, waited_for = search.asked, time.monotonic() - search.begun
        left = 0.0 if search.only_published else asked.wait_seconds - waited_for
        arriving = found.arriving if left > 0 else None
        n_arriving = 0 if arriving is None else arriving.n_tokens
        n_found = 0 if found.match is None or found.missing is not None else found.match.n_tokens
        has_all = search.only_published or max(n_found, n_arriving) >= self._n_most(search)
        if not has_all and waited_for < asked.grace_seconds:
            return None  # a source may be about to write more of this prompt
        if arriving is not None and n_arriving > n_found:
            return self._claimed(search, arriving, n_own, left)
        if found.missing is not None:
            raise Incompatible("partial", found.missing)
        if found.match is not None:
            return self._claimed(search, found.match, n_own)
        if found.arriving is not None:
            seconds = f"{asked.wait_seconds:g} s"
            raise Incompatible("timeout", f"the cache is still being written after {seconds} of waiting")
        raise Incompatible("not_found", "no cache of this prompt's first tokens is published")

    def _looked(self, search: Search) -> Found | None:
        """What the storage has; None: not known yet.

        Raises:
            Incompatible: cause "timeout" or "storage".
        """
        limit = self._settings.look_seconds
        now = time.monotonic()
        if search._look is None:
            if now < search._next:
                return None
            if self._looker.is_stuck(limit):
                raise Incompatible("timeout", f"the storage has not answered for more than {limit:g} s")
            assert self._mapper.mapper.fitted_for is not None
            request = search.request
            n_most = self._n_most(search)
            name = namespace(self._mapper.mapper.fitted_for.source, request.cache_salt)
            search._look = self._looker.look(name, tuple(request.prompt_token_ids[:n_most]))
            search._look_begun = now
            if not search._has_looked:  # many that wait must not hold up the scheduler together
                waited(search._look, _AT_ONCE_SECONDS)
                search._has_looked = True
        if not search._look.done():
            if now - search._look_begun > limit:
                raise Incompatible("timeout", f"the storage did not answer within {limit:g} s")
            return None
        look, search._look = search._look, None
        search._next = now + _POLL_SECONDS
        try:
            return look.result()
        except (KvmapError, OSError) as error:
            raise Incompatible("storage", str(error)) from error

    def _n_most(self, search: Search) -> int:
        """Tokens of a prompt that could be taken at most."""
        return max(search.request.num_prompt_tokens - self._settings.hold_back, 0)

    def _claimed(self, search: Search, match: Match, n_own: int, wait_seconds: float = 0.0) -> Claim:
        mapper, asked = self._mapper.mapper, search.asked
        check_published(match.manifest, mapper)
        exact = is_exact_copy(match.manifest, mapper, self._facts)
        n_end = match.n_tokens
        n_mapped = n_end - max(n_own, 0 if exact else min(self._mapper.native_head, n_end))
        n_least = asked.min_tokens if asked.min_tokens is not None else self._settings.min_tokens
        if n_mapped < max(n_least, 1):
            raise Incompatible(
                "too_short",
                f"{max(n_mapped, 0)} tokens to map: {n_end} are published, {n_own} the engine has itself; at "
                f"least {n_least} are wanted",
            )
        return Claim(match, n_own, n_end, wait_seconds)


def unservable(request: Any) -> str | None:
    """Why a request's cache is not that of its token ids alone; None where it is."""
    if request.lora_request is not None:
        return "the request uses a LoRA adapter"
    if request.mm_features or request.prompt_embeds is not None or request.prompt_token_ids is None:
        return "the prompt is not of token ids alone"
    if request.skip_reading_prefix_cache:
        return "the request reads its whole prompt itself (prompt_logprobs, or skip_reading_prefix_cache)"
    if request.resumable:
        return "the request's prompt grows while it runs"
    return None
