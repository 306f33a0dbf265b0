"""Which source layers inform which target layer: head-matched probes, and the rules that read them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kvmap.errors import KvmapError, UnknownName
from kvmap.fit.moments import KINDS, Moments, PairMoments
from kvmap.fit.ridge import RidgeError, intercept, r2_score, solve_ridge, sse_with_bias
from kvmap.progress import track

RULES = ("r2", "proportional", "all")

Selection = tuple[tuple[int, ...], ...]
"""Source layers, ascending, for each target layer."""


class SelectionError(KvmapError):
    """A rule or a number of source layers that cannot be served."""


@dataclass(frozen=True, eq=False)
class ProbeResult:
    """What the probes found.

    Attributes:
        r2: by kind, (n_source_layers, n_target_layers, n_target_heads) float64; heads past a layer's own
            count are NaN where target layers differ in their number of heads.
        fallbacks: (kind, source layer, source head) whose least-squares system was singular, so that the
            minimum-norm solution was taken.
    """

    r2: dict[str, Tensor]
    fallbacks: tuple[tuple[str, int, int], ...]


def head_map(n_source: int, n_target: int) -> tuple[int, ...]:
    """Source head that target head h reads, `a(h) = ⌊h · n_source / n_target⌋` ([C] §3.2).

    The identity where the counts match; otherwise the fixed group map, in which neighbouring target heads
    share a source head, as grouped queries share a KV head.
    """
    if n_source < 1 or n_target < 1:
        raise SelectionError(
            f"n_source={n_source}, n_target={n_target} KV heads: expected at least 1 of each"
        )
    return tuple(h * n_source // n_target for h in range(n_target))


def probe_r2(moments: PairMoments, split: str = "fit") -> dict[str, Tensor]:
    """R² of the probes by kind, (n_source_layers, n_target_layers, n_target_heads); see `probe`."""
    return probe(moments, split).r2


def probe(moments: PairMoments, split: str = "fit") -> ProbeResult:
    """Fit a least-squares probe for each (source layer, target layer, head), and judge it ([H] §3.2).

    The probe of target head h reads source head `a(h)` of one source layer: d_s features and an intercept.
    It is fitted on the fit split and judged on `split`, both from moments, in float64.

    Raises:
        RidgeError: moments that are not finite, naming the kind and the source layer.
    """
    n_source, n_target = len(moments.source_shape), len(moments.target_shape)
    n_heads = max(heads for heads, _ in moments.target_shape)
    r2 = {kind: torch.full((n_source, n_target, n_heads), math.nan, dtype=torch.float64) for kind in KINDS}
    fallbacks = []
    steps = [(kind, layer) for kind in KINDS for layer in range(n_source)]
    for kind, layer in track(steps, len(steps), "probe: source layers, keys and values"):
        fit, judge = moments.tables[kind, "fit"], moments.tables[kind, split]
        for targets, heads in _target_groups(moments):
            scores, singular = _probe_layer(moments, fit, judge, layer, targets, kind)
            r2[kind][layer, targets, :heads] = scores.cpu()
            fallbacks += [(kind, layer, head) for head in singular]
    return ProbeResult(r2, tuple(dict.fromkeys(fallbacks)))


def _target_groups(moments: PairMoments) -> Iterator[tuple[list[int], int]]:
    """Target layers of one shape, which can be probed in one batch, and their number of heads."""
    for shape in dict.fromkeys(moments.target_shape):
        yield [i for i, other in enumerate(moments.target_shape) if other == shape], shape[0]


def _probe_layer(
    moments: PairMoments, fit: Moments, judge: Moments, layer: int, targets: list[int], kind: str
) -> tuple[Tensor, list[int]]:
    """R² (n_targets, n_heads) of one source layer for target layers of one shape, and its singular heads."""
    n_heads, width = moments.target_shape[targets[0]]
    sources = head_map(moments.source_shape[layer][0], n_heads)
    rows = torch.stack([moments.feature_index((layer,), head) for head in sources]).to(fit.s_xx.device)
    columns = torch.stack(
        [
            torch.cat([_columns(moments.target_slice(target, head)) for target in targets])
            for head in range(n_heads)
        ]
    ).to(fit.s_xx.device)

    def blocks(table: Moments) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        return (
            table.s_xx[rows.unsqueeze(2), rows.unsqueeze(1)],  # (heads, d_s, d_s)
            table.s_xy[rows.unsqueeze(2), columns.unsqueeze(1)],  # (heads, d_s, targets · d_t)
            table.s_yy[columns],  # (heads, targets · d_t)
            table.mean_x[rows],
            table.mean_y[columns],
        )

    s_xx, s_xy, _, mean_x, mean_y = blocks(fit)
    try:
        solution = solve_ridge(s_xx, s_xy, 0.0)
    except RidgeError as error:
        raise RidgeError(f"the probes of {kind}s from source layer {layer} failed: {error}") from error
    bias = intercept(solution.weight, mean_x, mean_y)
    judged = blocks(judge)
    squared_error = sse_with_bias(solution.weight, bias, *judged, total_weight=judge.weight)
    shape = (n_heads, len(targets), width)
    scores = r2_score(squared_error.reshape(shape), judged[2].reshape(shape))
    singular = [sources[i] for i, solver in enumerate(solution.solver) if solver == "eigh"]
    return scores.T, singular


def _columns(span: slice) -> Tensor:
    return torch.arange(span.start, span.stop)


def layer_scores(r2: Mapping[str, Tensor]) -> Tensor:
    """Mean over heads, then over keys and values: (n_source_layers, n_target_layers)."""
    return torch.stack([r2[kind].nanmean(-1) for kind in KINDS]).mean(0)


def select_layers(r2: Mapping[str, Tensor], rule: str, top_k: int | Literal["all"]) -> Selection:
    """Choose the source layers of each target layer, for keys and values and all heads alike.

    * "r2": the k of highest `layer_scores` ([H] §3.2); equal scores go to the lower layer.
    * "proportional": the k nearest to `round(ℓ · L_s / L_t)`.
    * "all": every source layer, whatever `top_k` is.

    Args:
        r2: of `probe_r2`; the rules "proportional" and "all" read its shape alone.
        rule: one of `RULES`.
        top_k: k, or "all".

    Returns:
        For each target layer, its source layers in ascending order.

    Raises:
        SelectionError: k < 1, k larger than the number of source layers, or scores that are not finite.
        UnknownName: another rule.
    """
    if rule not in RULES:
        raise UnknownName("selection rule", rule, RULES)
    n_source, n_target = r2[KINDS[0]].shape[:2]
    if rule == "all" or top_k == "all":
        return (tuple(range(n_source)),) * n_target
    if isinstance(top_k, bool) or not isinstance(top_k, int) or not 1 <= top_k <= n_source:
        raise SelectionError(
            f"top_k={top_k!r}: the source has {n_source} layers; expected an integer from 1 to "
            f"{n_source}, or 'all'"
        )
    if rule == "proportional":
        return tuple(nearest_layers(layer, n_source, n_target, top_k) for layer in range(n_target))
    scores = layer_scores(r2)
    if not bool(torch.isfinite(scores).all()):
        source, target = (~torch.isfinite(scores)).nonzero()[0].tolist()
        raise SelectionError(
            f"the probe R² from source layer {source} to target layer {target} is not finite: calibrate again"
        )
    order = scores.argsort(dim=0, descending=True, stable=True)[:top_k]
    return tuple(tuple(sorted(order[:, layer].tolist())) for layer in range(n_target))


def proportional_layer(layer: int, n_source: int, n_target: int) -> int:
    """The source layer at the same relative depth, `round(ℓ · L_s / L_t)`, at most L_s − 1."""
    return min(round(layer * n_source / n_target), n_source - 1)


def nearest_layers(layer: int, n_source: int, n_target: int, top_k: int) -> tuple[int, ...]:
    """The `top_k` source layers nearest to the proportional one, ascending."""
    centre, exact = proportional_layer(layer, n_source, n_target), layer * n_source / n_target
    order = sorted(range(n_source), key=lambda s: (abs(s - centre), abs(s - exact), s))
    return tuple(sorted(order[:top_k]))
