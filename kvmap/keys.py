"""What determines a content, as one key: the same in every process, on every machine."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from typing import Any

SCHEMA_VERSION = 1

_SAFE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


def content_key(kind: str, spec: Mapping[str, Any]) -> str:
    """The sha256, in hex, of the canonical JSON of schema version, kind and spec.

    It depends on nothing else: not on the order of the keys, the process or PYTHONHASHSEED.

    Args:
        kind: What sort of thing, a plain name such as `moments`.
        spec: Exactly what determines the content: None, bools, integers, finite floats, strings, lists,
            tuples and dicts with string keys. Tuples count as lists.

    Raises:
        TypeError: For any other value, naming where in the spec it stands.
        ValueError: For a NaN or an infinity, or a kind that is no plain name.
    """
    _check_name("artifact kind", kind)
    content = {"schema": SCHEMA_VERSION, "kind": kind, "spec": plain_spec(spec)}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _check_name(what: str, name: str) -> None:
    if not _SAFE_NAME.fullmatch(name):
        raise ValueError(f"{what} {name!r} is no plain name: letters, digits, '_', '-' and '.' are allowed")


def plain_spec(value: Any, where: str = "spec") -> Any:
    """`value` in JSON's own types; anything whose text could differ between processes is refused."""
    if value is None or isinstance(value, bool | str):
        return value
    if type(value) in (int, float):  # exactly: numpy's float64 is a float by inheritance, its kin are not
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{where} is {value}: an artifact's spec holds finite numbers only")
        return value
    if isinstance(value, list | tuple):
        return [plain_spec(item, f"{where}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise TypeError(f"{where} has the key {key!r}: an artifact's spec has string keys only")
        return {key: plain_spec(item, f"{where}.{key}") for key, item in value.items()}
    raise TypeError(
        f"{where} is a {type(value).__name__}: an artifact's spec holds None, bool, int, float, str, list "
        "and dict only; turn it into one of them"
    )
