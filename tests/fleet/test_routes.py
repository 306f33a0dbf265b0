"""Which ways there are, which is best, and what a hub saves: against plain loops over made-up numbers."""

from __future__ import annotations

import math
from itertools import permutations

import pytest

from kvmap.evaluation.statistics import context_carried
from kvmap.fleet.judge import Judged
from kvmap.fleet.routes import Route, best_relays, hubs, route_row, routes_into

MODELS = ("a", "b", "c", "d")
SIZES = {pair: 10 + 7 * number for number, pair in enumerate(permutations(MODELS, 2))}


def rows():
    found = []
    for number, target in enumerate(MODELS):
        for last in MODELS:
            if last != target:
                for route in routes_into(MODELS, last, target):
                    value = (hash_of(route) % 97) / 97 + number
                    found.append(
                        {"source": route.source, "via": route.via or "", "target": route.target, "n": 4}
                        | {"kl_nats": value, "context_carried": 1 - value, "key_r2": value, "value_r2": value}
                    )
    return found


def hash_of(route: Route) -> int:
    return sum(ord(letter) * 31**place for place, letter in enumerate(str(route)))


def test_every_route_ends_somewhere_once() -> None:
    routes = [Route(r["source"], r["target"], r["via"] or None) for r in rows()]
    assert len(set(routes)) == len(routes)
    wanted = {Route(a, c) for a, c in permutations(MODELS, 2)} | {
        Route(a, c, b) for a, b, c in permutations(MODELS, 3)
    }
    assert set(routes) == wanted
    assert Route("a", "c", "b").steps == (("a", "b"), ("b", "c"))
    assert str(Route("a", "c", "b")) == "a -> b -> c"


def test_the_best_way_round_is_that_of_the_least_kl() -> None:
    table = rows()
    found = {(row["source"], row["target"]): row for row in best_relays(table, SIZES)}
    assert len(found) == 12
    for a, c in permutations(MODELS, 2):
        others = {
            row["via"]: row["kl_nats"]
            for row in table
            if row["via"] and (row["source"], row["target"]) == (a, c)
        }
        best = min(others, key=others.__getitem__)
        assert found[a, c]["via"] == best
        assert found[a, c]["relay_kl_nats"] == others[best]
        assert found[a, c]["relay_bytes"] == SIZES[a, best] + SIZES[best, c]
        assert found[a, c]["direct_bytes"] == SIZES[a, c]


def test_two_models_have_neither_a_way_round_nor_a_hub() -> None:
    two = [row for row in rows() if not row["via"] and {row["source"], row["target"]} == {"a", "b"}]
    sizes = {pair: SIZES[pair] for pair in (("a", "b"), ("b", "a"))}
    assert best_relays(two, sizes) == []
    (only,) = hubs(("a", "b"), two, sizes)
    assert (only["hub"], only["n_mappers"], only["bytes_share"]) == ("", 2, 1.0)


def test_a_hub_keeps_the_mappers_to_and_from_it() -> None:
    table = rows()
    found = {row["hub"]: row for row in hubs(MODELS, table, SIZES)}
    assert set(found) == {"", *MODELS}
    value = {(row["source"], row["via"], row["target"]): row["kl_nats"] for row in table}
    for hub in MODELS:
        kept = {pair: size for pair, size in SIZES.items() if hub in pair}
        assert found[hub]["n_mappers"] == len(kept) == 2 * (len(MODELS) - 1)
        assert found[hub]["weights_bytes"] == sum(kept.values())
        through = [value[a, "" if hub in (a, c) else hub, c] for a, c in permutations(MODELS, 2)]
        assert found[hub]["kl_nats"] == pytest.approx(sum(through) / 12)
        assert found[hub]["worst_context_carried"] == pytest.approx(1 - max(through))
        lost = found[""]["context_carried"] - found[hub]["context_carried"]
        assert found[hub]["context_carried_lost"] == pytest.approx(lost)
    assert found[""]["weights_bytes"] == sum(SIZES.values())


def test_pairs_whose_context_is_worth_nothing_are_left_out_of_the_mean_and_counted() -> None:
    table = rows()
    for row in table:
        if row["target"] == "a":
            row["context_carried"] = math.nan
    found = {row["hub"]: row for row in hubs(MODELS, table, SIZES)}
    assert all(row["n_carried"] == 9 and math.isfinite(row["context_carried"]) for row in found.values())


def test_a_route_is_measured_over_its_sequences() -> None:
    judged = [Judged(10, 20.0 + i, 18.0, 30.0, 2.0 * (i + 1), 5.0, 0.5, 0.25 * i) for i in range(4)]
    row = route_row(Route("a", "c", "b"), judged, n_resamples=200)
    assert (row["source"], row["via"], row["target"], row["n"]) == ("a", "b", "c", 4)
    assert row["kl_nats"] == pytest.approx(0.5)
    assert row["top1_agreement"] == pytest.approx(0.5)
    assert row["nll_nats"] == pytest.approx(2.15)
    assert row["value_r2"] == pytest.approx(0.375)
    carried = context_carried([20, 21, 22, 23], [18] * 4, [30] * 4, n_resamples=200)
    assert (row["context_carried"], row["context_carried_low"]) == (carried.value, carried.low)
    assert row["context_carried"] == pytest.approx((30 - 21.5) / 12)
