"""Moments from one model at a time, within bounded memory and disk; what was interrupted is gone on with.

After each wave of `kvmap.fit.spill` the sums so far are written, and the caches they are of removed. Sums are
float64 and are written as they are, so a calibration that was killed, at whatever point and however often,
gives the moments of one that was not, bit for bit; and so does any number of waves.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvmap.files import load_metadata, load_tensors, save_tensors
from kvmap.fit.calibrate import CalibrationOptions, accumulate_moments
from kvmap.fit.features import Layout
from kvmap.fit.outliers import OutlierRows
from kvmap.fit.pair_moments import PairMoments, TableSpec
from kvmap.fit.reading import remove_unfinished
from kvmap.fit.spill import Spill, split_batches, wave_stream, waves_of
from kvmap.models.pair import ModelPair


def accumulate_sequentially(
    pair: ModelPair,
    input_ids: Tensor,
    splits: Mapping[str, Sequence[int]],
    layout: Layout,
    tables: Sequence[TableSpec],
    options: CalibrationOptions,
    spill: Spill,
    *,
    batch_size: int,
    outliers: OutlierRows | None = None,
    is_part: bool = False,
    block: int = 0,
) -> tuple[PairMoments, OutlierRows | None]:
    """Moments of the calibration sequences, without ever holding both models.

    The spill folder stays: caches of a single wave serve further blocks of tables. Whoever has stored the
    moments removes it.

    Args:
        pair: the two models, loaded on first use, and released.
        input_ids: (n_sequences, tokens) int64, no padding.
        splits: sequence numbers by split, `fit` and `held_out`.
        layout, tables, options, is_part: see `kvmap.fit.calibrate.accumulate_moments`.
        spill: where caches and sums wait.
        batch_size: sequences per forward pass.
        outliers: what becomes of outlier tokens' rows, without rows as yet.
        block: which part of all tables these are, where they cannot grow together.

    Returns:
        Float64 moments on the CPU; the outlier rows, those that were given or as they were gone on with.

    Raises:
        KvmapError: a split without sequences, or a batch that `spill.max_bytes` has no room for.
        MemoryBudgetExceeded, MomentsError: see `kvmap.fit.calibrate.accumulate_moments`.
    """
    batches = split_batches(splits, batch_size)
    whole = waves_of(pair, batches, input_ids.shape[1], spill)
    sums = _Sums(spill.folder / f"moments.{block}.safetensors")
    moments, outliers, n_done = sums.read(layout, tables, outliers)
    remove_unfinished(spill.folder)
    spill.forget(range(n_done))
    for wave in (range(max(wave.start, n_done), wave.stop) for wave in whole):
        if not wave:
            continue
        moments = accumulate_moments(
            wave_stream(pair, input_ids, batches, wave, spill),
            layout,
            tables,
            options,
            outliers=outliers,
            is_part=True,
            onto=moments,
        )
        if len(whole) > 1:
            sums.write(moments, outliers, wave.stop)
            spill.forget(wave)
    assert moments is not None  # there is a batch in each split
    if outliers is not None and not is_part:
        outliers.settle(moments)
    return moments, outliers


@dataclass(frozen=True)
class _Sums:
    """What was added up so far, in one file, which is there whole or not at all."""

    path: Path

    def write(self, moments: PairMoments, outliers: OutlierRows | None, n_batches: int) -> None:
        """Moments and outlier rows of the first `n_batches` batches."""
        tensors, settings = moments.to_tensors()
        head: dict[str, Any] = {"n_batches": n_batches, "moments": settings, "outliers": None}
        if outliers is not None:
            head["outliers"], more = outliers.to_state()
            tensors |= {f"outliers.{name}": tensor for name, tensor in more.items()}
        save_tensors(self.path, tensors, {"sums": json.dumps(head)})

    def read(
        self, layout: Layout, tables: Sequence[TableSpec], outliers: OutlierRows | None
    ) -> tuple[PairMoments | None, OutlierRows | None, int]:
        """As written; nothing, and the outlier rows given, where that is of other tables or not there."""
        if not self.path.is_file():
            return None, outliers, 0
        head = json.loads(load_metadata(self.path)["sums"])
        # copied: sums go on in place, and products of tensors mapped from a file, which begin at other
        # addresses than the allocator's, round otherwise
        tensors = {name: tensor.clone() for name, tensor in load_tensors(self.path).items()}
        moments = PairMoments.from_tensors(tensors, head["moments"])
        if moments.layout != layout or not _are_of(moments, tables):
            # free memory, and with it what grows together, was another then
            return None, outliers, 0
        if outliers is not None:
            mine = {
                name.removeprefix("outliers."): tensor
                for name, tensor in tensors.items()
                if name.startswith("outliers.")
            }
            outliers = OutlierRows.from_state(head["outliers"], mine)
        return moments, outliers, int(head["n_batches"])


def _are_of(moments: PairMoments, tables: Sequence[TableSpec]) -> bool:
    held = [table.spec for table in moments.tables]
    return len(held) == len(tables) and all(
        mine.head == theirs.head
        and torch.equal(mine.features, theirs.features)
        and torch.equal(mine.targets, theirs.targets)
        for mine, theirs in zip(held, tables, strict=True)
    )
