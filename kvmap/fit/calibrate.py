"""Both models read the calibration tokens; the moments of their caches add up. Rows are never held."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from kvmap.errors import KvmapError
from kvmap.fit.captures import CapturedBatch, Stream
from kvmap.fit.features import Layout
from kvmap.fit.moments import PRODUCT_DTYPES
from kvmap.fit.outliers import OutlierRows
from kvmap.fit.pair_moments import PairMoments, RowWeights, TableSpec, calibration_rows
from kvmap.fit.spill import Spill, SplitBatch, spilled_stream, split_batches
from kvmap.fit.view import calibration_view
from kvmap.models.capture import prefill
from kvmap.models.pair import ModelPair
from kvmap.progress import track


@dataclass(frozen=True)
class CalibrationOptions:
    """Which tokens become rows, and how they are added up.

    Attributes:
        native_head: tokens at the start of each sequence that the target will compute itself; no rows.
        token_stride: keep every such token of the rest.
        rope: strategy, see `kvmap.fit.view.calibration_view`.
        product_dtype: dtype of the products whose float64 sums are the moments.
        device: where the tables are while they grow, "cpu" or a CUDA device.
        budget_bytes: refuse tables larger than this.
    """

    native_head: int = 1
    token_stride: int = 1
    rope: str = "strip"
    product_dtype: str = "float64"
    device: str = "cpu"
    budget_bytes: int | None = None


def accumulate_moments(
    stream: Stream,
    layout: Layout,
    tables: Sequence[TableSpec],
    options: CalibrationOptions,
    weigh: Callable[[CapturedBatch, Tensor], RowWeights] | None = None,
    outliers: OutlierRows | None = None,
    *,
    is_part: bool = False,
    onto: PairMoments | None = None,
) -> PairMoments:
    """Moments over a stream of captured batches ([H] section 3; METHOD: one pass, every answer).

    Args:
        stream: of `live_stream`, or of captures that were kept.
        layout: the numbering of features and targets.
        tables: what is to be held.
        options: see `CalibrationOptions`.
        weigh: row weights of a batch, given the rows that count; for tables that take them.
        outliers: what becomes of outlier tokens' rows, without rows as yet; it is filled on the way.
        is_part: others are to be merged with this one, so outliers are not settled: that comes after.
        onto: moments of the same tables, which are added to; None: of no rows.

    Returns:
        Float64 moments on the CPU.

    Raises:
        MemoryBudgetExceeded: tables over the budget.
        MomentsError: a value that is not finite.
    """
    if onto is not None:
        moments = onto.to(options.device)
    else:
        moments = PairMoments.zeros(
            layout,
            tables,
            device=options.device,
            product_dtype=PRODUCT_DTYPES[options.product_dtype],
            budget_bytes=options.budget_bytes,
        )
    # closed here: an error's traceback would keep the generator alive, and with it what it reads
    with closing(stream):
        for batch in stream:
            source, target = calibration_view(batch.source, batch.target, options.rope)
            rows = calibration_rows(source.mask, options.native_head, options.token_stride).cpu()
            source, target = source.to(options.device), target.to(options.device)
            if outliers is not None:
                rows, flagged = outliers.take(batch.split, source, target, rows)
                if bool(flagged.any()):
                    own = None if weigh is None else weigh(batch, flagged)
                    outliers.wait(batch.split, moments.read_rows(source, target, flagged, own))
            weights = None if weigh is None else weigh(batch, rows)
            moments.update(batch.split, source, target, rows, weights)
            del batch, source, target, weights  # before the next is read, or two would be held
    if outliers is not None and not is_part:
        outliers.settle(moments)
    return moments.to("cpu")


def live_stream(
    pair: ModelPair,
    input_ids: Tensor,
    splits: Mapping[str, Sequence[int]],
    *,
    batch_size: int,
    sequential: bool = False,
    spill_folder: Path | None = None,
) -> Stream:
    """Both models read the sequences of all splits; each batch is had once and not kept.

    Args:
        pair: the two models, loaded on first use.
        input_ids: (n_sequences, tokens) int64, no padding.
        splits: sequence numbers by split, `fit` and `held_out`.
        batch_size: sequences per forward pass.
        sequential: never hold both models in memory; the caches wait on disk in between.
        spill_folder: where they wait, of a sequential one; removed afterwards. If a model fails it stays, and
            the next stream of the same batches goes on with it.

    Raises:
        KvmapError: a split without sequences, or a sequential stream without a folder.
    """
    batches = split_batches(splits, batch_size)
    if sequential:
        if spill_folder is None:
            raise KvmapError("sequential=True keeps caches on disk in between: name a spill_folder")
        yield from spilled_stream(pair, input_ids, batches, Spill(spill_folder))
    else:
        yield from _live(pair, input_ids, batches)


def _live(pair: ModelPair, input_ids: Tensor, batches: Sequence[SplitBatch]) -> Stream:
    """Caches straight from the models."""
    for split, numbers in track(batches, len(batches), "calibrate: both models read"):
        ids = input_ids[list(numbers)]
        yield CapturedBatch(split, numbers, prefill(pair.source, ids), prefill(pair.target, ids))
