"""How much each cached key and value matters to the target's attention: row weights for a fit ([C]).

An error δv_i of one value moves the output of query u by a_ui δv_i; an error δk_i of one key moves it, to
first order, by a_ui (v_i − o_u) (q_u·δk_i) times the scaling. Weights are the squares of these, with q·δk
bounded by its norm, so a weighted ridge minimises what the target would notice of its own attention.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvmap.errors import KvmapError
from kvmap.fit.features import KINDS, CacheShape
from kvmap.models.cache import KVCache
from kvmap.models.loaded import LoadedModel
from kvmap.models.queries import attention_scores, attention_weights, read_queries, visible_columns

N_BOUNDARIES = 32
# Below this part of ‖v‖² + ‖o‖² a squared distance is rounding of float64 sums.
_ROUNDING = 64 * torch.finfo(torch.float64).eps

RowWeights = dict[tuple[str, int], Tensor]
"""By kind and target layer, (batch, n_kv_heads, tokens) float32."""


class SensitivityError(KvmapError):
    """Row weights that cannot be had or joined."""


def prefix_boundaries(n_tokens: int, n_boundaries: int = N_BOUNDARIES) -> tuple[int, ...]:
    """The prefix lengths B at which attention is looked at: log-spaced from 2 to n_tokens, distinct.

    Where rounding would repeat a length the next one is taken. A prefix of one token is left out, as its
    weight is 1 whatever the keys are; so is nothing else where there are no more than n_boundaries lengths.

    Raises:
        SensitivityError: `n_boundaries` < 1.
    """
    if n_boundaries < 1:
        raise SensitivityError(f"n_boundaries={n_boundaries}: expected 1 or more")
    if n_tokens - 1 <= n_boundaries:
        return tuple(range(min(2, n_tokens), n_tokens + 1)) if n_tokens else ()
    if n_boundaries == 1:
        return (n_tokens,)
    ratio = (n_tokens / 2) ** (1 / (n_boundaries - 1))
    lengths: list[int] = []
    for step in range(n_boundaries):
        lowest = lengths[-1] + 1 if lengths else 2
        lengths.append(max(lowest, round(2 * ratio**step)))
    return tuple(lengths)


def layer_sensitivity(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float,
    mask: Tensor,
    rows: Tensor | None = None,
    *,
    softcap: float | None = None,
    boundaries: int | Sequence[int] = N_BOUNDARIES,
    window: int | None = None,
) -> dict[str, Tensor]:
    """Raw row weights r of one layer ([C]).

    For a boundary b in B, the query u is the b-th real token, which sees the real tokens 1…b, in a layer with
    a window the last of them alone; every query head of the group that shares a KV head counts. With
    s = scaling·q·k, a = softmax(s), o = Σ a_i v_i::

        m_i^V(b) = Σ_u a_ui²
        m_i^K(b) = Σ_u a_ui² ‖v_i − o_u‖² ‖q_u‖² scaling²        (u: heads of the group, at b)
        r_i ∝ Σ_b m_i(b) / Σ_j m_j(b)                            (j: all of 1…b), of mean 1 over the rows

    [C] writes 1/d for scaling². A soft-capped score c·tanh(x/c) is flatter by 1 − (s/c)², whose square
    multiplies m^K. The unit mass of a boundary is that of its whole prefix, so leaving out rows (the native
    head, a stride) changes the others by one common factor, and a query that reads little but the sink says
    little of the rest. A boundary without mass (a prefix of one token, for keys) is skipped; where no row
    has any, every row weighs 1.

    float64 within: squared distances are small differences of large numbers. Peak memory: some five tensors
    of batch · n_heads · |B| · tokens numbers.

    Args:
        query: (batch, n_heads, tokens, head_dim), as the model multiplies them with the keys.
        key: (batch, n_kv_heads, tokens, head_dim), rotated; value: likewise.
        scaling: what q·k is multiplied by; softcap: the bound of soft-capped scores.
        mask: (batch, tokens) bool, real tokens.
        rows: (batch, tokens) bool, the columns that count for the fit; None: all real ones.
        boundaries: how many lengths of `prefix_boundaries`, of each row's own length; or the lengths
            themselves, of which a shorter row takes those it has.
        window: of the layer, `LayerGeometry.window`.

    Returns:
        By kind, (batch, n_kv_heads, tokens) float32 with mean 1 over the rows of a sequence, 0 elsewhere.
    """
    mask = mask.to(query.device).bool()
    rows = mask if rows is None else rows.to(query.device).bool() & mask
    columns, valid = _boundary_columns(mask, boundaries)
    if columns.shape[1] == 0:
        even = rows[:, None].float().expand(-1, key.shape[1], -1)
        return {kind: even.clone() for kind in KINDS}
    index = columns[:, None, :, None].expand(-1, query.shape[1], -1, query.shape[-1])
    q, v = query.gather(2, index).double(), value.double()
    scores = attention_scores(q, key.double(), scaling, softcap)
    visible = visible_columns(mask, columns, window)
    weights = attention_weights(scores, visible)
    moved = _squared_distances(weights, v)
    squared = weights.square_()
    moved.mul_(squared)
    moved.mul_(q.square().sum(-1).mul(scaling**2).unflatten(1, moved.shape[1:3]).unsqueeze(-1))
    if softcap is not None:
        moved.mul_((1 - (scores / softcap).square()).square_())
    masses = {"key": moved.sum(2), "value": squared.sum(2)}
    return {kind: _normalised(masses[kind], valid, rows) for kind in KINDS}


class SensitivityReader:
    """An `OnLayer` that weighs each layer's rows and keeps the weights alone, on the CPU."""

    def __init__(
        self,
        mask: Tensor,
        rows: Tensor | None = None,
        boundaries: int | Sequence[int] = N_BOUNDARIES,
        windows: Sequence[int | None] | None = None,
    ) -> None:
        """Args: see `layer_sensitivity`; `windows` are those of all layers, None where none has one."""
        self.weights: RowWeights = {}
        self._mask, self._rows, self._boundaries, self._windows = mask, rows, boundaries, windows

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, softcap: float | None, /
    ) -> None:
        """See `kvmap.models.queries.OnLayer`."""
        found = layer_sensitivity(
            query,
            key,
            value,
            scaling,
            self._mask,
            self._rows,
            softcap=softcap,
            boundaries=self._boundaries,
            window=None if self._windows is None else self._windows[layer],
        )
        for kind, weights in found.items():
            self.weights[kind, layer] = weights.cpu()


def read_sensitivity(
    loaded: LoadedModel,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    rows: Tensor | None = None,
    *,
    boundaries: int | Sequence[int] = N_BOUNDARIES,
) -> tuple[KVCache, RowWeights]:
    """Read contexts, and weigh the rows of every layer and KV head on the way: one forward for both.

    Args:
        loaded: the target.
        input_ids: (batch, tokens); attention_mask: (batch, tokens), left padding, or None.
        rows, boundaries: see `layer_sensitivity`.

    Returns:
        The cache, and the raw weights r by kind and layer.
    """
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    windows = [layer.window for layer in loaded.geometry.layers]
    reader = SensitivityReader(mask.bool(), rows, boundaries, windows)
    kv = read_queries(loaded, input_ids, attention_mask, reader)
    return kv, reader.weights


def shrink_weights(r: Tensor, alpha: Tensor, rows: Tensor | None = None) -> Tensor:
    """`w = 1 + α (r − 1)`, 0 where a row does not count.

    Args:
        r: (batch, n_kv_heads, tokens) raw weights; alpha: (n_kv_heads,) of `WeightSpread.alpha`.
        rows: (batch, tokens) bool, the columns that count; None: all.

    Returns:
        (batch, n_kv_heads, tokens) float64, ≥ 0.
    """
    r = r.double()
    w = 1 + alpha.to(r)[:, None] * (r - 1)
    return w if rows is None else w.masked_fill(~rows.to(w.device)[:, None], 0.0)


def shrinkage(cv2: Tensor, n_rows: int, n_features: int, rows_per_feature: float = 2.0) -> Tensor:
    """The largest α ≤ 1 that leaves an effective sample size of `min(n, 2p)` ([C]).

    Kish: `(Σw)²/Σw² = n / (1 + α²CV²)` for w = 1 + α(r − 1), so `α = min(1, √(n/min(n, 2p) − 1) / CV)`.

    Args:
        cv2: squared coefficient of variation of r, Σ(r − r̄)²/(n r̄²), any shape.
        n_rows: n; n_features: p.
        rows_per_feature: the 2 of 2p.
    """
    floor = min(float(n_rows), rows_per_feature * n_features)
    if floor <= 0:
        return torch.ones_like(cv2)
    # all weights alike: any α will do
    return torch.where(cv2 > 0, ((n_rows / floor - 1) / cv2).sqrt().clamp(max=1.0), 1.0)


@dataclass(eq=False)
class WeightSpread:
    """How unequal raw weights are over all rows of a calibration, added up batch by batch in float64.

    Attributes:
        n_rows: rows that count.
        sums: (n_kv_heads,) Σr by kind and layer; squares: Σr² likewise.
    """

    n_rows: int
    sums: dict[tuple[str, int], Tensor]
    squares: dict[tuple[str, int], Tensor]

    @classmethod
    def zeros(cls, target_shape: CacheShape) -> WeightSpread:
        """Of no rows yet, for the `(n_kv_heads, head_dim)` of each target layer."""

        def empty() -> dict[tuple[str, int], Tensor]:
            return {
                (kind, layer): torch.zeros(n_heads, dtype=torch.float64)
                for kind in KINDS
                for layer, (n_heads, _) in enumerate(target_shape)
            }

        return cls(0, empty(), empty())

    def update(self, weights: Mapping[tuple[str, int], Tensor], rows: Tensor) -> WeightSpread:
        """Add a batch, in place, and return self.

        Args:
            weights: raw weights of `read_sensitivity`, 0 where a row does not count.
            rows: (batch, tokens) bool, the rows that count.

        Raises:
            SensitivityError: weights of other layers or heads.
        """
        got = {name: r.shape[1] for name, r in weights.items()}
        if got != {name: len(total) for name, total in self.sums.items()}:
            raise SensitivityError(
                f"weights of layers {got} (heads by kind and layer) for a spread of "
                f"{ {name: len(total) for name, total in self.sums.items()} }: both must be of one target"
            )
        self.n_rows += int(rows.sum())
        for name, r in weights.items():
            r = r.to("cpu", torch.float64)
            self.sums[name] += r.sum((0, 2))
            self.squares[name] += r.square().sum((0, 2))
        return self

    def merge(self, other: WeightSpread) -> WeightSpread:
        """Add the rows of another part, in place, and return self.

        Raises:
            SensitivityError: a part of another target.
        """
        if {n: len(s) for n, s in self.sums.items()} != {n: len(s) for n, s in other.sums.items()}:
            raise SensitivityError("cannot merge the weights of two targets of different layers or heads")
        self.n_rows += other.n_rows
        for name in self.sums:
            self.sums[name] += other.sums[name]
            self.squares[name] += other.squares[name]
        return self

    def cv2(self, kind: str, layer: int) -> Tensor:
        """(n_kv_heads,) squared coefficient of variation `n Σr²/(Σr)² − 1`."""
        self._check_rows()
        sums, squares = self.sums[kind, layer], self.squares[kind, layer]
        return (self.n_rows * squares / sums.square() - 1).clamp(min=0.0)

    def alpha(self, kind: str, layer: int, n_features: int, rows_per_feature: float = 2.0) -> Tensor:
        """(n_kv_heads,) α of `shrinkage` for a fit of p features."""
        return shrinkage(self.cv2(kind, layer), self.n_rows, n_features, rows_per_feature)

    def effective_rows(self, kind: str, layer: int, alpha: Tensor) -> Tensor:
        """(n_kv_heads,) Kish effective sample size `n / (1 + α²CV²)` of the shrunk weights."""
        return self.n_rows / (1 + alpha.square() * self.cv2(kind, layer))

    def _check_rows(self) -> None:
        if self.n_rows == 0:
            raise SensitivityError("no rows were weighed yet: update() before asking for their spread")


def _boundary_columns(mask: Tensor, boundaries: int | Sequence[int]) -> tuple[Tensor, Tensor]:
    """Columns (batch, |B|) int64 of the boundary tokens of each row, and (batch, |B|) bool, which exist."""
    lengths = mask.sum(-1).tolist()
    chosen = [
        prefix_boundaries(length, boundaries)
        if isinstance(boundaries, int)
        else tuple(b for b in boundaries if 1 <= b <= length)
        for length in lengths
    ]
    widest = max(map(len, chosen), default=0)
    counts = torch.tensor([[*row, *[0] * (widest - len(row))] for row in chosen], dtype=torch.long)
    counts = counts.to(mask.device).reshape(len(chosen), widest)
    columns = torch.searchsorted(mask.long().cumsum(-1), counts.clamp(min=1))
    return columns.clamp(max=mask.shape[1] - 1), counts > 0


def _squared_distances(weights: Tensor, v: Tensor) -> Tensor:
    """`‖v_i − o_u‖²` with `o_u = Σ a_i v_i`, of the shape of the weights.

    The column m that draws most is told apart: where it draws nearly all, v_m − o_u is next to nothing, and
    `(1 − a_m) v_m − Σ_{i≠m} a_i v_i` has its digits. Elsewhere what is below rounding is 0.

    Args:
        weights: (batch, n_kv_heads, group, |B|, tokens); v: (batch, n_kv_heads, tokens, head_dim).
    """
    flat = weights.flatten(2, 3)
    most, column = flat.max(-1, keepdim=True)
    others = flat.scatter(-1, column, 0.0)
    from_others = others @ v
    v_most = v.gather(2, column.expand(-1, -1, -1, v.shape[-1]))
    o = from_others + most * v_most
    scale = o.square().sum(-1, keepdim=True) + v.square().sum(-1).unsqueeze(2)
    distances = (o @ v.transpose(2, 3)).mul_(-2).add_(scale)
    distances.masked_fill_(distances < scale.mul_(_ROUNDING), 0.0)
    to_most = (others.sum(-1, keepdim=True) * v_most - from_others).square().sum(-1, keepdim=True)
    return distances.scatter_(-1, column, to_most).unflatten(2, weights.shape[2:4])


def _normalised(masses: Tensor, valid: Tensor, rows: Tensor) -> Tensor:
    """Masses (batch, n_kv_heads, |B|, tokens) to weights (batch, n_kv_heads, tokens) of mean 1 over rows."""
    masses = masses * valid[:, None, :, None]
    unit = masses / masses.sum(-1, keepdim=True).clamp(min=torch.finfo(masses.dtype).tiny)
    counted = rows[:, None].to(masses.dtype)
    summed = unit.sum(2) * counted
    total = summed.sum(-1, keepdim=True)
    return torch.where(total > 0, summed * counted.sum(-1, keepdim=True) / total, counted).float()
