"""Reading a published cache from the store and checking every byte of it, beside the engine's steps."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from dataclasses import dataclass

from torch import Tensor

from kvmap.errors import KvmapError
from kvmap.files import ArtifactCorrupt
from kvmap.serving.background import Background
from kvmap.serving.manifest import Manifest, Run
from kvmap.serving.parts import part_name, read_part
from kvmap.serving.store import PartMissing, Store


class LoadFailed(KvmapError):
    """A cache that could not be read whole.

    Attributes:
        cause: one of `kvmap.serving.outcome.CAUSES`.
    """

    def __init__(self, cause: str, reason: object) -> None:
        """Args: the cause; and why, for people."""
        super().__init__(str(reason))
        self.cause = cause


@dataclass(frozen=True, eq=False)
class LoadedRun:
    """Tokens start:stop of every layer: keys and values, each (1, n_kv_heads, stop − start, head_dim)."""

    start: int
    stop: int
    keys: list[Tensor]
    values: list[Tensor]


@dataclass(frozen=True, eq=False)
class LoadedCache:
    """The runs of a cache that hold the tokens asked for.

    Attributes:
        runs: in order.
        n_bytes: read.
        seconds: reading and checking took.
    """

    runs: tuple[LoadedRun, ...]
    n_bytes: int
    seconds: float


class Loading:
    """A cache on its way."""

    def __init__(self, future: Future[LoadedCache], seconds: float) -> None:
        """Args: what is under way; and how long it may take."""
        self._future, self._until = future, time.monotonic() + seconds
        self._seconds = seconds

    @property
    def is_over(self) -> bool:
        """Whether it has come, failed, or is late."""
        return self._future.done() or time.monotonic() > self._until

    def wait(self, seconds: float) -> None:
        """Until it is over, at most so long."""
        with suppress(FutureTimeout):
            self._future.exception(timeout=seconds)

    def result(self) -> LoadedCache:
        """What came.

        Raises:
            LoadFailed: with cause "partial", "cache_file", "storage" or "timeout".
        """
        if not self._future.done():
            self._future.cancel()
            raise LoadFailed("timeout", f"the storage did not give the cache within {self._seconds:g} s")
        try:
            return self._future.result()
        except PartMissing as error:
            raise LoadFailed("partial", error) from error
        except ArtifactCorrupt as error:
            raise LoadFailed("cache_file", error) from error
        except (KvmapError, OSError) as error:
            raise LoadFailed("storage", error) from error
        except Exception as error:
            raise LoadFailed("failure", f"{type(error).__name__}: {error}") from error


class Loader:
    """Threads that read; none of them touches the model or its pages."""

    def __init__(self, store: Store, n_threads: int = 4) -> None:
        """Args: the store; and how many caches are read at a time."""
        self._store = store
        self._threads = Background("kvmap-load", n_threads)

    def start(self, manifest: Manifest, start: int, stop: int, seconds: float) -> Loading:
        """Begin to read the runs that hold tokens start:stop; it may take so many seconds."""
        return Loading(self._threads.submit(self._load, manifest, start, stop), seconds)

    def close(self) -> None:
        """Begin nothing more."""
        self._threads.close()

    def _load(self, manifest: Manifest, start: int, stop: int) -> LoadedCache:
        begun = time.perf_counter()
        runs, n_bytes = [], 0
        for number, run in _overlapping(manifest, start, stop):
            runs.append(self._loaded(manifest, number, run))
            n_bytes += sum(file.n_bytes for file in run.files)
        return LoadedCache(tuple(runs), n_bytes, time.perf_counter() - begun)

    def _loaded(self, manifest: Manifest, number: int, run: Run) -> LoadedRun:
        keys, values = [], []
        for layer, file in enumerate(run.files):
            name = part_name(number, layer)
            data = self._store.get_part(manifest.group, name, file.n_bytes)
            n_heads, width = manifest.shape[layer]
            shape = (n_heads, run.stop - run.start, width)
            try:
                pair = read_part(data, file.sha256, shape, manifest.dtype)
            except (ValueError, KeyError, TypeError) as error:
                raise ArtifactCorrupt(f"part {name} of {manifest.group}: {error!r}") from error
            keys.append(pair[0])
            values.append(pair[1])
        return LoadedRun(run.start, run.stop, keys, values)


def missing_part(store: Store, manifest: Manifest, stop: int) -> str | None:
    """The first part for the first `stop` tokens that is not there in full, in words; None where all are."""
    for number, run in _overlapping(manifest, 0, stop):
        for layer, file in enumerate(run.files):
            size = store.part_size(manifest.group, part_name(number, layer))
            if size != file.n_bytes:
                has = "is gone" if size is None else f"has {size} bytes of {file.n_bytes}"
                return f"layer {layer} over tokens {run.start}:{run.stop} {has}"
    return None


def _overlapping(manifest: Manifest, start: int, stop: int) -> Iterator[tuple[int, Run]]:
    """The runs that hold some of the tokens start:stop, with their numbers."""
    for number, run in enumerate(manifest.runs):
        if run.start < stop and run.stop > start:
            yield number, run
