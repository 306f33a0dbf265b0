"""How well a mapper rebuilds the target's cache: R² per layer, head and kind, from moments alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any, TypeAlias

from torch import Tensor

from kvmap.errors import KvmapError
from kvmap.fit.linear import r2_of
from kvmap.fit.moments import KINDS, SPLITS, PairMoments
from kvmap.fit.selection import layer_scores
from kvmap.mappers import Mapper
from kvmap.metrics import Metric

Row: TypeAlias = dict[str, Any]


def r2_rows(mapper: Mapper, moments: PairMoments, splits: Sequence[str] = SPLITS) -> list[Row]:
    """Exact R² of a linear mapper for every target layer, head, kind and split, no model run.

    `R² = 1 − SSE(W, b) / Σ‖y − ȳ‖²`, with `SSE(W) = tr(S_yy) − 2 tr(WᵀS_xy) + tr(WᵀS_xx W)` about the split's
    own means plus what the bias misses of them; float64.

    Args:
        mapper: of this pair.
        moments: of its calibration.
        splits: which of `fit` and `held_out`.

    Returns:
        Rows {layer, head, kind, split, r2}; a head that a layer does not have gets none.

    Raises:
        KvmapError: a mapper that is not linear in the source cache.
    """
    if not hasattr(mapper, "linear_weights"):
        raise KvmapError(
            f"mapper kind {mapper.kind!r} is not linear in the source cache, so moments do not give its R²; "
            "judge it on caches, or choose a linear kind"
        )
    weights = mapper.linear_weights()
    rows = []
    for split in splits:
        for kind, table in r2_of(weights, moments, split).items():
            rows += [
                {"layer": layer, "head": head, "kind": kind, "split": split, "r2": float(table[layer, head])}
                for layer, (n_heads, _) in enumerate(moments.target_shape)
                for head in range(n_heads)
            ]
    return rows


def r2_metrics(rows: Iterable[Row], arm: str = "mapped") -> dict[str, Metric]:
    """Mean over layers and heads, by `diagnose/<split>/<arm>/r2_<kind>`; n counts the heads."""
    groups: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        groups.setdefault((row["split"], row["kind"]), []).append(row["r2"])
    return {
        f"diagnose/{split}/{arm}/r2_{kind}": Metric(fmean(values), n=len(values))
        for (split, kind), values in groups.items()
    }


def probe_rows(r2: Mapping[str, Tensor]) -> list[Row]:
    """What each source layer says of each target layer: the probes behind the selection.

    Args:
        r2: of `kvmap.fit.selection.probe_r2`, by kind (n_source_layers, n_target_layers, n_target_heads).

    Returns:
        Rows {source_layer, target_layer, kind, r2}, means over heads, for `key`, `value` and their mean,
        `both`, by which layers are ranked.
    """
    tables = {kind: r2[kind].nanmean(-1) for kind in KINDS} | {"both": layer_scores(r2)}
    return [
        {"source_layer": source, "target_layer": target, "kind": kind, "r2": float(table[source, target])}
        for kind, table in tables.items()
        for source in range(table.shape[0])
        for target in range(table.shape[1])
    ]
