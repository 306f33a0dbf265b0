"""How the target comes by the context: from a cache that the source has published, or by reading it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from kvmap.serving.gateway.asked import Asked
from kvmap.serving.gateway.case import Case
from kvmap.serving.gateway.counting import Counting
from kvmap.serving.gateway.engine import Engine, EngineFailed, Role
from kvmap.serving.gateway.outcomes import TRANSFER, note_outcome
from kvmap.serving.gateway.prompts import Prompts, surely_shorter
from kvmap.serving.gateway.settings import Mode, Settings
from kvmap.serving.outcome import FIELD

#: seconds that `auto` does not ask again, after the target has said that hand-offs cannot be
UNSUPPORTED_SECONDS = 60.0
#: causes that are of the engines, not of one request
_LASTING = ("mismatch", "layout")
#: of a request, what has no bearing on how its prompt is read
_OF_THE_ANSWER = {
    *("stream", "stream_options", "n", "stop", "stop_token_ids", "seed", "logprobs", "top_logprobs", "echo"),
    *("max_tokens", "max_completion_tokens", "min_tokens", "ignore_eos", "logit_bias"),
    *("allowed_token_ids", "bad_words", "response_format", "structured_outputs"),
}


class HandingOver:
    """Has the source publish and the target take."""

    def __init__(
        self, settings: Settings, engines: Mapping[Role, Engine], prompts: Prompts, counting: Counting
    ) -> None:
        """Args: all settings; both engines; what counts prompts; what counts."""
        self._settings, self._engines = settings, engines
        self._prompts, self._counting = prompts, counting
        self._unsupported: tuple[float, str] | None = None

    def mode(self, asked: Asked) -> Mode:
        """Of a request: its own, or as set."""
        return asked.wish.mode or self._settings.handoff.mode

    def source_body(self, case: Case) -> dict[str, Any]:
        """What the source is asked: the request, and to publish its cache where that can be of use."""
        body = dict(case.asked.body)
        short = surely_shorter(case.asked, self._min_tokens(case.asked))
        if self.mode(case.asked) != "reprefill" and not short and self._may_publish(case):
            body[TRANSFER] = {FIELD: {"publish": True, "publish_output": case.asked.kind == "chat"}}
        return body

    async def target_body(self, case: Case) -> dict[str, Any]:
        """What the target is asked, once the source has read and published what it has not yet.

        The report's `mode` says which of the two it is, and `mode_reason` why, where there was a choice.
        """
        body, report, handoff = dict(case.asked.body), case.report, self._settings.handoff
        mode = self.mode(case.asked)
        report.mode = "reprefill"
        if mode == "reprefill":
            return body
        if mode == "auto":
            report.mode_reason = await self._not_worth_it(case)
            if report.mode_reason is not None:
                return body
        report.mode, report.mode_reason = "handoff", None
        least = self._min_tokens(case.asked)
        n_tokens = await case.n_tokens()
        unread = least if n_tokens is None else n_tokens - case.session.published_of(case.asked)
        if unread >= least and self._may_publish(case) and not case.source_failed:
            await self._have_it_read(case)
        take: dict[str, Any] = {"take": True, "min_tokens": least, "wait_seconds": handoff.wait_seconds}
        if handoff.require is not None:
            take["require"] = handoff.require
        body[TRANSFER] = {FIELD: take}
        return body

    def learn(self, case: Case) -> None:
        """Remember what the target said, for the next request."""
        outcome = case.report.outcome
        if outcome is None:
            return
        if outcome.outcome == "unsupported" and outcome.cause in _LASTING:
            self._unsupported = time.monotonic(), outcome.reason
        elif outcome.outcome == "applied":
            self._unsupported = None

    async def _not_worth_it(self, case: Case) -> str | None:
        """Why `auto` has the target read by itself; None: it does not."""
        least = self._min_tokens(case.asked)
        if self._unsupported and time.monotonic() - self._unsupported[0] < UNSUPPORTED_SECONDS:
            return f"the target said that hand-offs cannot be: {self._unsupported[1]}"
        if surely_shorter(case.asked, least):
            return f"fewer than {least} tokens"
        n_tokens = await case.n_tokens()
        if n_tokens is not None and n_tokens < least:
            return f"{n_tokens} tokens, fewer than {least}"
        if case.asked.kind == "chat" and await self._prompts.agree() is False:
            return "the engines' chat templates differ, so no cache of the one is of the other's tokens"
        return None

    async def _have_it_read(self, case: Case) -> None:
        """The source reads the prompt, whose earlier turns it has in its own cache, and publishes it."""
        asked = case.asked
        body = {name: value for name, value in asked.body.items() if name not in _OF_THE_ANSWER}
        body["max_completion_tokens" if asked.kind == "chat" else "max_tokens"] = 1
        body[TRANSFER] = {FIELD: {"publish": True}}
        begun = time.perf_counter()
        try:
            seconds = self._settings.timeouts.first_token
            answer = await self._engines["source"].answer(
                asked.kind, body, f"{case.request_id}-read", seconds
            )
        except EngineFailed as error:
            case.report.failed(error)
            self._counting.engine_failed(error)
            self._counting.reads.labels("failed").inc()
            return
        case.report.read_seconds = time.perf_counter() - begun
        note_outcome(answer, case)
        published = case.report.published
        self._counting.reads.labels("published" if published and published.published else "nothing").inc()

    def _may_publish(self, case: Case) -> bool:
        return case.session.published_bytes < self._settings.sessions.max_bytes

    def _min_tokens(self, asked: Asked) -> int:
        return asked.wish.min_tokens or self._settings.handoff.min_tokens
