"""How things are timed: calls and copies that take turns, and the memory that a call comes to hold."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

Row: TypeAlias = dict[str, Any]
Call: TypeAlias = Callable[[], object]

COLD_BYTES = 512 * 2**20
"""A copy of so many bytes finds no caches warm when its turn comes again, whatever the device."""


@contextmanager
def torch_threads(number: int) -> Iterator[None]:
    """Within it torch has so many threads, and afterwards as many as before."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(number)
        yield
    finally:
        torch.set_num_threads(before)


def time_interleaved(
    calls: dict[str, Call], repeats: int, warmup: int, devices: Iterable[torch.device] = ()
) -> dict[str, list[float]]:
    """Seconds of every call, the calls taking turns; CUDA devices are synchronised before and after each.

    Each turn starts with another call, so that whatever else the machine does falls on all alike.
    """
    cuda = {device for device in devices if device.type == "cuda"}

    def wait() -> None:
        for device in cuda:
            torch.cuda.synchronize(device)

    names = list(calls)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(warmup + repeats):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            wait()
            start = time.perf_counter()
            result = calls[name]()
            wait()
            elapsed = time.perf_counter() - start
            del result
            if turn >= warmup:
                seconds[name].append(elapsed)
    return seconds


def in_turn(calls: Sequence[Call]) -> Call:
    """A call that is each of `calls` in turn: the same work on other copies of its data."""
    place = -1

    def call() -> object:
        nonlocal place
        place = (place + 1) % len(calls)
        return calls[place]()

    return call


def n_copies(wanted: int, n_bytes: int) -> int:
    """How many copies of `n_bytes` to take turns with: `wanted`, but no more than `COLD_BYTES` fills."""
    return max(1, min(wanted, -(-COLD_BYTES // max(n_bytes, 1))))


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """`{p20_ms, p50_ms, p80_ms}`."""
    low, middle, high = np.percentile(np.asarray(seconds) * 1e3, [20, 50, 80])
    return {"p20_ms": float(low), "p50_ms": float(middle), "p80_ms": float(high)}


def peak_bytes(call: Call, device: torch.device) -> int:
    """Bytes that a call holds at most beyond what was held before it, its result included.

    On CUDA by the allocator's own record. On the CPU by the tensors that torch's operations return: what one
    operation holds for itself while it runs is not seen. Watching takes time: no timed run is watched.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        result = call()
        torch.cuda.synchronize(device)
        del result
        return torch.cuda.max_memory_allocated(device) - before
    with _Watched() as watched:
        result = call()
    del result
    return watched.peak


class _Watched(TorchDispatchMode):
    """Counts the bytes of storages that operations return and have not been given."""

    def __init__(self) -> None:
        super().__init__()
        self.held = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = {id(tensor.untyped_storage()) for tensor in _tensors((args, kwargs or {}))}
        found = func(*args, **(kwargs or {}))
        for tensor in _tensors(found):
            storage = tensor.untyped_storage()
            if id(storage) in given or id(storage) in self._known:
                continue
            self._known.add(id(storage))
            self.held += storage.nbytes()
            self.peak = max(self.peak, self.held)
            weakref.finalize(storage, self._gone, id(storage), storage.nbytes())
        return found

    def _gone(self, storage: int, n_bytes: int) -> None:
        self._known.discard(storage)
        self.held -= n_bytes


def _tensors(values: Any) -> list[Tensor]:
    leaves, _ = tree_flatten(values)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def setting(device: torch.device, dtype: torch.dtype, repeats: int) -> Row:
    """Where and how something was timed: `{n_repeats, device, dtype, threads}`."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return {
        "n_repeats": repeats,
        "device": name,
        "dtype": str(dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
    }
