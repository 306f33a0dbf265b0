"""Who answers, why, and what is told of it: requests that are not streamed, through OpenAI's own client."""

from __future__ import annotations

import math
from typing import Any

import pytest

from kvmap.serving.bench.points import GATEWAY_COLD, GATEWAY_REPREFILL, Point
from tests.serving.gateway.asking import LONG, Start, say, told, transfer, wish
from tests.serving.gateway.fake_engine import FakeEngine
from tests.serving.gateway.running import Running


class TestTheSource:
    def test_answers_where_nothing_speaks_against_it(self, gateway: Start, target: FakeEngine) -> None:
        answer = say(gateway(), "hello")
        assert answer.choices[0].message.content == "small says yes."
        assert answer.model == "small"
        assert target.requests == []
        report = told(answer)
        assert (report["answered_by"], report["why"], report["mode"]) == ("source", "default", "source")
        assert report["outcome"] is None
        assert report["n_mapped"] == 0
        assert report["confidence"] == pytest.approx(0.9, abs=1e-4)

    @pytest.mark.parametrize(
        ("metrics", "seconds"),
        [
            ({"time_to_first_token_ms": 30.0, "queue_time_ms": 1500.0}, 1.53),
            ({"time_to_first_token_ms": 30.0}, 0.03),
            ({"time_to_first_token_ms": None, "queue_time_ms": 1.0}, None),
            (None, None),
        ],
    )
    def test_a_first_token_has_waited_in_the_queue_too(
        self,
        gateway: Start,
        source: FakeEngine,
        metrics: dict[str, float | None] | None,
        seconds: float | None,
    ) -> None:
        """A cache that is taken is waited for there."""
        source.metrics = metrics
        found = told(say(gateway(), "hello"))["time_to_first_token"]
        assert found == (None if seconds is None else pytest.approx(seconds, abs=0.5))
        assert found is None or found >= seconds

    def test_keeps_its_probabilities_to_itself(self, gateway: Start) -> None:
        assert say(gateway(), "hello").choices[0].logprobs is None

    def test_gives_the_probabilities_that_were_asked_for(self, gateway: Start) -> None:
        running = gateway(confidence={"measure": "entropy", "top": 5, "threshold": 0.0})
        content = say(running, "hello", logprobs=True, top_logprobs=2).choices[0].logprobs.content
        assert [len(token.top_logprobs) for token in content] == [2, 2, 2]

    def test_publishes_a_long_prompt_and_no_short_one(self, gateway: Start, source: FakeEngine) -> None:
        running = gateway()
        short, long = say(running, "hello"), say(running, LONG)
        assert [transfer(body) for body in source.requests] == [{}, {"publish": True, "publish_output": True}]
        assert told(short)["published"] is None
        assert told(long)["published"]["published"] == 617
        assert "kv_transfer_params" not in long.model_extra

    def test_publishes_nothing_where_a_hand_off_is_out_of_the_question(
        self, gateway: Start, source: FakeEngine
    ) -> None:
        say(gateway(handoff={"mode": "reprefill"}), LONG)
        assert transfer(source.requests[0]) == {}


class TestOnRequest:
    @pytest.mark.parametrize(
        "arguments",
        [
            wish(escalate=True),
            {"extra_headers": {"X-Kvmap-Escalate": "true"}},
            {"model": "large"},
        ],
        ids=["field", "header", "model"],
    )
    def test_the_target_answers(self, gateway: Start, source: FakeEngine, arguments: dict[str, Any]) -> None:
        answer = say(gateway(), "hello", **arguments)
        assert answer.choices[0].message.content == "large says yes."
        assert told(answer)["why"] == "request"
        assert source.requests == []

    @pytest.mark.parametrize("arguments", [wish(escalate=False), {"model": "small"}], ids=["field", "model"])
    def test_the_source_answers_whatever_it_thinks_of_it(
        self, gateway: Start, source: FakeEngine, arguments: dict[str, Any]
    ) -> None:
        source.odds = [math.log(0.01)] * 3
        answer = say(gateway(rules={"from_turn": 1}), "hello", **arguments)
        assert answer.choices[0].message.content == "small says yes."
        assert told(answer)["confidence"] is None

    def test_of_field_and_header_that_disagree_neither_is_believed(self, gateway: Start) -> None:
        arguments = {**wish(escalate=True), "extra_headers": {"X-Kvmap-Escalate": "false"}}
        with pytest.raises(Exception, match="the header x-kvmap-escalate says otherwise"):
            say(gateway(), "hello", **arguments)


class TestRules:
    @pytest.mark.parametrize(
        ("rules", "texts", "because"),
        [
            ({"from_turn": 2}, ("a", "b", "c"), "turn 2, from 2 on"),
            ({"pattern": "(?i)prove"}, ("Prove it",), "the last message matches"),
            ({"prompt_tokens": 100}, ("y" * 100,), "117 tokens, from 100 on"),
        ],
    )
    def test_send_a_request_to_the_target(
        self, gateway: Start, source: FakeEngine, rules: Any, texts: tuple[str, ...], because: str
    ) -> None:
        report = told(say(gateway(rules=rules), *texts))
        assert (report["answered_by"], report["why"], report["because"]) == ("target", "rule", because)
        assert source.requests == []

    def test_that_do_not_hold_leave_it_with_the_source(self, gateway: Start) -> None:
        rules = {
            "from_turn": 9,
            "pattern": "prove",
            "prompt_tokens": 999,
            "tools": True,
            "system_pattern": "x",
        }
        assert told(say(gateway(rules=rules), "hello"))["answered_by"] == "source"

    def test_look_at_tools(self, gateway: Start) -> None:
        tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
        assert (
            told(say(gateway(rules={"tools": True}), "hello", tools=[tool]))["because"] == "it brings tools"
        )


class TestLowConfidence:
    @pytest.mark.parametrize(
        ("measure", "odds", "confident"),
        [
            ("mean", [0.9, 0.1, 0.1], False),
            ("mean", [0.9, 0.5, 0.5], True),
            ("first", [0.4, 1.0, 1.0], False),
            ("first", [0.6, 0.1, 0.1], True),
            ("off", [0.1, 0.1, 0.1], True),
        ],
    )
    def test_withholds_the_source_s_answer(
        self, gateway: Start, source: FakeEngine, measure: str, odds: list[float], confident: bool
    ) -> None:
        source.odds = [math.log(p) for p in odds]
        answer = say(gateway(confidence={"measure": measure}), "hello")
        report = told(answer)
        assert answer.choices[0].message.content == f"{'small' if confident else 'large'} says yes."
        assert report["why"] == ("default" if confident else "confidence")
        assert report["withheld_tokens"] == (0 if confident else 3)

    def test_by_entropy_counts_what_else_could_have_been_said(
        self, gateway: Start, source: FakeEngine
    ) -> None:
        source.odds = [math.log(0.9)] * 3
        sure = told(say(gateway(confidence={"measure": "entropy"}), "hello"))["confidence"]
        source.odds = [math.log(0.4)] * 3
        unsure = told(say(gateway(confidence={"measure": "entropy"}), "hello"))["confidence"]
        assert unsure < 0.5 < sure

    def test_is_not_asked_of_several_answers(self, gateway: Start, source: FakeEngine) -> None:
        source.odds = [math.log(0.01)] * 3
        answer = say(gateway(), "hello", n=2)
        assert told(answer)["answered_by"] == "source"
        assert len(answer.choices) == 2

    def test_of_a_completion(self, gateway: Start, source: FakeEngine) -> None:
        source.odds = [math.log(0.01)] * 3
        answer = gateway().client().completions.create(model="kvmap", prompt="one two", max_tokens=3)
        assert answer.choices[0].text == "large says yes."
        assert answer.choices[0].logprobs is None


class TestHandOff:
    def test_after_a_low_confidence_the_published_cache_is_taken(
        self, gateway: Start, source: FakeEngine, target: FakeEngine
    ) -> None:
        source.odds = [math.log(0.01)] * 3
        report = told(say(gateway(), LONG))
        assert (report["mode"], report["outcome"], report["cause"]) == ("handoff", "applied", None)
        assert report["n_mapped"] == 615
        assert report["n_prompt"] == 617
        assert report["bytes"] == 61500
        assert report["read_seconds"] is None, "the source has read it already"
        assert transfer(target.requests[0]) == {"take": True, "min_tokens": 256, "wait_seconds": 60.0}
        assert len(source.requests) == 1

    def test_by_a_rule_has_the_source_read_the_prompt(
        self, gateway: Start, source: FakeEngine, target: FakeEngine
    ) -> None:
        target.pause = 0.03
        report = told(say(gateway(rules={"from_turn": 1}), LONG, stop=["no"], logprobs=True))
        assert report["outcome"] == "applied"
        assert report["read_seconds"] > 0
        (reading,) = source.requests
        assert reading["max_completion_tokens"] == 1
        assert transfer(reading) == {"publish": True}
        assert {"stop", "logprobs"} & set(reading) == set()

    def test_in_mid_conversation_maps_what_the_source_has_read(
        self, gateway: Start, source: FakeEngine
    ) -> None:
        running = gateway()
        say(running, LONG, **wish(session="s"))
        answer = say(running, LONG, "small says yes.", "and now?", **wish(session="s", escalate=True))
        report = told(answer)
        assert report["outcome"] == "applied"
        assert report["n_mapped"] > 617, "the source's own answer too"
        assert len(source.requests) == 1, "few new tokens are not worth another reading"

    def test_of_another_conversation_of_the_same_user_is_read_anew(
        self, gateway: Start, source: FakeEngine, target: FakeEngine
    ) -> None:
        running, target.pause = gateway(), 0.03
        say(running, "w" * 900, user="anna")
        report = told(say(running, LONG, user="anna", **wish(escalate=True)))
        assert report["outcome"] == "applied"
        assert report["read_seconds"] is not None
        assert len(source.requests) == 2

    def test_that_is_too_short_is_not_asked_for(self, gateway: Start, source: FakeEngine) -> None:
        report = told(say(gateway(), "z" * 200, **wish(escalate=True)))
        assert (report["mode"], report["outcome"]) == ("reprefill", None)
        assert report["reason"] == "217 tokens, fewer than 256"
        assert source.requests == []

    def test_that_is_asked_for_is_tried_at_any_length(self, gateway: Start, target: FakeEngine) -> None:
        report = told(say(gateway(), "short", **wish(escalate=True, mode="handoff")))
        assert (report["mode"], report["outcome"], report["cause"]) == ("handoff", "fell_back", "not_found")

    @pytest.mark.parametrize("where", ["request", "settings"])
    def test_can_be_turned_off(self, gateway: Start, target: FakeEngine, where: str) -> None:
        running = gateway(handoff={"mode": "reprefill"} if where == "settings" else {})
        fields = {"escalate": True} | ({"mode": "reprefill"} if where == "request" else {})
        assert told(say(running, LONG, **wish(**fields)))["mode"] == "reprefill"
        assert transfer(target.requests[0]) == {}

    def test_is_not_tried_between_engines_whose_templates_differ(
        self, gateway: Start, target: FakeEngine
    ) -> None:
        target.template = "[{role}]"
        report = told(say(gateway(), LONG, **wish(escalate=True)))
        assert report["mode"] == "reprefill"
        assert "chat templates differ" in report["reason"]

    def test_is_left_alone_for_a_while_where_the_target_says_that_it_cannot_be(
        self, gateway: Start, target: FakeEngine
    ) -> None:
        running = gateway()
        target.outcome = {"outcome": "unsupported", "cause": "mismatch", "reason": "another tokenizer"}
        first, second = (told(say(running, LONG, **wish(escalate=True))) for _ in range(2))
        assert (first["mode"], first["outcome"], first["cause"]) == ("handoff", "unsupported", "mismatch")
        assert second["mode"] == "reprefill"
        assert "another tokenizer" in second["reason"]

    def test_requires_the_verdict_that_is_set(self, gateway: Start, target: FakeEngine) -> None:
        say(gateway(handoff={"require": "go"}), LONG, **wish(escalate=True))
        assert transfer(target.requests[0])["require"] == "go"

    def test_saves_what_the_target_s_own_prefill_would_take(self, gateway: Start, target: FakeEngine) -> None:
        running, target.prefill = gateway(), 0.0005
        prompts = {"model": "kvmap", "max_tokens": 3, "stream": True}
        none = _last(running, prompt="q" * 900, **prompts, **wish(escalate=True, mode="handoff"))
        assert none["outcome"] == "applied"
        assert none["seconds_saved"] is None, "nothing is known of its prefill yet"
        for n_tokens in (100, 150, 200, 250):
            _last(running, prompt="p" * n_tokens, **prompts, **wish(escalate=True, mode="reprefill"))
        saved = _last(running, prompt="r" * 900, **prompts, **wish(escalate=True, mode="handoff"))
        assert saved["outcome"] == "applied"
        assert 0.1 < saved["seconds_saved"] < 0.6, "of the 0.45 s that 900 tokens take"


def _last(running: Running, **arguments: Any) -> dict[str, Any]:
    """What the end of a streamed completion tells."""
    return told(list(running.client().completions.create(**arguments))[-1])


class TestSessions:
    def test_stay_with_the_target_once_they_are_there(self, gateway: Start, source: FakeEngine) -> None:
        running = gateway()
        reports = [
            told(say(running, "a", **wish(session="s", escalate=True))),
            told(say(running, "a", "b", "c", **wish(session="s"))),
            told(say(running, "a", **wish(session="other"))),
            told(say(running, "a", **wish(session="s", escalate=False))),
            told(say(running, "a", **wish(session="s"))),
        ]
        assert [report["answered_by"] for report in reports] == [
            *("target", "target", "source", "source", "source")
        ]
        assert [report["why"] for report in reports[:3]] == ["request", "session", "default"]
        assert [report["escalated"] for report in reports] == [True, True, False, False, False]

    def test_go_back_after_as_many_turns_as_are_set(self, gateway: Start) -> None:
        running = gateway(sessions={"stay_turns": 1})
        told(say(running, "a", user="anna", **wish(escalate=True)))
        by = [told(say(running, "a", user="anna"))["answered_by"] for _ in range(3)]
        assert by == ["target", "source", "source"]

    def test_are_none_without_a_name(self, gateway: Start) -> None:
        running = gateway()
        say(running, "a", **wish(escalate=True))
        report = told(say(running, "a"))
        assert report["answered_by"] == "source"
        assert report["escalated"] is None
        assert len(running.gateway.sessions) == 0

    def test_publish_no_more_than_is_set(self, gateway: Start, source: FakeEngine) -> None:
        running = gateway(sessions={"max_bytes": 60_000})
        for _ in range(2):
            say(running, LONG, **wish(session="s"))
        assert [bool(transfer(body)) for body in source.requests] == [True, False]


class TestLimitsOfAnAnswer:
    def test_bound_a_chat_that_does_not_say_how_long_it_may_be(
        self, gateway: Start, source: FakeEngine
    ) -> None:
        say(gateway(limits={"max_tokens": 2}), "hello")
        assert source.requests[0]["max_completion_tokens"] == 2

    def test_leave_room_for_the_prompt(self, gateway: Start, source: FakeEngine) -> None:
        source.max_model_len = 5000
        say(gateway(), "y" * 3000)
        assert source.requests[0]["max_completion_tokens"] == 5000 - 3017

    def test_leave_a_small_engine_to_itself(self, gateway: Start, source: FakeEngine) -> None:
        source.max_model_len = 2048
        say(gateway(), "hello")
        assert "max_completion_tokens" not in source.requests[0]


class TestWhatElseIsServed:
    def test_models(self, gateway: Start) -> None:
        assert [model.id for model in gateway().client().models.list()] == ["kvmap", "small", "large"]

    @pytest.mark.parametrize(("mode", "means"), [(GATEWAY_REPREFILL, "reprefill"), (GATEWAY_COLD, "handoff")])
    def test_the_bench(self, gateway: Start, mode: str, means: str) -> None:
        sent = {"repetition_penalty": 1.0, "max_tokens": 2, "logprobs": None, "ignore_eos": True}
        extra = {"temperature": 0, **Point(mode, 100, 1, 1, 2, 0).extra}
        report = _last(gateway(), model="kvmap", prompt="b" * 100, stream=True, extra_body=sent | extra)
        assert (report["answered_by"], report["mode"]) == ("target", means)
        assert report["outcome"] == ("applied" if means == "handoff" else None)

    def test_a_model_that_is_none_of_them(self, gateway: Start) -> None:
        with pytest.raises(Exception, match="there is no 'huge'; known: kvmap, small, large"):
            say(gateway(), "hello", model="huge")

    def test_headers_say_what_is_known_before_the_answer(self, gateway: Start) -> None:
        body = {"messages": [{"role": "user", "content": "a"}], "kvmap": {"escalate": True}}
        headers = gateway().post("/v1/chat/completions", json=body).headers
        known = {name: value for name, value in headers.items() if name.startswith("x-kvmap-")}
        assert known == {
            "x-kvmap-answered-by": "target",
            "x-kvmap-why": "request",
            "x-kvmap-mode": "reprefill",
            "x-kvmap-turn": "1",
        }

    def test_engines_know_a_request_by_the_gateway_s_name_for_it(
        self, gateway: Start, source: FakeEngine
    ) -> None:
        body = {"messages": [{"role": "user", "content": "a"}]}
        sent = gateway().post("/v1/chat/completions", json=body, headers={"X-Request-Id": "../../etc"})
        assert source.headers[0]["x-request-id"] == sent.headers["x-request-id"]
        assert sent.headers["x-request-id"].isalnum()
