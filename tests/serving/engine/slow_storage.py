"""A connector whose storage takes its time: loaded by an engine in place of kvmap's own.

How long each call takes stands in `<storage>/delays.json`, by the call's name, and may change while it runs.
"""

from __future__ import annotations

import json
import time
from typing import Any

from kvmap.serving.store import SharedFolder
from kvmap.serving.vllm import connector

SLOWED = ("get_part", "put_part", "manifests", "put_manifest", "part_size")


class KvmapConnector(connector.KvmapConnector):
    """Under the same name, by which vLLM finds it in this module."""


def _slowed(name: str) -> Any:
    plain = getattr(SharedFolder, name)

    def slowed(self: SharedFolder, *args: Any, **kwargs: Any) -> Any:
        try:
            delays = json.loads((self.root / "delays.json").read_text())
        except (FileNotFoundError, ValueError):
            delays = {}
        time.sleep(delays.get(name, 0.0))
        return plain(self, *args, **kwargs)

    return slowed


for _name in SLOWED:
    setattr(SharedFolder, _name, _slowed(_name))
