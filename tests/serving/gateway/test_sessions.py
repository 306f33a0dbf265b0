"""Sessions are bounded in number, age and storage, and requests of one may overlap."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmap.serving.gateway.sessions import Session, Sessions
from kvmap.serving.gateway.settings import SessionSettings
from tests.serving.gateway.asking import LONG, Start, say, stream, text_of, told, wish
from tests.serving.gateway.fake_engine import FakeEngine
from tests.serving.gateway.running import eventually


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def sessions(max_sessions: int = 2, ttl_seconds: float = 10.0) -> tuple[Sessions, Clock, list[str]]:
    clock, forgotten = Clock(), []
    settings = SessionSettings(max_sessions=max_sessions, ttl_seconds=ttl_seconds)
    return Sessions(settings, clock, forgotten.append), clock, forgotten


def touch(kept: Sessions, key: str) -> Session:
    with kept.using(key) as session:
        return session


class TestSessions:
    def test_are_the_same_for_the_same_key(self) -> None:
        kept, _, _ = sessions()
        assert touch(kept, "a") is touch(kept, "a")
        assert touch(kept, "a") is not touch(kept, "b")

    def test_the_least_recently_used_one_goes_first(self) -> None:
        kept, _, forgotten = sessions()
        first = touch(kept, "a")
        second = touch(kept, "b")
        touch(kept, "a")
        touch(kept, "c")
        assert touch(kept, "a") is first
        assert touch(kept, "b") is not second
        assert forgotten == ["full", "full"]

    def test_one_in_use_never_goes(self) -> None:
        kept, clock, _ = sessions(ttl_seconds=1)
        with kept.using("a") as session:
            for key in "bcd":
                touch(kept, key)
            clock.now = 100
            touch(kept, "e")
            with kept.using("a") as again:
                assert again is session
                assert session.in_use == 2
        assert touch(kept, "a") is session
        assert session.in_use == 0

    def test_idle_ones_are_forgotten(self) -> None:
        kept, clock, forgotten = sessions()
        touch(kept, "a")
        clock.now = 9
        touch(kept, "b")
        clock.now = 11
        assert len(kept) == 1
        assert forgotten == ["idle"]

    def test_without_a_key_none_is_kept(self) -> None:
        kept, _, _ = sessions()
        with kept.using(None) as session:
            session.escalate()
        with kept.using(None) as session:
            assert not session.escalated
        assert len(kept) == 0

    @given(st.lists(st.tuples(st.sampled_from("abcdef"), st.booleans()), max_size=60))
    def test_are_never_more_than_the_bound_while_it_holds_those_in_use(
        self, steps: list[tuple[str, bool]]
    ) -> None:
        """Opens and closes sessions in any order, at most three at a time in use."""
        kept, clock, _ = sessions(max_sessions=3, ttl_seconds=5)
        uses: list[tuple[str, Session, ExitStack]] = []
        for key, opens in steps:
            clock.now += 1
            if opens and len(uses) < 3:
                stack = ExitStack()
                uses.append((key, stack.enter_context(kept.using(key)), stack))
            elif uses:
                uses.pop(0)[2].close()
            assert len(kept) <= 3
            for key_in_use, session, _ in uses:
                assert kept._sessions[key_in_use] is session
        for _, _, stack in uses:
            stack.close()
        assert all(session.in_use == 0 for session in kept._sessions.values())


class TestStaying:
    @pytest.mark.parametrize(("stay_turns", "after"), [(None, [True] * 4), (0, [False] * 4)])
    def test_for_good_or_not_at_all(self, stay_turns: int | None, after: list[bool]) -> None:
        session, seen = Session(), []
        session.escalate()
        for _ in range(4):
            session.answered(by_target=session.escalated, tokens=1, stay_turns=stay_turns)
            seen.append(session.escalated)
        assert seen == after

    def test_escalating_again_does_not_begin_anew(self) -> None:
        session = Session()
        for _ in range(3):
            session.escalate()
            session.answered(by_target=True, tokens=5, stay_turns=2)
        assert not session.escalated
        assert (session.turns, session.tokens) == (3, 15)


class TestManyAtATime:
    def test_each_has_its_own_answer(self, gateway: Start, source: FakeEngine, target: FakeEngine) -> None:
        source.pause = target.pause = 0.002
        running = gateway(limits={"in_flight": 64})

        def ask(number: int) -> tuple[str, str]:
            escalated = number % 2 == 1
            chunks = stream(
                running, LONG, **wish(session=f"s{number % 10}", escalate=escalated, mode="handoff")
            )
            return text_of(chunks), told(chunks)["answered_by"]

        with ThreadPoolExecutor(16) as pool:
            answers = list(pool.map(ask, range(60)))
        assert answers == [
            ("large says yes.", "target") if n % 2 else ("small says yes.", "source") for n in range(60)
        ]
        assert eventually(lambda: running.gateway.admission.in_flight == 0)
        assert len(running.gateway.sessions) == 10
        kept = running.gateway.sessions._sessions.values()
        assert [session.in_use for session in kept] == [0] * 10
        assert [session.turns for session in kept] == [6] * 10

    def test_of_one_session_are_all_counted(self, gateway: Start, source: FakeEngine) -> None:
        source.pause = 0.01
        running = gateway(sessions={"max_sessions": 64})
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda _: say(running, "a", **wish(session="s")), range(16)))
        (session,) = running.gateway.sessions._sessions.values()
        assert (session.turns, session.in_use) == (16, 0)
        assert session.tokens == 16 * (18 + 3)
