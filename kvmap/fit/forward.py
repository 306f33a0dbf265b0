"""Greedy forward selection: the source layers that together say most of a target layer, from moments."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvmap.fit.features import KINDS, Block, Layout, Selection, head_map
from kvmap.fit.probes import Readers, check_finite, held_parts
from kvmap.progress import track

if TYPE_CHECKING:
    from kvmap.fit.moments import Moments
    from kvmap.fit.pair_moments import PairMoments

RELATIVE_RIDGE = 1e-8
"""Penalty on each feature, as a share of its own second moment.

Large against the rounding of the moments, so that a block of dead, duplicated or already explained channels
gains nothing; small against any spread that data has, so that R² moves in its last digits only.
"""

TIE = 1e-10
"""Scores of R² or cosine that differ by less are equal: rounding, which differs between machines."""


@dataclass(frozen=True, eq=False)
class ForwardResult:
    """What the greedy rule chose.

    Attributes:
        selection: by kind, the source layers of each target layer in the order they were chosen.
        r2: by kind, for each target layer, the joint R² on the fit split after each choice, mean over heads.
    """

    selection: dict[str, Selection]
    r2: dict[str, tuple[tuple[float, ...], ...]]


def forward(
    moments: PairMoments, top_k: int, apart: bool = False, native_layers: int | None = None
) -> ForwardResult:
    """Choose k source layers for each target layer, one at a time, each the best beside those before it.

    Target head h reads source head `a(h)` of every chosen layer. With the chosen features C and every
    feature's penalty, Λ = ε · diag(S_xx) and ε = `RELATIVE_RIDGE`, its score is the share of the head's
    spread that the joint ridge takes off its objective: its R², less the penalty's own share::

        R²(C) = tr(S_Cyᵀ (S_CC + Λ_C)⁻¹ S_Cy) / tr(S_yy) = 1 − min_W (‖Y − X_C W‖² + ‖Λ^½ W‖²) / ‖Y‖²

    A step takes the layer that raises the mean of R² over the heads, and over keys and values unless `apart`,
    most. Nothing is refitted: the residual moments after projecting the chosen features out, `S_ss − S_sC
    (S_CC + Λ_C)⁻¹ S_Cs` of each layer s with itself and with y, are kept as Schur complements and brought up
    to date after each choice, in float64. With p = L_s · d_s features a head, choosing k layers costs
    `O(k² d_s² p)` for each (target layer, head, kind), and memory holds the head-local moments once, and
    k · d_s · p numbers for each head and kind.

    Args:
        moments: of the pair; the fit split alone is read.
        top_k: k, from 1 to the number of source layers.
        apart: keys and values choose their layers separately.
        native_layers: first target layers that need no choice; None: those whose features the moments hold.

    Raises:
        SelectionError: moments that are not finite, naming the kind.
    """
    layout = moments.layout
    first = layout.native_layers if native_layers is None else native_layers
    systems = {kind: _systems(moments, kind, first) for kind in KINDS}
    groups = [(kind,) for kind in KINDS] if apart else [KINDS]
    chosen: dict[str, list[tuple[int, ...]]] = {kind: [()] * first for kind in KINDS}
    r2: dict[str, list[tuple[float, ...]]] = {kind: [()] * first for kind in KINDS}
    mapped = range(first, len(layout.target_shape))
    for layer in track(mapped, len(mapped), "forward selection: target layers"):
        for kinds in groups:
            residuals = {
                kind: [_Residual(system, layer) for system in systems[kind] if layer in system.columns]
                for kind in kinds
            }
            layers, curves = _choose(residuals, top_k)
            for kind in kinds:
                chosen[kind].append(layers)
                r2[kind].append(curves[kind])
    return ForwardResult(
        {kind: tuple(chosen[kind]) for kind in KINDS}, {kind: tuple(r2[kind]) for kind in KINDS}
    )


def best_layer(scores: Sequence[float], taken: Collection[int] = ()) -> int:
    """The layer of highest score that is not taken; of those within `TIE` of it, the lowest."""
    free = [layer for layer in range(len(scores)) if layer not in taken]
    highest = max(scores[layer] for layer in free)
    return next(layer for layer in free if scores[layer] >= highest - TIE)


def _choose(
    residuals: Mapping[str, list[_Residual]], top_k: int
) -> tuple[tuple[int, ...], dict[str, tuple[float, ...]]]:
    """Layers in the order of choice, and by kind the mean R² over heads after each choice."""
    chosen: list[int] = []
    curves: dict[str, list[float]] = {kind: [] for kind in residuals}
    for _ in range(top_k):
        if chosen:
            for residual in (each for parts in residuals.values() for each in parts):
                residual.project_out(chosen[-1])
        gains = {
            kind: torch.cat([part.gains() for part in parts], 1).mean(1) for kind, parts in residuals.items()
        }
        best = best_layer(torch.stack(list(gains.values())).mean(0).tolist(), chosen)
        chosen.append(best)
        for kind, curve in curves.items():
            curve.append((curve[-1] if curve else 0.0) + float(gains[kind][best]))
    return tuple(chosen), {kind: tuple(curve) for kind, curve in curves.items()}


@dataclass(frozen=True, eq=False)
class _System:
    """The moments of the target heads that read the same head of every source layer.

    Blocks of all layers have one width d: narrower ones are filled up with features that never vary.

    Attributes:
        gram: (L_s, d, L_s, d); cross: (L_s, d, q) over all target layers; spread: (q,).
        scale: (L_s, d), 1/√(second moment) of each feature, 0 where it never varies: features are taken at
            unit spread, which makes the relative penalty ε · I.
        blocks: (L_s, d, d), each layer with itself, scaled; factors: (L_s, d, d) of `_factor`.
        columns: for each target layer, its targets and its number of heads.
    """

    gram: Tensor
    cross: Tensor
    spread: Tensor
    scale: Tensor
    blocks: Tensor
    factors: Tensor
    columns: dict[int, tuple[slice, int]]

    def rows(self, layer: int) -> Tensor:
        """Scaled moments of one layer's features with all features, (d, L_s · d)."""
        return (self.gram[layer] * self.scale[layer][:, None, None] * self.scale).flatten(1)


def _systems(moments: PairMoments, kind: str, native_layers: int) -> list[_System]:
    """One system for each way in which target heads are matched with the heads of the source layers."""
    layout = moments.layout
    matched: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    for target in range(native_layers, len(layout.target_shape)):
        n_heads = layout.target_shape[target][0]
        maps = [head_map(n_source, n_heads) for n_source, _ in layout.source_shape]
        for head in range(n_heads):
            matched.setdefault(tuple(heads[head] for heads in maps), []).append((target, head))
    systems = []
    for own, readers in matched.items():
        blocks = [Block("source", kind, layer, head) for layer, head in enumerate(own)]
        for part, table in held_parts(moments, "fit", kind, blocks, tuple(readers)):
            check_finite(table, f"{kind}s from source heads {own}, one of each layer,")
            systems.append(_system(layout, table, part))
    return systems


def _system(layout: Layout, table: Moments, readers: Readers) -> _System:
    gram, cross = _in_blocks(layout, table.s_xx, table.s_xy)
    diagonal = torch.diagonal(gram.flatten(2).flatten(0, 1)).unflatten(0, gram.shape[:2])
    scale = torch.where(diagonal > 0, diagonal.clamp(min=torch.finfo(torch.float64).tiny).rsqrt(), 0.0)
    layers = torch.arange(len(gram), device=gram.device)
    blocks = gram[layers, :, layers] * scale[:, :, None] * scale[:, None, :]
    columns, start = {}, 0
    for layer, group in groupby(readers, key=itemgetter(0)):
        n_heads = len(list(group))
        stop = start + n_heads * layout.target_shape[layer][1]
        columns[layer], start = (slice(start, stop), n_heads), stop
    return _System(gram, cross, table.s_yy, scale, blocks, _factor(blocks), columns)


def _in_blocks(layout: Layout, s_xx: Tensor, s_xy: Tensor) -> tuple[Tensor, Tensor]:
    """Moments by layer, (L_s, d, L_s, d) and (L_s, d, q): views where all layers have one head width."""
    widths = [width for _, width in layout.source_shape]
    n, d = len(widths), max(widths)
    if min(widths) < d:
        place = torch.cat([layer * d + torch.arange(width) for layer, width in enumerate(widths)])
        place = place.to(s_xx.device)
        wide_xx, wide_xy = s_xx.new_zeros(n * d, n * d), s_xy.new_zeros(n * d, s_xy.shape[1])
        wide_xx[place[:, None], place] = s_xx
        wide_xy[place] = s_xy
        s_xx, s_xy = wide_xx, wide_xy
    return s_xx.reshape(n, d, n, d), s_xy.reshape(n, d, -1)


class _Residual:
    """What the chosen layers leave of one system for one target layer.

    Of the residual Gram only each layer's own block is kept, all that a gain needs; a chosen layer's row of
    it is formed when that layer is projected out, from the rows before it (a left-looking Cholesky).
    """

    def __init__(self, system: _System, layer: int) -> None:
        columns, n_heads = system.columns[layer]
        self.system = system
        self.spread = system.spread[columns].reshape(n_heads, -1).sum(1)
        scaled = system.cross[..., columns] * system.scale[..., None]
        self.cross = scaled.flatten(0, 1)  # (L_s · d, heads · d_t)
        self.blocks = system.blocks
        self.factors = system.factors
        self.projections: list[Tensor] = []  # of each chosen layer, (d, L_s · d)

    def gains(self) -> Tensor:
        """What each layer would add to each head's R², (L_s, heads); of no meaning for a chosen layer."""
        cross = self.cross.unflatten(0, self.blocks.shape[:2])
        self.whitened = torch.linalg.solve_triangular(self.factors, cross, upper=False)
        explained = torch.linalg.vector_norm(self.whitened, dim=1).square()
        explained = explained.unflatten(1, (len(self.spread), -1)).sum(2)
        return explained / torch.where(self.spread > 0, self.spread, 1.0)

    def project_out(self, layer: int) -> None:
        """Take a layer's features out of all others and of the targets. Follows a call of `gains`."""
        n, d = self.blocks.shape[:2]
        rows, own = self.system.rows(layer), slice(layer * d, (layer + 1) * d)
        for earlier in self.projections:
            rows.addmm_(earlier[:, own].T, earlier, alpha=-1)
        projection = torch.linalg.solve_triangular(self.factors[layer], rows, upper=False)
        by_layer = projection.unflatten(1, (n, d)).transpose(0, 1)  # (L_s, d, d)
        self.blocks = torch.baddbmm(self.blocks, by_layer.mT, by_layer, alpha=-1)
        self.cross.addmm_(projection.T, self.whitened[layer], alpha=-1)
        self.factors = _factor(self.blocks)
        self.projections.append(projection)


def _factor(blocks: Tensor) -> Tensor:
    """Lower triangular F with `F Fᵀ = B + εI`, for each of (n, d, d) blocks of features at unit spread.

    Products of float32 can leave a block that has nothing left indefinite by more than ε. Its negative
    eigenvalues are then taken as 0, so that no noise is divided by less than ε.
    """
    identity = torch.eye(blocks.shape[-1], dtype=blocks.dtype, device=blocks.device)
    factors, info = torch.linalg.cholesky_ex(blocks + RELATIVE_RIDGE * identity)
    pivots = torch.diagonal(factors, dim1=-2, dim2=-1).square().amin(-1)
    for i in ((info != 0) | ~(pivots > RELATIVE_RIDGE / 2)).nonzero().flatten().tolist():
        eigenvalues, vectors = torch.linalg.eigh(blocks[i])
        root = vectors * (eigenvalues.clamp(min=0) + RELATIVE_RIDGE).sqrt()
        factors[i] = torch.linalg.qr(root.T).R.T
    return factors
