"""Answers kept on disk under what determines them, so that no arm is asked the same thing twice."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvmap.files import storage_errors, write_json

ANSWERS_FILE, CONDITIONS_FILE = "answers.jsonl", "conditions.json"

CONTENT_CHARACTERS = 16
"""Of a hash that tells items apart in a table: 64 bits."""

Row = dict[str, Any]

_logger = logging.getLogger(__name__)


class Answers:
    """Answers of one arm under one set of conditions, by item key.

    On disk they are lines `{"key": ..., "row": {...}}` of `answers.jsonl` in a folder named after the hash of
    the conditions, which lie beside it. Lines are only ever appended, each batch in one write, so several
    processes may keep answers under the same conditions: what two of them found alike stands there twice.
    Numbers come back exactly; nan and infinities are written as Python's `json` does.

    Attributes:
        folder: where they lie; None where they are kept in memory alone.
    """

    def __init__(self, folder: Path | None, rows: Mapping[str, Row]) -> None:
        """Args: where to append; what is there already."""
        self.folder = folder
        self._rows: dict[str, Row] = dict(rows)
        self._earlier = frozenset(rows)
        self._found: set[str] = set()

    @classmethod
    def open(cls, folder: Path, conditions: Mapping[str, Any]) -> Answers:
        """Those kept under these conditions; none yet where the conditions are new.

        A line that is not whole, as a process that was killed leaves it, is skipped with a warning.

        Args:
            folder: of the answers to all conditions.
            conditions: everything that determines an answer but the item, as JSON has it.

        Raises:
            TypeError, ValueError: conditions that JSON cannot hold, such as infinite numbers.
            StorageError: the folder cannot be written to.
        """
        own = Path(folder) / canonical_hash(conditions)
        if not (own / CONDITIONS_FILE).is_file():
            write_json(own / CONDITIONS_FILE, conditions)
        return cls(own, dict(_read(own / ANSWERS_FILE)))

    @classmethod
    def in_memory(cls) -> Answers:
        """None, and what is added is kept nowhere."""
        return cls(None, {})

    @property
    def n_reused(self) -> int:
        """Answers from before that `get` has found; each counts once."""
        return len(self._found)

    def get(self, key: str) -> Row | None:
        """The row kept for an item key, or None."""
        row = self._rows.get(key)
        if row is not None and key in self._earlier:
            self._found.add(key)
        return row

    def add(self, rows: Mapping[str, Row]) -> None:
        """Keeps rows by item key; on disk when this returns.

        Raises:
            TypeError: a row that JSON cannot hold.
            StorageError: the disk is full or cannot be written to.
        """
        if not rows:
            return
        self._rows.update(rows)
        if self.folder is not None:
            lines = [json.dumps({"key": key, "row": row}, separators=(",", ":")) for key, row in rows.items()]
            _append(self.folder / ANSWERS_FILE, lines)


def item_key(*content: Any) -> str:
    """The sha256, in hex, of the canonical JSON of what is asked: ids of the context, choices, stops, ...

    Raises:
        TypeError, ValueError: content that JSON cannot hold.
    """
    return canonical_hash(content)


def canonical_hash(content: Any) -> str:
    """The sha256, in hex, of JSON with sorted keys and no blanks: the same in every process."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def lacking(answers: Mapping[str, Answers], keys: Sequence[str]) -> dict[tuple[str, ...], list[int]]:
    """Items without an answer under some arm, grouped by the arms that lack it.

    Items that lack the same arms can share batches; in an evaluation that was interrupted these are the
    batches it had not come to.

    Args:
        answers: by arm.
        keys: of the items.

    Returns:
        Arms, in the order given, to numbers of items, ascending. Items that lack nothing are left out.
    """
    groups: dict[tuple[str, ...], list[int]] = {}
    for number, key in enumerate(keys):
        arms = tuple(arm for arm, kept in answers.items() if kept.get(key) is None)
        if arms:
            groups.setdefault(arms, []).append(number)
    return groups


def _read(file: Path) -> Iterator[tuple[str, Row]]:
    """Key and row of every whole line."""
    if not file.is_file():
        return
    # Not by str.splitlines: it would also split at the unusual line ends that answers may hold.
    for number, line in enumerate(file.read_bytes().split(b"\n"), start=1):
        if not line:
            continue
        try:
            entry = json.loads(line)
            key, row = entry["key"], entry["row"]
        except (ValueError, KeyError, TypeError):
            key = row = None
        if isinstance(key, str) and isinstance(row, dict):
            yield key, row
        else:
            _logger.warning("%s, line %d is damaged: left out, and asked again where needed", file, number)


def _append(file: Path, lines: Iterable[str]) -> None:
    """Adds lines in one write to the end of a file that others may be adding to."""
    with storage_errors(file):
        handle = os.open(file, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            size = os.fstat(handle).st_size
            # A torn line that a killed process left must not swallow the first of these.
            torn = size > 0 and os.pread(handle, 1, size - 1) != b"\n"
            content = memoryview((("\n" if torn else "") + "".join(f"{line}\n" for line in lines)).encode())
            while content:
                content = content[os.write(handle, content) :]
        finally:
            os.close(handle)
