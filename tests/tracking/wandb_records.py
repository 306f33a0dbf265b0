"""Reads W&B's offline files with W&B's own messages, by a reader of LevelDB's log format of its own."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


def segments(directory: Path) -> list[Path]:
    """Files of the offline W&B runs of a run directory, the earliest first."""
    return sorted((directory / "wandb").glob("offline-run-*/run-*.wandb"))


def history(records: list[Any]) -> list[dict[str, Any]]:
    """Rows of the history, each as a dict by full key."""
    return [
        {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in entry.history.item}
        for entry in records
        if entry.HasField("history")
    ]


def wandb_records(directory: Path) -> list[Any]:
    """Records of the last offline W&B run of a run directory, its exit included.

    W&B's own process writes them, and may do so a moment after `finish` has returned.
    """
    deadline = time.monotonic() + 20
    while True:
        records = list(records_so_far(segments(directory)[-1]))
        if any(entry.HasField("exit") for entry in records):
            return records
        assert time.monotonic() < deadline, f"no exit record among {len(records)} records"
        time.sleep(0.1)


def records_so_far(file: Path) -> Iterator[Any]:
    """Whole records of the file: protobuf in LevelDB's log format, blocks of 32 KiB."""
    pb = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    data, block, header = file.read_bytes(), 32768, 7
    place, parts = header, b""  # the file begins with a header as long as a record's
    while place + header <= len(data):
        if block - place % block < header:  # too little is left in this block for a record
            place += block - place % block
            continue
        _, length, kind = struct.unpack("<IHB", data[place : place + header])
        if place + header + length > len(data):
            return
        parts += data[place + header : place + header + length]
        place += header + length
        if kind in (1, 4):  # a whole record, or the last part of one
            entry = pb.Record()
            entry.ParseFromString(parts)
            parts = b""
            yield entry
