"""Rows of one target layer from captured caches, for estimators that moments cannot serve."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from kvmap.fit.calibrate import CalibrationOptions
from kvmap.fit.captures import Captures
from kvmap.fit.features import Recipe
from kvmap.fit.network_rows import TensorRows
from kvmap.fit.outliers import OutlierRule
from kvmap.fit.pair_moments import calibration_rows
from kvmap.fit.view import cache_view
from kvmap.models.storage import load_kv


def counted_rows(
    captures: Captures, start: int, options: CalibrationOptions, outliers: OutlierRule | None = None
) -> Tensor:
    """Which columns of a captured batch are rows of the fit: (batch, tokens) bool.

    Args:
        captures: of sequences without padding; start: of the batch.
        options: native head, stride and RoPE strategy; the others are not read.
        outliers: flags rows that do not count; None: no such rows.
    """
    if outliers is None:
        every = torch.ones_like(captures.mask(start))
        return calibration_rows(every, options.native_head, options.token_stride)
    source = cache_view(load_kv(captures.path(start, "source")), options.rope)
    rows = calibration_rows(source.mask, options.native_head, options.token_stride)
    return rows & ~outliers.flag(source)


def layer_rows(
    captures: Captures,
    recipe: Recipe,
    splits: Mapping[str, Sequence[int]],
    kind: str,
    layer: int,
    options: CalibrationOptions,
    outliers: OutlierRule | None = None,
) -> TensorRows:
    """The rows that ridge would be fitted on, of one target layer and kind; only its layers are read.

    Args:
        captures: of sequences without padding.
        recipe: which features each head reads.
        splits: sequence numbers by split.
        kind, layer: of the target.
        options, outliers: which columns are rows, see `counted_rows`.

    Returns:
        By split, features (1 or H_t, N, p) and targets (H_t, N, d_t), float32, rows in the order of the
        sequences within each batch, then of the tokens.
    """
    features: dict[str, list[Tensor]] = {split: [] for split in splits}
    targets: dict[str, list[Tensor]] = {split: [] for split in splits}
    for start, stop in captures.batches:
        members = {
            split: [number - start for number in sorted(numbers) if start <= number < stop]
            for split, numbers in splits.items()
        }
        if not any(members.values()):
            continue
        gathered, truth = _batch(captures, recipe, kind, layer, start, options)
        counted = counted_rows(captures, start, options, outliers)
        for split, chosen in members.items():
            if chosen:
                features[split].append(gathered[:, chosen][:, counted[chosen]])
                targets[split].append(truth[:, chosen][:, counted[chosen]])
    return TensorRows(
        {split: torch.cat(parts, 1) for split, parts in features.items() if parts},
        {split: torch.cat(parts, 1) for split, parts in targets.items() if parts},
    )


def _batch(
    captures: Captures, recipe: Recipe, kind: str, layer: int, start: int, options: CalibrationOptions
) -> tuple[Tensor, Tensor]:
    """Features (1 or H_t, batch, tokens, p) and targets (H_t, batch, tokens, d_t) of one captured batch."""
    stripped = options.rope != "coupled"
    wanted: dict[tuple[str, str], list[int]] = {}
    for origin, source_kind, number in recipe.sources(kind, layer):
        wanted.setdefault((origin, source_kind), []).append(number)
    truth = captures.layers("target", kind, [layer], start, stripped=stripped)[0]

    def read(origin: str, source_kind: str) -> dict[int, Tensor]:
        numbers = wanted.get((origin, source_kind), [])
        role = "source" if origin == "source" else "target"
        found = captures.layers(role, source_kind, numbers, start, stripped=stripped)
        return dict(zip(numbers, found, strict=True))

    gathered = recipe.gather(
        kind,
        layer,
        read("source", "key"),
        read("source", "value"),
        read("native", "key"),
        read("native", "value"),
    )
    return gathered.unflatten(1, (truth.shape[0], -1)), truth.transpose(0, 1)
