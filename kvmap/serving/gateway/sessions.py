"""What is remembered of conversations: who answers them, and what the source has published of them."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from kvmap.serving.gateway.asked import Asked, Mark
from kvmap.serving.gateway.settings import SessionSettings


@dataclass
class Session:
    """One conversation, a handful of numbers whatever its length.

    Requests of one session may overlap. What each reads it reads between two awaits, so it is of one moment;
    what it adds commutes. An escalation that lands while another request is with the source holds for the
    requests after both.

    Attributes:
        escalated: whether the target answers.
        target_answers: how many it has given since.
        turns: answers given, by either.
        tokens: of prompts and answers, all turns together, as the engines counted them.
        published_tokens: of the prompt that the source has published last.
        published_mark: by which a later prompt that begins with that one is known, see `Asked.mark`.
        published_at: when the request came for which it was published.
        published_bytes: of all caches published for it; a bound on what it can fill the storage with.
        in_use: requests under way.
        used: when it was last used, seconds of the clock of its `Sessions`.
    """

    escalated: bool = False
    target_answers: int = 0
    turns: int = 0
    tokens: int = 0
    published_tokens: int = 0
    published_mark: Mark | None = None
    published_at: float = float("-inf")
    published_bytes: int = 0
    in_use: int = 0
    used: float = 0.0

    def escalate(self) -> None:
        """The target answers from here on."""
        if not self.escalated:
            self.escalated, self.target_answers = True, 0

    def back(self) -> None:
        """The source answers from here on."""
        self.escalated, self.target_answers = False, 0

    def published(self, n_tokens: int, n_bytes: int, mark: Mark, started: float) -> None:
        """Count a cache that the source has published.

        Args:
            n_tokens: of what; 0: nothing lies there.
            n_bytes: that were written.
            mark: by which a prompt that begins so is known.
            started: when the request came for which it was. The source may still read for one turn while the
                next is answered: of two, the later request's stands, whichever is published last.
        """
        self.published_bytes += n_bytes
        if n_tokens > 0 and started >= self.published_at:
            self.published_tokens, self.published_mark, self.published_at = n_tokens, mark, started

    def published_of(self, asked: Asked) -> int:
        """Tokens of a request's prompt that the source has published, with the answer that came then."""
        begins_so = (
            self.published_mark is not None and asked.mark(self.published_mark[0]) == self.published_mark
        )
        return self.published_tokens if begins_so else 0

    def answered(self, *, by_target: bool, tokens: int, stay_turns: int | None) -> None:
        """Count an answer; the target gives the conversation back when its turns are over."""
        self.turns += 1
        self.tokens += tokens
        if by_target and self.escalated:
            self.target_answers += 1
            if stay_turns is not None and self.target_answers > stay_turns:
                self.back()


class Sessions:
    """At most so many sessions, the least recently used given up first, those in use never.

    All methods run on one event loop and none awaits, so each is atomic.
    """

    def __init__(
        self,
        settings: SessionSettings,
        clock: Callable[[], float] = time.monotonic,
        forgotten: Callable[[str], None] = lambda why: None,
    ) -> None:
        """None yet.

        Args:
            settings: the bounds; `max_sessions` is at least the number of requests at a time.
            clock: seconds.
            forgotten: is told why a session was given up, `idle` or `full`.
        """
        self.settings, self._clock, self._forgotten = settings, clock, forgotten
        self._sessions: OrderedDict[str, Session] = OrderedDict()

    def __len__(self) -> int:
        """How many are remembered."""
        self._drop_idle()
        return len(self._sessions)

    @contextmanager
    def using(self, key: str | None) -> Iterator[Session]:
        """The session of a key, remembered as long as it is used; without a key, one that nobody keeps."""
        if key is None:
            yield Session()
            return
        self._drop_idle()
        session = self._sessions.get(key)
        if session is None:
            self._make_room()
            session = self._sessions[key] = Session()
        session.in_use += 1
        self._touch(key, session)
        try:
            yield session
        finally:
            session.in_use -= 1
            self._touch(key, session)

    def _touch(self, key: str, session: Session) -> None:
        session.used = self._clock()
        self._sessions.move_to_end(key)

    def _drop_idle(self) -> None:
        """Sessions lie in the order of their last use, but those in use may lie anywhere."""
        horizon = self._clock() - self.settings.ttl_seconds
        stale = []
        for key, session in self._sessions.items():
            if session.used >= horizon:
                break
            if not session.in_use:
                stale.append(key)
        for key in stale:
            self._forget(key, "idle")

    def _make_room(self) -> None:
        if len(self._sessions) < self.settings.max_sessions:
            return
        idle = next((key for key, session in self._sessions.items() if not session.in_use), None)
        if idle is not None:
            self._forget(idle, "full")

    def _forget(self, key: str, why: str) -> None:
        del self._sessions[key]
        self._forgotten(why)
