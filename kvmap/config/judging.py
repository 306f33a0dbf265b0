"""What every judgement of a setting needs: kinds of numbers, unknown keys and unknown names."""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, get_type_hints


def unknown_keys(values: Mapping[str, Any], schema: type, prefix: str = "") -> Iterator[str]:
    """Keys that `+key=value` has added but nothing reads; one line each."""
    known = {item.name for item in dataclasses.fields(schema)}
    nested = get_type_hints(schema)
    for key, value in values.items():
        if key not in known:
            yield f"{prefix}{key}: nothing reads this key; expected one of {', '.join(sorted(known))}"
        elif dataclasses.is_dataclass(nested[key]) and isinstance(value, Mapping):
            yield from unknown_keys(value, nested[key], f"{prefix}{key}.")


def is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_penalty(value: Any, *, infinite: bool) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and value >= 0 and (infinite or math.isfinite(value))


def unknown_name(key: str, value: object, known: Iterable[str]) -> str:
    names = list(known)
    near = difflib.get_close_matches(str(value), names, n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    return f"{key}={value}: expected one of {', '.join(names)}{hint}"
