"""What policies come to, against a simulation of requests one by one."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import numpy as np
import pytest

from kvmap.economics import POLICIES, Contexts, EconomicsError, Prices, Quality, Workload, counted
from kvmap.economics.outcomes import outcome_rows, weighted_quantile
from kvmap.economics.policies import serve
from tests.economics.cases import latencies
from tests.economics.simulation import Request

CONTEXTS = counted([128, 700, 2048, 5000, 8192], [5, 4, 3, 2, 1])
PRICES = Prices(source=1.5, target=2.0, source_gpus=2, target_gpus=4, gbyte=0.7, cached_discount=0.8)
WORKLOADS = {
    "usual": Workload(escalation_rate=0.25, output_tokens=20),
    "judged late": Workload(escalation_rate=0.4, output_tokens=12, judged_after=5, cached_share=0.3),
    "slow link, mapped cache": Workload(
        escalation_rate=0.6, output_tokens=3, gbit_per_s=2.0, link_ms=7.0, sent="mapped", cached_share=1.0
    ),
    "one memory": Workload(escalation_rate=1.0, output_tokens=1, gbit_per_s=None, cached_share=0.0),
    "nothing escalated": Workload(escalation_rate=0.0, output_tokens=7, judged_after=7),
}


def request(policy: str, length: float, escalates: bool, workload: Workload) -> Request:
    made = latencies()
    return Request(
        policy,
        escalates,
        at=lambda name: float(made.at(name, np.array([length]))[0]),
        saved=float(made.saved_ms(np.array([workload.cached_share * length]))[0]),
        output_tokens=workload.output_tokens,
        judged_after=workload.judged_after,
        gbit_per_s=workload.gbit_per_s,
        link_ms=workload.link_ms,
        sent=workload.sent,
        discount=PRICES.cached_discount,
    ).run()


def cost(done: Request) -> float:
    return 3.0 * done.source_ms / 1e3 + 8.0 * done.target_ms / 1e3 + 0.7 * done.gbytes


def rows(workload: Workload, contexts: Contexts = CONTEXTS, quality: Quality | None = None) -> dict:
    served = serve(latencies(), contexts.lengths, workload, PRICES.cached_discount)
    found = outcome_rows(served, contexts, workload.escalation_rate, PRICES, quality)
    return {row["policy"]: row for row in found}


@pytest.mark.parametrize("name", WORKLOADS)
@pytest.mark.parametrize("policy", POLICIES)
def test_means_and_quantiles_are_those_of_every_request_simulated(policy: str, name: str) -> None:
    workload = WORKLOADS[name]
    each = [
        (weight * share, request(policy, length, escalates, workload))
        for length, weight in zip(CONTEXTS.lengths, CONTEXTS.weights, strict=True)
        for escalates, share in ((True, workload.escalation_rate), (False, 1 - workload.escalation_rate))
        if share
    ]
    row = rows(workload)[policy]
    assert row["cost"] == pytest.approx(sum(share * cost(done) for share, done in each))
    assert row["ttft_mean_ms"] == pytest.approx(sum(share * done.shown_at for share, done in each))
    assert row["gbytes"] == pytest.approx(sum(share * done.gbytes for share, done in each))
    for share_below, column in ((0.5, "ttft_p50_ms"), (0.95, "ttft_p95_ms")):
        reached = 0.0
        for weight, time in sorted(
            ((weight, done.shown_at) for weight, done in each), key=lambda pair: pair[1]
        ):
            if reached < share_below - 1e-9:
                expected = time
            reached += weight
        assert row[column] == pytest.approx(expected)


def test_drawn_requests_come_to_the_same() -> None:
    """Lengths and escalations drawn: the sums are of what happens, to within four standard errors."""
    workload, draw = WORKLOADS["judged late"], random.Random(0)
    drawn = draw.choices(CONTEXTS.lengths.tolist(), CONTEXTS.weights.tolist(), k=3000)
    fates = [(length, draw.random() < workload.escalation_rate) for length in drawn]
    for policy in ("hand_off_warm", "cached_re_prefill"):
        known = {fate: request(policy, *fate, workload) for fate in set(fates)}
        costs = np.array([cost(known[fate]) for fate in fates])
        times = np.array([known[fate].shown_at for fate in fates])
        row = rows(workload)[policy]
        for values, expected in ((costs, row["cost"]), (times, row["ttft_mean_ms"])):
            assert abs(values.mean() - expected) < 4 * values.std() / math.sqrt(len(values))


def test_a_batch_shares_what_it_costs_and_none_of_its_time() -> None:
    workload = Workload(output_tokens=4)
    one, four = (serve(latencies(batch_size=n), CONTEXTS.lengths, workload)["hand_off_cold"] for n in (1, 4))
    np.testing.assert_allclose(four.escalated.target * 4, one.escalated.target)
    np.testing.assert_allclose(four.escalated.gbytes * 4, one.escalated.gbytes)
    np.testing.assert_allclose(four.escalated_ms, one.escalated_ms)


def test_writing_is_billed_by_its_own_batch() -> None:
    alone = serve(latencies(), CONTEXTS.lengths, Workload(output_tokens=9))["always_large"]
    shared = serve(latencies(), CONTEXTS.lengths, Workload(output_tokens=9, decode_batch=16))["always_large"]
    token = latencies().at("target_token", CONTEXTS.lengths) / 1e3
    np.testing.assert_allclose(alone.kept.target - shared.kept.target, 8 * token * (1 - 1 / 16))
    np.testing.assert_allclose(alone.kept_ms, shared.kept_ms)


def test_a_cached_context_is_billed_at_its_discount() -> None:
    workload = Workload(output_tokens=1, cached_share=1.0)
    served = serve(latencies(), CONTEXTS.lengths, workload, cached_discount=0.9)
    whole, cached = served["re_prefill"], served["cached_re_prefill"]
    np.testing.assert_allclose(cached.takeover_ms, 0.0, atol=1e-9)
    np.testing.assert_allclose(cached.escalated.target, 0.1 * whole.escalated.target)


class TestQuality:
    quality = Quality(source=0.4, target=0.9, mapped=0.8)

    def test_escalated_answers_are_the_targets_or_the_mapped_caches(self) -> None:
        found = rows(Workload(escalation_rate=0.25), quality=self.quality)
        accuracies = {policy: row["accuracy"] for policy, row in found.items()}
        assert accuracies["always_small"] == 0.4
        assert accuracies["always_large"] == 0.9
        assert accuracies["re_prefill"] == accuracies["cached_re_prefill"] == pytest.approx(0.525)
        assert accuracies["hand_off_warm"] == accuracies["hand_off_cold"] == pytest.approx(0.5)
        for row in found.values():
            assert row["cost_per_correct"] == pytest.approx(row["cost"] / row["accuracy"])

    def test_a_rule_that_knows_the_hard_ones_keeps_the_easy_ones(self) -> None:
        kept = replace(self.quality, source_kept=0.7)
        assert kept.of("re_prefill", 0.5) == pytest.approx(0.8)
        assert kept.of("always_small", 0.5) == 0.4

    def test_what_is_not_known_is_none_unless_it_never_happens(self) -> None:
        found = rows(Workload(escalation_rate=0.0), quality=Quality(source=0.4))
        assert found["hand_off_warm"]["accuracy"] == 0.4
        assert found["always_large"]["accuracy"] is None
        assert rows(Workload(), quality=Quality(source=0.4))["hand_off_warm"]["cost_per_correct"] is None

    def test_no_right_answer_has_no_price(self) -> None:
        found = rows(Workload(), quality=Quality(source=0.0, target=0.0, mapped=0.0))
        assert {row["cost_per_correct"] for row in found.values()} == {None}


def test_a_free_service_has_no_ratio() -> None:
    served = serve(latencies(), CONTEXTS.lengths, Workload())
    free = outcome_rows(served, CONTEXTS, 0.2, Prices(source=0.0, target=0.0))
    assert {row["cost"] for row in free} == {0.0}
    assert {row["cost_over_always_large"] for row in free} == {None}


@pytest.mark.parametrize("share", [0.0, 0.2, 0.5, 0.75, 1.0])
def test_a_quantile_is_that_of_values_repeated(share: float) -> None:
    values, counts = np.array([3.0, 1.0, 2.0, 8.0]), np.array([1, 4, 2, 3])
    repeated = np.sort(np.repeat(values, counts))
    expected = np.quantile(repeated, share, method="inverted_cdf")
    assert weighted_quantile(values, counts.astype(float), share) == expected


MISTAKES = {
    "escalation_rate=1.5: expected a number from 0 to 1": lambda: Workload(escalation_rate=1.5),
    "judged_after=9: the answer has output_tokens=4": lambda: Workload(judged_after=9, output_tokens=4),
    "sent='keys'": lambda: Workload(sent="keys"),
    "gbit_per_s=0": lambda: Workload(gbit_per_s=0.0),
    "cached_discount=2": lambda: Prices(cached_discount=2.0),
    "source price=-1": lambda: Prices(source=-1.0),
    "accuracy of mapped=7": lambda: Quality(mapped=7.0),
    "link_ms=nan": lambda: Workload(link_ms=math.nan),
    "weights of sum 0": lambda: weighted_quantile(np.ones(2), np.zeros(2), 0.5),
}


@pytest.mark.parametrize("said", MISTAKES)
def test_a_mistake_is_named(said: str) -> None:
    with pytest.raises(EconomicsError) as error:
        MISTAKES[said]()
    assert said in str(error.value)


def test_all_mistakes_come_at_once() -> None:
    with pytest.raises(EconomicsError, match=r"escalation_rate=2.*cached_share=-1"):
        Workload(escalation_rate=2, cached_share=-1)
