"""The scheduler's half of publishing: which pages are written when, and what has become of them."""

from __future__ import annotations

import secrets
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

from kvmap.serving.compatibility import EngineFacts
from kvmap.serving.keys import BLOCK_TOKENS, namespace
from kvmap.serving.manifest import Manifest
from kvmap.serving.outcome import Published
from kvmap.serving.vllm.claiming import unservable
from kvmap.serving.vllm.looking import Looker, settled
from kvmap.serving.vllm.messages import Outbox, Publish
from kvmap.serving.vllm.tracked import Publication, Tracked

#: the worker has waited for its writer already; this is for the manifest to be seen
_SEEN_SECONDS = 0.2
#: to learn whether a cache is published already; else it is written once more
_BEGUN_SECONDS = 0.02


class Publications:
    """Publishes the prompts of requests that ask for it, and their outputs after the end."""

    def __init__(self, facts: EngineFacts, looker: Looker, outbox: Outbox) -> None:
        """Args: the engine's facts; what looks at the storage; and what goes to the worker."""
        self._facts, self._looker, self._outbox = facts, looker, outbox

    def begin(self, tracked: Tracked) -> None:
        """A request has come that asks to be published."""
        request = tracked.request
        reason = unservable(request)
        if reason is None and request.num_prompt_tokens < BLOCK_TOKENS:
            reason = f"{request.num_prompt_tokens} tokens: caches are found by blocks of {BLOCK_TOKENS}"
        if reason is not None:
            tracked.published = Published(0, reason=reason)
        elif tracked.asked.publish and not tracked.asked.take:
            tracked.publication = self._announced(request)

    @staticmethod
    def wants_step(tracked: Tracked) -> bool:
        """Whether a request's prompt is still to be published."""
        return tracked.asked.publish and tracked.published is None

    def step(self, tracked: Tracked, n_scheduled: int, block_ids: tuple[int, ...], is_resumed: bool) -> None:
        """A request is computed on in this step.

        Args:
            tracked: the request; see `wants_step`.
            n_scheduled: tokens that are computed of it.
            block_ids: its pages.
            is_resumed: it was preempted before, and its pages were given away.
        """
        request, publication = tracked.request, tracked.publication
        if tracked.is_loading:
            self._give_up(tracked, "mapped tokens lie below: only a model's own cache is published")
            return
        if publication is None:
            # one that takes as well would else have waited for itself
            publication = tracked.publication = self._announced(request)
        seconds = 0.0 if self._looker.is_stuck(_SEEN_SECONDS) else _BEGUN_SECONDS
        if publication.upto == 0 and settled(publication.begun, seconds):
            tracked.publication, tracked.published = None, Published(request.num_prompt_tokens)
            return
        if is_resumed and 0 < publication.upto < request.num_prompt_tokens:
            # what is written so far is of no use: the same tokens come again
            self._drop(publication)
            publication = tracked.publication = self._announced(request)
        start, n_prompt = publication.upto, request.num_prompt_tokens
        stop = min(request.num_computed_tokens + n_scheduled, n_prompt)
        if stop <= start:
            return
        publication.upto = stop
        whole = tuple(request.prompt_token_ids) if stop == n_prompt else None
        group, name = publication.group, publication.name
        publish = Publish(request.request_id, group, start, stop, block_ids, whole, name)
        self._outbox.messages.publishes.append(publish)

    def failed(self, tracked: Tracked, why: str) -> None:
        """The worker could not write it."""
        assert tracked.publication is not None
        self._drop(tracked.publication)
        tracked.publication, tracked.published = None, Published(0, reason=f"storage: {why}")

    def published(self, tracked: Tracked) -> Published:
        """What has become of the prompt of a request that is over."""
        publication, request = tracked.publication, tracked.request
        if publication is None:
            return tracked.published or Published(0)
        if publication.upto < request.num_prompt_tokens:
            return self._give_up(tracked, "the request ended before its prompt was read")
        self._end(publication)
        pending = Published(0, reason="not written yet: the storage is slow, or failed", pending=True)
        if self._looker.is_stuck(_SEEN_SECONDS):
            return pending
        try:
            seen = self._looker.published(publication.name, tuple(request.prompt_token_ids))
            manifest = seen.result(timeout=_SEEN_SECONDS)
        except FutureTimeout:
            return pending
        except Exception as error:  # whatever lies on the storage, the request is answered
            return Published(0, reason=f"storage: {error}")
        if manifest is None:
            return pending
        return Published(request.num_prompt_tokens, manifest.n_bytes, manifest.seconds)

    def publish_all(self, tracked: Tracked, block_ids: list[int]) -> int:
        """Have all pages of a request that is over read before they are given back.

        Returns:
            Of how many tokens; 0: there is no need.
        """
        request = tracked.request
        n_tokens = min(request.num_computed_tokens, request.num_tokens - 1)
        refuses = tracked.is_loading or unservable(request) is not None
        if not tracked.asked.publish_output or refuses or n_tokens < 1:
            return 0
        name, group = self._namespace(request), secrets.token_hex(16)
        tokens = tuple(request.all_token_ids[:n_tokens])
        self._outbox.messages.publishes.append(
            Publish(request.request_id, group, 0, n_tokens, tuple(block_ids), tokens, name, after_end=True)
        )
        return n_tokens

    def _announced(self, request: Any) -> Publication:
        """A cache that is about to be written, in a group of its own."""
        facts, group, name = self._facts, secrets.token_hex(16), self._namespace(request)
        ids = tuple(request.prompt_token_ids)
        manifest = Manifest(name, facts.identity, group, ids, facts.shape, facts.dtype, facts.rotations)
        return Publication(group, name, self._looker.begin(manifest))

    def _namespace(self, request: Any) -> str:
        return namespace(self._facts.identity, request.cache_salt)

    def _give_up(self, tracked: Tracked, reason: str) -> Published:
        if tracked.publication is not None:
            self._drop(tracked.publication)
        tracked.publication, tracked.published = None, Published(0, reason=reason)
        return tracked.published

    def _drop(self, publication: Publication) -> None:
        self._outbox.messages.dropped_groups.append(publication.group)
        self._end(publication)

    def _end(self, publication: Publication) -> None:
        """Nothing more is computed of it; an announcement that is still to be made is not made."""
        publication.begun.cancel()
        self._looker.end(publication.group)
