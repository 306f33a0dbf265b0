"""Answers sent as they are made: framing, what is told at their end, and every way in which they break."""

from __future__ import annotations

import json
import math
import socket
import time
from typing import Any

import httpx
import openai
import pytest

from tests.serving.gateway.asking import LONG, Start, say, stream, text_of, told, wish
from tests.serving.gateway.fake_engine import FakeEngine
from tests.serving.gateway.running import Running, eventually

KINDS = {"error_after": "failed", "break_after": "broken"}
USAGE = {"stream_options": {"include_usage": True}}


def events(running: Running, **body: Any) -> list[str]:
    """The data of every event, as it stands on the wire."""
    asked = {"messages": [{"role": "user", "content": "hello"}], "stream": True, **body}
    content = running.post("/v1/chat/completions", json=asked).content.decode()
    assert content.endswith("\n\n")
    return [line.removeprefix("data: ") for line in content.removesuffix("\n\n").split("\n\n")]


class TestWhatTheClientSees:
    def test_every_token_by_itself_and_the_report_at_the_end(self, gateway: Start) -> None:
        chunks = stream(gateway(confidence={"measure": "off"}), "hello")
        assert [chunk.choices[0].delta.content for chunk in chunks] == ["", "small ", "says ", "yes."]
        assert [chunk.choices[0].finish_reason for chunk in chunks] == [None, None, None, "stop"]
        report = told(chunks)
        assert report["answered_by"] == "source"
        assert report["n_prompt"] == 22
        assert 0 < report["time_to_first_token"] <= report["seconds"]

    def test_usage_is_last_where_it_is_asked_for(self, gateway: Start) -> None:
        chunks = stream(gateway(), "hello", **USAGE)
        assert chunks[-1].choices == []
        assert chunks[-1].usage.total_tokens == 25
        assert told(chunks)["answered_by"] == "source"
        assert "kvmap" not in chunks[-2].model_extra

    def test_usage_is_left_out_where_it_is_not(self, gateway: Start) -> None:
        chunks = stream(gateway(), "hello")
        assert all(chunk.choices for chunk in chunks)
        assert all(chunk.usage is None for chunk in chunks)

    def test_done_is_the_last_event_and_nothing_of_hand_offs_is_seen(self, gateway: Start) -> None:
        seen = events(gateway(), kvmap={"escalate": True, "mode": "handoff", "min_tokens": 1})
        assert seen[-1] == "[DONE]"
        assert [event for event in seen if "kv_transfer_params" in event or "kvmap.outcome" in event] == []
        assert json.loads(seen[-2])["kvmap"]["outcome"] == "applied"

    def test_a_hand_off_is_reported(self, gateway: Start, target: FakeEngine) -> None:
        target.pause = 0.03
        chunks = stream(gateway(), LONG, **wish(escalate=True), **USAGE)
        report = told(chunks)
        assert text_of(chunks) == "large says yes."
        assert (report["mode"], report["outcome"], report["n_mapped"]) == ("handoff", "applied", 615)
        assert report["overlapped"]
        assert report["seconds"] > report["read_seconds"]

    def test_chunks_go_through_as_they_came(self, gateway: Start, target: FakeEngine) -> None:
        target.pieces = ["a\u2028b ", 'c\r\nd "', "\\n\n\ne ö"]
        seen = events(gateway(), kvmap={"escalate": True})
        deltas = [json.loads(event)["choices"][0]["delta"] for event in seen[:-1]]
        assert "".join(delta["content"] for delta in deltas) == "".join(target.pieces)

    def test_the_openai_client_reads_line_ends_of_every_kind(
        self, gateway: Start, source: FakeEngine
    ) -> None:
        source.pieces = ["a\u2028b\x85", "\r\n", "\n\n"]
        assert text_of(stream(gateway(), "hello")) == "a\u2028b\x85\r\n\n\n"

    def test_a_completion_is_streamed_too(self, gateway: Start) -> None:
        client = gateway().client()
        chunks = list(client.completions.create(model="kvmap", prompt="one", max_tokens=9, stream=True))
        assert "".join(chunk.choices[0].text for chunk in chunks) == "small says yes."
        assert chunks[-1].model_extra["kvmap"]["answered_by"] == "source"

    def test_headers_say_who_answers(self, gateway: Start) -> None:
        body = {"messages": [{"role": "user", "content": "a"}], "stream": True}
        headers = gateway().post("/v1/chat/completions", json=body).headers
        assert headers["content-type"].startswith("text/event-stream")
        assert headers["x-kvmap-answered-by"] == "source"
        assert headers["x-kvmap-confidence"] == "0.9000"

    def test_the_first_token_does_not_wait_for_the_last(self, gateway: Start, target: FakeEngine) -> None:
        target.pieces, target.odds, target.pause = ["a "] * 10, [0.0] * 10, 0.05
        begun = time.monotonic()
        chunks = say(gateway(), "hello", stream=True, **wish(escalate=True))
        next(chunks), next(chunks)
        first = time.monotonic() - begun
        report = told(list(chunks))
        assert first < time.monotonic() - begun - 0.3
        assert report["time_to_first_token"] < report["seconds"] - 0.3


class TestLowConfidence:
    def test_of_the_first_tokens_withholds_all_of_them(self, gateway: Start, source: FakeEngine) -> None:
        source.pieces, source.odds = ["no "] * 20, [math.log(0.1)] * 20
        source.pause = 0.02
        chunks = stream(gateway(confidence={"first_tokens": 4}), LONG)
        assert text_of(chunks) == "large says yes."
        report = told(chunks)
        assert (report["why"], report["withheld_tokens"]) == ("confidence", 4)
        assert report["outcome"] == "applied"
        assert eventually(lambda: source.aborted == 1), "the source need not go on"

    def test_after_the_first_tokens_is_not_looked_at(self, gateway: Start, source: FakeEngine) -> None:
        source.pieces, source.odds = ["so "] * 6, [math.log(p) for p in (0.9, 0.9, 0.01, 0.01, 0.01, 0.01)]
        chunks = stream(gateway(confidence={"first_tokens": 2}), "hello")
        assert text_of(chunks) == "so " * 6
        assert told(chunks)["confidence"] == pytest.approx(0.9, abs=1e-4)

    def test_of_an_answer_shorter_than_that_is_judged_by_all_of_it(
        self, gateway: Start, source: FakeEngine
    ) -> None:
        source.odds = [math.log(0.1)] * 3
        assert text_of(stream(gateway(confidence={"first_tokens": 99}), "hello")) == "large says yes."

    def test_cannot_be_told_of_an_engine_that_gives_no_probabilities(
        self, gateway: Start, source: FakeEngine
    ) -> None:
        source.pieces, source.odds, source.pause = ["a "] * 10, [0.0] * 10, 0.05
        source.max_logprobs = 0
        report = told(stream(gateway(confidence={"first_tokens": 10}), "hello"))
        assert report["confidence"] is None
        assert report["time_to_first_token"] < report["seconds"] - 0.3, "and the first token does not wait"

    def test_tokens_that_were_judged_are_sent_without_their_probabilities(self, gateway: Start) -> None:
        assert all(chunk.choices[0].logprobs is None for chunk in stream(gateway(), "hello"))

    def test_tokens_keep_the_probabilities_that_were_asked_for(self, gateway: Start) -> None:
        chunks = stream(gateway(), "hello", logprobs=True)
        assert [c.choices[0].logprobs is not None for c in chunks] == [False, True, True, True]


class TestBreaks:
    @pytest.mark.parametrize("how", ["error_after", "break_after"])
    def test_before_the_first_token_the_other_engine_answers(
        self, gateway: Start, target: FakeEngine, how: str
    ) -> None:
        setattr(target, how, 0)
        chunks = stream(gateway(), "hello", **wish(escalate=True))
        assert text_of(chunks) == "small says yes."
        report = told(chunks)
        assert (report["answered_by"], report["why"]) == ("source", "target_failed")
        assert report["failures"][0].startswith("target: ")

    @pytest.mark.parametrize("how", ["error_after", "break_after"])
    def test_in_the_middle_are_an_error_that_the_client_sees(
        self, gateway: Start, target: FakeEngine, how: str
    ) -> None:
        setattr(target, how, 2)
        running = gateway()
        chunks = say(running, "hello", stream=True, **wish(escalate=True))
        assert [next(chunks).choices[0].delta.content for _ in range(3)] == ["", "large ", "says "]
        with pytest.raises(openai.APIError, match="the target broke off"):
            next(chunks)
        assert running.metric("unanswered_total", why="broke_off") == 1
        assert running.metric("engine_errors_total", engine="target", kind=KINDS[how]) == 1
        assert eventually(lambda: running.gateway.admission.in_flight == 0)

    def test_silence_is_one(self, gateway: Start, target: FakeEngine) -> None:
        target.hang_after = 1
        running = gateway(timeouts={"between_tokens": 0.6})
        seen = events(running, kvmap={"escalate": True})
        assert "no event of its stream for 0.6 s" in json.loads(seen[-2])["error"]["message"]
        assert seen[-1] == "[DONE]"
        assert eventually(lambda: target.aborted == 1)

    def test_silence_before_the_first_token_is_answered_by_the_other(
        self, gateway: Start, source: FakeEngine
    ) -> None:
        source.hang_after = 0
        running = gateway(timeouts={"first_token": 0.6, "between_tokens": 0.6})
        assert text_of(stream(running, "hello")) == "large says yes."


class TestClientsThatGo:
    @pytest.mark.parametrize("streamed", [True, False])
    def test_while_they_wait_end_the_work_for_them(
        self, gateway: Start, source: FakeEngine, streamed: bool
    ) -> None:
        source.pieces, source.odds, source.pause = ["a "] * 200, [0.0] * 200, 0.05
        running = gateway(confidence={"first_tokens": 100})
        body = {"messages": [{"role": "user", "content": "a"}], "stream": streamed, "kvmap": {"session": "s"}}
        host, port = running.url.removeprefix("http://").split(":")
        content = json.dumps(body)
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n{content}".encode())
            assert eventually(lambda: len(source.requests) == 1)
        assert eventually(lambda: source.aborted == 1)
        assert eventually(lambda: running.gateway.admission.in_flight == 0)
        assert eventually(lambda: running.metric("unanswered_total", why="client_gone") == 1)

    def test_in_the_middle_of_a_stream_end_it_at_the_engine(self, gateway: Start, target: FakeEngine) -> None:
        target.pieces, target.odds, target.pause = ["a "] * 200, [0.0] * 200, 0.02
        running = gateway()
        chunks = say(running, "hello", stream=True, **wish(escalate=True, session="s"))
        for _ in range(3):
            next(iter(chunks))
        chunks.close()
        assert eventually(lambda: target.aborted == 1)
        assert eventually(lambda: running.gateway.admission.in_flight == 0)
        assert eventually(lambda: running.metric("unanswered_total", why="client_gone") == 1)
        assert next(iter(running.gateway.sessions._sessions.values())).in_use == 0

    def test_leave_no_connection_behind(self, gateway: Start, target: FakeEngine) -> None:
        target.pieces, target.odds, target.pause = ["a "] * 200, [0.0] * 200, 0.02
        running = gateway()
        for _ in range(5):
            chunks = say(running, "hello", stream=True, **wish(escalate=True))
            next(iter(chunks))
            chunks.close()
        pool = running.gateway.engines["target"]._client._transport._pool
        assert eventually(lambda: all(connection.is_idle() for connection in pool.connections))
        assert eventually(lambda: target.aborted == 5)

    def test_that_do_not_read_are_given_up(self, gateway: Start, target: FakeEngine) -> None:
        target.pieces, target.odds = ["a" * 100_000] * 400, [0.0] * 400
        running = gateway(timeouts={"total": 0.5})
        body = {"messages": [{"role": "user", "content": "a"}], "stream": True, "kvmap": {"escalate": True}}
        with httpx.stream("POST", f"{running.url}/v1/chat/completions", json=body, timeout=20):
            assert eventually(lambda: running.gateway.admission.in_flight == 0)
