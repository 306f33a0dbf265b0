"""The gateway before vLLM itself: one engine, source and target at two addresses, with the identity map.

So a hand-off must give what the engine says by itself.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvmap.serving.gateway.serving import listen
from kvmap.serving.gateway.settings import ServerSettings
from tests.serving.gateway.asking import say, stream, text_of, told, wish
from tests.serving.gateway.running import Running, eventually, running_gateway

pytestmark = [
    pytest.mark.serving,
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None, reason="vLLM is not installed beside this Python"
    ),
]

MODEL = "tiny-large"
START_SECONDS = 300
STORY = "anna is in paris . emma has the key . the key is red . " * 20
TEMPLATE = "{% for message in messages %}{{ message.content }} {% endfor %}"


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Starts it; gives `HOST:PORT` without the host."""
    folder = tmp_path_factory.mktemp("engine")
    _identity_map(folder / "mapper")
    (folder / "template.jinja").write_text(TEMPLATE)
    with listen(ServerSettings(port=0)) as free:
        port = str(free.getsockname()[1])
    line = [sys.executable, "-m", "kvmap.serving.engine", "--role", "both", "--model", f"zoo:{MODEL}"]
    line += ["--mapper", str(folder / "mapper"), "--storage", str(folder / "storage"), "--port", port]
    line += [
        "--served-name",
        "tiny",
        "--dtype",
        "float32",
        "--max-model-len",
        "1024",
        "--",
        "--enforce-eager",
    ]
    line += ["--chat-template", str(folder / "template.jinja")]
    line += ["--no-enable-prefix-caching"]  # or it would find in its own cache what it has read as the source
    settings = {
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    log = folder / "engine.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            line,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **settings},
            start_new_session=True,
        )
        try:
            _wait(process, port, log)
            yield port
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _identity_map(folder: Path) -> None:
    from kvmap.fit.features import geometry_shape
    from kvmap.mappers.identity import IdentityMapper
    from kvmap.mappers.store import identity_record, save_mapper
    from kvmap.models.load import read_geometry, read_identity
    from kvmap.models.spec import ModelSpec
    from kvmap.zoo import weights_folder

    spec = ModelSpec(id=str(weights_folder(MODEL)), dtype="float32")
    record = identity_record(read_identity(spec))
    mapper = IdentityMapper(geometry_shape(read_geometry(spec)))
    save_mapper(mapper, folder, {"source": record, "target": record, "rope": "strip"})


def _wait(process: subprocess.Popen[Any], port: str, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        assert process.poll() is None, f"the engine has died:\n{log.read_text()[-4000:]}"
        assert time.monotonic() < deadline, f"the engine does not start:\n{log.read_text()[-4000:]}"
        try:
            if httpx.get(f"http://127.0.0.1:{port}/health", timeout=2).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.5)


@pytest.fixture
def running(engine: str) -> Iterator[Running]:
    urls = {"source": {"url": f"http://127.0.0.1:{engine}"}, "target": {"url": f"http://localhost:{engine}"}}
    settings = {**urls, "handoff": {"min_tokens": 64}, "confidence": {"threshold": 0.0}}
    with running_gateway(settings, {}) as gateway:
        yield gateway


GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 8}


def asked(*texts: str) -> str:
    return STORY + " ".join(texts)


class TestOnePromptFourWays:
    def test_gives_one_answer(self, running: Running) -> None:
        question = asked("question : where is anna ? answer : anna is in")
        plain = say(running, question, **GREEDY, **wish(escalate=True, mode="reprefill"))
        source = say(running, question, **GREEDY)
        handed = say(running, question, **GREEDY, **wish(escalate=True, mode="handoff"))
        streamed = stream(running, question, **GREEDY, **wish(escalate=True, mode="handoff"))
        text = plain.choices[0].message.content
        assert text
        assert source.choices[0].message.content == text
        assert handed.choices[0].message.content == text
        assert text_of(streamed) == text

    def test_is_reported(self, running: Running) -> None:
        question = asked("question : who has the key ? answer :")
        source = told(say(running, question, **GREEDY))
        assert 0 < source["confidence"] <= 1
        assert source["published"]["published"] > 200
        assert source["time_to_first_token"] is not None
        for answer in (
            say(running, question, **GREEDY, **wish(escalate=True, mode="handoff")),
            stream(running, question, **GREEDY, **wish(escalate=True, mode="handoff")),
        ):
            report = told(answer)
            assert report["mode"] == "handoff"
            assert report["outcome"] == "applied", report
            assert report["n_mapped"] > 200
            assert report["bytes"] > 0
            assert report["time_to_first_token"] is not None


class TestAStream:
    def test_of_low_confidence_is_withheld_and_its_cache_taken(self, engine: str) -> None:
        urls = {
            "source": {"url": f"http://127.0.0.1:{engine}"},
            "target": {"url": f"http://localhost:{engine}"},
        }
        settings = {
            **urls,
            "handoff": {"min_tokens": 64},
            "confidence": {"threshold": 1.0, "first_tokens": 2},
        }
        with running_gateway(settings, {}) as running:
            question = asked("what colour is the key ? the key is")
            chunks = stream(running, question, **GREEDY)
            plain = say(running, question, **GREEDY, **wish(escalate=True, mode="reprefill"))
        assert text_of(chunks) == plain.choices[0].message.content
        report = told(chunks)
        assert report["why"] == "confidence"
        assert report["withheld_tokens"] == 2
        assert report["mode"] == "handoff"
        assert report["outcome"] == "applied", report

    def test_that_is_left_ends_at_the_engine(self, running: Running, engine: str) -> None:
        chunks = say(running, asked("go on"), stream=True, max_tokens=500, extra_body={"ignore_eos": True})
        next(chunks)
        chunks.close()

        def idle() -> bool:
            text = httpx.get(f"http://127.0.0.1:{engine}/metrics").text
            running_now = [line for line in text.splitlines() if line.startswith("vllm:num_requests_running")]
            return all(float(line.rsplit(" ", 1)[1]) == 0 for line in running_now)

        assert eventually(idle, 10)


class TestACompletion:
    @pytest.mark.parametrize("streamed", [False, True])
    def test_is_handed_over(self, running: Running, streamed: bool) -> None:
        arguments: dict[str, Any] = {"model": "kvmap", "prompt": asked("emma has"), **GREEDY}
        completions = running.client().completions
        plain = completions.create(**arguments, **wish(escalate=True, mode="reprefill"))
        handed: Any = completions.create(**arguments, **wish(escalate=True, mode="handoff"), stream=streamed)
        chunks = list(handed) if streamed else [handed]
        assert "".join(c.choices[0].text for c in chunks if c.choices) == plain.choices[0].text
        assert told(chunks)["outcome"] == "applied"
