"""Where weights rest and where they compute: accelerate's device maps, CPU and disk offload."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from kvmap.models.spec import InvalidSpec, ModelSpec

# Said by accelerate of what a device map was asked to do.
_EXPECTED = "on the meta device because they were offloaded"

DEVICE_MAPS = ("auto", "balanced", "balanced_low_0", "sequential", "disk")


def placement_arguments(spec: ModelSpec) -> dict[str, Any]:
    """What `from_pretrained` is to be told of devices; nothing without a device map.

    Raises:
        InvalidSpec: a map by an unknown name, a setting that only a map reads, or accelerate is not there.
    """
    if spec.device_map is None:
        for name in ("max_memory", "offload_folder"):
            if getattr(spec, name) is not None:
                raise InvalidSpec(
                    f"{spec.name}: {name}={getattr(spec, name)!r} without a device_map; set device_map=auto, "
                    "which reads it"
                )
        return {}
    if isinstance(spec.device_map, str) and spec.device_map not in DEVICE_MAPS:
        raise InvalidSpec(
            f"{spec.name}: device_map {spec.device_map!r}; expected {', '.join(DEVICE_MAPS)}, or module "
            "names and their devices. For one device, set device"
        )
    if importlib.util.find_spec("accelerate") is None:
        raise InvalidSpec(
            f"{spec.name}: device_map={spec.device_map} needs accelerate, which is not installed: "
            "pip install accelerate"
        )
    given = {"": "disk"} if spec.device_map == "disk" else spec.device_map
    arguments: dict[str, Any] = {"device_map": given if isinstance(given, str) else dict(given)}
    if spec.max_memory is not None:
        arguments["max_memory"] = dict(spec.max_memory)
    if spec.offload_folder is not None:
        arguments["offload_folder"] = str(Path(spec.offload_folder).expanduser())
    return arguments


@contextmanager
def expected_offload() -> Iterator[None]:
    """Within it accelerate does not warn that weights are offloaded."""
    logger = logging.getLogger("accelerate.big_modeling")

    def unexpected(record: logging.LogRecord) -> bool:
        return _EXPECTED not in record.getMessage()

    logger.addFilter(unexpected)
    try:
        yield
    finally:
        logger.removeFilter(unexpected)


def execution_device(module: nn.Module) -> torch.device:
    """The device a module computes on, which is where its inputs go and its outputs are.

    That of its first parameter; of a parameter that is offloaded (and rests as "meta" in between), that which
    accelerate brings it to.
    """
    for part in module.modules():
        for parameter in part.parameters(recurse=False):
            if parameter.device.type != "meta":
                return parameter.device
            for hook in _offloading(part):
                return _as_device(hook.execution_device)
    return torch.device("cpu")


def is_offloaded(module: nn.Module) -> bool:
    """Whether weights within a module are brought to its device anew each time it runs."""
    return any(_offloading(part) for part in module.modules())


@contextmanager
def weights_in_memory(*modules: nn.Module) -> Iterator[None]:
    """Within it, offloaded weights of some modules stay where they compute: they are brought there once.

    accelerate brings the weights of a module in before each of its forwards, and drops them after it. Here
    each of its hooks does the former at the start, the latter at the end, and neither in between.
    """
    hooks = [(part, hook) for module in modules for part in module.modules() for hook in _offloading(part)]
    held: list[tuple[nn.Module, Any]] = []
    try:
        for part, hook in hooks:
            held.append((part, hook))
            hook.pre_forward(part)
            hook.offload = False
        yield
    finally:
        for part, hook in held:
            hook.offload = True
            hook.post_forward(part, None)


def _offloading(module: nn.Module) -> list[Any]:
    """Hooks of accelerate on this very module that hold its weights elsewhere."""
    hook = getattr(module, "_hf_hook", None)
    hooks = () if hook is None else getattr(hook, "hooks", (hook,))
    return [each for each in hooks if getattr(each, "offload", False)]


def _as_device(device: Any) -> torch.device:
    return torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
