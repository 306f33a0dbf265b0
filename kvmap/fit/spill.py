"""Caches of both models by way of the disk, so that one model is in memory at a time, in a bounded space.

Batches are read in waves: the source reads all of a wave, leaves memory, the target reads the same, leaves
memory, and only then are the caches of the wave used, from memory-mapped files, and removed. A file is there
whole or not at all. What a process that was killed leaves is used by the next.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from kvmap.errors import KvmapError
from kvmap.fit.captures import ROLES, CapturedBatch, Stream
from kvmap.fit.reading import read_to_disk
from kvmap.models.geometry import Geometry
from kvmap.models.pair import ModelPair
from kvmap.models.storage import load_kv
from kvmap.progress import track

# Bytes of a cache file besides keys and values: positions and mask of each column of each layer; its header.
_COLUMN_BYTES, _HEADER_BYTES = 9, 512

SplitBatch = tuple[str, tuple[int, ...]]
"""Split and sequence numbers of one forward pass."""


@dataclass(frozen=True)
class Spill:
    """Where caches wait, and how.

    Attributes:
        folder: of one calibration alone; what lies there from an interrupted one is gone on with, so its
            name has to stand for both models, the tokens and the batches.
        max_bytes: the disk that caches may take there at a time; None: as much as all of them need.
        layerwise: whether models are read layer by layer, see `kvmap.models.layerwise`; None: those of whose
            layers any is offloaded.
    """

    folder: Path
    max_bytes: int | None = None
    layerwise: bool | None = None

    def path(self, number: int, role: str) -> Path:
        """The file of one batch."""
        return self.folder / f"{number}.{role}.safetensors"

    def forget(self, numbers: Sequence[int]) -> None:
        """Remove what waits of some batches."""
        for number in numbers:
            for role in ROLES:
                self.path(number, role).unlink(missing_ok=True)


def split_batches(splits: Mapping[str, Sequence[int]], batch_size: int) -> list[SplitBatch]:
    """All forward passes, split by split.

    Raises:
        KvmapError: a split without sequences.
    """
    for split, indices in splits.items():
        if not indices:
            raise KvmapError(f"the {split} split holds no sequence: raise calibration.n_sequences")
    return [
        (split, tuple(indices[start : start + batch_size]))
        for split, indices in splits.items()
        for start in range(0, len(indices), batch_size)
    ]


def waves_of(pair: ModelPair, batches: Sequence[SplitBatch], n_tokens: int, spill: Spill) -> list[range]:
    """Numbers of the batches of each wave: as many as `spill.max_bytes` has room for.

    Args:
        pair: the two models; no weights are read.
        batches: all of them.
        n_tokens: of each sequence.

    Raises:
        KvmapError: not even one batch has room.
    """
    if spill.max_bytes is None:
        return [range(len(batches))]
    sizes = [_batch_bytes(pair, len(numbers) * n_tokens, spill.layerwise) for _, numbers in batches]
    beside = max(extra for _, extra in sizes)
    starts, used = [0], 0
    for number, (size, _) in enumerate(sizes):
        if size + beside > spill.max_bytes:
            raise KvmapError(
                f"calibration.max_spill_gib={spill.max_bytes / 2**30:g}: the caches of one batch of "
                f"{len(batches[number][1])} sequences take {(size + beside) / 2**30:.3g} GiB; raise it, or "
                "lower calibration.batch_size"
            )
        if used + size + beside > spill.max_bytes:
            starts.append(number)
            used = 0
        used += size
    return [range(start, stop) for start, stop in pairwise([*starts, len(batches)])]


def wave_stream(
    pair: ModelPair, input_ids: Tensor, batches: Sequence[SplitBatch], wave: Sequence[int], spill: Spill
) -> Stream:
    """The batches of one wave: read by one model, then by the other, unless their files are there already.

    Args:
        pair: the two models, loaded on first use and released after it.
        input_ids: (n_sequences, tokens) int64, no padding.
        batches: all of them; wave: the numbers of those wanted.
    """
    for role in ROLES:
        wanted = {str(number): input_ids[list(batches[number][1])] for number in wave}
        paths = {str(number): spill.path(number, role) for number in wave}
        read_to_disk(pair, role, wanted, paths, spill.folder / f"layers.{role}", layerwise=spill.layerwise)
    for number in track(wave, len(wave), "calibrate: caches on disk"):
        split, numbers = batches[number]
        source, target = (load_kv(spill.path(number, role)) for role in ROLES)
        yield CapturedBatch(split, numbers, source, target)


def spilled_stream(pair: ModelPair, input_ids: Tensor, batches: Sequence[SplitBatch], spill: Spill) -> Stream:
    """All batches, wave by wave; the folder goes once the last has been used."""
    for wave in waves_of(pair, batches, input_ids.shape[1], spill):
        yield from wave_stream(pair, input_ids, batches, wave, spill)
        spill.forget(wave)
    shutil.rmtree(spill.folder, ignore_errors=True)


def captures_bytes(pair: ModelPair, n_tokens: int) -> int:
    """Disk of both models' caches of so many tokens, bytes; reads no weights."""
    return _batch_bytes(pair, n_tokens, layerwise=False)[0]


def _batch_bytes(pair: ModelPair, n_tokens: int, layerwise: bool | None) -> tuple[int, int]:
    """Disk of one batch, bytes: both caches, with hidden states where layers wait; and what the last step
    needs beside all others, when a cache is written while its layers are still there.
    """
    sizes, hidden = [], []
    for geometry, dtype in (
        (pair.source_geometry, pair.source_identity.dtype),
        (pair.target_geometry, pair.target_identity.dtype),
    ):
        width = torch.empty((), dtype=getattr(torch, dtype)).element_size()
        sizes.append(cache_file_bytes(geometry, n_tokens, width))
        # one layer's states are written while those before it are still there
        hidden.append(n_tokens * geometry.hidden_size * width)
    if layerwise is False:
        return sum(sizes), 0
    return sum(sizes) + max(hidden), max(sizes) + max(hidden)


def cache_file_bytes(geometry: Geometry, n_tokens: int, width: int) -> int:
    """Disk of a cache's file, bytes.

    Args:
        geometry: of the model.
        n_tokens: columns, of all rows together.
        width: bytes of a number.
    """
    columns = geometry.n_layers * (_COLUMN_BYTES * n_tokens + 4 * geometry.head_dim)
    return geometry.kv_bytes(n_tokens, width) + columns + (geometry.n_layers + 2) * 2 * _HEADER_BYTES
