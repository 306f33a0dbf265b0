"""What a request asks for: the object `kvmap` within vLLM's `kv_transfer_params`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvmap.errors import KvmapError
from kvmap.serving.outcome import FIELD


class BadAsking(KvmapError):
    """A field of a request that is not what it must be."""


@dataclass(frozen=True)
class Asked:
    """What a request asks for.

    Attributes:
        publish: write the cache of the prompt.
        publish_output: of prompt and output, after the end.
        take: use the source's cache of the longest prefix.
        min_tokens: fewer mapped tokens are not worth it; None: what the engine was given.
        wait_seconds: for a cache that is being written.
        grace_seconds: for a source to say that it is about to write one.
        require: "go": only a mapper that a preflight has judged so.
    """

    publish: bool = False
    publish_output: bool = False
    take: bool = False
    min_tokens: int | None = None
    wait_seconds: float = 0.0
    grace_seconds: float = 0.0
    require: str | None = None


def read_asked(params: Mapping[str, Any] | None) -> Asked | None:
    """What `kv_transfer_params` asks kvmap for; None where it asks nothing. Unknown keys are ignored.

    Raises:
        BadAsking: a value of another type, naming the key and what is expected.
    """
    record = params.get(FIELD) if isinstance(params, Mapping) else None
    if record is None:
        return None
    if not isinstance(record, Mapping):
        raise BadAsking(f"kv_transfer_params.{FIELD} is {type(record).__name__}: expected an object")
    found: dict[str, Any] = {}
    for name in ("publish", "publish_output", "take"):
        found[name] = _value(record, name, bool, False)
    for name in ("wait_seconds", "grace_seconds"):
        found[name] = float(_value(record, name, (int, float), 0.0))
        if not 0 <= found[name] <= 600:
            raise BadAsking(f"{FIELD}.{name}={found[name]}: expected 0 to 600 seconds")
    found["min_tokens"] = _value(record, "min_tokens", int, None)
    found["require"] = _value(record, "require", str, None)
    if found["require"] not in (None, "go"):
        raise BadAsking(f'{FIELD}.require={found["require"]!r}: expected "go", or nothing')
    asked = Asked(**found)
    return asked if asked.publish or asked.publish_output or asked.take else None


def _value(record: Mapping[str, Any], name: str, kind: Any, default: Any) -> Any:
    value = record.get(name)
    if value is None:
        return default
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise BadAsking(f"{FIELD}.{name}={value!r}: expected {getattr(kind, '__name__', 'a number')}")
    return value
