"""No answer is lost while one engine can give it; where none can, the client is told in words it knows."""

from __future__ import annotations

import math
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from tests.serving.gateway.asking import LONG, Start, say, stream, text_of, told, wish
from tests.serving.gateway.fake_engine import FakeEngine
from tests.serving.gateway.running import eventually

NOWHERE = {"url": "http://127.0.0.1:9"}


def answered(gateway: Any, streamed: bool, *texts: str, **arguments: Any) -> tuple[str, dict[str, Any]]:
    if streamed:
        chunks = stream(gateway, *texts, **arguments)
        return text_of(chunks), told(chunks)
    answer = say(gateway, *texts, **arguments)
    return answer.choices[0].message.content, told(answer)


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
class TestOneEngine:
    def test_a_target_that_is_not_there_leaves_it_to_the_source(self, gateway: Start, streamed: bool) -> None:
        running = gateway(target=NOWHERE)
        text, report = answered(running, streamed, LONG, **wish(escalate=True, session="s"))
        assert text == "small says yes."
        assert (report["answered_by"], report["why"], report["mode"]) == ("source", "target_failed", "source")
        assert "target: ConnectError" in report["failures"][0]
        assert report["escalated"] is False, "the session is not given to who is not there"
        assert running.metric("engine_errors_total", engine="target", kind="unreachable") == 1

    def test_a_source_that_is_not_there_leaves_it_to_the_target(self, gateway: Start, streamed: bool) -> None:
        running = gateway(source=NOWHERE)
        text, report = answered(running, streamed, "hello", **wish(session="s"))
        assert text == "large says yes."
        assert (report["answered_by"], report["why"]) == ("target", "source_failed")
        assert report["escalated"] is False

    def test_a_hand_off_without_a_source_is_a_prefill(
        self, gateway: Start, source: FakeEngine, streamed: bool
    ) -> None:
        source.status = 500
        text, report = answered(gateway(), streamed, LONG, **wish(escalate=True))
        assert text == "large says yes."
        assert (report["outcome"], report["cause"]) == ("fell_back", "not_found")
        assert report["failures"] == ["source: HTTP 500: out of order"]

    def test_a_low_answer_is_better_than_none(
        self, gateway: Start, source: FakeEngine, target: FakeEngine, streamed: bool
    ) -> None:
        source.odds, target.status = [math.log(0.1)] * 3, 503
        text, report = answered(gateway(), streamed, "hello")
        assert text == "small says yes."
        assert report["why"] == "target_failed"
        assert report["confidence"] == pytest.approx(0.1, abs=1e-4)

    def test_what_one_refuses_the_other_may_take(
        self, gateway: Start, source: FakeEngine, streamed: bool
    ) -> None:
        source.status, source.message = 400, "the prompt is too long"
        text, report = answered(gateway(), streamed, "hello")
        assert text == "large says yes."
        assert "the prompt is too long" in report["because"]

    def test_that_is_slow_is_given_up(self, gateway: Start, source: FakeEngine, streamed: bool) -> None:
        source.prefill = 1.0
        running = gateway(timeouts={"first_token": 0.6, "total": 0.7})
        text, _ = answered(running, streamed, "hello")
        assert text == "large says yes."
        assert running.metric("engine_errors_total", engine="source", kind="timeout") == 1


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
class TestBoth:
    def test_that_are_not_there(self, gateway: Start, streamed: bool) -> None:
        running = gateway(source=NOWHERE, target={"url": "http://127.0.0.1:7"})
        with pytest.raises(openai.APIStatusError) as raised:
            answered(running, streamed, "hello")
        assert raised.value.status_code == 502
        assert "source: " in raised.value.message
        assert "target: " in raised.value.message
        assert eventually(lambda: running.gateway.admission.in_flight == 0)

    def test_that_are_busy(
        self, gateway: Start, source: FakeEngine, target: FakeEngine, streamed: bool
    ) -> None:
        source.status, target.status = 503, 429
        with pytest.raises(openai.APIStatusError) as raised:
            answered(gateway(), streamed, "hello")
        assert raised.value.status_code == 503
        assert raised.value.response.headers["retry-after"] == "1"

    def test_that_refuse_the_request_say_why_in_their_own_words(
        self, gateway: Start, source: FakeEngine, target: FakeEngine, streamed: bool
    ) -> None:
        source.status = target.status = 400
        source.message, target.message = "temperature must be non-negative", "so it must"
        with pytest.raises(openai.BadRequestError, match="temperature must be non-negative"):
            answered(gateway(), streamed, "hello", temperature=-1)


SURE, UNSURE = [math.log(0.9)] * 3, [math.log(0.1)] * 3
BROKEN = (("status", 500), ("status", 503), ("break_after", 0), ("error_after", 0))


@pytest.mark.parametrize("which", ["source", "target"])
def test_200_requests_while_an_engine_comes_and_goes_get_200_answers(
    gateway: Start, source: FakeEngine, target: FakeEngine, which: str
) -> None:
    running, over = gateway(), threading.Event()
    broken = {"source": source, "target": target}[which]

    def disturb() -> None:
        """Each time in another way; in between the engine is well, and the source now sure, now not."""
        dice = random.Random(0)
        while not over.wait(0.02):
            how, value = dice.choice(BROKEN)
            setattr(broken, how, value)
            source.odds = dice.choice((SURE, UNSURE))
            over.wait(0.04)
            broken.status, broken.break_after, broken.error_after = 200, None, None

    def ask(number: int) -> str:
        fields = {"session": f"s{number % 20}", "escalate": (None, True, None, False)[number % 4]}
        return answered(running, number % 3 > 0, LONG, **wish(**fields))[0]

    thread = threading.Thread(target=disturb, daemon=True)
    thread.start()
    try:
        with ThreadPoolExecutor(12) as pool:
            texts = list(pool.map(ask, range(200)))
    finally:
        over.set()
        thread.join()
    assert set(texts) == {"small says yes.", "large says yes."}
    assert eventually(lambda: running.gateway.admission.in_flight == 0)
    assert running.metric("engine_errors_total", engine=which, kind="failed") > 0


class TestHealth:
    @pytest.mark.parametrize(
        ("source_is_well", "target_is_well", "status", "word"),
        [(True, True, 200, "ok"), (True, False, 200, "degraded"), (False, False, 503, "down")],
    )
    def test_says_which_engine_is_well(
        self,
        gateway: Start,
        source: FakeEngine,
        target: FakeEngine,
        source_is_well: bool,
        target_is_well: bool,
        status: int,
        word: str,
    ) -> None:
        source.healthy, target.healthy = source_is_well, target_is_well
        response = gateway().get("/health")
        assert (response.status_code, response.json()["status"]) == (status, word)
        assert response.json()["templates_agree"] is (True if word == "ok" else None)
