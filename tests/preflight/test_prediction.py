"""A prediction against the same by hand, the conformal bounds against counting, and what lies outside."""

from __future__ import annotations

import math

import numpy as np
import pytest

from kvmap.prediction.leave_out import chosen_penalty, pair_weights, ridge_guesses
from kvmap.preflight.prediction import FEATURES, Reference, bounds, probe_for, usable
from tests.preflight.planted_cases import PROBE, cases, diagnostics

ASKED = {"confidence": 0.9, "reach": 0.5}


def of(evidence, mapper="head_local"):
    return usable(evidence.of(mapper), PROBE)


def test_a_relation_that_is_there_is_found():
    found = Reference.of(of(cases()), PROBE).predict(diagnostics(0.55), **ASKED)
    assert found.value == pytest.approx(0.55, abs=0.02)
    assert found.low < 0.55 < found.high
    assert (found.n_cases, found.n_pairs, found.above, found.below) == (24, 12, (), ())


def test_the_bounds_are_errors_of_pairs_left_out():
    known = of(cases(noise=0.05))
    columns = [f"{PROBE}/{name}" for name in FEATURES]
    errors = []
    for pair in sorted(set(known["pair"])):
        rest, own = known[known["pair"] != pair], known[known["pair"] == pair]
        labels = np.unique(rest["pair"], return_inverse=True)[1]
        x, y = rest[columns].to_numpy(), rest["true"].to_numpy()
        guesses = ridge_guesses(x, y, pair_weights(labels), own[columns].to_numpy())
        errors.append((own["true"].to_numpy() - guesses[chosen_penalty(x, y, labels)]).mean())
    found = Reference.of(known, PROBE).predict(diagnostics(0.5), **ASKED)
    # 12 errors at 0.9: the least and the largest
    assert found.low - found.value == pytest.approx(min(errors))
    assert found.high - found.value == pytest.approx(max(errors))


@pytest.mark.parametrize("n", [2, 8, 9, 19, 40])
@pytest.mark.parametrize("confidence", [0.5, 0.8, 0.9])
def test_a_bound_is_the_tightest_error_that_enough_new_ones_keep_to(n, confidence):
    errors = np.random.default_rng(n).normal(size=n)
    low, high = bounds(errors, confidence)
    # of n + 1 places that a new error may take among the others, low leaves those above it
    kept = [(n + 1 - rank) / (n + 1) for rank in range(n + 1)]
    ranks = [rank for rank in range(n + 1) if kept[rank] >= confidence - 1e-9]
    ordered = [-math.inf, *sorted(errors)]
    assert low == ordered[max(ranks)]
    assert high == -bounds(-errors, confidence)[0]


def test_bounds_hold_as_often_as_they_say():
    random = np.random.default_rng(0)
    held = [random.normal() >= bounds(random.normal(size=12), 0.9)[0] for _ in range(2000)]
    # 12/13 by theory; standard error 0.006
    assert 0.9 < np.mean(held) < 0.945


@pytest.mark.parametrize(("quality", "side"), [(0.02, None), (-0.4, "below"), (1.5, "above")])
def test_what_is_far_outside_is_said(quality, side):
    found = Reference.of(of(cases()), PROBE).predict(diagnostics(quality), **ASKED)
    for name in ("below", "above"):
        assert bool(getattr(found, name)) == (name == side)
    if side:
        assert any(line.startswith("kl_share") for line in getattr(found, side))


def test_a_case_without_a_feature_is_left_out():
    evidence = cases()
    table = evidence.table.copy()
    table.loc[table["pair"] == "pair 3", f"{PROBE}/r2_key"] = math.nan
    assert set(usable(table, PROBE)["pair"]) == set(table["pair"]) - {"pair 3"}
    assert usable(table, "banded").empty


def test_a_mapper_is_judged_by_itself_or_by_the_richest_probe_that_the_cases_know():
    measured = {"head_local": {}, "linear": {}, "banded": {}}
    assert probe_for("head_local", measured, ["head_local", "banded"]) == "head_local"
    assert probe_for("mlp", measured, ["head_local", "banded"]) == "banded"
    assert probe_for("linear", measured, ["head_local"]) == "head_local"
    assert probe_for("mlp", measured, ["other"]) is None
