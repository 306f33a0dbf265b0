"""A source that takes its time: what an engine has published is written again, part by part, as announced."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from kvmap.serving.manifest import manifest_text
from kvmap.serving.parts import part_name
from kvmap.serving.signs_of_life import SignsOfLife
from kvmap.serving.store import SharedFolder
from tests.serving.engine.engines import Prompt, manifest_of

#: what may happen to a part: it gets the part's number and bytes, and gives the bytes to be written
Happening = Callable[[int, bytes], bytes]


def nothing_happens(_number: int, data: bytes) -> bytes:
    return data


class SourceGone(Exception):
    """Nothing more is written."""


class SlowSource:
    """Parts of one published cache, which are written again in a group of their own."""

    def __init__(self, storage: Path, prompt: Prompt) -> None:
        self.store = SharedFolder(storage)
        self.path, self.manifest = manifest_of(storage, prompt)
        names = [
            part_name(number, layer)
            for number, run in enumerate(self.manifest.runs)
            for layer in range(len(run.files))
        ]
        folder = storage / "parts" / self.manifest.group
        self.data = [(name, (folder / name).read_bytes()) for name in names]
        self.written = replace(self.manifest, group=secrets.token_hex(16))

    def announce(self) -> None:
        """In place of what was published."""
        self.path.unlink(missing_ok=True)
        self.store.drop_group(self.manifest.group)
        self.store.announce(self.written.group, manifest_text(replace(self.written, runs=(), seconds=0.0)))

    def write(self, seconds_a_part: float, happening: Happening) -> None:
        try:
            for number, (name, data) in enumerate(self.data):
                time.sleep(seconds_a_part)
                self.store.put_part(self.written.group, name, [happening(number, data)])
        except SourceGone:
            return
        self.publish()

    @contextmanager
    def first_run_published(self) -> Iterator[int]:
        """As a cache of its own, of a prompt that begins so; gives its tokens."""
        run = self.manifest.runs[0]
        ids = self.manifest.token_ids[: run.stop]
        first = replace(self.manifest, group=secrets.token_hex(16), token_ids=ids, runs=(run,))
        for name, data in self.data[: len(run.files)]:
            self.store.put_part(first.group, name, [data])
        self.store.put_manifest(first.key, manifest_text(first), group=first.group, n_bytes=first.n_bytes)
        yield run.stop
        (self.store.root / "published" / f"{first.key}.json").unlink()
        self.store.drop_group(first.group)

    def publish(self) -> None:
        for name, data in self.data:
            if self.store.part_size(self.written.group, name) is None:
                self.store.put_part(self.written.group, name, [data])
        self.store.put_manifest(
            self.written.key,
            manifest_text(self.written),
            group=self.written.group,
            n_bytes=self.written.n_bytes,
        )

    @contextmanager
    def writing(
        self, seconds_a_part: float = 0.02, happening: Happening = nothing_happens, *, lives: bool = True
    ) -> Iterator[None]:
        """While it writes; afterwards the cache is published as it was."""
        self.announce()
        signs = SignsOfLife(self.store)
        if lives:
            signs.begin(self.written.group)
        thread = threading.Thread(target=self.write, args=(seconds_a_part, happening))
        thread.start()
        try:
            yield
        finally:
            thread.join()
            signs.close()
            self.store.drop_group(self.written.group)
            self.publish()
