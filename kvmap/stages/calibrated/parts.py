"""Artifacts made in parts by as many processes as want them, and added up by one of these: map and reduce.

There is no orchestrator. Whoever wants the whole makes parts that nobody else is making, waits for those that
others are making, and takes over those whose maker dies. The last step is an artifact like any other: one
process makes it, the others wait for it.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from kvmap.artifacts import Artifact, ArtifactStore
from kvmap.errors import KvmapError
from kvmap.locks import BuildLock

T = TypeVar("T")

_POLL_SECONDS, _SLOWEST_POLL_SECONDS = 0.2, 2.0

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Parts:
    """A whole, its parts, and how each is made.

    Attributes:
        store: where they lie.
        kind, spec: of the whole.
        part_kind: of its parts.
        settings: of each part, what its spec has besides that of the whole.
        build: makes the part of a number in a folder.
        merge: makes the whole in a folder, from the folders of all parts in order.
    """

    store: ArtifactStore
    kind: str
    spec: dict[str, Any]
    part_kind: str
    settings: Sequence[dict[str, Any]]
    build: Callable[[int, Path], None]
    merge: Callable[[list[Path], Path], None]

    def get_or_build(self, first: int | None = None) -> tuple[Artifact, list[int]]:
        """The whole, and the numbers of the parts that this call has made.

        Parts are removed once the whole is there.

        Args:
            first: The part to begin with, if it is free; any where None, so that processes which come at the
                same time meet rarely.

        Raises:
            StorageError: The disk is full or the root cannot be written to.
        """
        made: list[int] = []
        if not self._whole_is_there():
            made = self._make_parts(secrets.randbelow(len(self.settings)) if first is None else first)
        whole = self.store.get_or_build(self.kind, self.spec, self._merge_into)
        if whole.built:
            for number in range(len(self.settings)):
                self.store.discard(self.part_kind, self._spec(number))
        return whole, made

    def _spec(self, number: int) -> dict[str, Any]:
        return self.spec | self.settings[number]

    def _whole_is_there(self) -> bool:
        return self.store.path(self.kind, self.spec).is_dir()

    def _make_parts(self, first: int) -> list[int]:
        """Returns when every part is there, or the whole; with the numbers of those made here."""
        n_parts = len(self.settings)
        paths = [self.store.path(self.part_kind, self._spec(number)) for number in range(n_parts)]
        locks = [self.store.lock(self.part_kind, self._spec(number)) for number in range(n_parts)]
        missing = [(first + step) % n_parts for step in range(n_parts)]
        made: list[int] = []
        began, waits = time.monotonic(), False
        while missing := [number for number in missing if not paths[number].is_dir()]:
            n_made = len(made)
            for number in missing:
                if self._whole_is_there():
                    return made
                if not paths[number].is_dir() and self._make(number, locks[number]):
                    _logger.info("made part %d of %d of %s", number, n_parts, self.kind)
                    made.append(number)
            if len(made) > n_made:
                began, waits = time.monotonic(), False
                continue
            if not waits:
                waits = True
                holders = ", ".join(f"{n} ({locks[n].holder_name()})" for n in missing)
                _logger.info("waiting for parts of %s that others are making: %s", self.kind, holders)
            waited = time.monotonic() - began
            time.sleep(max(_POLL_SECONDS, min(waited / 20, _SLOWEST_POLL_SECONDS)))
        return made

    def _make(self, number: int, lock: BuildLock) -> bool:
        return self.store.build_if_free(
            self.part_kind,
            self._spec(number),
            partial(self.build, number),
            lock,
            unless=self._whole_is_there,
        )

    def _merge_into(self, folder: Path) -> None:
        """Adds the parts up; one that is damaged or was removed meanwhile is made again first."""
        folders = [
            self.store.get_or_build(self.part_kind, self._spec(number), partial(self.build, number)).path
            for number in range(len(self.settings))
        ]
        self.merge(folders, folder)


def share_of(members: Sequence[T], number: int, n_shares: int) -> list[T]:
    """One of `n_shares` contiguous shares whose sizes differ by one at most."""
    n = len(members)
    return list(members[number * n // n_shares : (number + 1) * n // n_shares])


def shared_splits(splits: dict[str, list[int]], number: int, n_shares: int) -> dict[str, list[int]]:
    """The sequences of one part; both splits fall to all parts alike.

    Raises:
        KvmapError: A split with fewer sequences than parts.
    """
    shares = {split: share_of(members, number, n_shares) for split, members in splits.items()}
    few = {split: len(members) for split, members in splits.items() if len(members) < n_shares}
    if few:
        split, n = min(few.items(), key=lambda item: item[1])
        raise KvmapError(
            f"calibration.shards={n_shares}: the {split} split has {n} sequences; expected at most so many "
            f"parts. Lower it to {max(n, 1)}, or raise calibration.n_sequences"
        )
    return shares
