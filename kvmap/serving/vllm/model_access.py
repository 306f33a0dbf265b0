"""How the connector comes by the worker's model, which vLLM does not hand it."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from typing import Any

from torch import nn

from kvmap.errors import KvmapError


class ModelNotFoundInWorker(KvmapError):
    """No module of this process holds the worker's attention layers under their names."""


def find_model(attention_layers: Mapping[str, Any]) -> nn.Module:
    """The module in which every attention layer stands under its own name.

    vLLM names a layer by its path from the model, "model.layers.3.self_attn.attn", and gives connectors the
    layers but not the model. It is looked for among the objects that Python's collector knows, which has to
    be done while a worker starts: vLLM hides them from the collector later.

    Args:
        attention_layers: vLLM's attention modules by name.

    Raises:
        ModelNotFoundInWorker: there is none.
    """
    for candidate in gc.get_objects():
        # by type, not by isinstance: that would wake lazy objects
        if issubclass(type(candidate), nn.Module) and _holds(candidate, attention_layers):
            model: nn.Module = candidate
            return model
    raise ModelNotFoundInWorker("no module of the worker holds its attention layers under their names")


def _holds(module: nn.Module, attention_layers: Mapping[str, Any]) -> bool:
    def at(name: str) -> Any:
        found: Any = module
        for part in name.split("."):
            found = found._modules.get(part) if isinstance(found, nn.Module) else None
        return found

    return bool(attention_layers) and all(at(name) is layer for name, layer in attention_layers.items())
