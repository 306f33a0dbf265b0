"""The worker's half of publishing: copy pages as the forward reaches each layer, write them beside it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from kvmap.errors import KvmapError
from kvmap.serving.background import Background
from kvmap.serving.compatibility import EngineFacts
from kvmap.serving.manifest import Manifest, PartFile, Run, manifest_text
from kvmap.serving.parts import part_bytes, part_name
from kvmap.serving.store import Store
from kvmap.serving.vllm.messages import Publish
from kvmap.serving.vllm.pages import LayerPages

_log = logging.getLogger(__name__)

#: copied and not yet written; beyond it a publication is given up rather than memory filled
MOST_PENDING_BYTES = 1 << 30


@dataclass(eq=False)
class _Group:
    """One cache that is being written.

    Attributes:
        begun: when its first page was copied.
        runs: by their first token: the end, and each layer's file.
        failed: why it comes to nothing.
    """

    begun: float = field(default_factory=time.perf_counter)
    runs: dict[int, tuple[int, list[PartFile | None]]] = field(default_factory=dict)
    failed: str | None = None


class Publisher:
    """Caches on their way to the store. One thread writes, so that parts come before their manifest."""

    def __init__(self, facts: EngineFacts, pages: Sequence[LayerPages], store: Store) -> None:
        """Args: the engine's facts; the pages of every layer; and where caches go."""
        self._facts, self._pages, self._store = facts, pages, store
        self._writer = Background("kvmap-publish")
        self._groups: dict[str, _Group] = {}
        self._last: dict[str, Future[None]] = {}
        self._pending_bytes = 0
        self._lock = threading.Lock()
        self._failures: dict[str, str] = {}

    def copy_layer(self, publish: Publish, layer: int) -> None:
        """Copy what a layer's pages hold of the tokens, and have it written."""
        group = self._groups.setdefault(publish.group, _Group())
        if group.failed is not None:
            return
        n_runs_before = sum(1 for start in group.runs if start < publish.start)
        _, files = group.runs.setdefault(publish.start, (publish.stop, [None] * len(self._pages)))
        block_ids = torch.tensor(publish.block_ids, dtype=torch.long)
        try:
            pair = self._pages[layer].read(block_ids, publish.start, publish.stop)
            keys, values = (part.cpu() for part in pair)
        except Exception as error:
            # on the engine's own thread: a cache comes to nothing, never the engine
            self._fail(publish.group, group, f"{type(error).__name__}: {error}")
            return
        n_bytes = 2 * keys.numel() * keys.element_size()
        with self._lock:
            self._pending_bytes += n_bytes
            too_slow = self._pending_bytes > MOST_PENDING_BYTES
        if too_slow:
            self._fail(publish.group, group, "the storage takes caches more slowly than they are made")
        name = part_name(n_runs_before, layer)
        job = partial(self._write_part, publish, name, keys, values, files, layer)
        self._submit(publish.group, group, job, n_bytes)

    def finish(self, publish: Publish) -> Future[None] | None:
        """Where this is a cache's last run, have its manifest written."""
        if publish.token_ids is None:
            return None
        group = self._groups.pop(publish.group, None)
        if group is None or group.failed is not None:
            return None
        future = self._submit(publish.group, group, partial(self._write_manifest, publish, group))
        self._last[publish.group] = future
        return future

    def flush(self, seconds: float) -> None:
        """Wait until every cache whose last run was copied is published, at most so long.

        A storage that hangs has been waited for once, and is not waited for again.
        """
        waiting, self._last = list(self._last.values()), {}
        if waiting and self._writer.stuck_seconds() < seconds:
            wait_for(waiting, timeout=seconds)

    def drop(self, group: str) -> None:
        """Give up a cache, and remove what was written of it."""
        known = self._groups.pop(group, None)
        if known is not None:
            known.failed = "dropped"
        self._writer.submit(self._store.drop_group, group)

    def take_failures(self) -> dict[str, str]:
        """By group, why it came to nothing; each is told once."""
        with self._lock:
            failures, self._failures = self._failures, {}
        return failures

    def close(self) -> None:
        """Begin nothing more, and wait a little for what is copied."""
        self._writer.close()
        self.flush(1.0)

    def _submit(self, name: str, group: _Group, job: Callable[[], None], n_bytes: int = 0) -> Future[None]:
        def run() -> None:
            try:
                if group.failed is None:
                    job()
            except (KvmapError, OSError) as error:
                self._fail(name, group, str(error))
            except Exception as error:
                _log.warning("publication %s", name, exc_info=True)
                self._fail(name, group, f"{type(error).__name__}: {error}")
            finally:
                with self._lock:
                    self._pending_bytes -= n_bytes

        return self._writer.submit(run)

    def _fail(self, name: str, group: _Group, why: str) -> None:
        """A cache comes to nothing."""
        _log.warning("publication %s comes to nothing: %s", name, why)
        group.failed = why
        with self._lock:
            self._failures[name] = why
        self._writer.submit(self._store.drop_group, name)

    def _write_part(
        self,
        publish: Publish,
        name: str,
        keys: Tensor,
        values: Tensor,
        files: list[PartFile | None],
        layer: int,
    ) -> None:
        pieces, sha256, size = part_bytes(keys, values, publish.start)
        self._store.put_part(publish.group, name, pieces)
        files[layer] = PartFile(sha256, size)

    def _write_manifest(self, publish: Publish, group: _Group) -> None:
        assert publish.token_ids is not None
        runs = []
        for start, (stop, files) in sorted(group.runs.items()):
            done = tuple(file for file in files if file is not None)
            if len(done) != len(files):
                raise KvmapError(f"tokens {start}:{stop} lack layers: the forward did not reach them all")
            runs.append(Run(start, stop, done))
        manifest = Manifest(
            namespace=publish.namespace,
            source=self._facts.identity,
            group=publish.group,
            token_ids=publish.token_ids,
            shape=self._facts.shape,
            dtype=self._facts.dtype,
            rotations=self._facts.rotations,
            runs=tuple(runs),
            seconds=time.perf_counter() - group.begun,
        )
        self._store.put_manifest(
            manifest.key, manifest_text(manifest), group=publish.group, n_bytes=manifest.n_bytes
        )
