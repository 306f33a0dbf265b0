"""Attention-sensitivity weights of a calibration, shrunk to an effective sample size ([C])."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from torch import Tensor

from kvmap.errors import KvmapError
from kvmap.fit.calibrate import CalibrationOptions
from kvmap.fit.captures import CapturedBatch, Captures
from kvmap.fit.features import KINDS, Recipe
from kvmap.fit.outliers import OutlierRule
from kvmap.fit.pair_moments import RowWeights
from kvmap.fit.rows import counted_rows
from kvmap.fit.sensitivity import WeightSpread, shrink_weights
from kvmap.progress import track


class AttentionWeights:
    """The weights `w = 1 + α(r/r̄ − 1)` of every head, with the α that its number of features allows.

    r̄ is the mean of r over the rows that count: 1, unless outliers that r was taken over are left out.
    α rests on the spread of r over the fit rows of the whole calibration, so a first pass over the raw
    weights alone, which are small, comes before the pass over the rows.
    """

    def __init__(
        self,
        captures: Captures,
        recipe: Recipe,
        splits: Mapping[str, Sequence[int]],
        options: CalibrationOptions,
        outliers: OutlierRule | None = None,
    ) -> None:
        """Of one recipe.

        Args:
            captures: that hold raw weights.
            recipe: to be fitted.
            splits, options: which sequences and rows count.
            outliers: flags rows that do not; None: all others do.

        Raises:
            KvmapError: captures without raw weights.
        """
        if not captures.sensitivity:
            raise KvmapError(
                f"{captures.folder} holds no attention-sensitivity weights: capture again with them "
                f"(mapper.row_weights=sensitivity)"
            )
        self._captures, self._recipe = captures, recipe
        self._splits, self._options, self._outliers = splits, options, outliers

    @cached_property
    def spread(self) -> WeightSpread:
        """How unequal the raw weights of the fit rows are."""
        spread = WeightSpread.zeros(self._recipe.target_shape)
        members = set(self._splits["fit"])
        for start, stop in track(self._captures.batches, len(self._captures.batches), "weigh: raw weights"):
            rows = [number - start for number in range(start, stop) if number in members]
            if rows:
                raw = {key: r[rows] for key, r in self._captures.weights(start).items()}
                counted = counted_rows(self._captures, start, self._options, self._outliers)[rows]
                masked = {key: r.masked_fill(~counted[:, None], 0.0) for key, r in raw.items()}
                spread.update(masked, counted)
        return spread

    def alpha(self, kind: str, layer: int) -> Tensor:
        """(H_t,) α of each head of a target layer."""
        return self.spread.alpha(kind, layer, self._recipe.n_features(kind, layer))

    def weigh(self, batch: CapturedBatch, rows: Tensor) -> RowWeights:
        """Row weights of one batch; see `kvmap.fit.calibrate.accumulate_moments`."""
        if batch.sensitivity is None:
            raise KvmapError("a captured batch came without raw attention-sensitivity weights: capture again")
        weights = {}
        for kind in KINDS:
            for layer in self._recipe.mapped_layers:
                raw = batch.sensitivity[kind, layer].double()
                mean = (self.spread.sums[kind, layer] / self.spread.n_rows).to(raw)
                weights[kind, layer] = shrink_weights(raw / mean[:, None], self.alpha(kind, layer), rows)
        return weights

    def rows(self) -> list[dict[str, Any]]:
        """For each kind, target layer and head: α, CV² of the raw weights, effective and counted rows."""
        found = []
        for kind in KINDS:
            for layer in self._recipe.mapped_layers:
                alpha = self.alpha(kind, layer)
                effective = self.spread.effective_rows(kind, layer, alpha)
                cv2 = self.spread.cv2(kind, layer)
                found += [
                    {
                        "kind": kind,
                        "layer": layer,
                        "head": head,
                        "alpha": float(alpha[head]),
                        "cv_squared": float(cv2[head]),
                        "effective_rows": float(effective[head]),
                        "n_rows": self.spread.n_rows,
                    }
                    for head in range(len(alpha))
                ]
        return found
