"""What each policy comes to over a distribution of contexts: time to first token, cost, quality."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvmap.economics.contexts import Contexts
from kvmap.economics.curves import Array
from kvmap.economics.errors import EconomicsError, check_ranges
from kvmap.economics.policies import ESCALATING, POLICIES, Billed, Prices, Served

Row = dict[str, Any]


@dataclass(frozen=True)
class Quality:
    """How often an answer is right, each a share of requests; None where it is not known.

    Attributes:
        source: of the source alone, on all requests.
        target: of the target.
        mapped: of the target that goes on from the mapped cache.
        source_kept: of the source on those that it keeps; None: as on all, as if requests were escalated at
            random, which a rule that knows the hard ones betters.
    """

    source: float | None = None
    target: float | None = None
    mapped: float | None = None
    source_kept: float | None = None

    def __post_init__(self) -> None:
        """Refuse what is no share.

        Raises:
            EconomicsError: naming each.
        """
        names = ("source", "target", "mapped", "source_kept")
        check_ranges({f"accuracy of {name}": (getattr(self, name), 0, 1) for name in names})

    def of(self, policy: str, escalation_rate: float) -> float:
        """The share of right answers: `(1 − ρ) kept + ρ escalated`; NaN where a part is not known."""
        source, target, mapped = (
            math.nan if value is None else value for value in (self.source, self.target, self.mapped)
        )
        if policy not in ESCALATING:
            return source if policy == "always_small" else target
        kept = source if self.source_kept is None else self.source_kept
        escalated = mapped if policy.startswith("hand_off") else target
        # 0 · NaN is NaN: a part that never happens must not matter
        parts = ((1 - escalation_rate, kept), (escalation_rate, escalated))
        return sum(share * value for share, value in parts if share > 0)


def outcome_rows(
    served: Mapping[str, Served],
    contexts: Contexts,
    escalation_rate: float,
    prices: Prices,
    quality: Quality | None = None,
) -> list[Row]:
    """One row for each policy.

    Over lengths with weights w and, for escalating ones, ρ: means are exact sums; a quantile is the smallest
    time whose cumulated weight reaches it.

    Args:
        served: of `kvmap.economics.policies.serve` at the lengths of `contexts`.
        contexts: how often each length comes.
        escalation_rate: ρ.
        prices: of seconds.
        quality: of answers.

    Returns:
        Rows {policy, ttft_mean_ms, ttft_p50_ms, ttft_p95_ms, takeover_mean_ms, cost, source_seconds,
        target_seconds, gbytes, cost_over_always_large, accuracy, cost_per_correct}: cost and seconds of one
        request; `takeover_mean_ms` over escalated requests; None where it is not known.
    """
    rows = []
    costs = {name: mean_of(served[name].mixed(escalation_rate), contexts) for name in POLICIES}
    large = costs["always_large"].cost(prices)
    for name in POLICIES:
        policy, billed = served[name], costs[name]
        times = np.concatenate([policy.kept_ms, policy.escalated_ms])
        weights = np.concatenate(
            [contexts.weights * (1 - escalation_rate), contexts.weights * escalation_rate]
        )
        accuracy = (quality or Quality()).of(name, escalation_rate)
        cost = float(billed.cost(prices))
        rows.append(
            {
                "policy": name,
                "ttft_mean_ms": float(weights @ times),
                "ttft_p50_ms": weighted_quantile(times, weights, 0.5),
                "ttft_p95_ms": weighted_quantile(times, weights, 0.95),
                "takeover_mean_ms": known(float(contexts.weights @ policy.takeover_ms)),
                "cost": cost,
                "source_seconds": float(billed.source),
                "target_seconds": float(billed.target),
                "gbytes": float(billed.gbytes),
                "cost_over_always_large": known(cost / float(large)) if large else None,
                "accuracy": known(accuracy),
                "cost_per_correct": known(cost / accuracy) if accuracy else None,
            }
        )
    return rows


def mean_of(billed: Billed, contexts: Contexts) -> Billed:
    """Over the distribution of lengths; each part an array of no dimension."""
    weights = contexts.weights
    return Billed(*(np.asarray(weights @ part) for part in (billed.source, billed.target, billed.gbytes)))


def weighted_quantile(values: Array, weights: Array, share: float) -> float:
    """The smallest value up to which the weights add up to at least that share of their sum.

    Raises:
        EconomicsError: weights without a sum.
    """
    total = weights.sum()
    if not total > 0:
        raise EconomicsError(f"weights of sum {total}: expected some above 0")
    order = np.argsort(values, kind="stable")
    cumulated = np.cumsum(weights[order]) / total
    # rounding may leave the last sum below 1, or one that reaches the share just under it
    place = int(np.searchsorted(cumulated, share - 1e-12))
    return float(values[order][min(place, len(values) - 1)])


def known(value: float) -> float | None:
    """None for what is not a number."""
    return value if math.isfinite(value) else None
