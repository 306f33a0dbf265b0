"""The command: it says where it listens, finishes what is under way when told to stop, and leaves with 0."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from tests.serving.gateway.fake_engine import FakeEngine
from tests.serving.gateway.running import eventually


@contextmanager
def command(
    source: FakeEngine, target: FakeEngine, *flags: str
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The gateway as a process; gives it and its address."""
    line = [sys.executable, "-m", "kvmap.serving.gateway", "--port", "0", *flags]
    line += ["--source-url", source.url, "--target-url", target.url]
    process = subprocess.Popen(
        line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ}
    )
    try:
        assert process.stdout is not None
        said = process.stdout.readline()
        assert said.startswith("kvmap gateway on http://127.0.0.1:"), said
        yield process, said.split()[3].rstrip(":")
    finally:
        process.kill()
        process.wait()


def streamed(url: str, into: list[Any]) -> None:
    body = {"messages": [{"role": "user", "content": "a"}], "stream": True, "kvmap": {"escalate": False}}
    try:
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=20) as response:
            for line in response.iter_lines():
                into.append(line)
    except httpx.HTTPError as error:
        into.append(error)


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_an_answer_under_way_comes_to_its_end(
    source: FakeEngine, target: FakeEngine, number: signal.Signals
) -> None:
    source.pieces, source.odds, source.pause = ["a "] * 20, [0.0] * 20, 0.03
    with command(source, target) as (process, url):
        lines: list[Any] = []
        client = threading.Thread(target=streamed, args=(url, lines))
        client.start()
        assert eventually(lambda: len(lines) > 4)
        process.send_signal(number)
        client.join()
        assert process.wait(30) == 0
        assert lines[-2] == "data: [DONE]"
        assert sum("a " in str(line) for line in lines) == 20


@pytest.mark.slow
def test_one_that_takes_too_long_is_cut(source: FakeEngine, target: FakeEngine) -> None:
    source.pieces, source.odds, source.pause = ["a "] * 400, [0.0] * 400, 0.1
    with command(source, target, "--drain-seconds", "1") as (process, url):
        lines: list[Any] = []
        client = threading.Thread(target=streamed, args=(url, lines))
        client.start()
        assert eventually(lambda: len(lines) > 4)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0, "all of the answer would take 40 s"
        client.join()
        assert "data: [DONE]" not in lines
        assert eventually(lambda: source.aborted == 1)
