"""What one source head alone says of a target head: least-squares probes and Procrustes cosines."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvmap.fit.features import KINDS, Block, Layout, SelectionError, head_map
from kvmap.fit.moments import Moments, MomentsError
from kvmap.fit.ridge import RidgeError, intercept, r2_score, solve_ridge, sse_with_bias
from kvmap.progress import track

if TYPE_CHECKING:
    from kvmap.fit.pair_moments import PairMoments

Readers = tuple[tuple[int, int], ...]
"""(target layer, target head) of the heads that read the same features."""


@dataclass(frozen=True, eq=False)
class ProbeResult:
    """What the probes found.

    Attributes:
        r2: by kind, (n_source_layers, n_target_layers, n_target_heads) float64 on the CPU; heads past a
            layer's own count, and native layers, are NaN.
        fallbacks: (kind, source layer, source head) whose least-squares system was singular, so that the
            minimum-norm solution was taken.
    """

    r2: dict[str, Tensor]
    fallbacks: tuple[tuple[str, int, int], ...]


@dataclass(frozen=True)
class _SourceHead:
    """One source head, and the target heads that it is matched with."""

    kind: str
    layer: int
    head: int
    readers: Readers

    @property
    def features(self) -> tuple[Block, ...]:
        return (Block("source", self.kind, self.layer, self.head),)

    def __str__(self) -> str:
        return f"{self.kind}s from source layer {self.layer}, head {self.head}"


def probe_r2(moments: PairMoments, split: str = "fit", native_layers: int | None = None) -> dict[str, Tensor]:
    """R² of the probes by kind, (n_source_layers, n_target_layers, n_target_heads); see `probe`."""
    return probe(moments, split, native_layers).r2


def probe(moments: PairMoments, split: str = "fit", native_layers: int | None = None) -> ProbeResult:
    """Fit a least-squares probe for each (source layer, target layer, head), and judge it ([H] §3.2).

    The probe of target head h reads source head `a(h)` of one source layer: d_s features and an intercept.
    It is fitted on the fit split and judged on `split`, both from moments, in float64. One factorisation
    serves every target head that reads the same source head.

    Args:
        moments: of the pair.
        split: to judge on.
        native_layers: first target layers that need no probe; None: those whose features the moments hold.

    Raises:
        RidgeError: moments that are not finite, naming the kind and the source layer.
    """
    layout = moments.layout
    r2, fallbacks = _empty_tables(layout), []
    for source, fit in _matched(moments, "fit", native_layers, "probe: source heads, keys and values"):
        judge = fit
        if split != "fit":
            targets = reader_targets(layout, source.kind, source.readers)
            judge = moments.cut(split, layout.features(source.features), targets)
        squared_error, singular = _squared_error(source, fit, judge)
        widths = _widths(layout, source)
        error, spread = _head_sums(squared_error, widths), _head_sums(judge.s_yy, widths)
        _write(r2, source, r2_score(error[:, None], spread[:, None]))
        if singular:
            fallbacks.append((source.kind, source.layer, source.head))
    return ProbeResult(r2, tuple(dict.fromkeys(fallbacks)))


def procrustes_cosines(
    moments: PairMoments, split: str = "fit", native_layers: int | None = None
) -> dict[str, Tensor]:
    """Cosine of each source head with each target head it is matched with, after the best rotation.

    `cos = ‖S_xy‖_* / √(tr S_xx · tr S_yy)`, with the nuclear norm: the largest cosine, over all entries,
    between the target's centred channels and a rotation of the source's, the narrower of the two padded with
    zero channels. From 0 to 1; unlike a probe's R² it lets no direction of the source be stretched. A head
    that never varies has cosine 0. float64.

    Args: see `probe`.

    Returns:
        By kind, (n_source_layers, n_target_layers, n_target_heads), NaN where `ProbeResult.r2` is.

    Raises:
        SelectionError: moments that are not finite, naming the kind and the source layer.
    """
    layout = moments.layout
    cosines = _empty_tables(layout)
    for source, table in _matched(moments, split, native_layers, "cosine: source heads, keys and values"):
        check_finite(table, str(source))
        widths = _widths(layout, source)
        scale = (torch.diagonal(table.s_xx).sum() * _head_sums(table.s_yy, widths)).sqrt()
        ratio = _nuclear_norms(table.s_xy, widths) / torch.where(scale > 0, scale, 1.0)
        _write(cosines, source, torch.where(scale > 0, ratio.clamp(max=1.0), 0.0))
    return cosines


def layer_scores(tables: Mapping[str, Tensor]) -> Tensor:
    """Mean over heads, then over keys and values: (n_source_layers, n_target_layers); NaN for native layers.

    Args:
        tables: by kind, (n_source_layers, n_target_layers, n_target_heads), of `probe_r2` for one.
    """
    return torch.stack([tables[kind].nanmean(-1) for kind in KINDS]).mean(0)


def check_finite(table: Moments, place: str) -> None:
    """Refuse moments that hold NaN or infinite values.

    Raises:
        SelectionError: naming `place`.
    """
    if not all(bool(torch.isfinite(part).all()) for part in (table.s_xx, table.s_xy, table.s_yy)):
        raise SelectionError(
            f"the moments of {place} hold NaN or infinite values: calibrate again with finite caches"
        )


def held_parts(
    moments: PairMoments, split: str, kind: str, blocks: Sequence[Block], readers: Readers
) -> Iterator[tuple[Readers, Moments]]:
    """The moments of some features with the heads that read them, in as few parts as the tables allow.

    One table may hold all readers; or one for each number of a head, where the heads differ in what else
    they read; or one for each head, where the heads' rows differ in weight.

    Raises:
        MomentsError: a head that no table holds with these features.
    """
    layout = moments.layout
    try:
        table = moments.cut(split, layout.features(blocks), reader_targets(layout, kind, readers))
    except MomentsError:
        if len(readers) == 1:
            raise
    else:
        yield readers, table
        return
    parts: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for layer, head in readers:
        parts.setdefault((layout.target_shape[layer][0], head), []).append((layer, head))
    smaller = parts.values() if len(parts) > 1 else [[reader] for reader in readers]
    for part in smaller:
        yield from held_parts(moments, split, kind, blocks, tuple(part))


def reader_targets(layout: Layout, kind: str, readers: Readers) -> Tensor:
    """Numbers of the targets of some heads, in their order: (q,) int64."""
    return torch.cat([layout.targets(kind, layer, head) for layer, head in readers])


def _squared_error(source: _SourceHead, fit: Moments, judge: Moments) -> tuple[Tensor, bool]:
    """Each target channel's (q,), of least squares on `fit`, judged on `judge`; whether it was singular."""
    try:
        solution = solve_ridge(fit.s_xx, fit.s_xy, 0.0)
    except RidgeError as error:
        raise RidgeError(f"the probes of {source} failed: {error}") from error
    bias = intercept(solution.weight, fit.mean_x, fit.mean_y)
    moments = (judge.s_xx, judge.s_xy, judge.s_yy, judge.mean_x, judge.mean_y)
    squared_error = sse_with_bias(solution.weight, bias, *moments, total_weight=judge.weight)
    return squared_error, solution.solver[0] != "cholesky"


def _matched(
    moments: PairMoments, split: str, native_layers: int | None, description: str
) -> Iterator[tuple[_SourceHead, Moments]]:
    """Each source head that some target head reads, and its moments with its readers, in parts if need be."""
    native_layers = moments.layout.native_layers if native_layers is None else native_layers
    heads = list(_source_heads(moments.layout, native_layers))
    for source in track(heads, len(heads), description):
        for readers, table in held_parts(moments, split, source.kind, source.features, source.readers):
            yield replace(source, readers=readers), table


def _source_heads(layout: Layout, native_layers: int) -> Iterator[_SourceHead]:
    for kind in KINDS:
        for layer, (n_heads, _) in enumerate(layout.source_shape):
            readers: dict[int, list[tuple[int, int]]] = {}
            for target in range(native_layers, len(layout.target_shape)):
                for head, own in enumerate(head_map(n_heads, layout.target_shape[target][0])):
                    readers.setdefault(own, []).append((target, head))
            for own, found in sorted(readers.items()):
                yield _SourceHead(kind, layer, own, tuple(found))


def _widths(layout: Layout, source: _SourceHead) -> list[int]:
    return [layout.target_shape[layer][1] for layer, _ in source.readers]


def _empty_tables(layout: Layout) -> dict[str, Tensor]:
    n_heads = max(heads for heads, _ in layout.target_shape)
    shape = (len(layout.source_shape), len(layout.target_shape), n_heads)
    return {kind: torch.full(shape, math.nan, dtype=torch.float64) for kind in KINDS}


def _write(tables: dict[str, Tensor], source: _SourceHead, scores: Tensor) -> None:
    layers, heads = zip(*source.readers, strict=True)
    tables[source.kind][source.layer, list(layers), list(heads)] = scores.cpu()


def _head_sums(channels: Tensor, widths: list[int]) -> Tensor:
    """Sums over each head's channels, (Σ widths,) → (n,)."""
    return torch.stack([part.sum() for part in channels.split(widths)])


def _nuclear_norms(s_xy: Tensor, widths: list[int]) -> Tensor:
    """Nuclear norm of each head's block of (d_s, Σ widths) → (n,); blocks of one width in one batch."""
    blocks = s_xy.split(widths, dim=1)
    norms = s_xy.new_empty(len(widths))
    for width in dict.fromkeys(widths):
        same = [i for i, other in enumerate(widths) if other == width]
        norms[same] = torch.linalg.svdvals(torch.stack([blocks[i] for i in same])).sum(-1)
    return norms
