"""Limits in time, each on a call that is longer than its limit."""

from __future__ import annotations

import time

import pytest

from kvmap.tracking.bounded import Bounded


def nothing() -> None:
    return None


def test_a_call_that_hangs_is_given_up_and_is_the_last(caplog: pytest.LogCaptureFixture) -> None:
    ended: list[str] = []
    calls = Bounded("service", 0.1, on_hang=lambda: ended.append("service"))
    began = time.monotonic()
    assert not calls.call("log", lambda: time.sleep(5))
    assert not calls.call("log", nothing)
    assert not calls.last("finish", nothing)
    assert time.monotonic() - began < 2
    assert ended == ["service"]
    (line,) = caplog.messages
    assert line.startswith("service log failed (no answer within 0.1 s); going on without it")


def test_after_an_error_only_the_end_is_tried(caplog: pytest.LogCaptureFixture) -> None:
    calls = Bounded("service", 5.0)
    done: list[str] = []
    assert not calls.call("log", lambda: done.remove("what is not there"))
    assert not calls.call("log", nothing)
    assert calls.last("finish", lambda: done.append("finish"))
    assert done == ["finish"]
    assert len(caplog.messages) == 1


@pytest.mark.slow
def test_in_a_hurry_all_calls_have_the_time_of_one() -> None:
    calls = Bounded("service", 0.5)
    assert all(calls.call("log", lambda: time.sleep(0.3)) for _ in range(3))
    calls.hurry()
    began = time.monotonic()
    assert calls.call("table", lambda: time.sleep(0.3))
    assert not calls.call("table", lambda: time.sleep(0.3))
    assert time.monotonic() - began < 2
