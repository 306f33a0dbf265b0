"""An answer sent on as it is made."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from kvmap.serving.gateway.case import Case
from kvmap.serving.gateway.confidence import Window, asks_for_odds, odds_of, without_odds
from kvmap.serving.gateway.engine import Engine, EngineFailed, EngineStream, are_choices, parsed
from kvmap.serving.gateway.events import DONE, event
from kvmap.serving.gateway.outcomes import TRANSFER, note_outcome
from kvmap.serving.gateway.refusals import error_body
from kvmap.serving.gateway.settings import ConfidenceSettings

_DONE = "[DONE]"


class StreamReply:
    """An answer under way, of which the first token is there, or as many as confidence is judged by.

    Attributes:
        confidence: of the tokens so far; None where it is not judged.
        n_judged: how many they are.
        over: whether all of it is there, or the engine has failed in the middle of it.
    """

    def __init__(
        self, stream: EngineStream, case: Case, judged: ConfidenceSettings | None, sent_at: float
    ) -> None:
        """Args: open; of which request; how confidence is measured, None: it is not; when it was asked."""
        self._stream, self._case, self._sent_at = stream, case, sent_at
        self._window = None if judged is None else Window(judged)
        self._early: list[tuple[str, dict[str, Any] | None]] = []
        self._first_token_at: float | None = None
        self._role = stream.role
        self.over = False

    @property
    def confidence(self) -> float | None:
        """Of the tokens so far."""
        return None if self._window is None else self._window.confidence

    @property
    def n_judged(self) -> int:
        """Tokens that it is judged by."""
        return 0 if self._window is None else len(self._window.odds)

    async def begin(self) -> None:
        """Wait for what must be there before anything is sent: until then another engine can take over.

        Raises:
            EngineFailed: it came to nothing.
        """
        while True:
            payload, chunk = await self._next()
            self._early.append((payload, chunk))
            if chunk is None or self._begun(chunk):
                break
        self._first_token_at = time.perf_counter()

    def _begun(self, chunk: dict[str, Any]) -> bool:
        choices = chunk.get("choices") or []
        if any(choice.get("finish_reason") for choice in choices):
            return True
        seen = any(_visible(choice) for choice in choices)
        if self._window is None or self._window.full:
            return seen
        return seen and not self._window.odds  # the engine gives none: there is nothing to wait for

    async def _next(self) -> tuple[str, dict[str, Any] | None]:
        """The next event, as it came and parsed; None for the last.

        Raises:
            EngineFailed: it is an error, or no event of an answer.
        """
        payload = await self._stream.next()
        if payload == _DONE:
            return payload, None
        chunk = parsed(payload)
        error = chunk.get("error") if isinstance(chunk, dict) else None
        if not isinstance(chunk, dict) or not (error or are_choices(chunk.get("choices") or [])):
            raise EngineFailed(self._role, "broken", "an event of its stream is none of an answer")
        if error:
            message = error.get("message") if isinstance(error, dict) else error
            raise EngineFailed(self._role, "failed", f"it broke off: {str(message)[:300]}")
        if self._window is not None:
            for choice in chunk.get("choices") or ():
                if not self._window.full:
                    self._window.odds += odds_of(self._case.asked.kind, choice)
        return payload, chunk

    def note(self, case: Case) -> None:
        """Put down what is known of it, where it is the one that stands."""
        case.report.sent_at, case.report.first_token_at = self._sent_at, self._first_token_at

    async def withhold(self) -> None:
        """End it, at the engine too: none of it is sent."""
        await self._stream.aclose()

    async def sent(
        self, conclude: Callable[[], None], broken: Callable[[EngineFailed], None]
    ) -> AsyncIterator[bytes]:
        """The events for the client, `[DONE]` the last one.

        An error of the engine, which now comes too late for another one, is an event of its own.

        Args:
            conclude: called once all of the answer is there, before the report goes out.
            broken: called where the engine fails in the middle, before the client is told.
        """
        try:
            async for content in self._relayed(conclude):
                yield content
        except EngineFailed as error:
            self.over = True
            self._case.report.failed(error)
            broken(error)
            said = error_body(502, f"the {self._role} broke off: {error.reason}", "engine_failed")
            yield event({**said, "kvmap": self._case.report.record()})
            yield DONE

    async def _relayed(self, conclude: Callable[[], None]) -> AsyncIterator[bytes]:
        """Every chunk as it comes, but the last one only when all is known that it tells."""
        report = self._case.report
        last: tuple[str, dict[str, Any]] | None = None
        usage: dict[str, Any] | None = None
        named: dict[str, Any] = {}
        async for payload, chunk in self._all():
            if TRANSFER in chunk:
                note_outcome(chunk, self._case)
                del chunk[TRANSFER]
                payload = ""
            if not chunk.get("choices"):
                if isinstance(chunk.get("usage"), dict):
                    report.count_usage(chunk["usage"])
                    usage = chunk
                continue
            if last is not None:
                yield self._written(*last)
            named, last = chunk, (payload, chunk)
            if not any(choice.get("finish_reason") for choice in chunk["choices"]):
                yield self._written(*last)
                last = None
        self.over = True
        conclude()
        for content in self._ending(last, usage, named):
            yield content

    async def _all(self) -> AsyncIterator[tuple[str, dict[str, Any]]]:
        for payload, chunk in self._early:
            if chunk is None:
                return
            yield payload, chunk
        self._early = []
        while True:
            payload, chunk = await self._next()
            if chunk is None:
                return
            yield payload, chunk

    def _ending(
        self, last: tuple[str, dict[str, Any]] | None, usage: dict[str, Any] | None, named: dict[str, Any]
    ) -> list[bytes]:
        """The last events: what the report is of is known now.

        It goes with the usage where the client wants that, else with the chunk that ends the answer.
        """
        told = {"kvmap": self._case.report.record()}
        events = []
        wants_usage = self._case.asked.include_usage and usage is not None
        if last is not None:
            self._stripped(last[1])
            events.append(self._written(*last) if wants_usage else event({**last[1], **told}))
        if wants_usage:
            events.append(event({**(usage or {}), **told}))
        elif last is None:
            kept = {name: named[name] for name in ("id", "object", "created", "model") if name in named}
            events.append(event({**kept, "choices": [], **told}))
        return [*events, DONE]

    def _written(self, payload: str, chunk: dict[str, Any]) -> bytes:
        """A chunk as it came, where nothing is to be taken out of it."""
        if self._stripped(chunk) or not payload or "\n" in payload or "\r" in payload:
            return event(chunk)
        return b"data: " + payload.encode() + b"\n\n"

    def _stripped(self, chunk: dict[str, Any]) -> bool:
        """Take out the probabilities that the client did not ask for."""
        if self._window is None:
            return False
        for choice in chunk["choices"]:
            without_odds(self._case.asked.kind, choice, self._case.asked.body)
        return True


def _visible(choice: dict[str, Any]) -> bool:
    """Whether a chunk's choice has something of the answer in it: a role alone is nothing."""
    if choice.get("text"):
        return True
    delta = choice.get("delta") or {}
    return any(
        delta.get(name) for name in ("content", "reasoning", "reasoning_content", "tool_calls", "refusal")
    )


async def ask_stream(
    engine: Engine, case: Case, body: dict[str, Any], judged: ConfidenceSettings | None
) -> StreamReply:
    """Ask an engine, and wait until its answer has begun; arguments and errors as of `ask_whole`."""
    if judged is not None:
        asks_for_odds(case.asked.kind, body, judged)
    sent_at = time.perf_counter()
    stream = await engine.open(case.asked.kind, body, case.request_id)
    case.closing.push_async_callback(stream.aclose)
    reply = StreamReply(stream, case, judged, sent_at)
    try:
        await reply.begin()
    except EngineFailed:
        await stream.aclose()
        raise
    return reply
