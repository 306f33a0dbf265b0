"""What the operation `add_second_moments` is given, and what it adds to: plain tensors.

Of a chunk of rows x (n, p) and y (n, q) with weights w ≥ 0 (all ones where none are given):

    x̄ = Σ w x / Σ w                         ȳ likewise
    s_xx += Σ w (x − x̄)(x − x̄)ᵀ             s_xy += Σ w (x − x̄)(y − ȳ)ᵀ             s_yy += Σ w (y − ȳ)²
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from kvmap.errors import KvmapError


class SecondMomentsError(KvmapError):
    """A path that cannot serve the rows it was asked for."""


@dataclass(frozen=True, eq=False)
class Rows:
    """A chunk of rows, on one device.

    Attributes:
        x: (n, p) features, of any floating dtype and strides; y: (n, q) targets, likewise.
        weights: (n,) float64, at least 0 and finite; None: all ones. A row of weight 0 is not looked at.
    """

    x: Tensor
    y: Tensor
    weights: Tensor | None = None

    def counted(self) -> Rows:
        """Those of non-zero weight; a copy where rows are weighted."""
        if self.weights is None:
            return self
        counted = self.weights > 0
        return Rows(self.x[counted], self.y[counted], self.weights[counted])


@dataclass(frozen=True, eq=False)
class Sums:
    """Tables that are added to in place, float64, on the device of the rows.

    Attributes:
        s_xx: (p, p), of which only the square blocks on and above the diagonal need to be right.
        s_xy: (p, q); s_yy: (q,).
        block: features along one side of such a block.
    """

    s_xx: Tensor
    s_xy: Tensor
    s_yy: Tensor
    block: int


class Means(NamedTuple):
    """Zeroth and first moments of a chunk.

    Attributes:
        n_rows: rows of non-zero weight.
        weight: Σ w.
        mean_x: (p,) float64; mean_y: (q,) float64; zeros where there are no rows.
    """

    n_rows: int
    weight: float
    mean_x: Tensor
    mean_y: Tensor

    @property
    def finite(self) -> bool:
        """Whether all means are, and so all rows: a NaN or an infinity stays one in every sum."""
        return bool(self.mean_x.isfinite().all() and self.mean_y.isfinite().all())
