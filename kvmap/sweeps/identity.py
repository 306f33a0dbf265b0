"""The identity of a job: a hash of what determines its results."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any

LENGTH = 16
LEFT_OUT = ("hydra", "outputs", "study", "threads", "kernels", "tracking", "sweep")
"""Groups and settings that change no result, or only where it is kept."""


def job_identity(config: Mapping[str, Any]) -> str:
    """The first 16 hexadecimal digits of the sha256 of the configuration's canonical JSON.

    It depends neither on the order of keys nor on how a number is written (`1` or `1.0`), nor on `LEFT_OUT`,
    and on group `plan` only where nothing but a plan is asked.

    Args:
        config: The resolved configuration as plain values.

    Raises:
        TypeError: A value is none of None, bool, int, float, str, list, tuple and dict.
    """
    stages = config.get("stages", ())
    # what is planned for changes a plan, and nothing of a run that does what it plans
    left_out = LEFT_OUT if set(stages) <= {"plan", "report"} else (*LEFT_OUT, "plan")
    content = {key: _canonical(value, str(key)) for key, value in config.items() if key not in left_out}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:LENGTH]


def _canonical(value: Any, where: str) -> Any:
    if value is None or isinstance(value, bool | str | int):
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            return {"float": str(value)}
        return int(value) if value.is_integer() else value
    if isinstance(value, list | tuple):
        return [_canonical(item, f"{where}[{position}]") for position, item in enumerate(value)]
    if isinstance(value, Mapping):
        return {str(key): _canonical(item, f"{where}.{key}") for key, item in value.items()}
    raise TypeError(f"{where} is a {type(value).__name__}: a configuration holds plain values only")
