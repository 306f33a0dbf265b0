"""Rates against counting by hand, and that a pair never judges itself."""

from __future__ import annotations

import pandas as pd
import pytest

from kvmap.preflight import Evidence, Rules, judge
from kvmap.preflight.rates import Rates, left_out, measures_of, rates
from kvmap.preflight.text import evidence_text, rates_text
from tests.preflight.planted_cases import cases

RULES = Rules(min_retention=0.8)


def row(pair, mapper, true, decision):
    return {"pair": pair, "seed": "0", "mapper": mapper, "true": true, "decision": decision}


def test_rates_are_counts():
    found = rates(
        pd.DataFrame(
            [
                row("a", "head_local", 0.7, "pass"),
                row("a", "mlp", 0.95, "pass"),
                row("b", "head_local", 0.95, "fail"),
                row("b", "mlp", 0.95, "pass"),
                row("c", "head_local", 0.1, "fail"),
                row("c", "mlp", 0.95, "unknown"),
            ]
        ),
        0.9,
    )
    assert found == Rates(3, 4, 2, 1, 2, 1, 3, 2, 1)
    assert [(line["value"], line["n"]) for line in found.rows()] == [
        (0.5, 2),
        (0.5, 4),
        (pytest.approx(1 / 6), 6),
        (0.5, 2),
    ]


def test_nothing_to_count_is_no_rate():
    found = rates(pd.DataFrame(), 0.9)
    assert all(line["value"] is None for line in found.rows())
    assert "–" in rates_text(found, RULES)


@pytest.fixture(scope="module")
def judged():
    return left_out(cases(), RULES)


def test_every_case_is_judged_by_other_pairs(judged):
    evidence = cases()
    assert len(judged) == evidence.n_cases
    for case in evidence.table.iloc[[0, 21, 47]].to_dict("records"):
        others = Evidence(evidence.table[evidence.table["pair"] != case["pair"]])
        found = judge(case["mapper"], measures_of(case, evidence.probes), others, RULES)
        own = judged[
            (judged[["pair", "seed", "mapper"]] == [case[n] for n in ("pair", "seed", "mapper")]).all(axis=1)
        ]
        assert own["decision"].item() == found.decision
        assert own["predicted"].item() == pytest.approx(found.predicted.value)


def test_cases_of_another_family_judge_only_where_any_may():
    table = cases().table
    strange = table["pair"] == "pair 0"
    evidence = Evidence(table.assign(family=["b" * 12 if own else "a" * 12 for own in strange]))
    own, every = left_out(evidence, RULES), left_out(evidence, RULES, "any")
    assert set(own[own["pair"] == "pair 0"]["decision"]) == {"unknown"}
    assert set(every[every["pair"] == "pair 0"]["decision"]) <= {"pass", "fail"}
    pd.testing.assert_frame_equal(every, left_out(cases(), RULES))


def test_what_came_of_a_pair_does_not_judge_it(judged):
    table = cases().table.copy()
    table.loc[table["pair"] == "pair 5", ["retention", "true"]] = 5.0
    changed = left_out(Evidence(table), RULES)
    own = judged["pair"] == "pair 5"
    assert changed[own]["predicted"].tolist() == pytest.approx(judged[own]["predicted"].tolist())
    assert changed[~own]["predicted"].tolist() != pytest.approx(judged[~own]["predicted"].tolist())


def test_a_clear_relation_is_judged_right(judged):
    found = rates(judged, RULES.min_retention)
    assert found.false_accepts == 0
    assert found.false_rejects <= 0.2 * found.n_good
    assert found.n_wrong_go == 0


def test_a_relation_that_is_not_there_accepts_next_to_nothing():
    table = cases().table
    table = table[table["mapper"] == "head_local"].copy()
    table["true"] = table["retention"] = [0.2, 0.2, 0.95, 0.95] * 6
    found = rates(left_out(Evidence(table), Rules()), 0.9)
    assert found.false_accepts == 0


def test_the_cases_in_words():
    said = evidence_text(cases())
    assert "head_local" in said
    assert "0.55 [0.2" in said
