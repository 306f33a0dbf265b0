"""Short ways to ask a gateway, and to read what it tells."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from tests.serving.gateway.running import Running

Start: TypeAlias = Callable[..., Running]
LONG = "x" * 600


def say(running: Running, *texts: str, **arguments: Any) -> Any:
    """Ask; texts are the user's and the assistant's in turn."""
    roles = ("user", "assistant")
    messages: Any = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
    return running.client().chat.completions.create(**{"model": "kvmap", "messages": messages, **arguments})


def stream(running: Running, *texts: str, **arguments: Any) -> list[Any]:
    """All chunks of a streamed answer."""
    return list(say(running, *texts, stream=True, **arguments))


def text_of(chunks: list[Any]) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def told(answer: Any) -> dict[str, Any]:
    """The field `kvmap` of an answer, or of a stream's last chunk."""
    return dict((answer[-1] if isinstance(answer, list) else answer).model_extra["kvmap"])


def wish(**fields: Any) -> dict[str, Any]:
    return {"extra_body": {"kvmap": fields}}


def transfer(body: dict[str, Any]) -> dict[str, Any]:
    """What an engine was asked of hand-offs."""
    return dict((body.get("kv_transfer_params") or {}).get("kvmap") or {})
