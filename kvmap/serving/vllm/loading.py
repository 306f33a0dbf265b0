"""Reading a cache from the store part by part and checking every byte of it, beside the engine's steps.

A cache that is still being written is read as its parts appear.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from kvmap.errors import KvmapError
from kvmap.files import ArtifactCorrupt
from kvmap.serving.background import Background
from kvmap.serving.index import ALIVE_SECONDS
from kvmap.serving.manifest import Manifest, Run
from kvmap.serving.parts import Part, part_name, read_part
from kvmap.serving.store import PartMissing, Store

#: between two looks for a part that is not there yet
_POLL_SECONDS = 0.004
#: between two looks for the source's signs of life
_SIGN_SECONDS = 0.25


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
class Wanted:
    """What is to be read of a cache.

    Attributes:
        manifest: of the cache; one that is not written yet names no parts.
        start, stop: tokens.
        wait_seconds: for parts that are not written yet.
        load_seconds: reading may take beside that.
    """

    manifest: Manifest
    start: int
    stop: int
    wait_seconds: float
    load_seconds: float


@dataclass(frozen=True, eq=False)
class Arrived:
    """Source layer `layer` over tokens start:stop: keys and values, each (1, n_kv_heads, stop − start, d)."""

    layer: int
    start: int
    stop: int
    keys: Tensor
    values: Tensor


class Loading:
    """A cache on its way. A thread that reads puts parts in, the engine's own takes them out."""

    def __init__(self, wanted: Wanted, news: threading.Event) -> None:
        """Args: what is under way; and what is set whenever something has come, or it is over."""
        self._begun = time.monotonic()
        self._most_seconds = wanted.wait_seconds + wanted.load_seconds
        self._news = news
        self._parts: deque[Arrived] = deque()
        self._failure: LoadFailed | None = None
        self._is_ended = False
        self.n_bytes, self.seconds, self.wait_seconds = 0, 0.0, 0.0

    def take(self) -> list[Arrived]:
        """What has come since it was last asked: runs by token, and each run's layers from the first.

        Raises:
            LoadFailed: with cause "partial", "cache_file", "storage", "timeout" or "failure".
        """
        if self._failure is not None:
            raise self._failure
        if not self._is_ended and time.monotonic() - self._begun > self._most_seconds:
            seconds = f"{self._most_seconds:g} s"
            self.fail(LoadFailed("timeout", f"the storage did not give the cache within {seconds}"))
            return self.take()
        return [self._parts.popleft() for _ in range(len(self._parts))]

    @property
    def is_ended(self) -> bool:
        """Whether everything has come; what was not taken yet may still be."""
        return self._is_ended

    @property
    def is_over(self) -> bool:
        """Whether nothing more comes: all has, or it has failed."""
        return self._is_ended or self._failure is not None

    def put(self, part: Arrived, n_bytes: int, seconds: float) -> None:
        """A part has come, and how long it took to read."""
        self.n_bytes += n_bytes
        self.seconds += seconds
        self._parts.append(part)
        self._news.set()

    def end(self) -> None:
        """Everything has come."""
        self._is_ended = True
        self._news.set()

    def fail(self, failure: LoadFailed) -> None:
        """Nothing more comes; the first failure stands."""
        if self._failure is None:
            self._failure = failure
        self._news.set()

    def give_up(self) -> None:
        """Nobody wants it any more: what reads it ends."""
        self.fail(LoadFailed("failure", "the request is over"))


class Loader:
    """Threads that read; none of them touches the model or its pages."""

    def __init__(self, store: Store, n_threads: int = 4) -> None:
        """Args: the store; and how many caches are read at a time."""
        self._store = store
        self._threads = Background("kvmap-load", n_threads)
        self.news = threading.Event()

    def start(self, wanted: Wanted) -> Loading:
        """Begin to read; `news` is set whenever a part has come, or none will any more."""
        loading = Loading(wanted, self.news)
        reading = _Reading(self._store, wanted, loading)
        self._threads.submit(self._read, loading, reading, reading.parts())
        return loading

    def close(self) -> None:
        """Begin nothing more."""
        self._threads.close()

    def _read(self, loading: Loading, reading: _Reading, parts: Iterator[bool]) -> None:
        """Read until a part is not there yet; then others get the thread first."""
        try:
            for has_come in parts:
                if loading.is_over:
                    return
                if not has_come:
                    time.sleep(_POLL_SECONDS)
                    self._threads.submit(self._read, loading, reading, parts)
                    return
            loading.end()
        except LoadFailed as error:
            loading.fail(error)
        except PartMissing as error:
            loading.fail(LoadFailed("partial", error))
        except ArtifactCorrupt as error:
            loading.fail(LoadFailed("cache_file", error))
        except (KvmapError, OSError) as error:
            loading.fail(LoadFailed("storage", error))
        except Exception as error:
            loading.fail(LoadFailed("failure", f"{type(error).__name__}: {error}"))


class _Reading:
    """One cache that is read."""

    def __init__(self, store: Store, wanted: Wanted, loading: Loading) -> None:
        self._store, self._wanted, self._loading = store, wanted, loading
        self._manifest = wanted.manifest

    def parts(self) -> Iterator[bool]:
        """Reads one part after another; False: the next one is not there yet."""
        return self._published() if self._manifest.is_written else self._arriving()

    def _published(self) -> Iterator[bool]:
        for number, run in _overlapping(self._manifest, self._wanted.start, self._wanted.stop):
            for layer, file in enumerate(run.files):
                part = self._read(number, layer, file.n_bytes)
                if (part.start, part.stop, part.sha256) != (run.start, run.stop, file.sha256):
                    raise ArtifactCorrupt(
                        f"layer {layer} over tokens {run.start}:{run.stop} is not the part that was published"
                    )
                yield True

    def _arriving(self) -> Iterator[bool]:
        """Which tokens a run holds is known when its first layer has come."""
        at, number, patience = 0, 0, _Patience(self._store, self._wanted)
        while at < self._wanted.stop:
            stop = None
            for layer in range(len(self._manifest.shape)):
                name, begun = part_name(number, layer), time.monotonic()
                while (n_bytes := self._store.part_size(self._manifest.group, name)) is None:
                    patience.check(name, at)
                    yield False
                self._loading.wait_seconds += time.monotonic() - begun
                part = self._read(number, layer, n_bytes, wanted_from=self._wanted.start)
                stop = part.stop if stop is None else stop
                if (part.start, part.stop) != (at, stop):
                    raise ArtifactCorrupt(f"tokens {part.start}:{part.stop} of layer {layer} come after {at}")
                if stop <= self._wanted.start:
                    break  # the engine has these itself
                yield True
            assert stop is not None
            at, number = stop, number + 1

    def _read(self, number: int, layer: int, n_bytes: int, wanted_from: int = 0) -> Part:
        begun = time.perf_counter()
        data = self._store.get_part(self._manifest.group, part_name(number, layer), n_bytes)
        part = read_part(data, self._manifest.shape[layer], self._manifest.dtype)
        if part.stop > wanted_from:
            arrived = Arrived(layer, part.start, part.stop, part.keys, part.values)
            self._loading.put(arrived, n_bytes, time.perf_counter() - begun)
        return part


class _Patience:
    """How long a part is waited for that is not written yet."""

    def __init__(self, store: Store, wanted: Wanted) -> None:
        self._store, self._wanted = store, wanted
        self._group = wanted.manifest.group
        self._until = time.monotonic() + wanted.wait_seconds
        self._stamp: int | None = None
        self._seen = self._next = time.monotonic()

    def check(self, name: str, n_written: int) -> None:
        """Go on waiting.

        Raises:
            PartMissing: the source has given the cache up.
            LoadFailed: cause "timeout": the source shows no sign of life, or takes too long.
        """
        now = time.monotonic()
        so_far = f"{n_written} of {self._wanted.stop} tokens were written"
        if now > self._until:
            raise LoadFailed("timeout", f"{so_far} after {self._wanted.wait_seconds:g} s of waiting")
        if now < self._next:
            return
        self._next = now + _SIGN_SECONDS
        stamp = next((e.stamp for e in self._store.announcements() if e.key == self._group), None)
        if stamp is None and self._store.part_size(self._group, name) is None:
            raise PartMissing(f"the source gave the cache up after {n_written} tokens")
        if stamp != self._stamp:
            self._stamp, self._seen = stamp, now
        if now - self._seen > ALIVE_SECONDS:
            silent = f"the source has given no sign of life for {ALIVE_SECONDS:g} s"
            raise LoadFailed("timeout", f"{silent}; {so_far}")


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
