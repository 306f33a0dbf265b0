"""Streaming first and second moments of source and target caches: all a linear fit ever needs.

Means, `XᵀX`, `XᵀY` and `diag(YᵀY)` on a fit split and a held-out split answer every selection rule,
support, k and λ, and give the exact R² of any linear map. Data is read once, chunk by chunk.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvmap.errors import KvmapError, UnknownName

if TYPE_CHECKING:
    from kvmap.models.cache import KVCache
    from kvmap.models.geometry import Geometry

KINDS = ("key", "value")
SPLITS = ("fit", "held_out")
PRODUCT_DTYPES = {"float64": torch.float64, "float32": torch.float32}

CacheShape = tuple[tuple[int, int], ...]
"""`(n_kv_heads, head_dim)` of each layer."""

_BLOCK_FEATURES = 4096
_TENSOR_FIELDS = ("mean_x", "mean_y", "s_xx", "s_xy", "s_yy")


class MomentsError(KvmapError):
    """Moments that cannot be formed, merged or read."""


class MemoryBudgetExceeded(KvmapError):
    """The moments of this pair need more memory than was allowed."""


@dataclass
class Moments:
    """Weighted, centred, mergeable moments of `n` features and targets.

    With weights w and means x̄ = Σwx/Σw, ȳ = Σwy/Σw::

        s_xx = Σ w (x − x̄)(x − x̄)ᵀ     s_xy = Σ w (x − x̄)(y − ȳ)ᵀ     s_yy = Σ w (y − ȳ)²

    They are sums, not averages: doubling every row doubles them. All five tensors are float64.
    Chunks are centred on their own mean before any product and joined by Chan's pairwise update, so
    a large common offset costs no digits and the order of the chunks matters only to rounding.

    Attributes:
        n_rows: rows of non-zero weight that were read.
        weight: Σw.
        mean_x: (p,) mean_y: (q,) s_xx: (p, p) s_xy: (p, q) s_yy: (q,), the diagonal alone.
    """

    n_rows: int
    weight: float
    mean_x: Tensor
    mean_y: Tensor
    s_xx: Tensor
    s_xy: Tensor
    s_yy: Tensor

    @classmethod
    def zeros(cls, p: int, q: int, device: torch.device | str = "cpu") -> Moments:
        """Moments of no rows, for p features and q targets."""

        def empty(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float64, device=device)

        return cls(0, 0.0, empty(p), empty(q), empty(p, p), empty(p, q), empty(q))

    @property
    def n_features(self) -> int:
        return self.mean_x.shape[0]

    @property
    def n_targets(self) -> int:
        return self.mean_y.shape[0]

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
        x, y, w = self._checked(x, y, weights)
        if w is not None:
            x, y, w = x[w > 0], y[w > 0], w[w > 0]
        n_rows = x.shape[0]
        if n_rows == 0:
            return self
        x, y = x.double(), y.double()
        if w is None:
            weight, mean_x, mean_y = float(n_rows), x.mean(0), y.mean(0)
        else:
            weight = float(w.sum())
            mean_x, mean_y = w @ x / weight, w @ y / weight
        x, y = x - mean_x, y - mean_y
        if w is not None:
            root = w.sqrt().unsqueeze(1)
            x, y = x * root, y * root
        self._add_products(x.to(product_dtype), y.to(product_dtype))
        self.s_yy += y.square().sum(0)
        self._shift_means(n_rows, weight, mean_x, mean_y)
        return self

    def merge(self, other: Moments) -> Moments:
        """Add the rows of `other`, in place (the tables are large), and return self."""
        if (self.n_features, self.n_targets) != (other.n_features, other.n_targets):
            raise MomentsError(
                f"cannot merge moments of {other.n_features} features and {other.n_targets} targets into "
                f"moments of {self.n_features} and {self.n_targets}: both must come from one pair of models"
            )
        device = self.mean_x.device
        for name in ("s_xx", "s_xy", "s_yy"):
            getattr(self, name).add_(getattr(other, name).to(device))
        self._shift_means(other.n_rows, other.weight, other.mean_x.to(device), other.mean_y.to(device))
        return self

    def __add__(self, other: Moments) -> Moments:
        return self.clone().merge(other)

    def clone(self) -> Moments:
        return Moments(self.n_rows, self.weight, *(getattr(self, name).clone() for name in _TENSOR_FIELDS))

    def to(self, device: torch.device | str) -> Moments:
        return Moments(self.n_rows, self.weight, *(getattr(self, name).to(device) for name in _TENSOR_FIELDS))

    def _checked(self, x: Tensor, y: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        n = x.shape[0]
        if x.shape != (n, self.n_features) or y.shape != (n, self.n_targets):
            raise MomentsError(
                f"a chunk of features {tuple(x.shape)} and targets {tuple(y.shape)} was given; expected "
                f"(n, {self.n_features}) and (n, {self.n_targets})"
            )
        device = self.mean_x.device
        x, y = x.to(device), y.to(device)
        for name, rows in (("features", x), ("targets", y)):
            if not bool(torch.isfinite(rows).all()):
                column = int((~torch.isfinite(rows)).any(0).nonzero()[0])
                raise MomentsError(
                    f"the {name} hold a NaN or infinite value in column {column}: a cache overflowed its "
                    f"dtype; capture in bfloat16 or float32"
                )
        if weights is None:
            return x, y, None
        if weights.shape != (n,):
            raise MomentsError(
                f"weights have shape {tuple(weights.shape)}; expected ({n},), one for each row"
            )
        w = weights.to(device, torch.float64)
        if not bool(torch.isfinite(w).all()) or bool((w < 0).any()):
            raise MomentsError("row weights must be finite and at least 0")
        return x, y, w

    def _add_products(self, x: Tensor, y: Tensor) -> None:
        """Add XᵀX and XᵀY, by blocks of features so that a float32 product needs no second full table."""
        for start in range(0, self.n_features, _BLOCK_FEATURES):
            block = slice(start, start + _BLOCK_FEATURES)
            left = x[:, block].T
            self.s_xx[block] += left @ x
            self.s_xy[block] += left @ y

    def _shift_means(self, n_rows: int, weight: float, mean_x: Tensor, mean_y: Tensor) -> None:
        """Join means, and add the part of the second moments that lies between the two means (Chan)."""
        total = self.weight + weight
        if weight == 0:
            return
        delta_x, delta_y = mean_x - self.mean_x, mean_y - self.mean_y
        between = self.weight * weight / total
        if between > 0:
            self.s_xx.addr_(delta_x, delta_x, alpha=between)
            self.s_xy.addr_(delta_x, delta_y, alpha=between)
            self.s_yy.addcmul_(delta_y, delta_y, value=between)
        self.mean_x += delta_x * (weight / total)
        self.mean_y += delta_y * (weight / total)
        self.n_rows += n_rows
        self.weight = total


@dataclass
class PairMoments:
    """Moments of every source feature against every target channel, for keys and values, on both splits.

    Features are ordered (layer, head, channel), over all source layers; targets likewise.

    Attributes:
        source_shape: `(n_kv_heads, head_dim)` of each source layer; target_shape likewise.
        tables: moments by `(kind, split)`, kind in `KINDS`, split in `SPLITS`.
        product_dtype: dtype of the centred products; sums are float64.
    """

    source_shape: CacheShape
    target_shape: CacheShape
    tables: dict[tuple[str, str], Moments]
    product_dtype: torch.dtype = torch.float64
    _source_offsets: list[int] = field(init=False, repr=False)
    _target_offsets: list[int] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._source_offsets = _offsets(self.source_shape)
        self._target_offsets = _offsets(self.target_shape)

    @classmethod
    def zeros(
        cls,
        source_shape: CacheShape,
        target_shape: CacheShape,
        device: torch.device | str = "cpu",
        product_dtype: torch.dtype = torch.float64,
        budget_bytes: int | None = None,
    ) -> PairMoments:
        """Empty moments of a pair.

        Raises:
            MemoryBudgetExceeded: the tables would be larger than `budget_bytes`.
        """
        check_memory(source_shape, target_shape, budget_bytes)
        p, q = n_channels(source_shape), n_channels(target_shape)
        tables = {(kind, split): Moments.zeros(p, q, device) for kind in KINDS for split in SPLITS}
        return cls(source_shape, target_shape, tables, product_dtype)

    def update(
        self,
        split: str,
        source: KVCache,
        target: KVCache,
        rows: Tensor | None = None,
        weights: Tensor | None = None,
    ) -> PairMoments:
        """Add a batch of sequences to one split, in place, and return self.

        Args:
            split: "fit" or "held_out".
            source: stripped cache (see `kvmap.transfer.calibration_view`); target likewise, same columns.
            rows: (batch, tokens) bool, the columns that count; None: every real token.
            weights: (batch, tokens) row weights, or None.

        Raises:
            MomentsError: an unstripped cache, caches that disagree with each other or with the shapes.
        """
        if split not in SPLITS:
            raise UnknownName("split", split, SPLITS)
        self._check_caches(source, target)
        rows = source.mask if rows is None else rows & source.mask.to(rows.device)
        row_weights = None if weights is None else weights[rows.to(weights.device)]
        for kind in KINDS:
            x = feature_rows(source.keys if kind == "key" else source.values, rows)
            y = feature_rows(target.keys if kind == "key" else target.values, rows)
            self.tables[kind, split].update(x, y, row_weights, self.product_dtype)
        return self

    def _check_caches(self, source: KVCache, target: KVCache) -> None:
        for name, kv, shape in (("source", source, self.source_shape), ("target", target, self.target_shape)):
            if not kv.stripped:
                raise MomentsError(
                    f"the {name} cache carries rotated keys; moments are taken of content keys: pass it "
                    f"through calibration_view first"
                )
            if cache_shape(kv) != shape:
                raise MomentsError(
                    f"the {name} cache has layers {cache_shape(kv)} (heads, head_dim); these moments are "
                    f"of {shape}"
                )
        if not torch.equal(source.mask.cpu(), target.mask.cpu()):
            raise MomentsError(
                f"source and target caches hold different columns: {tuple(source.mask.shape)} and "
                f"{tuple(target.mask.shape)} (batch, tokens), or other pads. Both must read the same ids"
            )

    def merge(self, other: PairMoments) -> PairMoments:
        """Add the rows of `other` (another shard), in place, and return self."""
        if (self.source_shape, self.target_shape) != (other.source_shape, other.target_shape):
            raise MomentsError(
                f"cannot merge moments of another pair: {other.source_shape} → {other.target_shape} into "
                f"{self.source_shape} → {self.target_shape}"
            )
        for key, table in self.tables.items():
            table.merge(other.tables[key])
        return self

    def feature_index(self, layers: Sequence[int], head: int | None = None) -> Tensor:
        """Columns of X that belong to these source layers, (p,) int64; with `head`, to that head of each."""
        spans = [self._source_span(layer, head) for layer in layers]
        return torch.tensor([i for start, stop in spans for i in range(start, stop)], dtype=torch.int64)

    def _source_span(self, layer: int, head: int | None) -> tuple[int, int]:
        n_heads, head_dim = self.source_shape[layer]
        start = self._source_offsets[layer]
        if head is None:
            return start, start + n_heads * head_dim
        return start + head * head_dim, start + (head + 1) * head_dim

    def target_slice(self, layer: int, head: int | None = None) -> slice:
        """Columns of Y that belong to a target layer, or to one of its heads."""
        n_heads, head_dim = self.target_shape[layer]
        start = self._target_offsets[layer]
        if head is None:
            return slice(start, start + n_heads * head_dim)
        return slice(start + head * head_dim, start + (head + 1) * head_dim)

    @property
    def nbytes(self) -> int:
        return moments_bytes(self.source_shape, self.target_shape)

    def to(self, device: torch.device | str) -> PairMoments:
        tables = {key: table.to(device) for key, table in self.tables.items()}
        return PairMoments(self.source_shape, self.target_shape, tables, self.product_dtype)

    def to_tensors(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Flat float64 tensors, and settings that JSON can hold."""
        tensors = {
            f"{kind}.{split}.{name}": getattr(table, name).cpu().contiguous()
            for (kind, split), table in self.tables.items()
            for name in _TENSOR_FIELDS
        }
        settings = {
            "source_shape": [list(layer) for layer in self.source_shape],
            "target_shape": [list(layer) for layer in self.target_shape],
            "product_dtype": str(self.product_dtype).removeprefix("torch."),
            "n_rows": {f"{kind}.{split}": table.n_rows for (kind, split), table in self.tables.items()},
            "weight": {f"{kind}.{split}": table.weight for (kind, split), table in self.tables.items()},
        }
        return tensors, settings

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], settings: Mapping[str, Any]) -> PairMoments:
        """Inverse of `to_tensors`.

        Raises:
            MomentsError: a tensor that is missing or has another shape than the settings say.
        """
        source_shape = _shape_from_json(settings["source_shape"])
        target_shape = _shape_from_json(settings["target_shape"])
        p, q = n_channels(source_shape), n_channels(target_shape)
        expected = {"mean_x": (p,), "mean_y": (q,), "s_xx": (p, p), "s_xy": (p, q), "s_yy": (q,)}
        tables = {}
        for kind in KINDS:
            for split in SPLITS:
                parts = []
                for name in _TENSOR_FIELDS:
                    key = f"{kind}.{split}.{name}"
                    if key not in tensors or tuple(tensors[key].shape) != expected[name]:
                        got = tuple(tensors[key].shape) if key in tensors else "nothing"
                        raise MomentsError(f"moments tensor {key!r}: got {got}, expected {expected[name]}")
                    parts.append(tensors[key].double())
                label = f"{kind}.{split}"
                counts = int(settings["n_rows"][label]), float(settings["weight"][label])
                tables[kind, split] = Moments(*counts, *parts)
        return cls(source_shape, target_shape, tables, PRODUCT_DTYPES[settings["product_dtype"]])


def calibration_rows(mask: Tensor, native_head: int = 0, stride: int = 1) -> Tensor:
    """Which columns of a batch count for the fit.

    Pads are left out, and so are the first `native_head` real tokens of each row, which the target will
    compute itself; of the rest every `stride`-th is kept, starting with the first.

    Args:
        mask: (batch, tokens) bool, True at real tokens; left padding allowed.

    Returns:
        (batch, tokens) bool.

    Raises:
        MomentsError: `native_head` < 0 or `stride` < 1.
    """
    if native_head < 0 or stride < 1:
        raise MomentsError(
            f"native_head={native_head}, stride={stride}: expected native_head >= 0 and stride >= 1"
        )
    mask = mask.bool()
    index = mask.cumsum(-1) - 1 - native_head
    return mask & (index >= 0) & (index % stride == 0)


def feature_rows(layers: Sequence[Tensor], rows: Tensor) -> Tensor:
    """Rows of (layer, head, channel) features of the chosen columns.

    Args:
        layers: per layer (batch, n_kv_heads, tokens, head_dim).
        rows: (batch, tokens) bool with n columns True.

    Returns:
        (n, Σ n_kv_heads · head_dim), in the order of the batch, then of the tokens.
    """
    return torch.cat([layer.transpose(1, 2)[rows.to(layer.device)].flatten(1) for layer in layers], dim=1)


def cache_shape(kv: KVCache) -> CacheShape:
    """`(n_kv_heads, head_dim)` of each layer of a cache."""
    return tuple((keys.shape[1], keys.shape[3]) for keys in kv.keys)


def geometry_shape(geometry: Geometry) -> CacheShape:
    """`(n_kv_heads, head_dim)` of each layer of a model."""
    return tuple((layer.n_kv_heads, layer.head_dim) for layer in geometry.layers)


def n_channels(shape: Iterable[tuple[int, int]]) -> int:
    """Channels of one token over all layers and heads: Σ n_kv_heads · head_dim."""
    return sum(n_heads * head_dim for n_heads, head_dim in shape)


def moments_bytes(source_shape: CacheShape, target_shape: CacheShape) -> int:
    """Bytes of the tables of one pair: 2 kinds · 2 splits · 8 · (p² + pq + p + 2q)."""
    p, q = n_channels(source_shape), n_channels(target_shape)
    return len(KINDS) * len(SPLITS) * 8 * (p * p + p * q + p + 2 * q)


def check_memory(source_shape: CacheShape, target_shape: CacheShape, budget_bytes: int | None) -> None:
    """Refuse moments that would not fit a budget.

    Raises:
        MemoryBudgetExceeded: with the bytes needed and allowed.
    """
    needed = moments_bytes(source_shape, target_shape)
    if budget_bytes is not None and needed > budget_bytes:
        raise MemoryBudgetExceeded(
            f"the moments of this pair need {needed:,} bytes (p = {n_channels(source_shape):,} source and "
            f"q = {n_channels(target_shape):,} target channels, keys and values, two splits, float64); "
            f"{budget_bytes:,} are allowed. Raise the budget, or use a machine with more memory"
        )


def _offsets(shape: CacheShape) -> list[int]:
    offsets = [0]
    for n_heads, head_dim in shape:
        offsets.append(offsets[-1] + n_heads * head_dim)
    return offsets


def _shape_from_json(layers: Iterable[Sequence[int]]) -> CacheShape:
    return tuple((int(n_heads), int(head_dim)) for n_heads, head_dim in layers)
