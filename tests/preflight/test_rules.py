"""What is refused, what the cases decide, and which verdict that makes."""

from __future__ import annotations

import math

import pytest
from scipy.stats import binomtest

from kvmap.mappers import VERDICTS
from kvmap.preflight import Evidence, Judgement, Rules, judge, overall
from kvmap.preflight.rules import by_prompts, candidates, rejections
from kvmap.preflight.verdicts import canary_of, said, verdict_of
from tests.preflight.planted_cases import cases, diagnostics

RULES = Rules(min_retention=0.8)
CASES = cases()


def judged(quality, mapper="head_local", rules=RULES, evidence=CASES, **changed):
    return judge(mapper, {"head_local": diagnostics(quality) | changed}, evidence, rules)


def test_a_good_map_passes_and_a_poor_one_fails():
    assert judged(0.88).decision == "pass"
    assert judged(0.5).decision == "fail"
    assert judged(0.5).predicted.value == pytest.approx(0.5, abs=0.02)


def test_a_network_is_judged_by_a_probe():
    found = judged(0.5, "mlp")
    assert (found.decision, found.probe) == ("pass", "head_local")


def test_an_exact_map_needs_no_cases():
    found = judged(1.0, evidence=Evidence(CASES.table.iloc[:0]), kl_nats=1e-9)
    assert found.decision == "pass"
    assert found.reason.startswith("exact")


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"r2_key": -0.1}, "held-out R² of keys -0.10"),
        ({"r2_value": -0.1}, "held-out R² of values"),
        ({"kl_share": 0.95}, "no better than the mean cache"),
        ({"kl_nats": math.nan}, "not a number"),
        ({"rows_per_feature": 1.2, "gap_value": 0.4}, "over-fitted"),
    ],
)
def test_what_is_refused_whatever_the_cases_say(changed, said):
    found = judged(0.88, **changed)
    assert found.decision == "fail"
    assert said in found.reason
    assert judged(0.88, "mlp", **changed).decision == "fail"


class TestPrompts:
    def test_bounds_are_those_of_wilson(self):
        found = by_prompts({"prompts_n": 48, "prompts_top1_agreement": 45 / 48}, Rules(confidence=0.95))
        expected = binomtest(45, 48).proportion_ci(0.90, method="wilson")
        assert (found.low, found.high) == pytest.approx((expected.low, expected.high))
        assert by_prompts(diagnostics(0.8), RULES) is None

    def test_they_refuse_what_the_cases_would_pass(self):
        found = judged(0.88, prompts_n=32, prompts_top1_agreement=0.3)
        assert (found.decision, found.probe) == ("fail", "prompts")
        assert "from 32 prompts" in found.reason

    def test_they_speak_of_the_map_that_was_asked_alone(self):
        assert judged(0.5, "mlp", prompts_n=32, prompts_top1_agreement=0.3).decision == "pass"

    def test_they_let_pass_where_the_cases_say_nothing(self):
        nothing = Evidence(CASES.table.iloc[:0])
        sure = {"prompts_n": 48, "prompts_top1_agreement": 1.0}
        assert judged(0.88, evidence=nothing, **sure).decision == "pass"
        assert judged(0.5, **sure).decision == "fail", "the cases know better"
        few = {"prompts_n": 2, "prompts_top1_agreement": 1.0}
        assert judged(0.88, evidence=nothing, **few).decision == "unknown"


def test_few_rows_without_a_gap_and_a_gap_with_many_rows_are_not_refused():
    assert rejections(diagnostics(0.8) | {"rows_per_feature": 1.2}) == []
    assert rejections(diagnostics(0.8) | {"gap_key": 0.4}) == []


@pytest.mark.parametrize("n_pairs", [0, 8])
def test_too_few_pairs_are_not_enough(n_pairs):
    few = Evidence(CASES.table[CASES.table["pair"].isin([f"pair {n}" for n in range(n_pairs)])])
    found = judged(0.88, evidence=few)
    assert found.decision == "unknown"
    assert f"cases of {n_pairs} pairs, 9 are needed" in found.reason


def test_far_better_than_every_case_is_not_enough():
    found = judged(1.4, kl_nats=0.1)
    assert found.decision == "unknown"
    assert "far from every case" in found.reason


def test_far_worse_than_every_case_fails_where_the_cases_did():
    hopeless = diagnostics(-0.4) | {
        "r2_key": 0.0,
        "r2_value": 0.0,
        "kl_share": 0.89,
        "attention_cosine": -0.9,
    }
    found = judge("head_local", {"head_local": hopeless}, CASES, RULES)
    assert found.decision == "fail"
    assert "worse than every case" in found.reason
    # what every case of it passed is no reason to expect that this one does not
    assert judge("mlp", {"head_local": hopeless}, CASES, RULES).decision in ("unknown", "fail")


def judgements(**decisions):
    return [Judgement(mapper, decision, "") for mapper, decision in decisions.items()]


@pytest.mark.parametrize(
    ("decisions", "verdict", "named"),
    [
        ({"head_local": "fail", "banded": "pass", "mlp": "pass"}, "go", "banded"),
        ({"head_local": "unknown", "banded": "pass"}, "go", "banded"),
        ({"head_local": "fail", "banded": "fail", "mlp": "pass", "residual": "pass"}, "try_mlp", "mlp"),
        ({"head_local": "fail", "mlp": "fail"}, "no_go", None),
        ({"head_local": "fail", "mlp": "unknown"}, "not_enough_evidence", None),
        ({"head_local": "unknown"}, "not_enough_evidence", None),
    ],
)
def test_the_verdict_of_a_pair(decisions, verdict, named):
    found, cheapest = overall(judgements(**decisions))
    assert (found, None if cheapest is None else cheapest.mapper) == (verdict, named)
    assert VERDICTS[found] in said(found, cheapest, judgements(**decisions), RULES, CASES)[0]


def test_candidates_come_cheapest_first():
    measured = {"banded": diagnostics(0.5), "head_local": diagnostics(0.5)}
    assert candidates(measured, CASES) == ["head_local", "banded", "mlp"]


def test_what_is_kept_beside_a_mapper():
    values = diagnostics(0.88)
    found = judged(0.88)
    kept = verdict_of(found, "go", found, values, CASES, RULES)
    assert (kept.verdict, kept.n_cases, kept.n_pairs) == ("go", 24, 12)
    assert kept.low <= kept.predicted_retention <= kept.high
    assert kept.measured == values
    failed = verdict_of(judged(0.5), "try_mlp", judged(0.5, "mlp"), diagnostics(0.5), CASES, RULES)
    assert failed.verdict == "try_mlp"
    assert "the cheapest that passes: mlp" in " ".join(failed.reasons)


class TestCanary:
    def test_above_it_no_case_passed(self):
        passing = CASES.table[CASES.table["true"] >= RULES.min_retention]["kl_nats"].max()
        canary, why = canary_of(diagnostics(0.99), CASES, RULES)
        assert canary.max_kl_nats == passing
        assert "no case kept 0.8" in why

    def test_eight_tokens_vary_more_than_a_corpus(self):
        canary, why = canary_of(diagnostics(0.5), CASES, RULES)
        assert canary.max_kl_nats == diagnostics(0.5)["kl_window_nats"]
        assert "99th percentile" in why

    def test_without_cases_it_is_a_multiple_of_what_was_measured(self):
        values = diagnostics(0.5) | {"kl_window_nats": math.nan}
        canary, why = canary_of(values, Evidence(CASES.table.iloc[:0]), RULES)
        assert canary.max_kl_nats == 4 * values["kl_nats"]
        assert "4 times" in why

    def test_without_a_measured_kl_there_is_none(self):
        assert canary_of(diagnostics(0.5) | {"kl_nats": math.nan}, CASES, RULES) is None
