"""Slow oracles of the fitting core: explicit rows, two passes in extended precision, head by head."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from kvmap.fit.features import KINDS, Recipe
from kvmap.fit.moments import Moments
from kvmap.models.cache import KVCache
from tests.fit.caches import kind_layers, rows_of

FIELDS = ("mean_x", "mean_y", "s_xx", "s_xy", "s_yy")


def from_rows(x: np.ndarray, y: np.ndarray, w: np.ndarray | None = None) -> dict[str, np.ndarray]:
    """Two passes over all rows in extended precision."""
    x, y = x.astype(np.longdouble), y.astype(np.longdouble)
    w = np.ones(len(x), np.longdouble) if w is None else w.astype(np.longdouble)
    mean_x, mean_y = w @ x / w.sum(), w @ y / w.sum()
    xc, yc = x - mean_x, y - mean_y
    return {
        "mean_x": mean_x,
        "mean_y": mean_y,
        "s_xx": (xc * w[:, None]).T @ xc,
        "s_xy": (xc * w[:, None]).T @ yc,
        "s_yy": (w[:, None] * yc * yc).sum(0),
    }


def assert_matches(moments: Moments, expected: dict[str, np.ndarray], rtol: float = 1e-12) -> None:
    """Within float64 rounding of some hundred additions, against the scale of each table."""
    for name in FIELDS:
        want = expected[name].astype(np.float64)
        scale = max(float(np.abs(want).max(initial=0.0)), 1.0)
        got = getattr(moments, name).numpy()
        assert getattr(moments, name).dtype == torch.float64
        np.testing.assert_allclose(got, want, rtol=0, atol=rtol * scale, err_msg=name)


def assert_same(got: Moments, expected: Moments, rtol: float = 1e-12) -> None:
    """Equal to float64 rounding, against the scale of each table; counts equal as they are."""
    assert got.n_rows == expected.n_rows
    np.testing.assert_allclose(got.weight, expected.weight, rtol=1e-13)
    assert_matches(got, {name: getattr(expected, name).numpy() for name in FIELDS}, rtol)


def own_head(n_source: int, n_target: int, head: int) -> int:
    """The source head that a target head is matched with (METHOD, head-local support)."""
    return head * n_source // n_target


def head_parts(
    recipe: Recipe, source: KVCache, target: KVCache, kind: str, layer: int, head: int
) -> list[tuple[int, Tensor]]:
    """(band, one head's (batch, 1, tokens, head_dim)) of all that a target head reads, as METHOD says it.

    Bands: 0 its own source head, 1 another source head, 2 a native layer.
    """
    other = KINDS[1 - KINDS.index(kind)]
    kinds = [kind] if recipe.regressors == "own_kind" else [kind, other]
    parts = []
    for origin, kv in (("source", source), ("native", target)):
        for read_kind in kinds:
            numbers = recipe.selection[kind][layer] if origin == "source" else range(recipe.native_layers)
            for number in numbers:
                tensor = kind_layers(kv, read_kind)[number]
                own = own_head(tensor.shape[1], recipe.target_shape[layer][0], head)
                for a in range(tensor.shape[1]):
                    if recipe.support == "head_local" and a != own:
                        continue
                    band = 2 if origin == "native" else int(a != own)
                    parts.append((band, tensor[:, a : a + 1]))
    return parts


def regressors(
    recipe: Recipe,
    source: KVCache,
    target: KVCache,
    kind: str,
    layer: int,
    head: int,
    rows: Tensor | None = None,
) -> np.ndarray:
    """X of one target head, (n, p), column by column."""
    parts = head_parts(recipe, source, target, kind, layer, head)
    return np.concatenate([rows_of((part,), rows) for _, part in parts], axis=1)


def bands(recipe: Recipe, source: KVCache, target: KVCache, kind: str, layer: int, head: int) -> np.ndarray:
    """The band of each column of `regressors`, (p,)."""
    parts = head_parts(recipe, source, target, kind, layer, head)
    return np.repeat([band for band, _ in parts], [part.shape[3] for _, part in parts])


def head_rows(kv: KVCache, kind: str, layer: int, head: int, rows: Tensor | None = None) -> np.ndarray:
    """Y of one head, (n, head_dim)."""
    return rows_of((kind_layers(kv, kind)[layer][:, head : head + 1],), rows)
