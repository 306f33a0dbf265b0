"""How the target comes by the context: from a cache that the source has published, or by reading it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from kvmap.serving.gateway.asked import Asked
from kvmap.serving.gateway.case import Case
from kvmap.serving.gateway.counting import Counting
from kvmap.serving.gateway.engine import Engine, Role
from kvmap.serving.gateway.outcomes import TRANSFER
from kvmap.serving.gateway.prompts import Prompts, surely_shorter
from kvmap.serving.gateway.settings import Mode, Settings
from kvmap.serving.gateway.source_reads import SourceReads
from kvmap.serving.outcome import FIELD

#: seconds that `auto` does not ask again, after the target has said that hand-offs cannot be
UNSUPPORTED_SECONDS = 60.0
#: causes that are of the engines, not of one request
_LASTING = ("mismatch", "layout")


class HandingOver:
    """Has the source publish and the target take.

    Attributes:
        reads: has the source read what it has not read yet.
    """

    def __init__(
        self, settings: Settings, engines: Mapping[Role, Engine], prompts: Prompts, counting: Counting
    ) -> None:
        """Args: all settings; both engines; what counts prompts; what counts."""
        self._settings, self._prompts = settings, prompts
        self.reads = SourceReads(engines["source"], settings, counting)
        self._unsupported: tuple[float, str] | None = None

    def mode(self, asked: Asked) -> Mode:
        """Of a request: its own, or as set."""
        return asked.wish.mode or self._settings.handoff.mode

    def source_body(self, case: Case) -> dict[str, Any]:
        """What the source is asked: the request, and to publish its cache where that can be of use."""
        body = dict(case.asked.body)
        every = self._settings.handoff.publish == "every_answer"
        short = surely_shorter(case.asked, self._min_tokens(case.asked))
        if every and self.mode(case.asked) != "reprefill" and not short and self._may_publish(case):
            body[TRANSFER] = {FIELD: {"publish": True, "publish_output": case.asked.kind == "chat"}}
        return body

    async def target_body(self, case: Case) -> dict[str, Any]:
        """What the target is asked; what the source has not read yet it then reads, and publishes.

        The report's `mode` says which of the two it is, and `mode_reason` why, where there was a choice.
        """
        body, report = dict(case.asked.body), case.report
        mode = self.mode(case.asked)
        report.mode = "reprefill"
        if mode == "reprefill":
            return body
        if mode == "auto":
            report.mode_reason = await self._not_worth_it(case)
            if report.mode_reason is not None:
                return body
        report.mode, report.mode_reason = "handoff", None
        if await self._is_unread(case):
            report.overlapped = await self.reads.begin(case)
        body[TRANSFER] = {FIELD: self._take(case)}
        return body

    async def _is_unread(self, case: Case) -> bool:
        """Whether the source is to read the prompt for this hand-off."""
        least, n_tokens = self._min_tokens(case.asked), await case.n_tokens()
        unread = least if n_tokens is None else n_tokens - case.session.published_of(case.asked)
        return unread >= least and self._may_publish(case) and not case.source_failed

    def _take(self, case: Case) -> dict[str, Any]:
        handoff = self._settings.handoff
        take: dict[str, Any] = {
            "take": True,
            "min_tokens": self._min_tokens(case.asked),
            "wait_seconds": handoff.wait_seconds,
        }
        if case.report.overlapped:
            take["grace_seconds"] = handoff.grace_seconds
        if handoff.require is not None:
            take["require"] = handoff.require
        return take

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

    def _may_publish(self, case: Case) -> bool:
        return case.session.published_bytes < self._settings.sessions.max_bytes

    def _min_tokens(self, asked: Asked) -> int:
        return asked.wish.min_tokens or self._settings.handoff.min_tokens
