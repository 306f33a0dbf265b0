"""Settings: where they come from, and that all mistakes are told at once, with exit status 2."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvmap.serving.gateway.__main__ import EXIT_MISTAKEN, EXIT_REFUSED, FLAGS, main
from kvmap.serving.gateway.reading_settings import SettingsMistaken, fields, read_settings

URLS = {"source.url": "http://127.0.0.1:8001/", "target.url": "http://127.0.0.1:8002"}
TWO = ["--source-url", "http://127.0.0.1:8001", "--target-url", "http://127.0.0.1:8002"]


def mistakes(given: dict[str, Any], environment: dict[str, str] | None = None) -> list[str]:
    with pytest.raises(SettingsMistaken) as raised:
        read_settings(None, {**URLS, **given}, environment or {})
    return raised.value.mistakes


def test_a_flag_goes_before_the_file_and_the_file_before_the_default(tmp_path: Path) -> None:
    file = tmp_path / "gateway.json"
    file.write_text(
        json.dumps({"server": {"port": 1, "drain_seconds": 7}, "confidence": {"threshold": 0.25}})
    )
    settings = read_settings(file, {**URLS, "server.port": "2"}, {})
    assert settings.server.port == 2
    assert settings.server.drain_seconds == 7
    assert settings.confidence.threshold == 0.25
    assert settings.handoff.mode == "auto"
    assert settings.source.url == "http://127.0.0.1:8001"


def test_every_mistake_is_told_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "gateway.json"
    wrong = {
        "confidence": {"threshold": 3, "measur": "mean"},
        "rules": {"pattern": "("},
        "server": {"host": "0.0.0.0"},
        "source": {"url": "ftp://x"},
    }
    file.write_text(json.dumps(wrong))
    assert main(["--config", str(file), "--port", "99999"]) == EXIT_MISTAKEN
    told = capsys.readouterr().err
    for part in (
        "confidence.threshold=3: input should be less than or equal to 1",
        "confidence.measur: there is no such setting; did you mean confidence.measure?",
        "rules.pattern='(': no regular expression",
        "server.port='99999'",
        "server.host=0.0.0.0: others can reach it; expected a loopback address",
        "put an API key for them into $KVMAP_GATEWAY_API_KEY",
        "source.url='ftp://x': expected http://HOST:PORT",
        "target: missing; expected",
    ):
        assert part in told


@pytest.mark.parametrize(
    ("given", "environment", "n_mistakes"),
    [
        ({"server.host": "0.0.0.0"}, {}, 2),
        ({"server.host": "0.0.0.0", "server.expose": True}, {}, 1),
        ({"server.host": "0.0.0.0"}, {"KVMAP_GATEWAY_API_KEY": "k"}, 1),
        ({"server.host": "192.168.1.2", "server.api_key_env": "K", "server.expose": True}, {"K": ""}, 1),
    ],
)
def test_others_are_let_in_only_with_a_word_and_a_key(
    given: dict[str, Any], environment: dict[str, str], n_mistakes: int
) -> None:
    assert len(mistakes(given, environment)) == n_mistakes


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "127.0.0.2"])
def test_this_machine_needs_neither(host: str) -> None:
    assert read_settings(None, {**URLS, "server.host": host}, {}).server.host == host


def test_others_are_let_in_with_both() -> None:
    given = {**URLS, "server.host": "0.0.0.0", "server.expose": True}
    assert read_settings(None, given, {"KVMAP_GATEWAY_API_KEY": "k"}).server.expose


@pytest.mark.parametrize(
    ("given", "part"),
    [
        ({"target.url": "http://127.0.0.1:8001"}, "expected two engines"),
        ({"sessions.max_sessions": 3, "limits.in_flight": 4}, "at least limits.in_flight=4"),
        ({"source.api_key_env": "NONE"}, "there is no such environment variable"),
        ({"source.url": "http://u:p@host"}, "expected http://HOST:PORT"),
        ({"source.url": "http://host/v1"}, "without a path"),
        ({"timeouts.total": float("nan")}, "timeouts.total"),
        ({"handoff.wait_seconds": 601}, "handoff.wait_seconds=601"),
        ({"handoff.grace_seconds": 61}, "handoff.grace_seconds=61"),
        ({"handoff.publish": "never"}, "'every_answer' or 'on_hand_off'"),
    ],
)
def test_what_does_not_go_together_is_told(given: dict[str, Any], part: str) -> None:
    assert any(part in mistake for mistake in mistakes(given))


@pytest.mark.parametrize(("content", "part"), [("{", "no sound JSON"), ("[]", "expected an object")])
def test_a_file_that_is_none_is_told(tmp_path: Path, content: str, part: str) -> None:
    file = tmp_path / "gateway.json"
    file.write_text(content)
    with pytest.raises(SettingsMistaken, match=part):
        read_settings(file, URLS, {})


def test_a_file_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(SettingsMistaken, match="no file"):
        read_settings(tmp_path / "none.json", URLS, {})


def test_check_prints_what_would_hold(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TWO, "--check", "--min-tokens", "64"]) == 0
    assert json.loads(capsys.readouterr().out)["handoff"]["min_tokens"] == 64


def test_help_tells_every_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        main(["--help"])
    assert raised.value.code == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "(default: 8080)" in told
    assert all(flag in told for flag in FLAGS)


def test_every_flag_is_a_setting_and_every_setting_is_told_of() -> None:
    known = {name: text for name, _, text in fields()}
    assert set(FLAGS.values()) <= set(known)
    assert all(known.values())


def test_every_setting_is_documented() -> None:
    docs = (Path(__file__).parents[3] / "docs" / "serving_gateway.md").read_text()
    missing = [name for name, *_ in fields() if f"`{name}`" not in docs]
    assert missing == []


def test_an_address_that_is_taken_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main([*TWO, "--port", str(port)]) == EXIT_REFUSED
    assert f"server.port={port}: Address already in use" in capsys.readouterr().err
