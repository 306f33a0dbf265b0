"""Two engines as they are served, and everything that can go wrong between them: every answer comes, none is
wrong.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvmap.serving.engine import EngineOptions, serve_command, serve_environment, transfer_config
from kvmap.serving.outcome import Outcome, read_outcome, read_published
from kvmap.zoo import weights_folder
from tests.serving.engine.prompts import zoo_prompts
from tests.serving.engine.test_one_model import save_identity

MODEL, N = "tiny-large", 12
SLOW = "tests.serving.engine.slow_storage"


def post(port: int, path: str, body: dict[str, Any], timeout: float = 60.0) -> Any:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=timeout) as answer:
        return answer.read().decode()


@dataclass(frozen=True)
class Served:
    port: int
    process: subprocess.Popen[bytes]

    def complete(self, prompt: Sequence[int], asked: dict[str, Any] | None, n_tokens: int = N) -> Any:
        body: dict[str, Any] = {
            "model": "m",
            "prompt": list(prompt),
            "max_tokens": n_tokens,
            "temperature": 0,
        }
        body |= {"ignore_eos": True, "return_token_ids": True}
        if asked is not None:
            body["kv_transfer_params"] = {"kvmap": asked}
        return json.loads(post(self.port, "/v1/completions", body))

    def tokens(self, prompt: Sequence[int], asked: dict[str, Any] | None) -> tuple[list[int], Outcome | None]:
        answer = self.complete(prompt, asked)
        return answer["choices"][0]["token_ids"], read_outcome(answer)

    def kill(self) -> None:
        """As a power cut would: the API and the engine's processes."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


@contextmanager
def served(role: str, storage: Path, mapper: Path, log: Path) -> Iterator[Served]:
    port = free_port()
    options = EngineOptions(
        role,
        str(weights_folder(MODEL)),
        storage,
        mapper=mapper,
        port=port,
        served_name="m",
        dtype="float32",
        max_model_len=1024,
        settings=(("load_seconds", 1.0), ("look_seconds", 0.5), ("flush_seconds", 0.5)),
    )
    config = json.dumps({**transfer_config(options), "kv_connector_module_path": SLOW})
    more = ["--enforce-eager", "--max-num-seqs", "8", "--max-num-batched-tokens", "256"]
    command = [*serve_command(options), *more, "--kv-transfer-config", config]
    root = str(Path(__file__).resolve().parents[3])
    environment = {**serve_environment(os.environ), "OMP_NUM_THREADS": "1", "VLLM_SERVER_DEV_MODE": "1"}
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, env=environment, cwd=root, start_new_session=True
        )
    engine = Served(port, process)
    try:
        _wait_until_ready(engine, log)
        yield engine
    finally:
        with suppress(ProcessLookupError):
            engine.kill()


def _wait_until_ready(engine: Served, log: Path) -> None:
    until = time.monotonic() + 300
    while time.monotonic() < until:
        assert engine.process.poll() is None, log.read_text()[-3000:]
        with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{engine.port}/health", timeout=5):
            return
        time.sleep(0.5)
    raise AssertionError(f"the engine did not start: {log.read_text()[-3000:]}")


@dataclass(frozen=True)
class Both:
    source: Served
    target: Served
    storage: Path


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    folder = tmp_path_factory.mktemp("faults")
    storage, mapper = folder / "storage", save_identity(folder / "mapper", MODEL)
    with (
        served("source", storage, mapper, folder / "source.log") as source,
        served("target", storage, mapper, folder / "target.log") as target,
    ):
        yield Both(source, target, storage)


def at_once(
    served_by: Served, prompts: Sequence[Sequence[int]], asked: Any
) -> list[tuple[list[int], Outcome | None]]:
    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(lambda prompt: served_by.tokens(prompt, asked), prompts))


def publish(both: Both, prompts: Sequence[Sequence[int]]) -> int:
    """How many were published; a source that is gone publishes none."""
    n_published = 0
    for prompt in prompts:
        with suppress(OSError):
            published = read_published(both.source.complete(prompt, {"publish": True}, 1))
            n_published += published is not None and published.published == len(prompt)
    return n_published


def delay(storage: Path, **seconds: float) -> None:
    (storage / "delays.json").write_text(json.dumps(seconds))


def damage(storage: Path, draw: random.Random) -> None:
    """Cut, change or remove parts and manifests, here and there."""
    for path in sorted([*(storage / "parts").rglob("*-*"), *(storage / "published").glob("*.json")]):
        if not path.is_file() or draw.random() > 0.05:
            continue
        data = path.read_bytes()
        kind = draw.choice(["cut", "change", "remove"])
        if kind == "remove":
            path.unlink()
        elif kind == "cut":
            path.write_bytes(data[: len(data) // 2])
        else:
            path.write_bytes(data[:-20] + bytes(20))


def test_streams_say_what_became_of_them(both: Both) -> None:
    (prompt,) = zoo_prompts(1, lengths=(200,), seed=900)
    assert publish(both, [prompt]) == 1
    body = {"model": "m", "prompt": prompt, "max_tokens": 4, "temperature": 0, "stream": True}
    plain = post(both.target.port, "/v1/completions", body)
    text = post(
        both.target.port, "/v1/completions", {**body, "kv_transfer_params": {"kvmap": {"take": True}}}
    )
    lines = [line.removeprefix("data: ") for line in text.split("\n") if line]
    assert lines[-1] == "[DONE]"
    event = json.loads(lines[-2])
    assert event["choices"] == []
    outcome = read_outcome(event)
    assert outcome is not None
    assert outcome.outcome == "applied" or outcome.cause == "too_short"
    # how many tokens a chunk has is the engine's affair
    told = [line.removeprefix("data: ") for line in plain.split("\n") if line]
    assert streamed(lines[:-2]) == streamed(told[:-1])


def streamed(lines: list[str]) -> str:
    return "".join(choice["text"] for line in lines for choice in json.loads(line)["choices"])


def test_a_target_maps_while_the_source_still_reads(both: Both) -> None:
    """Both are asked at the same time; the source reads in four steps, and its storage takes its time."""
    (prompt,) = zoo_prompts(1, lengths=(900,), seed=899)
    plain, _ = both.target.tokens(prompt, None)
    forget_by_filling(both)
    delay(both.storage, put_part=0.03)
    with ThreadPoolExecutor(2) as pool:
        publishing = pool.submit(both.source.complete, prompt, {"publish": True}, 1)
        asked = {"take": True, "wait_seconds": 60.0, "grace_seconds": 10.0}
        tokens, outcome = both.target.tokens(prompt, asked)
        publishing.result()
    delay(both.storage)
    assert tokens == plain
    assert outcome is not None
    assert (outcome.outcome, outcome.n_mapped) == ("applied", 899)
    assert outcome.wait_seconds > 0.1


def test_two_hundred_requests_are_answered_and_none_wrongly(both: Both) -> None:
    """The storage is damaged and slowed down, and the source killed in the middle of its work."""
    draw = random.Random(0)
    prompts = zoo_prompts(200, lengths=(70, 128, 200, 300), seed=901)
    expected = [tokens for tokens, _ in at_once(both.target, prompts, None)]
    rounds: list[tuple[list[int], Outcome | None]] = []
    forget_by_filling(both)

    assert publish(both, prompts[:120]) == 120
    rounds += at_once(both.target, prompts[:40], {"take": True})
    damage(both.storage, draw)
    rounds += at_once(both.target, prompts[40:80], {"take": True})
    delay(both.storage, get_part=0.4)
    rounds += at_once(both.target, prompts[80:88], {"take": True})
    delay(both.storage, manifests=0.8, part_size=0.1)
    rounds += at_once(both.target, prompts[88:100], {"take": True})
    delay(both.storage)
    rounds += at_once(both.target, prompts[100:120], {"take": True})

    with ThreadPoolExecutor(2) as pool:
        delay(both.storage, put_part=0.02)
        publishing = pool.submit(publish, both, prompts[120:])
        taking = pool.submit(
            at_once, both.target, prompts[120:], {"take": True, "wait_seconds": 1.0, "grace_seconds": 0.3}
        )
        time.sleep(2.5)
        both.source.kill()
        publishing.result()
        rounds += taking.result()

    assert len(rounds) == 200
    wrong = [number for number, (tokens, _) in enumerate(rounds) if tokens != expected[number]]
    assert wrong == []
    outcomes = Counter((o.outcome, o.cause) if o is not None else None for _, o in rounds)
    print(dict(outcomes))
    assert None not in outcomes
    assert {outcome for outcome, _ in outcomes} == {"applied", "fell_back"}
    assert sum(n for (outcome, _), n in outcomes.items() if outcome == "applied") >= 60
    assert {"timeout", "not_found"} <= {cause for _, cause in outcomes}
    status = json.loads(urllib.request.urlopen(f"http://127.0.0.1:{both.target.port}/kvmap/status").read())
    assert status["counts"]["requests"] >= 200
    metrics = urllib.request.urlopen(f"http://127.0.0.1:{both.target.port}/metrics").read().decode()
    told = {
        (found[1], found[2]): int(float(found[3]))
        for found in re.finditer(r'^kvmap_takes_total\{cause="(\w*)",outcome="(\w+)"\} (\S+)$', metrics, re.M)
    }
    assert sum(told.values()) == status["counts"]["requests"]
    assert told["", "applied"] == status["counts"]["applied"]
    assert f"kvmap_mapped_tokens_total {float(status['counts']['mapped_tokens'])}" in metrics


def forget_by_filling(both: Both) -> None:
    """What the target has read before is no part of what it is asked to take."""
    with suppress(urllib.error.HTTPError):
        post(both.target.port, "/reset_prefix_cache", {})
