"""What is not taken: fields that name caches, sizes beyond the bounds, strangers, and more than fits."""

from __future__ import annotations

import json
import socket
import threading
from typing import Any

import openai
import pytest

from tests.serving.gateway.asking import Start, say, wish
from tests.serving.gateway.fake_engine import FakeEngine
from tests.serving.gateway.running import Running, eventually

CHAT = {"messages": [{"role": "user", "content": "hello"}]}
KEY = {"KVMAP_GATEWAY_API_KEY": "open sesame"}


def refusal(running: Running, body: Any, path: str = "/v1/chat/completions") -> tuple[int, dict[str, Any]]:
    response = running.post(path, json=body)
    return response.status_code, response.json()["error"]


class TestFields:
    @pytest.mark.parametrize(
        "field",
        [
            *("kv_transfer_params", "ec_transfer_params", "vllm_xargs", "request_id", "session_id"),
            *("prompt_embeds", "chat_template", "mm_processor_kwargs", "media_io_kwargs"),
        ],
    )
    def test_that_reach_into_an_engine_are_not_taken(
        self, gateway: Start, source: FakeEngine, field: str
    ) -> None:
        status, error = refusal(gateway(), {**CHAT, field: {"kvmap": {"take": True}}})
        assert status == 400
        assert error["code"] == "field_not_allowed"
        assert error["param"] == field
        assert source.requests == []

    def test_that_are_unknown_are_named(self, gateway: Start) -> None:
        status, error = refusal(gateway(), {**CHAT, "temprature": 1})
        assert status == 400
        assert error["message"] == "temprature: no such field of a chat; did you mean 'temperature'?"

    def test_that_other_services_know_are_passed_over(self, gateway: Start, source: FakeEngine) -> None:
        say(gateway(), "a", user="anna", store=True, metadata={"a": "b"}, safety_identifier="x")
        assert set(source.requests[0]) <= {
            *("model", "messages", "logprobs", "top_logprobs", "max_completion_tokens", "stream")
        }

    @pytest.mark.parametrize(
        ("change", "param"),
        [
            ({"messages": None}, "messages"),
            ({"messages": []}, "messages"),
            ({"messages": ["a"]}, "messages[0]"),
            ({"messages": [{"content": "a"}]}, "messages[0]"),
            ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
            ({"messages": [{"role": "user", "content": "a"}] * 6}, "messages"),
            ({"max_tokens": 101}, "max_tokens"),
            ({"max_tokens": 0}, "max_tokens"),
            ({"max_completion_tokens": "7"}, "max_completion_tokens"),
            ({"n": 9}, "n"),
            ({"n": True}, "n"),
            ({"top_logprobs": 21}, "top_logprobs"),
            ({"stream": "yes"}, "stream"),
            ({"model": 7}, "model"),
            ({"tools": {}}, "tools"),
            ({"stream_options": []}, "stream_options"),
            ({"chat_template_kwargs": {"chat_template": "{{x}}"}}, "chat_template_kwargs.chat_template"),
            ({"user": 7}, "user"),
            ({"kvmap": 7}, "kvmap"),
            ({"kvmap": {"escalate": "yes"}}, "kvmap.escalate"),
            ({"kvmap": {"mode": "magic"}}, "kvmap.mode"),
            ({"kvmap": {"session": "s" * 257}}, "kvmap.session"),
            ({"kvmap": {"session": ""}}, "kvmap.session"),
            ({"kvmap": {"path": "/etc"}}, "kvmap.path"),
        ],
    )
    def test_that_are_wrong_are_named(self, gateway: Start, change: dict[str, Any], param: str) -> None:
        running = gateway(limits={"messages": 5, "max_tokens": 100, "in_flight": 4})
        status, error = refusal(running, {**CHAT, **change})
        assert (status, error["param"], error["type"]) == (400, param, "invalid_request_error")
        assert error["message"].startswith(param)

    @pytest.mark.parametrize(
        "part",
        [
            {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}},
            {"type": "text", "text": "a", "image_url": "http://10.0.0.1"},
            {"type": "text"},
            {"type": "input_audio", "text": "a"},
        ],
    )
    def test_with_anything_but_text_are_not_taken(self, gateway: Start, part: Any) -> None:
        status, _ = refusal(gateway(), {"messages": [{"role": "user", "content": [part]}]})
        assert status == 400

    @pytest.mark.parametrize(
        "prompt", [None, "", [], ["a", "b"], [[1], [2]], [1, "a"], [-1], [True], {}, [[]]]
    )
    def test_prompts_are_one_text_or_one_list_of_ids(self, gateway: Start, prompt: Any) -> None:
        status, error = refusal(gateway(), {"prompt": prompt}, "/v1/completions")
        assert (status, error["param"]) == (400, "prompt")

    @pytest.mark.parametrize("prompt", ["a", ["a"], [1, 2], [[1, 2]]])
    def test_prompts_that_are_taken(self, gateway: Start, prompt: Any) -> None:
        assert gateway().client().completions.create(model="kvmap", prompt=prompt).choices[0].text

    def test_a_wrong_field_never_ends_up_in_a_header(self, gateway: Start) -> None:
        response = gateway().post("/v1/chat/completions", json={**CHAT, "kvmap": {"session": "a\r\nx: y"}})
        assert response.status_code == 200
        assert "x" not in response.headers


class TestBodies:
    @pytest.mark.parametrize(
        "content",
        [
            b"",
            b"{",
            b"[]",
            b"null",
            b'{"messages": NaN}',
            b'{"seed": 1e999}',
            b'{"a": "\\ud800"}',
            b"\xff",
            b"[" * 90_000,
        ],
        ids=["empty", "half", "list", "null", "nan", "infinite", "surrogate", "bytes", "deep"],
    )
    def test_that_are_no_sound_object_are_refused(self, gateway: Start, content: bytes) -> None:
        headers = {"content-type": "application/json"}
        response = gateway().post("/v1/chat/completions", content=content, headers=headers)
        assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_json")

    @pytest.mark.parametrize("declared", [True, False])
    def test_that_are_too_large_are_refused(self, gateway: Start, declared: bool) -> None:
        content = b'{"messages": "' + b"a" * 5000 + b'"}'
        sent: Any = content if declared else iter([content[:3000], content[3000:]])
        running = gateway(limits={"body_bytes": 2048})
        response = running.post(
            "/v1/chat/completions", content=sent, headers={"content-type": "application/json"}
        )
        assert (response.status_code, response.json()["error"]["code"]) == (413, "request_too_large")
        assert running.metric("unanswered_total", why="too_large") == 1

    def test_that_do_not_say_that_they_are_json_are_refused(self, gateway: Start) -> None:
        response = gateway().post(
            "/v1/chat/completions", content=json.dumps(CHAT), headers={"content-type": "text/plain"}
        )
        assert response.status_code == 415

    def test_that_end_in_the_middle_leave_nothing_behind(self, gateway: Start) -> None:
        running = gateway()
        host, port = running.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as connection:
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
            connection.sendall(f"{head}Content-Length: 100\r\n\r\n{{".encode())
            assert eventually(lambda: running.gateway.admission.in_flight == 1)
        assert eventually(lambda: running.gateway.admission.in_flight == 0)


class TestStrangers:
    def test_without_the_key_get_nothing(self, gateway: Start) -> None:
        running = gateway(environment=KEY)
        for path in ("/v1/models", "/metrics"):
            assert running.get(path).status_code == 401
        with pytest.raises(openai.AuthenticationError):
            running.client("wrong").chat.completions.create(
                model="kvmap", messages=[{"role": "user", "content": "a"}]
            )

    def test_with_the_key_get_answers_and_the_engines_do_not_see_it(
        self, gateway: Start, source: FakeEngine
    ) -> None:
        client = gateway(environment=KEY).client("open sesame")
        client.chat.completions.create(model="kvmap", messages=[{"role": "user", "content": "a"}])
        assert "authorization" not in source.headers[0]

    def test_an_engine_gets_its_own_key(self, gateway: Start, source: FakeEngine) -> None:
        environment = {"SMALL_KEY": "for the small one"}
        settings = {"url": source.url, "api_key_env": "SMALL_KEY"}
        say(gateway(environment=environment, source=settings), "a")
        assert source.headers[0]["authorization"] == "Bearer for the small one"

    def test_under_another_name_than_this_machine_s_are_turned_away(self, gateway: Start) -> None:
        running = gateway()
        assert running.get("/v1/models", headers={"Host": "evil.example"}).status_code == 400
        assert running.get("/v1/models", headers={"Host": "localhost:80"}).status_code == 200

    def test_may_always_ask_for_health(self, gateway: Start) -> None:
        assert gateway(environment=KEY).get("/health").status_code == 200


class TestTooMany:
    def test_are_told_to_come_back(self, gateway: Start, source: FakeEngine) -> None:
        source.pause = 0.3
        running = gateway(limits={"in_flight": 2})
        waiting = [threading.Thread(target=say, args=(running, "a")) for _ in range(2)]
        for thread in waiting:
            thread.start()
        assert eventually(lambda: running.gateway.admission.in_flight == 2)
        with pytest.raises(openai.RateLimitError) as raised:
            say(running, "a")
        assert raised.value.response.headers["retry-after"] == "1"
        for thread in waiting:
            thread.join()
        source.pause = 0.0
        assert say(running, "a").choices[0].message.content == "small says yes."
        assert running.metric("unanswered_total", why="busy") == 1


class TestOtherPaths:
    @pytest.mark.parametrize(
        ("method", "path", "status"),
        [
            ("get", "/docs", 404),
            ("get", "/openapi.json", 404),
            ("get", "/v1/chat/completions", 405),
            ("post", "/kvmap/status", 404),
        ],
    )
    def test_are_none(self, gateway: Start, method: str, path: str, status: int) -> None:
        response = getattr(gateway(), method)(path)
        assert response.status_code == status
        assert path in response.json()["error"]["message"]

    def test_a_wish_is_a_wish_only_in_its_field(self, gateway: Start, source: FakeEngine) -> None:
        say(gateway(), "a", **wish(session="s"))
        assert "kvmap" not in source.requests[0]
