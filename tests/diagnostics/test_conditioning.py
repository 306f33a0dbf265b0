"""The table of conditioning, head by head, against numpy on the rows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch

from kvmap.diagnostics.conditioning import conditioning_metrics, conditioning_rows
from kvmap.fit.features import KINDS, SUPPORTS, Recipe, Selection
from kvmap.fit.linear import Head, Penalties, Penalty
from kvmap.fit.pair_moments import PairMoments, full_tables, head_local_tables
from kvmap.models.cache import KVCache
from tests.fit.caches import (
    SOURCE_SHAPE,
    TARGET_SHAPE,
    UNEVEN_SOURCE_SHAPE,
    UNEVEN_TARGET_SHAPE,
    kind_layers,
    moments_of,
    pair_of_caches,
    stripped,
)
from tests.fit.oracles import bands, regressors

Pairs = dict[str, tuple[KVCache, KVCache]]
SELECTION: dict[str, Selection] = {"key": ((0, 2), (0, 2), (1,)), "value": ((1,), (0, 1, 2), (2,))}


def problem(support: str, native_layers: int = 0, uneven: bool = False) -> tuple[Pairs, PairMoments, Recipe]:
    source_shape = UNEVEN_SOURCE_SHAPE if uneven else SOURCE_SHAPE
    target_shape = UNEVEN_TARGET_SHAPE if uneven else TARGET_SHAPE
    pairs = pair_of_caches(target_shape, source_shape=source_shape)
    selection = {
        kind: tuple(() if layer < native_layers else SELECTION[kind][layer] for layer in range(len(target_shape)))
        for kind in KINDS
    }
    recipe = Recipe(source_shape, target_shape, support, selection, native_layers=native_layers)
    return pairs, moments_of(pairs, native_layers, full_tables), recipe


def heads_of(recipe: Recipe) -> set[Head]:
    return {
        (kind, layer, head)
        for kind in KINDS
        for layer in recipe.mapped_layers
        for head in range(recipe.target_shape[layer][0])
    }


def by_numpy(pairs: Pairs, recipe: Recipe, head: Head, penalty: Penalty) -> dict[str, float]:
    """Condition number, degrees of freedom and rank of one head's system."""
    x = regressors(recipe, *pairs["fit"], *head)
    x = x - x.mean(0)
    none = (penalty.own if other is None else other for other in (penalty.cross, penalty.native))
    lambdas = np.array([penalty.own, *none])[bands(recipe, *pairs["fit"], *head)]
    read = np.isfinite(lambdas)
    x, lambdas = x[:, read], lambdas[read]
    gram = x.T @ x
    if penalty.convention == "relative":
        lambdas = lambdas * np.diag(gram).mean()
    system = gram + np.diag(lambdas)
    return {
        "condition_number": np.linalg.cond(system),
        "degrees_of_freedom": np.trace(np.linalg.solve(system, gram)),
        "rank": np.linalg.matrix_rank(x),
    }


def assert_rows_equal_numpy(
    rows: list[dict[str, Any]], pairs: Pairs, recipe: Recipe, penalties: Penalties
) -> None:
    """Every head stands in one row, whose numbers are those of the head's own system."""
    served: list[Head] = []
    for row in rows:
        layers, heads = ([int(n) for n in row[name].split()] for name in ("layers", "heads"))
        mine = {(row["kind"], layer, head) for layer in layers for head in heads} & heads_of(recipe)
        assert row["n_rows"] == 5 * 17
        for head in sorted(mine):
            penalty = penalties if isinstance(penalties, Penalty) else penalties.get(head)
            if penalty is None:
                continue
            expected = by_numpy(pairs, recipe, head, penalty)
            if not all(row[name] == pytest.approx(value, rel=1e-8) for name, value in expected.items()):
                continue  # several systems of one layer share heads' numbers only where layers differ
            served.append(head)
            assert row["n_features"] == recipe.n_features(head[0], head[1])
    wanted = heads_of(recipe) if isinstance(penalties, Penalty) else set(penalties)
    assert sorted(served) == sorted(wanted)
