"""How long each arm's work takes, batch by batch, beside the source's prefill that the mapped arms share."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from kvmap.models.pair import LoadedModel
from kvmap.transfer import HandOff

SOURCE_PREFILL = "source_prefill"
"""Its reading of a context, once for the source's own arm and all that map its cache."""

T = TypeVar("T")


class Stopwatch:
    """Wall time by arm; of a GPU's work until it is done."""

    def __init__(self) -> None:
        self._seconds: dict[str, dict[tuple[int, ...], float]] = {}

    @contextmanager
    def lap(self, name: str, model: LoadedModel, batch: tuple[int, ...]) -> Iterator[None]:
        """Counts the block as work of a model on a batch under an arm; laps of one batch add up.

        Args:
            name: the arm, or `SOURCE_PREFILL`.
            model: whose work it is.
            batch: numbers of the contexts, `Batch.index`.
        """
        started = _now(model)
        yield
        self._add(name, batch, _now(model) - started)

    def hand_offs(
        self, model: LoadedModel, batch: tuple[int, ...], made: Iterable[tuple[str, HandOff]]
    ) -> Iterator[tuple[str, HandOff]]:
        """Passes hand-offs on; each counts from when it is asked for until the next one is."""
        started = _now(model)
        for arm, hand_off in made:
            yield arm, hand_off
            ended = _now(model)
            self._add(arm, batch, ended - started)
            started = ended

    def stream(
        self, name: str, model: LoadedModel, batch: tuple[int, ...], chunks: Iterable[T]
    ) -> Iterator[T]:
        """Passes on what a model does chunk by chunk; what is done with the chunks does not count."""
        rest = iter(chunks)
        while True:
            with self.lap(name, model, batch):
                chunk = next(rest, None)
            if chunk is None:
                return
            yield chunk

    def record(self) -> dict[str, dict[str, Any]]:
        """By arm {seconds, n_contexts, median_seconds}; the last a context, as the median over batches."""
        return {
            name: {
                "seconds": sum(batches.values()),
                "n_contexts": sum(len(index) for index in batches),
                "median_seconds": statistics.median(
                    seconds / len(index) for index, seconds in batches.items()
                ),
            }
            for name, batches in self._seconds.items()
        }

    def _add(self, name: str, batch: tuple[int, ...], seconds: float) -> None:
        batches = self._seconds.setdefault(name, {})
        batches[batch] = batches.get(batch, 0.0) + seconds


def _now(model: LoadedModel) -> float:
    """Seconds on a clock that runs while a GPU works, read when it has finished."""
    for device in {*model.layer_devices, model.device}:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    return time.perf_counter()
