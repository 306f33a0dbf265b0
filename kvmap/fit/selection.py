"""Which source layers inform which target layer: the rules, and what each reads.

Every rule chooses on the fit split. The held-out split is kept to judge what was fitted, and to choose k and
λ: layers chosen on it would make it a part of the fit, and its R² too good.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

import torch
from torch import Tensor

from kvmap.errors import UnknownName
from kvmap.fit.features import KINDS, Layout, Selection, SelectionError, both, head_map
from kvmap.fit.forward import ForwardResult, best_layer, forward
from kvmap.fit.probes import ProbeResult, layer_scores, probe, probe_r2, procrustes_cosines

if TYPE_CHECKING:
    from kvmap.fit.pair_moments import PairMoments

__all__ = [
    "RULES",
    "ForwardResult",
    "ProbeResult",
    "Selection",
    "SelectionError",
    "forward",
    "head_map",
    "layer_scores",
    "nearest_layers",
    "needs",
    "probe",
    "probe_r2",
    "procrustes_cosines",
    "proportional_layer",
    "rank_layers",
]

Scores: TypeAlias = Mapping[str, Tensor]
"""By kind, (n_source_layers, n_target_layers, n_target_heads); heads that are not there are NaN."""

Needs: TypeAlias = Literal["nothing", "matched", "joint"]


def rank_layers(
    moments: PairMoments | Layout,
    rule: str,
    top_k: int | Literal["all"],
    *,
    apart: bool = False,
    scores: Scores | None = None,
    native_layers: int | None = None,
) -> dict[str, Selection]:
    """Choose the source layers of each target layer, for all its heads alike, the best layer first.

    * "r2": the k whose head-matched least-squares probes have the highest R² ([H] §3.2), mean over heads,
      and over keys and values.
    * "cosine": the k of highest `procrustes_cosines`, mean likewise; a baseline.
    * "forward": greedy joint R²; see `kvmap.fit.forward.forward`.
    * "proportional": the k nearest to `round(ℓ · L_s / L_t)`, the nearest first; a baseline.
    * "all": every source layer in ascending order, whatever `top_k` is.

    All read the fit split alone (see this module). What a rule chooses for k is the first k of what it
    chooses for any larger number. Scores within `kvmap.fit.forward.TIE` of each other are equal, and of
    equals the lower layer comes first. Target layers that the target computes itself get no source layer.

    Args:
        moments: of the pair; its layout alone does for a rule that `needs` nothing.
        rule: one of `RULES`.
        top_k: k, or "all".
        apart: keys and values choose separately (r2, cosine and forward); otherwise both get one choice.
        scores: the table of "r2" (`probe_r2`) or "cosine" (`procrustes_cosines`), where it is there already;
            other rules do not look at it.
        native_layers: first target layers that the target computes itself; None: those whose features the
            moments hold.

    Returns:
        By target kind, the source layers of each target layer.

    Raises:
        SelectionError: k < 1, k larger than the number of source layers, scores or moments that are not
            finite, or no moments for a rule that reads them.
        UnknownName: another rule.
    """
    _check_rule(rule)
    layout = moments if isinstance(moments, Layout) else moments.layout
    n_source = len(layout.source_shape)
    if rule != "all":
        top_k = n_source if top_k == "all" else top_k
        if isinstance(top_k, bool) or not isinstance(top_k, int) or not 1 <= top_k <= n_source:
            raise SelectionError(
                f"top_k={top_k!r}: the source has {n_source} layers; expected an integer from 1 to "
                f"{n_source}, or 'all'"
            )
    native = layout.native_layers if native_layers is None else native_layers
    return RULES[rule](_Choice(moments, n_source if top_k == "all" else top_k, apart, scores, native))


def needs(rule: str) -> Needs:
    """What a rule reads of the moments, which is what a pass must have accumulated before it.

    * "nothing": only the numbers of layers.
    * "matched": for each kind, the moments of one source head with itself, and with each target head that it
      is matched with.
    * "joint": for each kind and target head h, the moments of the heads a(h) of all source layers with each
      other, and with h.

    Raises:
        UnknownName: another rule.
    """
    _check_rule(rule)
    return _NEEDS[rule]


def proportional_layer(layer: int, n_source: int, n_target: int) -> int:
    """The source layer at the same relative depth, `round(ℓ · L_s / L_t)`, at most L_s − 1."""
    return min(round(layer * n_source / n_target), n_source - 1)


def nearest_layers(layer: int, n_source: int, n_target: int, top_k: int) -> tuple[int, ...]:
    """The `top_k` source layers nearest to the proportional one, the nearest first."""
    centre, exact = proportional_layer(layer, n_source, n_target), layer * n_source / n_target
    order = sorted(range(n_source), key=lambda s: (abs(s - centre), abs(s - exact), s))
    return tuple(order[:top_k])


@dataclass(frozen=True, eq=False)
class _Choice:
    """What a rule is asked for; see `rank_layers`."""

    moments: PairMoments | Layout
    top_k: int
    apart: bool
    scores: Scores | None
    native_layers: int

    @property
    def layout(self) -> Layout:
        return self.moments if isinstance(self.moments, Layout) else self.moments.layout

    def read(self, rule: str) -> PairMoments:
        if isinstance(self.moments, Layout):
            raise SelectionError(
                f"selection rule {rule!r} reads moments, and none are there: calibrate first, or choose "
                f"'proportional' or 'all'"
            )
        return self.moments

    def alike(self, chosen: Callable[[int], tuple[int, ...]]) -> dict[str, Selection]:
        """One choice for both kinds, layer by layer; none for native layers."""
        layers = range(len(self.layout.target_shape))
        return both(tuple(chosen(layer) if layer >= self.native_layers else () for layer in layers))


def _by_r2(asked: _Choice) -> dict[str, Selection]:
    table = asked.scores
    if table is None:
        table = probe_r2(asked.read("r2"), native_layers=asked.native_layers)
    return _by_scores(asked, table, "probe R²")


def _by_cosine(asked: _Choice) -> dict[str, Selection]:
    table = asked.scores
    if table is None:
        table = procrustes_cosines(asked.read("cosine"), native_layers=asked.native_layers)
    return _by_scores(asked, table, "cosine")


def _by_forward(asked: _Choice) -> dict[str, Selection]:
    return forward(asked.read("forward"), asked.top_k, asked.apart, asked.native_layers).selection


def _by_depth(asked: _Choice) -> dict[str, Selection]:
    n_source, n_target = len(asked.layout.source_shape), len(asked.layout.target_shape)
    return asked.alike(lambda layer: nearest_layers(layer, n_source, n_target, asked.top_k))


def _every_layer(asked: _Choice) -> dict[str, Selection]:
    every = tuple(range(len(asked.layout.source_shape)))
    return asked.alike(lambda layer: every)


Rule: TypeAlias = Callable[[_Choice], dict[str, Selection]]

RULES: dict[str, Rule] = {
    "r2": _by_r2,
    "cosine": _by_cosine,
    "forward": _by_forward,
    "proportional": _by_depth,
    "all": _every_layer,
}
"""What `rank_layers` does by each rule, once the arguments are checked."""

_NEEDS: dict[str, Needs] = {
    "r2": "matched",
    "cosine": "matched",
    "forward": "joint",
    "proportional": "nothing",
    "all": "nothing",
}


def _by_scores(asked: _Choice, tables: Scores, name: str) -> dict[str, Selection]:
    """The k layers of highest mean score, for each target layer that is mapped."""
    means = {kind: _head_means(asked, tables[kind], f"{name} of {kind}s") for kind in KINDS}
    if asked.apart:
        return {kind: _ranked(asked, means[kind]) for kind in KINDS}
    return both(_ranked(asked, torch.stack(list(means.values())).mean(0)))


def _head_means(asked: _Choice, table: Tensor, name: str) -> Tensor:
    """Mean over each target layer's own heads, (n_source_layers, n_target_layers); 0 for native layers."""
    layout = asked.layout
    n_source, n_target = len(layout.source_shape), len(layout.target_shape)
    if table.shape[:2] != (n_source, n_target):
        raise SelectionError(
            f"the table of the {name} has shape {tuple(table.shape)}: expected ({n_source} source layers, "
            f"{n_target} target layers, heads); compute it from the moments of this pair"
        )
    means = torch.zeros(n_source, n_target, dtype=torch.float64)
    for layer in range(asked.native_layers, n_target):
        means[:, layer] = table[:, layer, : layout.target_shape[layer][0]].mean(-1)
    if not bool(torch.isfinite(means).all()):
        source, target = (~torch.isfinite(means)).nonzero()[0].tolist()
        raise SelectionError(
            f"the {name} from source layer {source} to target layer {target} is not finite: calibrate again"
        )
    return means


def _ranked(asked: _Choice, means: Tensor) -> Selection:
    chosen = []
    for layer, scores in enumerate(means.T.tolist()):
        ranking: list[int] = []
        while layer >= asked.native_layers and len(ranking) < asked.top_k:
            ranking.append(best_layer(scores, ranking))
        chosen.append(tuple(ranking))
    return tuple(chosen)


def _check_rule(rule: str) -> None:
    if rule not in RULES:
        raise UnknownName("selection rule", rule, RULES)
