"""Servers in threads, each on a port of its own, and clients of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import openai
import uvicorn
from prometheus_client.parser import text_string_to_metric_families

from kvmap.serving.gateway.app import Gateway, application
from kvmap.serving.gateway.reading_settings import read_settings
from kvmap.serving.gateway.serving import listen
from kvmap.serving.gateway.settings import ServerSettings


@contextmanager
def running_server(app: Any) -> Iterator[str]:
    """An ASGI application on a free port; gives its address."""
    listening = listen(ServerSettings(port=0))
    config = uvicorn.Config(app, log_level="warning", lifespan="on", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    deadline = time.monotonic() + 10
    while not server.started:
        assert thread.is_alive(), "the server has died"
        assert time.monotonic() < deadline, "the server does not start"
        time.sleep(0.005)
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        # it ends by itself within a few tenths of a second, which no test has to wait for
        server.should_exit = True


# Each client of its own reads all certificates of the system, which takes longer than most tests.
_openai = openai.OpenAI(base_url="http://127.0.0.1:9/v1", api_key="unused", max_retries=0, timeout=20)
_http = httpx.Client(timeout=20)


@dataclass
class Running:
    """A gateway that runs."""

    url: str
    gateway: Gateway

    def client(self, key: str = "unused") -> openai.OpenAI:
        """A client that does not try again."""
        return _openai.with_options(base_url=f"{self.url}/v1", api_key=key)

    def get(self, path: str, **arguments: Any) -> httpx.Response:
        return _http.get(f"{self.url}{path}", **arguments)

    def post(self, path: str, **arguments: Any) -> httpx.Response:
        return _http.post(f"{self.url}{path}", **arguments)

    def metric(self, name: str, **labels: str) -> float:
        """A sample of /metrics; 0 where there is none."""
        text = self.get("/metrics").text
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name == f"kvmap_gateway_{name}" and sample.labels == labels:
                    return sample.value
        return 0.0


@contextmanager
def running_gateway(values: Mapping[str, Any], environment: Mapping[str, str]) -> Iterator[Running]:
    given = {name: value for name, value in values.items() if not isinstance(value, Mapping)}
    for group, members in values.items():
        if isinstance(members, Mapping):
            given |= {f"{group}.{name}": value for name, value in members.items()}
    app = application(read_settings(None, given, environment), environment)
    with running_server(app) as url:
        yield Running(url, app.state.gateway)


def eventually(holds: Any, seconds: float = 5.0) -> bool:
    """Whether something comes true before long."""
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True
