"""The connector in the scheduler: what is claimed, what is published, what is answered."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, replace
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig

from kvmap.errors import KvmapError
from kvmap.serving.asking import Asked, BadAsking, read_asked
from kvmap.serving.compatibility import EngineFacts, Incompatible, check_mapper
from kvmap.serving.keys import BLOCK_TOKENS, namespace
from kvmap.serving.manifest import Manifest
from kvmap.serving.outcome import FIELD, Outcome, Published, refused
from kvmap.serving.store import SharedFolder
from kvmap.serving.vllm.claiming import Claim, Claims, Search, unservable
from kvmap.serving.vllm.facts import engine_facts
from kvmap.serving.vllm.looking import Looker, settled
from kvmap.serving.vllm.mapper_files import engine_mapper
from kvmap.serving.vllm.messages import Messages, Publish, Report, Take, Taken
from kvmap.serving.vllm.salting import salt_blocks
from kvmap.serving.vllm.settings import Settings

_log = logging.getLogger(__name__)

#: the worker has waited for its writer already; this is for the manifest to be seen
_SEEN_SECONDS = 0.2
#: to learn whether a cache is published already; else it is written once more
_BEGUN_SECONDS = 0.02


@dataclass(eq=False)
class _Publication:
    """A prompt's cache on its way to the store.

    Attributes:
        group: of the store.
        name: namespace.
        begun: True by it: the cache is published already.
        upto: first tokens whose pages the worker was told to write.
    """

    group: str
    name: str
    begun: Future[bool]
    upto: int = 0


@dataclass(eq=False)
class _Tracked:
    """One request, and what is known of it so far.

    Attributes:
        request: vLLM's.
        asked: what it asks for.
        search: for a cache to take; None where none is asked for.
        claim: what was claimed last.
        is_loading: pages are being filled, or were: mapped tokens lie in them.
        undo_salt: gives the request's pages their plain hashes back.
        outcome: of taking, once it is known.
        publication: under way.
        published: of publishing, once it is known.
    """

    request: Any
    asked: Asked
    search: Search | None = None
    claim: Claim | None = None
    is_loading: bool = False
    undo_salt: Callable[[], None] | None = None
    outcome: Outcome | None = None
    publication: _Publication | None = None
    published: Published | None = None

    def refuse(self, cause: str, reason: object) -> None:
        """Nothing is taken: the engine reads the whole prompt."""
        n_prompt = self.request.num_prompt_tokens
        self.outcome = refused(cause, reason, n_prompt=n_prompt, n_held_back=n_prompt)


class SchedulerSide:
    """Decides for each request what is taken and what is published."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        settings: Settings,
        *,
        publishes: bool,
        takes: bool,
    ) -> None:
        """Args: as vLLM gives them to a connector; the settings; and what the engine's role is."""
        self._settings = settings
        self._hash_tokens = kv_cache_config.hash_block_size or vllm_config.cache_config.block_size
        self._looker = Looker(SharedFolder(settings.storage, settings.max_storage_bytes))
        self._tracked: dict[str, _Tracked] = {}
        self._messages = Messages()
        self._facts: EngineFacts | None = None
        self._claims: Claims | None = None
        self._no_publishing: Incompatible | None = None
        self._no_taking: Incompatible | None = None
        try:
            self._facts = engine_facts(vllm_config, kv_cache_config)
            self._facts.check()
        except KvmapError as error:
            cause = error.cause if isinstance(error, Incompatible) else "layout"
            self._no_publishing = self._no_taking = Incompatible(cause, str(error))
            _log.warning("kvmap serves nothing in this engine: %s", error)
        if not publishes:
            self._no_publishing = Incompatible("request", "this engine was started as a target alone")
        if not takes:
            self._no_taking = Incompatible("request", "this engine was started as a source alone")
        elif self._no_taking is None:
            self._open_mapper(self._facts)

    def _open_mapper(self, facts: EngineFacts | None) -> None:
        assert facts is not None
        try:
            mapper = engine_mapper(self._settings)
            check_mapper(mapper.mapper, facts)
            self._claims = Claims(mapper, facts, self._looker, self._settings)
        except KvmapError as error:
            cause = error.cause if isinstance(error, Incompatible) else "mapper_file"
            self._no_taking = Incompatible(cause, str(error))
            _log.warning("no cache is taken in this engine: %s", error)

    def close(self) -> None:
        """Let threads end."""
        self._looker.close()

    def new_request(self, request: Any) -> None:
        """A request has come."""
        try:
            asked = read_asked(request.kv_transfer_params)
        except BadAsking as error:
            tracked = self._tracked[request.request_id] = _Tracked(request, Asked())
            tracked.refuse("request", error)
            return
        if asked is None:
            return
        tracked = self._tracked[request.request_id] = _Tracked(request, asked)
        if asked.take:
            tracked.search = Search(request, asked)
            if self._no_taking is not None:
                tracked.refuse(self._no_taking.cause, self._no_taking)
        if asked.publish or asked.publish_output:
            self._begin_publication(tracked)

    def _begin_publication(self, tracked: _Tracked) -> None:
        request = tracked.request
        reason = unservable(request) if self._no_publishing is None else str(self._no_publishing)
        if reason is None and request.num_prompt_tokens < BLOCK_TOKENS:
            reason = f"{request.num_prompt_tokens} tokens: caches are found by blocks of {BLOCK_TOKENS}"
        if reason is not None:
            tracked.published = Published(0, reason=reason)
        elif tracked.asked.publish:
            assert self._facts is not None
            name = namespace(self._facts.identity, request.cache_salt)
            tracked.publication = self._announced(name, tuple(request.prompt_token_ids))

    def _announced(self, name: str, token_ids: tuple[int, ...]) -> _Publication:
        """A cache that is about to be written, in a group of its own."""
        assert self._facts is not None
        facts, group = self._facts, secrets.token_hex(16)
        manifest = Manifest(name, facts.identity, group, token_ids, facts.shape, facts.dtype, facts.rotations)
        return _Publication(group, name, self._looker.begin(manifest))

    def matched(self, request: Any, n_computed: int) -> tuple[int | None, bool]:
        """How many tokens beyond those computed can be had; None: ask again. See vLLM's connector base."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None or tracked.search is None or tracked.outcome is not None or tracked.is_loading:
            return 0, False
        assert self._claims is not None
        try:
            tracked.claim = self._claims.claim(tracked.search, n_computed)
        except Incompatible as error:
            tracked.refuse(error.cause, error)
            return 0, False
        except Exception as error:
            # a request is never lost to the search for a cache
            _log.warning("%s: looking for a cache failed", request.request_id, exc_info=True)
            tracked.refuse("failure", f"{type(error).__name__}: {error}")
            return 0, False
        if tracked.claim is None:
            return None, False
        return tracked.claim.n_end - n_computed, True

    def allocated(self, request: Any, blocks: Any, n_external: int) -> None:
        """Pages are there for what was claimed."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None or tracked.claim is None or tracked.is_loading or tracked.outcome is not None:
            return
        claim = tracked.claim
        if n_external == 0:
            tracked.refuse("failure", "the engine did not take the tokens that were offered")
            return
        tracked.is_loading = True
        tracked.undo_salt = salt_blocks(request, claim.n_own, self._hash_tokens)
        tokens, block_ids = tuple(request.prompt_token_ids[: claim.n_end]), tuple(blocks.get_block_ids()[0])
        manifest = claim.match.manifest
        take = Take(request.request_id, manifest, tokens, claim.n_own, block_ids, claim.wait_seconds)
        self._messages.takes.append(take)

    def messages(self, output: SchedulerOutput) -> Messages:
        """To the worker, for this step."""
        resumed = output.scheduled_cached_reqs.resumed_req_ids
        for request_id, n_scheduled in output.num_scheduled_tokens.items():
            tracked = self._tracked.get(request_id)
            if tracked is not None and tracked.publication is not None:
                self._publish_step(tracked, n_scheduled, output, request_id in resumed)
        messages, self._messages = self._messages, Messages()
        return messages

    def _publish_step(
        self, tracked: _Tracked, n_scheduled: int, output: SchedulerOutput, is_resumed: bool
    ) -> None:
        request, publication = tracked.request, tracked.publication
        assert publication is not None
        assert output.kv_connector_block_state is not None
        if tracked.is_loading:
            self._give_up(tracked, "mapped tokens lie below: only a model's own cache is published")
            return
        seconds = 0.0 if self._looker.is_stuck(_SEEN_SECONDS) else _BEGUN_SECONDS
        if publication.upto == 0 and settled(publication.begun, seconds):
            tracked.publication, tracked.published = None, Published(request.num_prompt_tokens)
            return
        if is_resumed and publication.upto:
            # its pages were given away: what is written so far stays, what follows is the same tokens again
            self._drop(publication)
            publication = self._announced(publication.name, tuple(request.prompt_token_ids))
            tracked.publication = publication
        stop = min(request.num_computed_tokens + n_scheduled, request.num_prompt_tokens)
        block_ids = output.kv_connector_block_state.get_block_ids(request.request_id)
        if stop <= publication.upto or block_ids is None:
            return
        tokens = tuple(request.prompt_token_ids) if stop == request.num_prompt_tokens else None
        start, publication.upto = publication.upto, stop
        self._messages.publishes.append(
            Publish(
                request.request_id,
                publication.group,
                start,
                stop,
                tuple(block_ids[0]),
                tokens,
                publication.name,
            )
        )

    def learn(self, report: Report) -> None:
        """What the worker has done."""
        for request_id, taken in report.taken.items():
            tracked = self._tracked.get(request_id)
            if tracked is not None:
                _learn_taken(tracked, taken)
        for tracked in self._tracked.values() if report.failed_groups else ():
            publication = tracked.publication
            if publication is not None and publication.group in report.failed_groups:
                why = report.failed_groups[publication.group]
                tracked.publication, tracked.published = None, Published(0, reason=f"storage: {why}")

    def finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """A request is over: what it is answered, and whether its pages are still needed."""
        tracked = self._tracked.pop(request.request_id, None)
        if tracked is None:
            return False, None
        answer: dict[str, Any] = {}
        if tracked.outcome is not None:
            answer |= tracked.outcome.record()
        elif tracked.is_loading:
            self._messages.given_up_takes.append(request.request_id)
        n_kept = 0
        if tracked.asked.publish or tracked.asked.publish_output:
            published = self._published(tracked)
            n_kept = self._publish_all(tracked, block_ids)
            answer |= replace(published, output_pending=n_kept).record()
        return n_kept > 0, {FIELD: answer} if answer else None

    def _published(self, tracked: _Tracked) -> Published:
        """What became of the prompt's publication."""
        publication, request = tracked.publication, tracked.request
        if publication is None:
            return tracked.published or Published(0)
        if publication.upto < request.num_prompt_tokens:
            self._give_up(tracked, "the request ended before its prompt was read")
            return Published(0, reason="the request ended before its prompt was read")
        self._looker.end(publication.group)
        pending = Published(0, reason="not written yet: the storage is slow, or failed", pending=True)
        if self._looker.is_stuck(_SEEN_SECONDS):
            return pending
        try:
            seen = self._looker.published(publication.name, tuple(request.prompt_token_ids))
            manifest = seen.result(timeout=_SEEN_SECONDS)
        except FutureTimeout:
            return pending
        except (KvmapError, OSError) as error:
            return Published(0, reason=f"storage: {error}")
        if manifest is None:
            return pending
        return Published(request.num_prompt_tokens, manifest.n_bytes, manifest.seconds)

    def _publish_all(self, tracked: _Tracked, block_ids: list[int]) -> int:
        """Have all pages read before they are given back: of how many tokens; 0: there is no need."""
        request = tracked.request
        n_tokens = min(request.num_computed_tokens, request.num_tokens - 1)
        refuses = self._no_publishing is not None or unservable(request) is not None
        if not tracked.asked.publish_output or tracked.is_loading or refuses or n_tokens < 1:
            return 0
        assert self._facts is not None
        name = namespace(self._facts.identity, request.cache_salt)
        tokens, group = tuple(request.all_token_ids[:n_tokens]), secrets.token_hex(16)
        self._messages.publishes.append(
            Publish(request.request_id, group, 0, n_tokens, tuple(block_ids), tokens, name, after_end=True)
        )
        return n_tokens

    def _give_up(self, tracked: _Tracked, reason: str) -> None:
        assert tracked.publication is not None
        self._drop(tracked.publication)
        tracked.publication, tracked.published = None, Published(0, reason=reason)

    def _drop(self, publication: _Publication) -> None:
        self._messages.dropped_groups.append(publication.group)
        self._looker.end(publication.group)


def _learn_taken(tracked: _Tracked, taken: Taken) -> None:
    """What became of a request's take; where it came to nothing, its pages are plain ones again."""
    request, claim = tracked.request, tracked.claim
    if taken.cause is not None or claim is None:
        tracked.refuse(taken.cause or "failure", taken.reason)
        tracked.is_loading = False
        if tracked.undo_salt is not None:
            tracked.undo_salt()
            tracked.undo_salt = None
        return
    tracked.outcome = Outcome(
        "applied",
        None,
        taken.reason,
        n_prompt=request.num_prompt_tokens,
        n_mapped=taken.n_mapped,
        n_native_head=taken.n_native_head,
        n_own_prefix=claim.n_own,
        n_held_back=request.num_prompt_tokens - claim.n_end,
        bytes=taken.bytes,
        load_seconds=taken.load_seconds,
        map_seconds=taken.map_seconds,
        wait_seconds=taken.wait_seconds,
    )
