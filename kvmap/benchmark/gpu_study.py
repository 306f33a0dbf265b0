"""What `kvmap.benchmark.gpu` measures, what it has found, and how much of its time is left."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from kvmap.benchmark.gpu_cases import PairShape
from kvmap.files import write_json


@dataclass(frozen=True)
class Study:
    """What is measured.

    Attributes:
        shape: of the two caches.
        top_k: source layers that a target layer reads.
        lengths: context tokens, ascending.
        source, target: hub ids, whose shapes the models of the re-prefill have.
        max_layers: of those models; None: as many as the memory holds.
        dtype: of models, caches and weights.
        repeats: timed runs at short lengths; a quarter of them at long ones.
        tune_at: the length at which tiles are tried.
        dry: whether it is a rehearsal: tiny, on the CPU, kernels interpreted.
    """

    shape: PairShape
    top_k: int
    lengths: tuple[int, ...]
    source: str
    target: str
    max_layers: int | None
    dtype: torch.dtype
    repeats: int
    tune_at: int
    dry: bool = False

    @property
    def device(self) -> torch.device:
        """Where it is measured."""
        return torch.device("cpu" if self.dry else "cuda")

    def repeats_at(self, length: int) -> int:
        """Timed runs at a length."""
        return self.repeats if length <= 4096 else max(self.repeats // 4, 1)


FULL = Study(
    PairShape(40, 64, 8, 128),
    8,
    (64, 256, 1024, 4096, 16384, 32768, 65536),
    "Qwen/Qwen3-14B",
    "Qwen/Qwen3-32B",
    None,
    torch.bfloat16,
    20,
    32768,
)
DRY = Study(
    PairShape(3, 2, 2, 16),
    2,
    (3, 8),
    "HuggingFaceTB/SmolLM2-135M-Instruct",
    "HuggingFaceTB/SmolLM2-135M-Instruct",
    2,
    torch.float32,
    1,
    8,
    dry=True,
)


@dataclass
class Record:
    """What has been found so far, on disk after every part, and how much time is left.

    Attributes:
        seconds: for everything.
        output: the file; None: nowhere.
        found: by part.
    """

    seconds: float
    output: Path | None = None
    found: dict[str, Any] = field(default_factory=dict)
    _start: float = field(default_factory=time.monotonic)

    @property
    def left(self) -> float:
        """Seconds."""
        return self.seconds - (time.monotonic() - self._start)

    def keep(self, part: str, value: Any) -> None:
        """Add a part, or replace it, and write the file."""
        self.found[part] = value
        self.found["seconds"] = self.seconds - self.left
        if self.output is not None:
            write_json(self.output, self.found)

    def skip(self, what: str) -> None:
        """Say what there was no time for."""
        self.found.setdefault("skipped", []).append(what)
        self.say(f"no time left for {what}")

    def say(self, text: str) -> None:
        """A line of progress."""
        print(f"[{self.seconds - self.left:6.1f} s] {text}", flush=True)


def free(device: torch.device) -> None:
    """Give memory back that nothing holds."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
