"""The connector in the scheduler: what each request takes, what it publishes, and what it is answered."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig

from kvmap.errors import KvmapError
from kvmap.serving.asking import Asked, BadAsking, read_asked
from kvmap.serving.compatibility import EngineFacts, Incompatible, check_mapper
from kvmap.serving.outcome import FIELD, Outcome, Published
from kvmap.serving.store import SharedFolder
from kvmap.serving.vllm.claiming import Claims, Search
from kvmap.serving.vllm.facts import engine_facts
from kvmap.serving.vllm.looking import Looker
from kvmap.serving.vllm.mapper_files import engine_mapper
from kvmap.serving.vllm.messages import Messages, Outbox, Report, Take, Taken
from kvmap.serving.vllm.publications import Publications
from kvmap.serving.vllm.salting import salt_blocks
from kvmap.serving.vllm.settings import Settings
from kvmap.serving.vllm.tracked import Tracked

_log = logging.getLogger(__name__)


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
        self._hash_tokens = kv_cache_config.hash_block_size or vllm_config.cache_config.block_size
        self._looker = Looker(SharedFolder(settings.storage, settings.max_storage_bytes))
        self._tracked: dict[str, Tracked] = {}
        self._outbox = Outbox()
        self._publications: Publications | Incompatible
        self._claims: Claims | Incompatible
        try:
            facts = engine_facts(vllm_config, kv_cache_config)
            facts.check()
        except KvmapError as error:
            self._publications = self._claims = _incompatible(error, "layout")
            _log.warning("kvmap serves nothing in this engine: %s", error)
            return
        self._publications = Incompatible("request", "this engine was started as a target alone")
        if publishes:
            self._publications = Publications(facts, self._looker, self._outbox)
        self._claims = Incompatible("request", "this engine was started as a source alone")
        if takes:
            self._claims = _opened(facts, self._looker, settings)

    def close(self) -> None:
        """Let threads end."""
        self._looker.close()

    def new_request(self, request: Any) -> None:
        """A request has come."""
        try:
            asked = read_asked(request.kv_transfer_params)
        except BadAsking as error:
            tracked = self._tracked[request.request_id] = Tracked(request, Asked())
            tracked.refuse("request", error)
            return
        if asked is None:
            return
        tracked = self._tracked[request.request_id] = Tracked(request, asked)
        if asked.take:
            tracked.search = Search(request, asked)
            if isinstance(self._claims, Incompatible):
                tracked.refuse(self._claims.cause, self._claims)
        if asked.publish or asked.publish_output:
            if isinstance(self._publications, Incompatible):
                tracked.published = Published(0, reason=str(self._publications))
            else:
                self._publications.begin(tracked)

    def matched(self, request: Any, n_computed: int) -> tuple[int | None, bool]:
        """How many tokens beyond those computed can be had; None: ask again. See vLLM's connector base."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None or tracked.search is None or not tracked.is_searching:
            return 0, False
        assert isinstance(self._claims, Claims)
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
        tracked.outcome, tracked.tries_again = None, False
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
        self._outbox.messages.takes.append(take)

    def messages(self, output: SchedulerOutput) -> Messages:
        """To the worker, for this step."""
        for request_id, n_scheduled in output.num_scheduled_tokens.items():
            tracked = self._tracked.get(request_id)
            if tracked is not None:
                self._publish(tracked, n_scheduled, output)
        messages = self._outbox.taken()
        messages.is_idle = output.total_num_scheduled_tokens == 0
        return messages

    def _publish(self, tracked: Tracked, n_scheduled: int, output: SchedulerOutput) -> None:
        publications = self._publications
        if isinstance(publications, Incompatible) or not publications.wants_step(tracked):
            return
        assert output.kv_connector_block_state is not None
        request_id = tracked.request.request_id
        block_ids = output.kv_connector_block_state.get_block_ids(request_id)
        if block_ids is not None:
            is_resumed = request_id in output.scheduled_cached_reqs.resumed_req_ids
            publications.step(tracked, n_scheduled, tuple(block_ids[0]), is_resumed)

    def learn(self, report: Report) -> None:
        """What the worker has done."""
        for request_id, taken in report.taken.items():
            tracked = self._tracked.get(request_id)
            if tracked is not None:
                _learn_taken(tracked, taken)
        for tracked in self._tracked.values() if report.failed_groups else ():
            publication = tracked.publication
            if publication is not None and publication.group in report.failed_groups:
                assert isinstance(self._publications, Publications)
                self._publications.failed(tracked, report.failed_groups[publication.group])

    def finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """A request is over: what it is answered, and whether its pages are still needed."""
        tracked = self._tracked.pop(request.request_id, None)
        if tracked is None:
            return False, None
        answer: dict[str, Any] = {}
        if tracked.outcome is not None:
            answer |= tracked.outcome.record()
        elif tracked.is_loading:
            self._outbox.messages.given_up_takes.append(request.request_id)
        n_kept = 0
        if tracked.asked.publish or tracked.asked.publish_output:
            published = tracked.published or Published(0)
            if isinstance(self._publications, Publications):
                published = self._publications.published(tracked)
                n_kept = self._publications.publish_all(tracked, block_ids)
            answer |= replace(published, output_pending=n_kept).record()
        return n_kept > 0, {FIELD: answer} if answer else None


def _opened(facts: EngineFacts, looker: Looker, settings: Settings) -> Claims | Incompatible:
    """What decides on takes, with the engine's mapper; or why nothing is taken."""
    try:
        mapper = engine_mapper(settings)
        check_mapper(mapper.mapper, facts)
        return Claims(mapper, facts, looker, settings)
    except KvmapError as error:
        _log.warning("no cache is taken in this engine: %s", error)
        return _incompatible(error, "mapper_file")


def _incompatible(error: KvmapError, cause: str) -> Incompatible:
    return error if isinstance(error, Incompatible) else Incompatible(cause, str(error))


def _learn_taken(tracked: Tracked, taken: Taken) -> None:
    """What became of a request's take; where it came to nothing, its pages are plain ones again."""
    request, claim = tracked.request, tracked.claim
    if taken.cause is not None or claim is None:
        tracked.refuse(taken.cause or "failure", taken.reason, taken)
        tracked.is_loading = False
        if claim is not None and not claim.match.manifest.is_written:
            tracked.try_again()
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
