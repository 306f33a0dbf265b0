"""The fixtures of this folder: both engines, and gateways before them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.serving.gateway.fake_engine import FakeEngine, Storage
from tests.serving.gateway.running import Running, running_gateway, running_server

__all__ = ["engines", "gateway", "source", "started_engines", "target"]


@pytest.fixture(scope="session")
def started_engines() -> Iterator[tuple[FakeEngine, FakeEngine]]:
    with ExitStack() as stack:
        pair = FakeEngine("small"), FakeEngine("large")
        for engine in pair:
            engine.url = stack.enter_context(running_server(engine.app()))
        yield pair


@pytest.fixture
def engines(started_engines: tuple[FakeEngine, FakeEngine]) -> tuple[FakeEngine, FakeEngine]:
    """Source and target, as if just started, on one storage."""
    storage = Storage()
    for engine in started_engines:
        engine.reset(storage)
    return started_engines


@pytest.fixture
def source(engines: tuple[FakeEngine, FakeEngine]) -> FakeEngine:
    return engines[0]


@pytest.fixture
def target(engines: tuple[FakeEngine, FakeEngine]) -> FakeEngine:
    return engines[1]


@pytest.fixture
def gateway(source: FakeEngine, target: FakeEngine) -> Iterator[Callable[..., Running]]:
    """Starts a gateway before the two; settings by group, as in the JSON file."""
    with ExitStack() as stack:

        def start(*, environment: dict[str, str] | None = None, **settings: Any) -> Running:
            engines = {"source": {"url": source.url}, "target": {"url": target.url}}
            return stack.enter_context(running_gateway({**engines, **settings}, environment or {}))

        yield start
