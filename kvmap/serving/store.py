"""The transport: where caches lie between engines. One small interface; a shared folder behind it.

A cache is a group of parts (bytes by name), announced before the first of them, and one manifest, put last.
What a manifest names lies there complete; of what is announced, parts may be read as they appear.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from kvmap.errors import KvmapError
from kvmap.files import replacing

_KEY = re.compile(r"[0-9a-f]{32}")
_PART = re.compile(r"[0-9]{4}-[0-9]{4}")

#: what a writer has left that has shown no life for so long is removed
STALE_SECONDS = 120.0


class StoreError(KvmapError):
    """A store that would not take or give what it was asked for."""


class PartMissing(StoreError):
    """A part that is not there, or not of the size it was written with."""


@dataclass(frozen=True)
class Listed:
    """One entry of a listing.

    Attributes:
        key: 32 hex digits.
        stamp: changes when the entry is written anew.
    """

    key: str
    stamp: int


class Store(Protocol):
    """What a transport must do. Keys are 32 hex digits, part names four digits, a dash, and four digits.

    Every call may raise `StoreError` or `OSError`; none blocks for longer than its transfer takes.
    """

    def put_part(self, group: str, name: str, parts: Sequence[bytes | memoryview]) -> None:
        """Write one part, the pieces of `parts` one after another; it is there whole, or not at all."""

    def get_part(self, group: str, name: str, n_bytes: int) -> bytearray:
        """Read one part of exactly this size."""

    def part_size(self, group: str, name: str) -> int | None:
        """Bytes of a part as it lies there; None where it does not."""

    def put_manifest(self, key: str, text: str, *, group: str, n_bytes: int) -> None:
        """Publish a group under a key, in one step; what was published under the key is replaced."""

    def get_manifest(self, key: str) -> str | None:
        """What was published under a key; None where nothing was."""

    def manifests(self) -> list[Listed]:
        """Every key that something is published under."""

    def announce(self, group: str, text: str) -> None:
        """Say that a group is being written, and of what; over when it is published or dropped."""

    def still_writing(self, group: str) -> bool:
        """Give an announcement a new stamp; False where it is over."""

    def get_announcement(self, group: str) -> str | None:
        """What was announced of a group; None where it is over."""

    def announcements(self) -> list[Listed]:
        """Every group that is announced, with the stamp of the writer's last sign of life."""

    def drop_group(self, group: str) -> None:
        """Remove a group's parts and its announcement."""


def checked_key(key: str) -> str:
    """The key itself, if it is one.

    Raises:
        StoreError: it is not 32 hex digits: a path, perhaps.
    """
    if not isinstance(key, str) or not _KEY.fullmatch(key):
        raise StoreError(f"store key {key!r}: expected 32 hex digits")
    return key


def checked_part(name: str) -> str:
    """The part's name itself, if it is one.

    Raises:
        StoreError: it is not four digits, a dash, and four digits.
    """
    if not isinstance(name, str) or not _PART.fullmatch(name):
        raise StoreError(f"part name {name!r}: expected four digits, a dash, and four digits, as 0003-0021")
    return name


def _text(path: Path) -> str:
    """What is no UTF-8 becomes other signs, which no checksum agrees with."""
    return path.read_text(encoding="utf-8", errors="replace")


_WRITING = os.O_WRONLY | os.O_CREAT | os.O_TRUNC


def _write_all(file: int, parts: Sequence[bytes | memoryview]) -> None:
    """Few calls: after each, the thread that writes has to get the interpreter back from an engine's loop."""
    left = [memoryview(part).cast("B") for part in parts]
    while left:
        written = os.writev(file, left)
        while left and written >= left[0].nbytes:
            written -= left.pop(0).nbytes
        if left:
            left[0] = left[0][written:]


class SharedFolder:
    """A folder that all engines see, bounded: the caches published longest ago make room for new ones.

    ::

        published/<key>.json        manifests
        parts/<group>/<part>        keys and values
        announced/<group>.json      what is being written

    Writers need no lock: each writes a group of its own, and a manifest takes its place in one step. Nothing
    is forced to disk: a manifest carries the checksums of its parts, so what a power cut leaves is refused.
    """

    def __init__(self, root: Path, max_bytes: int = 4 << 30) -> None:
        """Args: the folder, made if it is not there; and what it may hold.

        Raises:
            StoreError: a bound below 1, or a folder that cannot be made.
        """
        if max_bytes < 1:
            raise StoreError(f"max_bytes={max_bytes}: expected at least 1 byte")
        self.root, self.max_bytes = Path(root), max_bytes
        self._published, self._parts, self._announced = (
            self.root / name for name in ("published", "parts", "announced")
        )
        try:
            for folder in (self._published, self._parts, self._announced):
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(f"storage {self.root} cannot be made: {error}; give another folder") from error

    def put_part(self, group: str, name: str, parts: Sequence[bytes | memoryview]) -> None:
        """See `Store`."""
        path = self._parts / checked_key(group) / checked_part(name)
        temporary = path.with_suffix(".writing")
        try:
            file = os.open(temporary, _WRITING)
        except FileNotFoundError:
            path.parent.mkdir(exist_ok=True)
            file = os.open(temporary, _WRITING)
        try:
            _write_all(file, parts)
        finally:
            os.close(file)
        os.replace(temporary, path)

    def get_part(self, group: str, name: str, n_bytes: int) -> bytearray:
        """See `Store`. Read, not mapped: a file that is cut while it is mapped would end the engine.

        Raises:
            PartMissing: no such part, or one of another size.
        """
        path = self._parts / checked_key(group) / checked_part(name)
        buffer = bytearray(n_bytes)
        try:
            with open(path, "rb", buffering=0) as file:
                view, got = memoryview(buffer), 0
                while got < n_bytes and (n := file.readinto(view[got:])):
                    got += n
                if got < n_bytes or file.read(1):
                    raise PartMissing(f"part {name} of {group} does not hold the {n_bytes} bytes written")
        except FileNotFoundError:
            raise PartMissing(f"part {name} of {group} is gone") from None
        return buffer

    def part_size(self, group: str, name: str) -> int | None:
        """See `Store`."""
        try:
            return (self._parts / checked_key(group) / checked_part(name)).stat().st_size
        except FileNotFoundError:
            return None

    def put_manifest(self, key: str, text: str, *, group: str, n_bytes: int) -> None:
        """See `Store`; makes room before."""
        path = self._published / f"{checked_key(key)}.json"
        checked_key(group)
        self._make_room(n_bytes)
        with replacing(path) as temporary:
            temporary.write_text(f"{group} {n_bytes}\n{text}", encoding="utf-8")
        (self._announced / f"{group}.json").unlink(missing_ok=True)
        # the parts of what was replaced may just be read: they go with what else no manifest names
        self._remove_abandoned(now=path.stat().st_mtime)

    def get_manifest(self, key: str) -> str | None:
        """See `Store`."""
        try:
            return _text(self._published / f"{checked_key(key)}.json").partition("\n")[2]
        except FileNotFoundError:
            return None

    def manifests(self) -> list[Listed]:
        """See `Store`."""
        return [Listed(key, stamp) for key, stamp, _ in self._listed(self._published)]

    def announce(self, group: str, text: str) -> None:
        """See `Store`."""
        path = self._announced / f"{checked_key(group)}.json"
        temporary = path.with_suffix(".writing")
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)

    def still_writing(self, group: str) -> bool:
        """See `Store`."""
        try:
            os.utime(self._announced / f"{checked_key(group)}.json")
        except FileNotFoundError:
            return False
        return True

    def get_announcement(self, group: str) -> str | None:
        """See `Store`."""
        try:
            return _text(self._announced / f"{checked_key(group)}.json")
        except FileNotFoundError:
            return None

    def announcements(self) -> list[Listed]:
        """See `Store`."""
        return [Listed(group, stamp) for group, stamp, _ in self._listed(self._announced)]

    def drop_group(self, group: str) -> None:
        """See `Store`."""
        shutil.rmtree(self._parts / checked_key(group), ignore_errors=True)
        (self._announced / f"{group}.json").unlink(missing_ok=True)

    def _listed(self, folder: Path) -> list[tuple[str, int, Path]]:
        """Key, time of writing in ns, and path of every JSON file of a key, in no order."""
        found = []
        with os.scandir(folder) as entries:
            for entry in entries:
                key, _, suffix = entry.name.rpartition(".")
                if suffix == "json" and _KEY.fullmatch(key):
                    with suppress(FileNotFoundError):
                        found.append((key, entry.stat().st_mtime_ns, Path(entry.path)))
        return found

    def _held(self) -> list[tuple[Path, str, int]]:
        """Of each manifest that can be read, oldest first: its path, its group, the bytes of its parts."""
        held = []
        for _, _, path in sorted(self._listed(self._published), key=lambda entry: entry[1]):
            with suppress(FileNotFoundError, ValueError, StoreError), open(path, encoding="utf-8") as file:
                group, n_bytes = file.readline().split()
                held.append((path, checked_key(group), int(n_bytes)))
        return held

    def _make_room(self, n_bytes: int) -> None:
        """Remove what was published longest ago until `n_bytes` more fit.

        Raises:
            StoreError: a cache larger than the whole bound.
        """
        if n_bytes > self.max_bytes:
            raise StoreError(
                f"a cache of {n_bytes} bytes does not fit the storage's {self.max_bytes}: raise max_bytes"
            )
        held = self._held()
        total = sum(size for _, _, size in held)
        for path, group, size in held:
            if total + n_bytes <= self.max_bytes:
                break
            path.unlink(missing_ok=True)
            self.drop_group(group)
            total -= size

    def _remove_abandoned(self, now: float) -> None:
        """Parts that no manifest names, and announcements, whose writer has shown no life for long.

        Args:
            now: by the storage's clock, in seconds.
        """
        oldest, known = now - STALE_SECONDS, {group for _, group, _ in self._held()}
        alive = {group: stamp / 1e9 for group, stamp, _ in self._listed(self._announced)}
        with os.scandir(self._parts) as entries:
            for entry in entries:
                if _KEY.fullmatch(entry.name):
                    with suppress(FileNotFoundError):
                        alive[entry.name] = max(alive.get(entry.name, 0.0), entry.stat().st_mtime)
        for group, seconds in alive.items():
            if group not in known and seconds < oldest:
                self.drop_group(group)
