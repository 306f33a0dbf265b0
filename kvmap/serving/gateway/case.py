"""One request on its way through the gateway."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

from kvmap.serving.gateway.asked import Asked
from kvmap.serving.gateway.report import Report
from kvmap.serving.gateway.sessions import Session


@dataclass
class Case:
    """A request, its session, and what is known of both so far.

    Attributes:
        asked: the request.
        session: its session; one that nobody keeps where it names none.
        count: counts its prompt's tokens.
        report: what will be told of its answer.
        closing: ends, however the request ends, the engines' streams that were opened for it.
        source_failed: whether the source has just given no answer.
        reading: the source's read of its prompt, beside the target; None: there was none.
        concluded: whether all of its answer is there.
        request_id: a name of the gateway's own, by which the engines' logs know it.
    """

    asked: Asked
    session: Session
    count: Callable[[Asked], Awaitable[int | None]]
    closing: AsyncExitStack
    source_failed: bool = False
    reading: asyncio.Task[None] | None = None
    concluded: bool = False
    report: Report = field(default_factory=Report)
    request_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    _n_tokens: int | None = None
    _counted: bool = False

    @property
    def turn(self) -> int:
        """Number of the request in its conversation, 1 the first."""
        return max(1, self.asked.turn if self.asked.turn is not None else self.session.turns + 1)

    async def n_tokens(self) -> int | None:
        """Of its prompt, counted once; None: no engine says."""
        if not self._counted:
            self._n_tokens, self._counted = await self.count(self.asked), True
        return self._n_tokens
