"""Moments of any tables, made from the run's rows as one or in parts, and their files."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvmap.artifacts import Artifact
from kvmap.files import load_tensors, read_json, save_tensors, write_json
from kvmap.fit.calibrate import Stream, accumulate_moments, live_stream
from kvmap.fit.features import Layout
from kvmap.fit.outliers import OutlierRows
from kvmap.fit.pair_moments import PairMoments, TableSpec
from kvmap.fit.planner import default_budget, row_bytes, table_blocks
from kvmap.fit.sequential import accumulate_sequentially
from kvmap.fit.spill import Spill
from kvmap.fit.weighting import AttentionWeights
from kvmap.stages.calibrated.outliers import FlaggedRows, read_outliers, write_outliers
from kvmap.stages.calibrated.parts import Parts, shared_splits
from kvmap.stages.calibrated.rows import Splits

MOMENTS, MOMENTS_PART = "moments", "moments_part"


@dataclass(frozen=True)
class Wanted:
    """What is to be held of the rows.

    Attributes:
        tables: of which features and targets.
        layout: their numbering.
        mode: of the moments, see `kvmap.fit.planner`.
        weights: of rows, by head; None: all alike.
    """

    tables: Sequence[TableSpec]
    layout: Layout
    mode: str
    weights: AttentionWeights | None = None


class AccumulatedRows(FlaggedRows):
    """Rows that can be added up.

    Attributes:
        n_parts_made: parts of moments that this process has made.
    """

    n_parts_made = 0

    def make_moments(self, spec: dict[str, Any], wanted: Wanted) -> Artifact:
        """Moments in the store, made now if no run has done so before.

        With `calibration.shards` they are made in parts, whose sum is that of one pass but for the order of
        float64 additions; so both have one key.

        Args:
            spec: exactly what determines them.
            wanted: what they hold.

        Raises:
            KvmapError: more parts than sequences of a split.
        """
        store, n_parts = self.ctx.store, self.cfg.shards
        if n_parts == 1:
            spill = self.spill(MOMENTS, spec)
            found = store.get_or_build(
                MOMENTS, spec, lambda folder: self._add_up(wanted, self.splits, folder, spill)
            )
            shutil.rmtree(spill.folder, ignore_errors=True)
            return found
        spills = [self.spill(MOMENTS, spec, f"{number}/{n_parts}") for number in range(n_parts)]

        def build(number: int, folder: Path) -> None:
            splits = shared_splits(self.splits, number, n_parts)
            self._add_up(wanted, splits, folder, spills[number], is_part=True)
            # a part is small beside what it was made from, of which one at a time is to be on disk
            shutil.rmtree(spills[number].folder, ignore_errors=True)

        settings = [{"part": f"{number}/{n_parts}"} for number in range(n_parts)]
        parts = Parts(store, MOMENTS, spec, MOMENTS_PART, settings, build, self._merge)
        whole, made = parts.get_or_build(self.cfg.worker)
        self.n_parts_made += len(made)
        for spill in spills:
            shutil.rmtree(spill.folder, ignore_errors=True)
        return whole

    def _add_up(
        self, wanted: Wanted, splits: Splits, folder: Path, spill: Spill, *, is_part: bool = False
    ) -> None:
        rule = self.outlier_rule
        weigh = None if wanted.weights is None else wanted.weights.weigh
        for number, block in enumerate(self._blocks(wanted)):
            outliers = None if rule is None else OutlierRows(rule, self.cfg.outliers.policy, wanted.layout)
            if self.captures is None and self.cfg.sequential:
                moments, outliers = accumulate_sequentially(
                    self.ctx.pair,
                    self.ctx.tokens.input_ids,
                    splits,
                    wanted.layout,
                    block,
                    self.options,
                    spill,
                    batch_size=self.cfg.batch_size,
                    outliers=outliers,
                    is_part=is_part,
                    block=number,
                )
            else:
                stream = self._stream(splits)
                moments = accumulate_moments(
                    stream, wanted.layout, block, self.options, weigh, outliers, is_part=is_part
                )
            write_moments(moments, folder, number)
            if outliers is not None and number == 0:  # every pass finds the same
                write_outliers(outliers, folder)

    def _merge(self, parts: Sequence[Path], folder: Path) -> None:
        """The moments of all parts; each is read once, and one at a time."""
        total = read_moments(parts[0])
        outliers = None if self.outlier_rule is None else read_outliers(parts[0])
        for path in parts[1:]:
            total.merge(read_moments(path))
            if outliers is not None:
                outliers.merge(read_outliers(path))
        if outliers is not None:
            outliers.settle(total)
            write_outliers(outliers, folder)
        write_moments(total, folder)

    def _blocks(self, wanted: Wanted) -> list[list[TableSpec]]:
        """Tables that may grow together, within the budget; one pass for each block."""
        budget = self.cfg.memory_budget_gib
        allowed = default_budget() if budget is None else int(budget * 2**30)
        sizes = [(len(table.features), len(table.targets)) for table in wanted.tables]
        tokens = self.cfg.batch_size * self.cfg.sequence_length
        rows = tokens * row_bytes(wanted.layout, wanted.mode, sizes)
        blocks = table_blocks([table.nbytes for table in wanted.tables], allowed - rows)
        return [[wanted.tables[position] for position in block] for block in blocks]

    def _stream(self, splits: Splits) -> Stream:
        """Batches of captured caches, from the store or straight from the models."""
        if self.captures is not None:
            return self.captures.stream(splits)
        return live_stream(self.ctx.pair, self.ctx.tokens.input_ids, splits, batch_size=self.cfg.batch_size)


def read_moments(folder: Path) -> PairMoments:
    """Moments that `write_moments` wrote, all blocks of them. Tensors are mapped: the disk backs them."""
    parts = [
        PairMoments.from_tensors(load_tensors(path.with_suffix(".safetensors")), read_json(path))
        for path in sorted(folder.glob("moments.*.json"), key=lambda path: int(path.stem.split(".")[1]))
    ]
    tables = [table for part in parts for table in part.tables]
    return PairMoments(parts[0].layout, tables, parts[0].product_dtype)


def write_moments(moments: PairMoments, folder: Path, block: int = 0) -> None:
    """Moments, or one block of their tables, as a tensor file and its settings."""
    tensors, settings = moments.to_tensors()
    save_tensors(folder / f"moments.{block}.safetensors", tensors)
    write_json(folder / f"moments.{block}.json", settings)
