"""Weighted, centred, mergeable first and second moments of rows: all that a linear fit ever needs of them."""

from __future__ import annotations

import torch
from torch import Tensor

from kvmap.errors import KvmapError
from kvmap.kernels.second_moments import Rows, Sums, add_second_moments
from kvmap.kernels.settings import current

PRODUCT_DTYPES = {"float64": torch.float64, "float32": torch.float32}

_BLOCK_FEATURES = 512
_SHORTEST_RUN = 8  # positions, on average
_TENSOR_FIELDS = ("mean_x", "mean_y", "s_xx", "s_xy", "s_yy")


class MomentsError(KvmapError):
    """Moments that cannot be formed, merged or read."""


class Moments:
    """Weighted, centred, mergeable moments of `n_rows` rows of p features and q targets.

    With weights w and means x̄ = Σwx/Σw, ȳ = Σwy/Σw::

        s_xx = Σ w (x − x̄)(x − x̄)ᵀ     s_xy = Σ w (x − x̄)(y − ȳ)ᵀ     s_yy = Σ w (y − ȳ)²

    They are sums, not averages: doubling every row doubles them. All five tensors are float64.
    Chunks are centred on their own mean before any product and joined by Chan's pairwise update, so
    a large common offset costs no digits and the order of the chunks matters only to rounding.

    Only the blocks of s_xx on and above its diagonal are accumulated; the rest is mirrored when it is read.

    Attributes:
        n_rows: rows of non-zero weight that were read.
        weight: Σw.
        mean_x: (p,) mean_y: (q,) s_xx: (p, p) s_xy: (p, q) s_yy: (q,), the diagonal alone.
    """

    def __init__(
        self,
        n_rows: int,
        weight: float,
        mean_x: Tensor,
        mean_y: Tensor,
        s_xx: Tensor,
        s_xy: Tensor,
        s_yy: Tensor,
    ) -> None:
        """Args: see the attributes; the tensors are taken over, not copied."""
        self.n_rows = n_rows
        self.weight = weight
        self.mean_x = mean_x
        self.mean_y = mean_y
        self.s_xy = s_xy
        self.s_yy = s_yy
        self._s_xx = s_xx
        self._mirrored = True

    @classmethod
    def zeros(cls, p: int, q: int, device: torch.device | str = "cpu") -> Moments:
        """Moments of no rows, for p features and q targets."""

        def empty(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float64, device=device)

        return cls(0, 0.0, empty(p), empty(q), empty(p, p), empty(p, q), empty(q))

    @property
    def s_xx(self) -> Tensor:
        """Σ w (x − x̄)(x − x̄)ᵀ, (p, p) float64, symmetric."""
        if not self._mirrored:
            for start in range(_BLOCK_FEATURES, self.n_features, _BLOCK_FEATURES):
                block = slice(start, start + _BLOCK_FEATURES)
                self._s_xx[block, :start] = self._s_xx[:start, block].T
            self._mirrored = True
        return self._s_xx

    @property
    def n_features(self) -> int:
        """Features p."""
        return self.mean_x.shape[0]

    @property
    def n_targets(self) -> int:
        """Targets q."""
        return self.mean_y.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of the five tensors."""
        return moments_bytes(self.n_features, self.n_targets)

    def update(
        self,
        x: Tensor,
        y: Tensor,
        weights: Tensor | None = None,
        product_dtype: torch.dtype = torch.float64,
    ) -> Moments:
        """Add a chunk of rows, in place, and return self.

        Args:
            x: (n, p) features; y: (n, q) targets; any floating dtype.
            weights: (n,) weights ≥ 0, or None for all ones. A row of weight 0 is not counted.
            product_dtype: dtype of the centred products; their sums are float64 either way.

        Raises:
            MomentsError: shapes that disagree, a negative weight, or a value that is not finite.
        """
        rows = self._checked(x, y, weights)
        sums = Sums(self._s_xx, self.s_xy, self.s_yy, _BLOCK_FEATURES)
        means = add_second_moments(rows, sums, product_dtype=product_dtype, path=current().moments)
        if not means.finite:
            counted = rows.counted()
            raise _not_finite(counted.x, counted.y)
        if means.n_rows > 0:
            self._mirrored = self.n_features <= _BLOCK_FEATURES
            self._shift_means(*means)
        return self

    def merge(self, other: Moments) -> Moments:
        """Add the rows of `other`, in place (the tables are large), and return self."""
        if (self.n_features, self.n_targets) != (other.n_features, other.n_targets):
            raise MomentsError(
                f"cannot merge moments of {other.n_features} features and {other.n_targets} targets into "
                f"moments of {self.n_features} and {self.n_targets}: both must come from one pair of models"
            )
        device = self.mean_x.device
        self.s_xx.add_(other.s_xx.to(device))
        self.s_xy.add_(other.s_xy.to(device))
        self.s_yy.add_(other.s_yy.to(device))
        self._shift_means(other.n_rows, other.weight, other.mean_x.to(device), other.mean_y.to(device))
        return self

    def __add__(self, other: Moments) -> Moments:
        """The rows of both; neither is changed."""
        return self.clone().merge(other)

    def clone(self) -> Moments:
        """A copy that shares no storage."""
        return Moments(self.n_rows, self.weight, *(getattr(self, name).clone() for name in _TENSOR_FIELDS))

    def to(self, device: torch.device | str) -> Moments:
        """The same moments elsewhere."""
        return Moments(self.n_rows, self.weight, *(getattr(self, name).to(device) for name in _TENSOR_FIELDS))

    def cut(self, features: Tensor, targets: Tensor) -> Moments:
        """The moments of some features and targets, by position; views where the positions are consecutive.

        Args:
            features: (p',) int64 positions; targets: (q',).
        """
        parts = [take(self.s_xx[run], features, 1) for run in runs(features)]
        if parts:
            s_xx = parts[0] if len(parts) == 1 else torch.cat(parts)
        else:
            s_xx = self.s_xx[features[:, None], features]
        # first what makes a view, or else what leaves less to copy
        if len(runs(targets)) == 1:
            s_xy = take(take(self.s_xy, targets, 1), features, 0)
        else:
            s_xy = take(take(self.s_xy, features, 0), targets, 1)
        means = take(self.mean_x, features, 0), take(self.mean_y, targets, 0)
        return Moments(self.n_rows, self.weight, *means, s_xx, s_xy, take(self.s_yy, targets, 0))

    def tensors(self) -> dict[str, Tensor]:
        """The five tensors by name."""
        return {name: getattr(self, name) for name in _TENSOR_FIELDS}

    def _checked(self, x: Tensor, y: Tensor, weights: Tensor | None) -> Rows:
        n = x.shape[0]
        if x.shape != (n, self.n_features) or y.shape != (n, self.n_targets):
            raise MomentsError(
                f"a chunk of features {tuple(x.shape)} and targets {tuple(y.shape)} was given; expected "
                f"(n, {self.n_features}) and (n, {self.n_targets})"
            )
        device = self.mean_x.device
        x, y = x.to(device), y.to(device)
        if weights is None:
            return Rows(x, y)
        if weights.shape != (n,):
            raise MomentsError(
                f"weights have shape {tuple(weights.shape)}; expected ({n},), one for each row"
            )
        w = weights.to(device, torch.float64)
        if not bool(torch.isfinite(w).all()) or bool((w < 0).any()):
            raise MomentsError("row weights must be finite and at least 0")
        return Rows(x, y, w)

    def _shift_means(self, n_rows: int, weight: float, mean_x: Tensor, mean_y: Tensor) -> None:
        """Join means, and add the part of the second moments that lies between the two means (Chan)."""
        total = self.weight + weight
        if weight == 0:
            return
        delta_x, delta_y = mean_x - self.mean_x, mean_y - self.mean_y
        between = self.weight * weight / total
        if between > 0:
            self._s_xx.addr_(delta_x, delta_x, alpha=between)
            self.s_xy.addr_(delta_x, delta_y, alpha=between)
            self.s_yy.addcmul_(delta_y, delta_y, value=between)
        self.mean_x += delta_x * (weight / total)
        self.mean_y += delta_y * (weight / total)
        self.n_rows += n_rows
        self.weight = total


def moments_bytes(p: int, q: int) -> int:
    """Bytes of the moments of p features and q targets: 8 · (p² + pq + p + 2q)."""
    return 8 * (p * p + p * q + p + 2 * q)


def _not_finite(x: Tensor, y: Tensor) -> MomentsError:
    name, rows = ("features", x) if not bool(torch.isfinite(x).all()) else ("targets", y)
    column = int((~torch.isfinite(rows)).any(0).nonzero()[0])
    return MomentsError(
        f"the {name} hold a NaN or infinite value in column {column}: a cache overflowed its dtype; "
        f"capture in bfloat16 or float32"
    )


def runs(positions: Tensor) -> list[slice]:
    """Runs of consecutive positions as slices, in order; none where they are too short to be worth it."""
    starts = [0, *((positions.diff() != 1).nonzero().flatten() + 1).tolist()]
    if not len(positions) or (len(starts) > 1 and len(starts) * _SHORTEST_RUN > len(positions)):
        return []
    lengths = [stop - start for start, stop in zip(starts, [*starts[1:], len(positions)], strict=True)]
    firsts = positions[starts].tolist()
    return [slice(first, first + length) for first, length in zip(firsts, lengths, strict=True)]


def take(tensor: Tensor, positions: Tensor, dim: int) -> Tensor:
    """Entries along a dim: a view where they are consecutive; runs of them are joined, which is several times
    faster than taking them one by one.
    """
    parts = [tensor.narrow(dim, run.start, run.stop - run.start) for run in runs(positions)]
    if not parts:
        return tensor.index_select(dim, positions.to(tensor.device))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)
