"""W&B's files on disk: which segments a run has, and what of one can be read."""

from __future__ import annotations

import os
import shutil
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvmap.files import replacing
from kvmap.tracking.wandb_mirror import SYNCED

TORN = ".torn"
SETTLE_SECONDS = 5.0
_BLOCK, _HEADER = 32768, 7
_WHOLE, _LAST = 1, 4  # kinds of a LevelDB log's chunks: a record of one chunk, the last chunk of several
_RUN_FIELD = 17  # of the message Record: the run's name, project and settings
_EXIT_FIELD = 18  # how the run ended
_VARINT, _EIGHT_BYTES, _BYTES, _FOUR_BYTES = 0, 1, 2, 5  # wire types of protobuf


@dataclass(frozen=True)
class Segment:
    """What one attempt wrote: `<run>/wandb/<mode>-<time>-<id>/run-<id>.wandb`."""

    file: Path

    @property
    def directory(self) -> Path:
        """The run directory."""
        return self.file.parents[2]

    @property
    def id(self) -> str:
        """Of the W&B run that it belongs to."""
        return self.file.stem.removeprefix("run-")

    @property
    def order(self) -> str:
        """Sorts the segments of one run: when each was begun."""
        return self.file.parent.name.removeprefix("offline-")

    @property
    def sent(self) -> bool:
        """All of it is at the service."""
        return self.mark(SYNCED).exists()

    def mark(self, suffix: str) -> Path:
        """A file beside the segment's."""
        return self.file.with_name(self.file.name + suffix)

    def settle(self) -> None:
        """Waits until W&B's own process has written the end; where it was killed, until it writes no more.

        It may still write a moment after the run has told it to finish.
        """
        while not self._holds(_EXIT_FIELD) and time.time() - self.file.stat().st_mtime < SETTLE_SECONDS:
            time.sleep(0.2)

    def holds_run(self) -> bool:
        """Whether it says which run it is of: one cut short before that holds nothing."""
        return self._holds(_RUN_FIELD)

    def _holds(self, field: int) -> bool:
        return any(field in _fields(record) for record, _ in whole_records(self.file))

    def mend(self) -> bool:
        """Cuts off a record that was not written to its end; what was there stays beside it as `.torn`.

        W&B sends no segment after one that ends so. Nothing of such a record can be read.
        """
        end = max((end for _, end in whole_records(self.file)), default=0)
        if end == self.file.stat().st_size or not end:
            return False
        shutil.copyfile(self.file, self.mark(TORN))
        with replacing(self.file) as temporary:
            shutil.copyfile(self.file, temporary)
            os.truncate(temporary, end)
        return True


def segments_in(folder: Path) -> list[Segment]:
    """Every segment of every run in a folder, by run directory and time."""
    files = (file for file in folder.rglob("run-*.wandb") if file.parents[1].name == "wandb")
    found = [Segment(file) for file in files if not file.parent.is_symlink()]
    return sorted(found, key=lambda each: (each.directory, each.id, each.order))


def whole_records(file: Path) -> Iterator[tuple[bytes, int]]:
    """Records (protobuf) that were written to their end, and where in the file each ends."""
    data = file.read_bytes()
    place, parts = _HEADER, b""  # the file begins with a header as long as a chunk's
    while place + _HEADER <= len(data):
        if _BLOCK - place % _BLOCK < _HEADER:  # the rest of this block is filled with zeros
            place += _BLOCK - place % _BLOCK
            continue
        _, length, kind = struct.unpack("<IHB", data[place : place + _HEADER])
        end = place + _HEADER + length
        if end > len(data) or not kind:
            return
        parts += data[place + _HEADER : end]
        place = end
        if kind in (_WHOLE, _LAST):
            yield parts, end
            parts = b""


def _fields(message: bytes) -> set[int]:
    """Numbers of the fields at the top of a protobuf message; those read so far, where it is not sound."""
    found: set[int] = set()
    place = 0
    try:
        while place < len(message):
            tag, place = _varint(message, place)
            number, wire = tag >> 3, tag & 7
            found.add(number)
            if wire == _VARINT:
                _, place = _varint(message, place)
            elif wire == _BYTES:
                length, place = _varint(message, place)
                place += length
            else:
                place += {_EIGHT_BYTES: 8, _FOUR_BYTES: 4}[wire]
    except (IndexError, KeyError):
        pass
    return found


def _varint(data: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[place]
        place += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if not byte & 0x80:
            return value, place
