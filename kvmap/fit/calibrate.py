"""Both models read the calibration tokens; the moments of their caches add up. Rows are never kept."""

from __future__ import annotations

import shutil
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from kvmap.errors import KvmapError
from kvmap.fit.moments import PRODUCT_DTYPES, PairMoments, calibration_rows, geometry_shape
from kvmap.fit.view import calibration_view
from kvmap.models.cache import KVCache
from kvmap.models.capture import prefill
from kvmap.models.pair import ModelPair
from kvmap.models.storage import load_kv, save_kv
from kvmap.progress import track


@dataclass(frozen=True)
class CalibrationOptions:
    """Which tokens become rows, and how they are read.

    Attributes:
        native_head: tokens at the start of each sequence that the target will compute itself; no rows.
        token_stride: keep every such token of the rest.
        rope: strategy, see `kvmap.fit.view.calibration_view`.
        batch_size: sequences per forward pass.
        product_dtype: dtype of the products whose float64 sums are the moments.
        sequential: never hold both models in memory; the source's caches wait on disk in between.
        budget_bytes: refuse moments larger than this.
    """

    native_head: int = 1
    token_stride: int = 1
    rope: str = "strip"
    batch_size: int = 8
    product_dtype: str = "float64"
    sequential: bool = False
    budget_bytes: int | None = None


@dataclass(frozen=True)
class _Batch:
    number: int
    split: str
    input_ids: Tensor


_Captures = Generator[tuple[_Batch, KVCache], None, None]


def accumulate_moments(
    pair: ModelPair,
    input_ids: Tensor,
    splits: Mapping[str, Sequence[int]],
    options: CalibrationOptions,
    spill_folder: Path,
) -> PairMoments:
    """Moments of the pair over token sequences ([H] section 3; METHOD: one pass, every answer).

    Args:
        pair: the two models, loaded on first use.
        input_ids: (n_sequences, tokens) int64, no padding.
        splits: sequence indices by split, `fit` and `held_out`.
        options: see `CalibrationOptions`.
        spill_folder: where a sequential pass keeps the source's caches; removed afterwards.

    Returns:
        Float64 moments on the CPU.

    Raises:
        KvmapError: a split without sequences, or moments over the budget.
    """
    for split, indices in splits.items():
        if not indices:
            raise KvmapError(f"the {split} split holds no sequence: raise calibration.n_sequences")
    batches = _batches(input_ids, splits, options.batch_size)
    moments = PairMoments.zeros(
        geometry_shape(pair.source_geometry),
        geometry_shape(pair.target_geometry),
        product_dtype=PRODUCT_DTYPES[options.product_dtype],
        budget_bytes=options.budget_bytes,
    )
    captures = _spilled(pair, batches, spill_folder) if options.sequential else _live(pair, batches)
    # closed here: an error's traceback would keep the generator alive, and with it the folder
    with closing(captures):
        for batch, source_kv in captures:
            target_kv = prefill(pair.target, batch.input_ids)
            source, target = calibration_view(source_kv, target_kv, options.rope)
            rows = calibration_rows(source.mask, options.native_head, options.token_stride)
            moments.update(batch.split, source.to("cpu"), target.to("cpu"), rows.cpu())
    return moments


def _batches(input_ids: Tensor, splits: Mapping[str, Sequence[int]], batch_size: int) -> list[_Batch]:
    batches: list[_Batch] = []
    for split, indices in splits.items():
        for chunk in torch.tensor(list(indices)).split(batch_size):
            batches.append(_Batch(len(batches), split, input_ids[chunk]))
    return batches


def _live(pair: ModelPair, batches: Sequence[_Batch]) -> _Captures:
    """Source caches straight from the source model."""
    for batch in track(batches, len(batches), "calibrate: both models read"):
        yield batch, prefill(pair.source, batch.input_ids)


def _spilled(pair: ModelPair, batches: Sequence[_Batch], folder: Path) -> _Captures:
    """Source caches by way of the disk, so that the source can leave memory before the target comes."""
    try:
        pair.release("target")  # an earlier stage may have left it in memory
        for batch in track(batches, len(batches), "calibrate: source reads"):
            save_kv(prefill(pair.source, batch.input_ids), folder / f"{batch.number}.safetensors")
        pair.release("source")
        for batch in track(batches, len(batches), "calibrate: target reads"):
            file = folder / f"{batch.number}.safetensors"
            yield batch, load_kv(file)
            file.unlink()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
