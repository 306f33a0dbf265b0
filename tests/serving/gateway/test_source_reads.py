"""The source reads while the target already takes: in which order, and whose end ends what."""

from __future__ import annotations

import asyncio
import gc
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AsyncExitStack
from typing import Any

import httpx
import pytest

from kvmap.serving.gateway.app import Gateway
from kvmap.serving.gateway.asked import asked
from kvmap.serving.gateway.case import Case
from kvmap.serving.gateway.reading_settings import read_settings
from kvmap.serving.gateway.report import Report
from kvmap.serving.gateway.sessions import Session
from tests.serving.gateway.asking import LONG, Start, say, stream, told, transfer, wish
from tests.serving.gateway.fake_engine import FakeEngine
from tests.serving.gateway.running import Running, eventually
from tests.serving.gateway.test_shutdown import command

ESCALATED = wish(escalate=True, session="s")
FELL_BACK = {"outcome": "fell_back", "cause": "not_found", "reason": "no cache of it"}
BODY = {"messages": [{"role": "user", "content": LONG}], "kvmap": {"escalate": True}}


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


def report(running: Running, streamed: bool, *texts: str, **arguments: Any) -> dict[str, Any]:
    return told((stream if streamed else say)(running, *texts, **{**ESCALATED, **arguments}))


def reads(running: Running) -> int:
    """Reads under way beside or after their requests."""
    return len(running.gateway.cascade.handing_over.reads)


def session(running: Running) -> Session:
    (kept,) = running.gateway.sessions._sessions.values()
    return kept


def asked_while_reading(source: FakeEngine, target: FakeEngine, answer: Future[Any]) -> bool:
    """Whether the target was asked before the source had read."""
    assert eventually(lambda: source.reads_begun == 1)
    assert eventually(lambda: source.reads_over or target.requests or answer.done())
    return source.reads_over == 0


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
class TestBesideTheTarget:
    def test_the_source_reads_while_the_target_takes(
        self, gateway: Start, source: FakeEngine, target: FakeEngine, pool: ThreadPoolExecutor, streamed: bool
    ) -> None:
        source.prefill = target.prefill = 0.0005
        target.pause = 0.03
        answer = pool.submit(report, gateway(), streamed, LONG)
        assert asked_while_reading(source, target, answer)
        found = answer.result()
        assert transfer(target.requests[0]) == {
            **{"take": True, "min_tokens": 256},
            **{"wait_seconds": 60.0, "grace_seconds": 10.0},
        }
        assert (found["mode"], found["outcome"], found["overlapped"]) == ("handoff", "applied", True)
        assert found["read_seconds"] > 0.3
        assert found["published"]["published"] == 617

    def test_or_before_it_where_that_is_set(
        self, gateway: Start, source: FakeEngine, target: FakeEngine, pool: ThreadPoolExecutor, streamed: bool
    ) -> None:
        source.prefill = 0.0003
        running = gateway(handoff={"overlap": False, "wait_seconds": 7, "grace_seconds": 3})
        answer = pool.submit(report, running, streamed, LONG)
        assert not asked_while_reading(source, target, answer)
        found = answer.result()
        assert (found["outcome"], found["overlapped"]) == ("applied", False)
        assert found["read_seconds"] > 0.15
        assert transfer(target.requests[0]) == {"take": True, "min_tokens": 256, "wait_seconds": 7.0}

    def test_in_mid_conversation_what_is_new_is_waited_for(
        self, gateway: Start, source: FakeEngine, target: FakeEngine, streamed: bool
    ) -> None:
        running = gateway()
        say(running, LONG, **wish(session="s"))
        source.prefill = 0.0002
        found = report(running, streamed, LONG, "small says yes.", "y" * 400)
        assert (found["overlapped"], found["outcome"]) == (True, "applied")
        assert found["n_mapped"] == found["n_prompt"] - 2

    def test_an_answer_that_ends_first_leaves_the_read_to_the_next_turn(
        self, gateway: Start, source: FakeEngine, target: FakeEngine, streamed: bool
    ) -> None:
        source.prefill, target.outcome = 0.0008, FELL_BACK
        running = gateway()
        found = report(running, streamed, LONG)
        assert source.reads_over == 0
        assert reads(running) == 1
        assert (found["outcome"], found["overlapped"]) == ("fell_back", True)
        assert (found["read_seconds"], found["published"]) == (None, None)
        gc.collect()
        assert eventually(lambda: reads(running) == 0)
        assert (source.reads_over, source.aborted) == (1, 0)
        assert running.metric("source_reads_total", outcome="published") == 1
        assert running.metric("published_bytes_total") == 61700
        assert session(running).published_tokens == 617
        target.outcome = None
        assert report(running, streamed, LONG, "large says yes.", "and now?")["outcome"] == "applied"
        assert len(source.requests) == 1

    def test_a_client_that_goes_ends_it(
        self, gateway: Start, source: FakeEngine, target: FakeEngine, streamed: bool
    ) -> None:
        source.prefill = 0.01
        running = gateway()
        with pytest.raises(httpx.ReadTimeout):
            running.post("/v1/chat/completions", json={**BODY, "stream": streamed}, timeout=0.4)
        assert eventually(lambda: source.aborted == 1)
        assert eventually(lambda: reads(running) == 0)
        assert running.metric("source_reads_total", outcome="cancelled") == 1
        assert running.metric("unanswered_total", why="client_gone") == 1

    def test_a_target_that_fails_leaves_the_source_to_one_answer(
        self, gateway: Start, source: FakeEngine, target: FakeEngine, streamed: bool
    ) -> None:
        source.prefill, target.status, target.deaf = 0.0008, 500, 0.1
        running = gateway()
        found = report(running, streamed, LONG)
        assert (found["answered_by"], found["mode"], found["overlapped"]) == ("source", "source", False)
        assert found["failures"] == ["target: HTTP 500: out of order"]
        assert found["read_seconds"] is None
        assert source.aborted == 1
        assert found["published"]["output_pending"] == session(running).published_tokens == 617 + 15
        assert running.metric("source_reads_total", outcome="cancelled") == 1
        assert running.metric("published_bytes_total") == 61700

    def test_a_target_that_fails_later_finds_the_prompt_read(
        self, gateway: Start, source: FakeEngine, target: FakeEngine, streamed: bool
    ) -> None:
        target.status, target.deaf = 500, 0.2
        running = gateway()
        found = report(running, streamed, LONG)
        assert found["answered_by"] == "source"
        assert found["read_seconds"] is not None
        assert found["published"]["output_pending"] == session(running).published_tokens == 617 + 15

    def test_a_source_that_fails_meanwhile_costs_the_hand_off_alone(
        self, gateway: Start, source: FakeEngine, target: FakeEngine, streamed: bool
    ) -> None:
        source.status, source.deaf = 500, 0.1
        found = report(gateway(handoff={"grace_seconds": 0.3}), streamed, LONG)
        assert (found["answered_by"], found["outcome"], found["overlapped"]) == ("target", "fell_back", True)
        assert found["failures"] == ["source: HTTP 500: out of order"]


class TestASourceThatCannotPublish:
    @pytest.mark.parametrize(
        "broken",
        [{"status": 500}, {"publishes": {"published": 0, "reason": "the storage is full"}}],
        ids=["fails", "publishes nothing"],
    )
    def test_is_waited_for_until_it_publishes_again(
        self, gateway: Start, source: FakeEngine, broken: dict[str, Any]
    ) -> None:
        running = gateway(handoff={"grace_seconds": 0.1})
        well = {name: getattr(source, name) for name in broken}
        overlapped = []
        for states in (broken, broken, broken, well, well):
            vars(source).update(states)
            overlapped.append(report(running, False, LONG, **wish(escalate=True))["overlapped"])
            assert eventually(lambda: reads(running) == 0)
        assert overlapped == [True, False, False, False, True]

    def test_yet_is_no_reason_to_wait(self, gateway: Start, source: FakeEngine) -> None:
        running = gateway(handoff={"grace_seconds": 0.1})
        source.publishes = {"published": 0, "reason": "slow", "pending": True}
        for _ in range(2):
            assert report(running, False, LONG, **wish(escalate=True))["overlapped"]
            assert eventually(lambda: reads(running) == 0)


class TestMany:
    def test_no_more_are_left_under_way_than_requests_may_be(
        self, gateway: Start, source: FakeEngine, target: FakeEngine
    ) -> None:
        source.prefill, target.outcome = 0.0008, FELL_BACK
        running = gateway(limits={"in_flight": 2})
        found = [report(running, False, LONG, **wish(escalate=True))["overlapped"] for _ in range(3)]
        assert found == [True, True, False]

    def test_a_stream_that_is_left_in_mid_answer_ends_its_own_alone(
        self, gateway: Start, source: FakeEngine, target: FakeEngine
    ) -> None:
        source.prefill, target.outcome = 0.0015, FELL_BACK
        running = gateway()
        report(running, False, LONG)
        target.pieces, target.odds, target.pause = ["a "] * 100, [0.0] * 100, 0.02
        chunks = say(running, LONG, stream=True, **ESCALATED)
        next(chunks), next(chunks)
        assert reads(running) == 2
        chunks.close()
        assert eventually(lambda: source.aborted == 1)
        assert eventually(lambda: reads(running) == 0)
        assert running.metric("source_reads_total", outcome="published") == 1
        assert running.metric("source_reads_total", outcome="cancelled") == 1

    def test_of_two_requests_the_later_one_s_publication_stands(self) -> None:
        kept = Session()
        kept.published(900, 5, (3, "of the later"), started=2.0)
        kept.published(600, 5, (1, "of the earlier, which took longer"), started=1.0)
        assert (kept.published_tokens, kept.published_mark) == (900, (3, "of the later"))
        assert kept.published_bytes == 10
        kept.published(910, 0, (4, "of the same, its answer"), started=2.0)
        assert kept.published_tokens == 910

    def test_only_a_read_before_the_target_is_time_of_its_own(self) -> None:
        assert Report(read_seconds=3.0).seconds_before == 3.0
        assert Report(read_seconds=3.0, overlapped=True).seconds_before == 0.0
        assert Report().seconds_before == 0.0


@pytest.mark.parametrize("ended", [True, False], ids=["after its answer", "under way"])
def test_one_that_is_left_at_the_end_is_cut(source: FakeEngine, target: FakeEngine, ended: bool) -> None:
    source.prefill, target.outcome, target.pause = 0.03, FELL_BACK, 0.0 if ended else 5.0
    with command(source, target, "--drain-seconds", "1") as (process, url), ThreadPoolExecutor(1) as pool:
        answer = pool.submit(httpx.post, f"{url}/v1/chat/completions", json=BODY, timeout=20)
        assert eventually(lambda: source.reads_begun == 1)
        if ended:
            assert answer.result().json()["kvmap"]["overlapped"]
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0, "the read would take 18 s"
        assert eventually(lambda: source.aborted == 1)
        assert process.stderr is not None
        assert not ended or "Traceback" not in process.stderr.read()


def test_closing_a_gateway_ends_what_is_left(source: FakeEngine, target: FakeEngine) -> None:
    source.prefill = 0.03
    urls = {"source.url": source.url, "target.url": target.url}

    async def left() -> list[int]:
        gateway = Gateway(read_settings(None, urls, {}), {})
        found, wanted = gateway.cascade.handing_over.reads, {"prompt": LONG, "max_tokens": 3}
        async with AsyncExitStack() as closing:
            request = asked("completion", wanted, {}, gateway.settings.limits)
            case = Case(request, Session(), gateway.cascade.prompts.count, closing, concluded=True)
            await found.begin(case)
        numbers = [len(found)]
        await gateway.aclose()
        return [*numbers, len(found)]

    assert asyncio.run(left()) == [1, 0]


class TestPublishedOnHandOff:
    def test_alone_an_answer_of_the_source_is_not_published(
        self, gateway: Start, source: FakeEngine, target: FakeEngine
    ) -> None:
        running = gateway(handoff={"publish": "on_hand_off"})
        first = told(say(running, LONG, **wish(session="s")))
        assert (first["answered_by"], first["published"]) == ("source", None)
        assert transfer(source.requests[0]) == {}
        target.pause = 0.03
        found = report(running, False, LONG, "small says yes.", "and now?")
        assert (found["outcome"], found["overlapped"]) == ("applied", True)
        assert transfer(source.requests[1]) == {"publish": True}
