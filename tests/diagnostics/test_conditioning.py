"""The table of conditioning, head by head, against numpy on the rows."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

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
        kind: tuple(
            () if layer < native_layers else SELECTION[kind][layer] for layer in range(len(target_shape))
        )
        for kind in KINDS
    }
    recipe = Recipe(source_shape, target_shape, support, selection, native_layers=native_layers)
    return pairs, moments_of(pairs, native_layers, full_tables), recipe


def heads_of(recipe: Recipe) -> list[Head]:
    return [
        (kind, layer, head)
        for kind in KINDS
        for layer in recipe.mapped_layers
        for head in range(recipe.target_shape[layer][0])
    ]


def by_numpy(pairs: Pairs, recipe: Recipe, head: Head, penalty: Penalty) -> dict[str, Any]:
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
        "condition_number": float(np.linalg.cond(system)),
        "degrees_of_freedom": float(np.trace(np.linalg.solve(system, gram))),
        "rank": int(np.linalg.matrix_rank(x)),
    }


def expected_rows(pairs: Pairs, recipe: Recipe, penalties: Penalties) -> list[dict[str, Any]]:
    """One row for all heads of a kind that read the same features and are penalised alike, by numpy."""
    systems: dict[tuple[object, ...], list[Head]] = {}
    for head in heads_of(recipe):
        penalty = penalties if isinstance(penalties, Penalty) else penalties.get(head)
        if penalty is None:
            continue
        x = regressors(recipe, *pairs["fit"], *head)
        apart = penalty.cross not in (None, penalty.own)
        band = bands(recipe, *pairs["fit"], *head).tobytes() if apart else b""
        systems.setdefault((head[0], x.tobytes(), band, penalty), []).append(head)
    return [
        {
            "kind": kind,
            "layers": " ".join(str(layer) for layer in sorted({layer for _, layer, _ in heads})),
            "heads": " ".join(str(head) for head in sorted({head for _, _, head in heads})),
            "n_features": recipe.n_features(kind, heads[0][1]),
            "n_rows": 5 * 17,
            **by_numpy(pairs, recipe, heads[0], penalty),
        }
        for (kind, _, _, penalty), heads in systems.items()
    ]


def assert_same_rows(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    def place(row: dict[str, Any]) -> tuple[Any, ...]:
        return (
            row["kind"],
            row["layers"],
            row["heads"],
            row["n_features"],
            round(row["degrees_of_freedom"], 6),
        )

    assert len(found) == len(expected)
    for mine, theirs in zip(sorted(found, key=place), sorted(expected, key=place), strict=True):
        assert mine == {
            # condition numbers up to 1e6, float64
            name: pytest.approx(value, rel=1e-9) if isinstance(value, float) else value
            for name, value in theirs.items()
        }


PENALTIES = {
    "one": Penalty(0.5),
    "relative": Penalty(0.1, convention="relative"),
    "bands": Penalty(0.5, cross=70.0, native=3.0),
    "relative bands": Penalty(0.01, cross=5.0, convention="relative"),
    "own heads alone": Penalty(0.5, cross=math.inf),
    "no native features": Penalty(0.5, native=math.inf),
}


@pytest.mark.parametrize("native_layers", [0, 1])
@pytest.mark.parametrize("name", PENALTIES)
@pytest.mark.parametrize("support", SUPPORTS)
def test_every_system_stands_in_one_row(support: str, name: str, native_layers: int) -> None:
    pairs, moments, recipe = problem(support, native_layers)
    found = conditioning_rows(moments, recipe, PENALTIES[name])
    assert_same_rows(found, expected_rows(pairs, recipe, PENALTIES[name]))
    served = {(row["kind"], int(n)) for row in found for n in row["layers"].split()}
    assert served == {(kind, layer) for kind, layer, _ in heads_of(recipe)}


@pytest.mark.parametrize("support", SUPPORTS)
def test_layers_of_other_head_counts_and_widths(support: str) -> None:
    pairs, moments, recipe = problem(support, uneven=True)
    for penalty in (Penalty(0.5), Penalty(0.5, cross=70.0)):
        found = conditioning_rows(moments, recipe, penalty)
        assert_same_rows(found, expected_rows(pairs, recipe, penalty))


def test_heads_penalised_each_in_their_own_way() -> None:
    pairs, moments, recipe = problem("full_head")
    heads = heads_of(recipe)
    penalties = {head: Penalty(10.0**i) for i, head in enumerate(heads)}
    found = conditioning_rows(moments, recipe, penalties)
    assert len(found) == len(heads)
    assert_same_rows(found, expected_rows(pairs, recipe, penalties))
    some = dict(list(penalties.items())[:3])
    assert len(conditioning_rows(moments, recipe, some)) == 3


def test_moments_of_the_support_alone_do() -> None:
    pairs, _, recipe = problem("head_local")
    fewer = moments_of(pairs, tables=head_local_tables)
    found = conditioning_rows(fewer, recipe, Penalty(0.5))
    assert_same_rows(found, expected_rows(pairs, recipe, Penalty(0.5)))


def test_duplicated_features_show() -> None:
    pairs = pair_of_caches(TARGET_SHAPE)
    twice = {
        split: (
            stripped([source.keys[0], source.keys[0], source.keys[2]], list(source.values)),
            target,
        )
        for split, (source, target) in pairs.items()
    }
    moments = moments_of(twice)
    recipe = Recipe(SOURCE_SHAPE, TARGET_SHAPE, "full_head", dict.fromkeys(KINDS, ((0, 1), (0, 1))))
    key, value = conditioning_rows(moments, recipe, Penalty(0.0))
    assert (key["n_features"], key["rank"], key["condition_number"]) == (12, 6, math.inf)
    assert key["degrees_of_freedom"] == pytest.approx(6)
    assert (value["rank"], value["degrees_of_freedom"]) == (12, pytest.approx(12))
    mended, _ = conditioning_rows(moments, recipe, Penalty(1.0))
    assert math.isfinite(mended["condition_number"])


def test_the_metrics_are_the_worst_condition_and_the_median_freedom() -> None:
    rows = [
        {"kind": "key", "condition_number": 10.0, "degrees_of_freedom": 3.0},
        {"kind": "key", "condition_number": 1000.0, "degrees_of_freedom": 5.0},
        {"kind": "key", "condition_number": 7.0, "degrees_of_freedom": 4.5},
        {"kind": "value", "condition_number": math.inf, "degrees_of_freedom": 2.0},
    ]
    metrics = conditioning_metrics(rows)
    assert {name: (metric.value, metric.n) for name, metric in metrics.items()} == {
        "diagnose/conditioning/mapped/worst_condition_number_key": (1000.0, 3),
        "diagnose/conditioning/mapped/median_degrees_of_freedom_key": (4.5, 3),
        "diagnose/conditioning/mapped/worst_condition_number_value": (math.inf, 1),
        "diagnose/conditioning/mapped/median_degrees_of_freedom_value": (2.0, 1),
    }
    assert set(conditioning_metrics(rows[:1], "other")) == {
        "diagnose/conditioning/other/worst_condition_number_key",
        "diagnose/conditioning/other/median_degrees_of_freedom_key",
    }
