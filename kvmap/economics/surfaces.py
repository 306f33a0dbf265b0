"""Time over length and bandwidth, cost over escalation rate and price: where each way is the better one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kvmap.economics.contexts import Contexts
from kvmap.economics.curves import Latencies
from kvmap.economics.errors import EconomicsError
from kvmap.economics.outcomes import mean_of
from kvmap.economics.policies import POLICIES, Prices, Workload, serve

Row = dict[str, Any]


@dataclass(frozen=True)
class Axes:
    """Where the surfaces are computed.

    Attributes:
        lengths: tokens; (): those that are known.
        gbit_per_s: of the link.
        escalation_rates: ρ.
        price_ratios: P_t/P_s, with P_s as it is.
    """

    lengths: tuple[float, ...] = ()
    gbit_per_s: tuple[float, ...] = (0.1, 1, 10, 25, 50, 100, 400)
    escalation_rates: tuple[float, ...] = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
    price_ratios: tuple[float, ...] = (0.5, 1, 2, 4, 8, 16)

    def __post_init__(self) -> None:
        """Refuse what cannot be.

        Raises:
            EconomicsError: an empty axis, or a number out of range.
        """
        for name, values, low, high in (
            ("gbit_per_s", self.gbit_per_s, 1e-6, np.inf),
            ("escalation_rates", self.escalation_rates, 0, 1),
            ("price_ratios", self.price_ratios, 1e-9, np.inf),
        ):
            if not values or not all(low <= value <= high for value in values):
                raise EconomicsError(
                    f"surface {name}={list(values)}: expected at least one, {low:g} to {high:g}"
                )


def time_surface(
    latencies: Latencies, workload: Workload, lengths: Sequence[float], gbit_per_s: Sequence[float]
) -> list[Row]:
    """The takeover x by length and bandwidth.

    Args:
        latencies: of the pair.
        workload: whose bandwidth is left out.
        lengths: tokens; none: those that are known.
        gbit_per_s: of the links.

    Returns:
        Rows {length, gbit_per_s, re_prefill_ms, cached_re_prefill_ms, hand_off_warm_ms, hand_off_cold_ms,
        warm_ratio, cold_ratio}: ratios are re-prefill's time over the hand-off's; above 1 it is the faster.
    """
    sizes = np.asarray(lengths or latencies.lengths, dtype=np.float64)
    rows = []
    for rate in gbit_per_s:
        served = serve(latencies, sizes, replace(workload, gbit_per_s=rate))
        x = {name: policy.takeover_ms for name, policy in served.items() if not name.startswith("always")}
        for place, length in enumerate(sizes):
            ms = {f"{name}_ms": float(values[place]) for name, values in x.items()}
            ratios = {
                f"{state}_ratio": ms["re_prefill_ms"] / ms[f"hand_off_{state}_ms"]
                for state in ("warm", "cold")
            }
            rows.append({"length": float(length), "gbit_per_s": float(rate), **ms, **ratios})
    return rows


def cost_surface(
    latencies: Latencies,
    contexts: Contexts,
    workload: Workload,
    prices: Prices,
    escalation_rates: Sequence[float],
    price_ratios: Sequence[float],
) -> list[Row]:
    """The mean cost of a request by escalation rate and price ratio.

    Args:
        latencies: of the pair.
        contexts: how often each length comes.
        workload: whose escalation rate is left out.
        prices: of which the source's stays, and the target's is left out.
        escalation_rates: ρ.
        price_ratios: P_t/P_s; P_t itself where the source is free.

    Returns:
        Rows {escalation_rate, price_ratio, <policy>_cost for each policy, cheapest}: `cheapest` of those that
        have the target's answer where one is asked for, which leaves always-small out.
    """
    served = serve(latencies, contexts.lengths, workload, prices.cached_discount)
    rows = []
    for ratio in price_ratios:
        of_target = (prices.source_second or 1.0) * ratio / prices.target_gpus
        priced = replace(prices, target=of_target)
        for rate in escalation_rates:
            costs = {
                name: float(mean_of(policy.mixed(rate), contexts).cost(priced))
                for name, policy in served.items()
            }
            answering = [name for name in POLICIES if name != "always_small"]
            rows.append(
                {
                    "escalation_rate": float(rate),
                    "price_ratio": float(ratio),
                    **{f"{name}_cost": cost for name, cost in costs.items()},
                    "cheapest": min(answering, key=lambda name: costs[name]),
                }
            )
    return rows
