"""The source reads a prompt for a hand-off alone, before the target is asked for it or beside it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable
from typing import Any

from kvmap.serving.gateway.asked import Asked
from kvmap.serving.gateway.case import Case
from kvmap.serving.gateway.counting import Counting
from kvmap.serving.gateway.engine import Engine, EngineFailed
from kvmap.serving.gateway.outcomes import TRANSFER, note_published
from kvmap.serving.gateway.settings import Settings
from kvmap.serving.outcome import FIELD

log = logging.getLogger("kvmap.gateway")

#: of a request, what has no bearing on how its prompt is read
_OF_THE_ANSWER = {
    *("stream", "stream_options", "n", "stop", "stop_token_ids", "seed", "logprobs", "top_logprobs", "echo"),
    *("max_tokens", "max_completion_tokens", "min_tokens", "ignore_eos", "logit_bias"),
    *("allowed_token_ids", "bad_words", "response_format", "structured_outputs"),
}


class SourceReads:
    """Has the source read and publish prompts.

    A read beside the target is a task that is held here until it ends. Up to the end of its request's answer
    it shares the request's fate: where there is none, it is cancelled. One that takes longer than the answer
    goes on, of use to the next turn, and what it comes to is put down for the session all the same.
    """

    def __init__(self, source: Engine, settings: Settings, counting: Counting) -> None:
        """Args: who reads; all settings; what counts."""
        self._source, self._settings, self._counting = source, settings, counting
        self._under_way: set[asyncio.Task[None]] = set()
        self._last_published = True

    def __len__(self) -> int:
        """How many are under way beside the target, or after it."""
        return len(self._under_way)

    async def begin(self, case: Case) -> bool:
        """Have a prompt read.

        Returns:
            Whether the source is still at it, so that the target is to take the cache as it is written. Where
            the read before came to nothing, this one is waited for: a target waits in vain for a source
            that cannot publish.
        """
        if not self._beside():
            await self._read(case)
            return False
        task = case.reading = asyncio.create_task(self._read(case))
        self._under_way.add(task)
        task.add_done_callback(self._ended)
        case.closing.push_async_callback(self._leave, case)
        return True

    def _beside(self) -> bool:
        room = len(self._under_way) < self._settings.limits.in_flight
        return self._settings.handoff.overlap and self._last_published and room

    async def give_up(self, case: Case) -> None:
        """Cancel a request's read, where one is under way, at the engine too."""
        if case.reading is not None:
            await _cancelled([case.reading])

    async def aclose(self) -> None:
        """Cancel all of them."""
        await _cancelled(list(self._under_way))

    async def _leave(self, case: Case) -> None:
        """The request is over."""
        if not case.concluded:
            await self.give_up(case)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._under_way.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a read of the source's failed", exc_info=error)

    async def _read(self, case: Case) -> None:
        """The source reads the prompt, whose earlier turns it has in its own cache, and publishes it."""
        begun, name = time.perf_counter(), f"{case.request_id}-read"
        seconds = self._settings.timeouts.first_token
        try:
            answer = await self._source.answer(case.asked.kind, _body(case.asked), name, seconds)
        except EngineFailed as error:
            self._last_published = False
            case.report.failed(error)
            self._counting.engine_failed(error)
            self._counting.reads.labels("failed").inc()
        except asyncio.CancelledError:
            self._counting.reads.labels("cancelled").inc()
            raise
        else:
            case.report.read_seconds = time.perf_counter() - begun
            self._note(case, answer)

    def _note(self, case: Case, answer: dict[str, Any]) -> None:
        published = note_published(answer, case)
        n_tokens = published.published if published else 0
        self._counting.reads.labels("published" if n_tokens else "nothing").inc()
        self._last_published = n_tokens > 0 or (published is not None and published.pending)
        if published is not None and case.concluded:  # the report, by which bytes are counted, has gone out
            self._counting.published_bytes.inc(max(0, published.bytes))


def _body(asked: Asked) -> dict[str, Any]:
    """A request that has a prompt read and published, and asks for as little else as can be."""
    body = {name: value for name, value in asked.body.items() if name not in _OF_THE_ANSWER}
    body["max_completion_tokens" if asked.kind == "chat" else "max_tokens"] = 1
    body[TRANSFER] = {FIELD: {"publish": True}}
    return body


async def _cancelled(tasks: Iterable[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
