"""Mistakes in where models are put, and in what a calibration of one model at a time may take."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from kvmap.config.judging import unknown_name
from kvmap.config.schema import DEVICE_MAPS, Config

_SIZE = re.compile(r"\d+(\.\d+)?\s*([KMGT]i?B|B)", re.IGNORECASE)
_DEVICES = "a GPU's number, cpu or disk"


def placement_mistakes(cfg: Config) -> Iterator[str]:
    """Device maps, memory of devices, offload; disk and order of a sequential capture."""
    for role, model in (("source", cfg.pair.source), ("target", cfg.pair.target)):
        yield from _device_map(f"pair.{role}", model.device_map)
        yield from _max_memory(f"pair.{role}", model.max_memory)
        for name in ("max_memory", "offload_folder"):
            value = getattr(model, name)
            if value is not None and model.device_map is None:
                yield (
                    f"pair.{role}.{name}={value} without pair.{role}.device_map: only a device map reads it; "
                    "set it to auto"
                )
    yield from _spill(cfg)


def _device_map(key: str, value: Any) -> Iterator[str]:
    if value is None:
        return
    if isinstance(value, str):
        if value not in DEVICE_MAPS:
            yield unknown_name(f"{key}.device_map", value, DEVICE_MAPS)
        return
    if not isinstance(value, Mapping) or not value:
        yield (
            f"{key}.device_map={value!r}: expected {', '.join(DEVICE_MAPS)}, or module names and "
            "their devices"
        )
        return
    for module, device in value.items():
        if not _is_device(device):
            yield f"{key}.device_map: {module!r} on {device!r}; expected {_DEVICES}"
    for inner in value:
        outer = next(
            (name for name in value if name != inner and f"{inner}.".startswith(f"{name}.".lstrip("."))), None
        )
        if outer is not None:
            yield (
                f"{key}.device_map: {inner!r} lies within {outer!r}; name modules that together are the "
                "model, none within another"
            )


def _max_memory(key: str, value: Any) -> Iterator[str]:
    if value is None:
        return
    if not isinstance(value, Mapping) or not value:
        yield f"{key}.max_memory={value!r}: expected sizes by device, such as {{0: 20GiB, cpu: 30GiB}}"
        return
    for device, size in value.items():
        if not _is_device(device) or device == "disk":
            yield f"{key}.max_memory: {device!r} is no device; expected a GPU's number or cpu"
        whole = isinstance(size, int) and not isinstance(size, bool) and size >= 0
        if not whole and not (isinstance(size, str) and _SIZE.fullmatch(size.strip())):
            yield f"{key}.max_memory: {size!r} of {device!r}; expected bytes or a size such as 20GiB"


def _is_device(device: Any) -> bool:
    if isinstance(device, int) and not isinstance(device, bool):
        return device >= 0
    return isinstance(device, str) and re.fullmatch(r"cpu|disk|mps|cuda(:\d+)?", device) is not None


def _spill(cfg: Config) -> Iterator[str]:
    calibration = cfg.calibration
    bound, layerwise = calibration.max_spill_gib, calibration.layerwise
    if bound is not None and not (bound > 0 and math.isfinite(bound)):
        yield f"calibration.max_spill_gib={bound}: expected a number above 0, or null for no bound"
    if layerwise != "auto" and not isinstance(layerwise, bool):
        yield f"calibration.layerwise={layerwise}: expected auto, true or false"
    elif layerwise is True and not calibration.sequential:
        yield (
            "calibration.layerwise=true: layers are read one at a time by one model at a time; set "
            "calibration.sequential=true as well"
        )
