"""Both models' caches of the calibration text: found in the store, or captured into it."""

from __future__ import annotations

import shutil
from functools import cached_property
from pathlib import Path
from typing import Any

from kvmap.artifacts import Artifact, ArtifactMissing, content_key
from kvmap.errors import KvmapError
from kvmap.fit.captures import Captures, SensitivityOptions, batches_of, capture, join_captures
from kvmap.fit.spill import Spill, captures_bytes
from kvmap.stages.calibrated.parts import Parts, share_of
from kvmap.stages.calibrated.rows import CalibrationRows

CAPTURES, CAPTURES_PART = "captures", "captures_part"


class CapturedRows(CalibrationRows):
    """Rows whose caches may lie on disk."""

    @property
    def weighted(self) -> bool:
        """Whether the run's mapper weighs rows by the target's attention."""
        return self.ctx.cfg.mapper.row_weights == "sensitivity"

    @property
    def captures_spec(self) -> dict[str, Any]:
        """What determines the captures; their key in the store is its hash."""
        if not self.weighted:
            return self.content
        return self.content | {
            "sensitivity_boundaries": self.cfg.sensitivity_boundaries,
            "token_stride": self.cfg.token_stride,
            "native_head": self.native_head,
        }

    @cached_property
    def captures(self) -> Captures | None:
        """The captured caches: made if they are to be kept, used if a run has kept them."""
        keep = self.cfg.keep_captures
        rows = self.ctx.cfg.mapper.kind == "mlp" or self.weighted
        if keep is True or (keep == "auto" and rows):
            return Captures.open(self.captures_artifact.path)
        try:
            return Captures.open(self.ctx.store.load(CAPTURES, self.captures_spec).path)
        except ArtifactMissing:
            return None

    @cached_property
    def captures_artifact(self) -> Artifact:
        """The captures in the store, made now if no run has done so before; in parts where asked for."""
        batches = batches_of(len(self.ctx.tokens.input_ids), self.cfg.batch_size)
        n_parts = min(self.cfg.shards, len(batches))
        store, spec = self.ctx.store, self.captures_spec
        self._check_room()
        if n_parts == 1:
            spill = self.spill(CAPTURES, spec)
            found = store.get_or_build(
                CAPTURES, spec, lambda folder: self._capture(folder, batches, spill.folder)
            )
            shutil.rmtree(spill.folder, ignore_errors=True)
            return found
        settings = {"batch_size": self.cfg.batch_size}
        spills = [self.spill(CAPTURES, spec, f"{number}/{n_parts}") for number in range(n_parts)]
        parts = Parts(
            store,
            CAPTURES,
            spec,
            CAPTURES_PART,
            [{"part": f"{number}/{n_parts}"} | settings for number in range(n_parts)],
            build=lambda number, folder: self._capture(
                folder, share_of(batches, number, n_parts), spills[number].folder
            ),
            merge=join_captures,
        )
        whole = parts.get_or_build(self.cfg.worker)[0]
        for spill in spills:
            shutil.rmtree(spill.folder, ignore_errors=True)
        return whole

    def kept_captures(self) -> Captures:
        """The captured caches, for what cannot do without rows.

        Raises:
            KvmapError: they were not to be kept.
        """
        if self.captures is None:
            raise KvmapError(
                "calibration.keep_captures=false: this mapper reads rows, which only captured caches hold; "
                "set calibration.keep_captures=auto"
            )
        return self.captures

    def spill(self, kind: str, spec: dict[str, Any], part: str = "1/1") -> Spill:
        """Where what becomes an artifact waits: known by the same content, so that a run finds what one that
        was killed has left. Whoever finds the artifact there removes it.
        """
        identity = content_key("spill", {"of": kind, "part": part, "batch_size": self.cfg.batch_size} | spec)
        bound, layerwise = self.cfg.max_spill_gib, self.cfg.layerwise
        return Spill(
            self.ctx.store.root / "spill" / identity,
            None if bound is None else int(bound * 2**30),
            None if layerwise == "auto" else bool(layerwise),
        )

    def _check_room(self) -> None:
        """Refuse captures that are to be kept and take more disk than is allowed.

        Raises:
            KvmapError: naming both.
        """
        bound = self.cfg.max_spill_gib
        if bound is None:
            return
        ids = self.ctx.tokens.input_ids
        taken = captures_bytes(self.ctx.pair, ids.numel()) / 2**30
        if taken > bound:
            raise KvmapError(
                f"calibration.max_spill_gib={bound:g}: the captured caches that calibration.keep_captures="
                f"{self.cfg.keep_captures} keeps take {taken:.3g} GiB. Raise it, lower "
                "calibration.n_sequences, or set calibration.keep_captures=false where no mapper reads rows"
            )

    def _capture(self, folder: Path, batches: list[tuple[int, int]], waiting: Path) -> None:
        """Captures of some batches in a folder, by way of another where unfinished ones wait."""
        sensitivity = None
        if self.weighted:
            sensitivity = SensitivityOptions(
                self.cfg.sensitivity_boundaries, self.native_head, self.cfg.token_stride
            )
        capture(
            self.ctx.pair,
            self.ctx.tokens.input_ids,
            waiting,
            batch_size=self.cfg.batch_size,
            batches=batches,
            sequential=self.cfg.sequential,
            sensitivity=sensitivity,
            layerwise=None if self.cfg.layerwise == "auto" else bool(self.cfg.layerwise),
            resume=True,
        )
        join_captures([waiting], folder)
