"""What is counted, and that no client can make up a label."""

from __future__ import annotations

import math

from prometheus_client.parser import text_string_to_metric_families

from tests.serving.gateway.asking import LONG, Start, say, stream, wish
from tests.serving.gateway.fake_engine import FakeEngine


def test_answers_hand_offs_tokens_and_times(gateway: Start, source: FakeEngine, target: FakeEngine) -> None:
    running, target.pause = gateway(), 0.03
    say(running, "hello", **wish(session="s"))
    stream(running, LONG, **wish(escalate=True))
    source.odds = [math.log(0.1)] * 3
    stream(running, "low")
    count = running.metric
    assert count("answers_total", answered_by="source", why="default", mode="source") == 1
    assert count("answers_total", answered_by="target", why="request", mode="handoff") == 1
    assert count("answers_total", answered_by="target", why="confidence", mode="reprefill") == 1
    assert count("handoffs_total", outcome="applied", cause="none") == 1
    assert count("source_reads_total", outcome="published") == 1
    assert count("mapped_tokens_total") == 615
    assert count("mapped_bytes_total") == 61500
    assert count("published_bytes_total") == 61700
    assert count("withheld_tokens_total") == 3
    assert count("tokens_total", engine="target", kind="completion") == 6
    assert count("time_to_first_token_seconds_count", mode="handoff") == 1
    assert count("mapped_tokens_of_a_handoff_bucket", le="1024.0") == 1
    assert count("confidence_count") == 2
    assert count("sessions") == 1
    assert count("in_flight") == 0
    assert count("templates_agree") == 1


def test_causes_are_counted_and_unknown_ones_are_one(gateway: Start, target: FakeEngine) -> None:
    running = gateway()
    for cause in ("not_found", "partial", "made up 1", "made up 2"):
        target.outcome = {"outcome": "fell_back", "cause": cause, "reason": "so"}
        say(running, LONG, **wish(escalate=True))
    assert running.metric("handoffs_total", outcome="fell_back", cause="not_found") == 1
    assert running.metric("handoffs_total", outcome="fell_back", cause="partial") == 1
    assert running.metric("handoffs_total", outcome="fell_back", cause="other") == 2


def test_an_engine_that_says_nonsense_of_a_hand_off_still_answers(gateway: Start, target: FakeEngine) -> None:
    running = gateway()
    for outcome in (
        {"outcome": "applied", "n_mapped": "many"},
        {"outcome": "great"},
        {"outcome": "applied", "bytes": None},
    ):
        target.outcome = outcome
        assert say(running, LONG, **wish(escalate=True)).choices[0].message.content == "large says yes."
    assert running.metric("handoffs_total", outcome="unknown", cause="none") == 3


def test_no_label_is_of_a_client_s_choosing(gateway: Start) -> None:
    running, mark = gateway(), "zebra"
    say(running, mark, user=mark, **wish(session=mark))
    for path, body in (("/v1/chat/completions", {mark: 1}), (f"/{mark}", {})):
        running.post(path, json=body, headers={"x-kvmap-mode": mark})
    text = running.get("/metrics").text
    assert mark not in text
    assert len(list(text_string_to_metric_families(text))) > 20
