"""How well a mapper rebuilds the target's cache: R² per layer, head and kind, from moments alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any, TypeAlias

import torch
from torch import Tensor

from kvmap.errors import KvmapError
from kvmap.fit.calibrate import CalibrationOptions
from kvmap.fit.captures import CapturedBatch
from kvmap.fit.features import KINDS
from kvmap.fit.linear import r2_of
from kvmap.fit.outliers import OutlierRule
from kvmap.fit.pair_moments import SPLITS, PairMoments, calibration_rows
from kvmap.fit.selection import layer_scores
from kvmap.fit.view import calibration_view
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
        Rows {layer, head, kind, split, r2}; a head that a layer does not have gets none, nor do the layers
        that the target computes itself.

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
                for layer in weights.recipe.mapped_layers
                for head in range(moments.target_shape[layer][0])
            ]
    return rows


def r2_rows_from_caches(
    mapper: Mapper,
    batches: Iterable[CapturedBatch],
    moments: PairMoments,
    options: CalibrationOptions,
    outliers: OutlierRule | None = None,
) -> list[Row]:
    """R² of any mapper, by mapping captured caches: for those that moments cannot judge.

    Args:
        mapper: of this pair.
        batches: captured caches of one or both splits.
        moments: of the same calibration, for Σ‖y − ȳ‖².
        options: which columns are rows, and the RoPE strategy.
        outliers: flags rows that do not count, as in the moments; None: no such rows.

    Returns:
        Rows as `r2_rows` gives them, of the splits that the batches are of.
    """
    errors: dict[tuple[str, str, int], Tensor] = {}
    for batch in batches:
        source, target = calibration_view(batch.source, batch.target, options.rope)
        rows = calibration_rows(source.mask, options.native_head, options.token_stride)
        if outliers is not None:
            rows = rows & ~outliers.flag(source)
        native = target.first_layers(mapper.native_layers) if mapper.native_layers else None
        mapped = mapper.map(source.to(device=mapper.device), native)
        for kind in KINDS:
            found, true = (kv.keys if kind == "key" else kv.values for kv in (mapped, target))
            for layer in range(mapper.native_layers, len(true)):
                error = (found[layer].cpu().double() - true[layer].double()).square()
                summed = (error * rows[:, None, :, None]).sum((0, 2, 3))
                key = (batch.split, kind, layer)
                errors[key] = errors[key] + summed if key in errors else summed
    nothing = torch.zeros(0, dtype=torch.int64)
    found_rows = []
    for (split, kind, layer), error in errors.items():
        for head in range(len(error)):
            targets = moments.layout.targets(kind, layer, head)
            spread = moments.cut(split, nothing, targets).s_yy.sum()
            r2 = float(1 - error[head] / spread) if spread > 0 else float("nan")
            found_rows.append({"layer": layer, "head": head, "kind": kind, "split": split, "r2": r2})
    return found_rows


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
        `both`, by which layers are ranked; none for layers that the target computes itself.
    """
    tables = {kind: r2[kind].nanmean(-1) for kind in KINDS} | {"both": layer_scores(r2)}
    return [
        {"source_layer": source, "target_layer": target, "kind": kind, "r2": float(table[source, target])}
        for kind, table in tables.items()
        for source in range(table.shape[0])
        for target in range(table.shape[1])
        if not bool(table[source, target].isnan())
    ]
