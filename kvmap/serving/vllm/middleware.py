"""ASGI middleware of an engine's API server: outcomes for clients of streams, counts and metrics.

vLLM puts `kv_transfer_params` into whole answers and leaves it out of streams. The middleware notes what the
engine says of each request, adds one event before `data: [DONE]`, counts, and answers `GET /kvmap/status`.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from kvmap.serving.outcome import FIELD, OutcomeCounts, read_outcome, read_published
from kvmap.serving.vllm.metrics import EngineMetrics

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

STATUS_PATH = "/kvmap/status"
_DONE = b"data: [DONE]"


@functools.cache
def _metrics() -> EngineMetrics:
    """Of this process: Prometheus knows a name once."""
    return EngineMetrics()


@dataclass(eq=False)
class _Note:
    """What the engine has said of the request that is being answered."""

    params: dict[str, Any] | None = None


@dataclass(eq=False)
class _Engine:
    """What is known of one API server."""

    counts: OutcomeCounts = field(default_factory=OutcomeCounts)
    metrics: EngineMetrics = field(default_factory=_metrics)

    def note(self, params: dict[str, Any]) -> None:
        """A request has ended."""
        body = {"kv_transfer_params": params}
        if (outcome := read_outcome(body)) is not None:
            self.counts.add(outcome)
            self.metrics.take(outcome)
        if (published := read_published(body)) is not None:
            self.counts.add_published(published)
            self.metrics.publish(published)


_current: ContextVar[_Note | None] = ContextVar("kvmap_note", default=None)


class OutcomeMiddleware:
    """See the module. Given to vLLM as `--middleware kvmap.serving.vllm.middleware.OutcomeMiddleware`."""

    def __init__(self, app: Any) -> None:
        """Args: the ASGI app behind."""
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        state = scope["app"].state
        engine = _listening(state)
        if scope["path"] == STATUS_PATH:
            await _send_json(send, _status(state, engine))
            return
        note = _Note()
        token = _current.set(note)
        try:
            await self._app(scope, receive, _adding(send, note, state))
        finally:
            _current.reset(token)


def _listening(state: Any) -> _Engine:
    """The engine's counts; the first request has its client listened to."""
    engine: _Engine | None = getattr(state, "kvmap_engine", None)
    if engine is None:
        engine = state.kvmap_engine = _Engine()
        client = getattr(state, "engine_client", None)
        if client is not None:
            client.generate = _noting(client.generate, engine)
    return engine


def _noting(
    generate: Callable[..., AsyncIterator[Any]], engine: _Engine
) -> Callable[..., AsyncIterator[Any]]:
    def noting(*args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        return _passed_on(generate(*args, **kwargs), _current.get(), engine)

    return noting


async def _passed_on(outputs: AsyncIterator[Any], note: _Note | None, engine: _Engine) -> AsyncIterator[Any]:
    async for output in outputs:
        params = getattr(output, "kv_transfer_params", None)
        if params and FIELD in params:
            if note is not None:
                note.params = params
            engine.note(params)
        yield output


def _adding(send: Send, note: _Note, state: Any) -> Send:
    """`send`, with the event added where the answer is a stream."""

    async def adding(message: MutableMapping[str, Any]) -> None:
        body = message.get("body", b"")
        if message["type"] == "http.response.body" and note.params is not None and body.startswith(_DONE):
            message = {**message, "body": _event(note.params, state) + body}
        await send(message)

    return adding


def _event(params: dict[str, Any], state: Any) -> bytes:
    names = _served_names(state)
    event = {
        "id": "kvmap-outcome",
        "object": "kvmap.outcome",
        "created": int(time.time()),
        "model": names[0] if names else "",
        "choices": [],
        "kv_transfer_params": params,
    }
    return b"data: " + json.dumps(event).encode() + b"\n\n"


def _status(state: Any, engine: _Engine) -> dict[str, Any]:
    config = getattr(state, "vllm_config", None)
    transfer = getattr(config, "kv_transfer_config", None)
    extra = getattr(transfer, "kv_connector_extra_config", None) or {}
    roles = {"kv_producer": "source", "kv_consumer": "target", "kv_both": "both"}
    return {
        "role": roles.get(str(getattr(transfer, "kv_role", None))),
        "model": getattr(getattr(config, "model_config", None), "model", None),
        "served": _served_names(state),
        "storage": extra.get("storage"),
        "mapper": extra.get("mapper"),
        "counts": engine.counts.record(),
    }


def _served_names(state: Any) -> list[str]:
    models = getattr(state, "openai_serving_models", None)
    return [path.name for path in getattr(models, "base_model_paths", ())]


async def _send_json(send: Send, content: Any) -> None:
    body = json.dumps(content).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})
