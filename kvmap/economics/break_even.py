"""Where one way becomes the better one: by length, bandwidth, escalation rate, price, and cached share."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from kvmap.economics.contexts import Contexts
from kvmap.economics.curves import Array, Latencies
from kvmap.economics.outcomes import mean_of
from kvmap.economics.policies import ESCALATING, HAND_OFFS, Prices, Served, Workload, serve, transport

Row = dict[str, Any]

N_SCANNED = 400
"""Lengths and shares at which a change of sign is looked for, before it is closed in on."""
N_REFINED, REFINEMENTS = 33, 10
"""Points of each finer search between two, and how many: 2^50 times closer."""


def break_even_rows(
    latencies: Latencies, contexts: Contexts, workload: Workload, prices: Prices
) -> list[Row]:
    """Every break-even, over the distribution of contexts but for those of the length.

    With bars for means over contexts and c̄(·) for a mean cost:

    * `length`, hand-off against re-prefill and the cached one, by time x(T) and by the cost of an escalated
      request: the length from which on, up to the longest known, the hand-off is the better.
    * `gbit_per_s`: `B = 8 · bytes̄ / (r̄ − link_ms − h̄)` (cold: − s̄ too); above it a hand-off takes less
      time on average.
    * `escalation_rate`, a policy against always-large: cost is linear in ρ,
      `ρ* = (c̄_large − c̄_kept) / (c̄_escalated − c̄_kept)`; below it the policy costs less.
    * `price_ratio`, P_t/P_s with P_s as it is: cost is linear in P_t too,
      `P_t* = (P_s · S_policy + links) / (T_large − T_policy)`, S and T the seconds of source and target;
      above it the policy costs less than always-large.
    * `cached_share`, hand-off against cached re-prefill: the c at which x̄ and c̄ are equal; below it the
      hand-off is the better.

    Returns:
        Rows {what, policy, against, by, value, better, note}: `better` says on which side of `value` the
        policy is the better one ("above", "below", "always", "never"); `value` is None for the last two.
    """
    served = serve(latencies, contexts.lengths, workload, prices.cached_discount)
    rows = [*_lengths(latencies, workload, prices)]
    rows += [_bandwidth(name, latencies, contexts, workload) for name in HAND_OFFS]
    rows += [_escalation(name, served, contexts, prices) for name in ESCALATING]
    rows += [_price(name, served, contexts, workload, prices) for name in ESCALATING]
    return [*rows, *_shares(latencies, contexts, workload, prices)]


def _row(what: str, policy: str, against: str, by: str, better: str, value: float | None, note: str) -> Row:
    return {"what": what, "policy": policy, "against": against, "by": by} | {
        "value": value,
        "better": better,
        "note": note,
    }


def _lengths(latencies: Latencies, workload: Workload, prices: Prices) -> list[Row]:
    def gain(lengths: Array, policy: str, against: str, by: str) -> Array:
        served = serve(latencies, lengths, workload, prices.cached_discount)
        if by == "time":
            return served[against].takeover_ms - served[policy].takeover_ms
        return served[against].escalated.cost(prices) - served[policy].escalated.cost(prices)

    first, last = latencies.lengths[0], latencies.lengths[-1]
    grid = np.unique(np.concatenate([np.geomspace(first, last, N_SCANNED), latencies.lengths]))
    grid = grid.clip(first, last)
    note = f"known from {first:,.0f} to {last:,.0f} tokens"
    rows = []
    for policy in HAND_OFFS:
        for against in ("re_prefill", "cached_re_prefill"):
            for by in ("time", "cost"):

                def of(lengths: Array, policy: str = policy, against: str = against, by: str = by) -> Array:
                    return gain(lengths, policy, against, by)

                better, value = better_from(of, grid)
                rows.append(_row("length", policy, against, by, better, value, note))
    return rows


def better_from(gain: Callable[[Array], Array], grid: Array) -> tuple[str, float | None]:
    """From which point of a rising grid on, to its end, a gain is above 0.

    Returns:
        "always", "never" (it is not at the end), or "above" with the point, closed in on.
    """
    positive = gain(grid) > 0
    if positive.all():
        return "always", None
    if not positive[-1]:
        return "never", None
    for _ in range(REFINEMENTS):
        last = int(np.flatnonzero(~positive)[-1])
        grid = np.linspace(grid[last], grid[last + 1], N_REFINED)
        positive = gain(grid) > 0
        # rounding may have the ends of a range this small change sides
        positive[0], positive[-1] = False, True
    return "above", float(grid[int(np.flatnonzero(~positive)[-1]) + 1])


def _bandwidth(policy: str, latencies: Latencies, contexts: Contexts, workload: Workload) -> Row:
    at_once = replace(workload, gbit_per_s=None)
    served = serve(latencies, contexts.lengths, at_once)
    spare = served["re_prefill"].takeover_ms - served[policy].takeover_ms
    spare_ms = float(contexts.weights @ spare) - workload.link_ms
    sizes = {name: latencies.at(name, contexts.lengths) for name in latencies.n_bytes}
    at_one, _ = transport(sizes, replace(workload, gbit_per_s=1.0, link_ms=0.0))
    note = "mean time; Gb/s"
    if spare_ms <= 0:
        return _row("gbit_per_s", policy, "re_prefill", "time", "never", None, note)
    value = float(contexts.weights @ at_one) / spare_ms
    return _row("gbit_per_s", policy, "re_prefill", "time", "above", value, note)


def _escalation(policy: str, served: Mapping[str, Served], contexts: Contexts, prices: Prices) -> Row:
    large = float(mean_of(served["always_large"].kept, contexts).cost(prices))
    kept = float(mean_of(served[policy].kept, contexts).cost(prices))
    escalated = float(mean_of(served[policy].escalated, contexts).cost(prices))
    at_none, at_all = large - kept, large - escalated
    better, value = _of_line(at_none, at_all)
    return _row("escalation_rate", policy, "always_large", "cost", better, value, "mean cost of a request")


def _of_line(at_none: float, at_all: float) -> tuple[str, float | None]:
    """Where a gain that is linear over a share from 0 to 1 changes sign."""
    if at_none > 0 and at_all > 0:
        return "always", None
    if at_none <= 0 and at_all <= 0:
        return "never", None
    return ("below" if at_none > 0 else "above"), at_none / (at_none - at_all)


def _price(
    policy: str, served: Mapping[str, Served], contexts: Contexts, workload: Workload, prices: Prices
) -> Row:
    own = mean_of(served[policy].mixed(workload.escalation_rate), contexts)
    large = mean_of(served["always_large"].kept, contexts)
    fixed = float(prices.source_second * own.source + prices.gbyte * own.gbytes)
    spared = float(large.target - own.target)
    note = "price of a second of the target over one of the source, GPUs counted in"
    said = ("price_ratio", policy, "always_large", "cost")
    if spared <= 0:
        return _row(*said, "never", None, note)
    if prices.source_second == 0:
        now = "always" if prices.target_second * spared > fixed else "never"
        return _row(*said, now, None, f"{note}; the source is free: at the target's price as it is")
    return _row(*said, "above", fixed / spared / prices.source_second, note)


def _shares(latencies: Latencies, contexts: Contexts, workload: Workload, prices: Prices) -> list[Row]:
    served = serve(latencies, contexts.lengths, workload, prices.cached_discount)
    whole, weights = served["re_prefill"], contexts.weights
    price = prices.target_second * prices.cached_discount / 1e3 / latencies.batch_size
    rows = []
    for policy in HAND_OFFS:
        spare_ms = float(weights @ (whole.takeover_ms - served[policy].takeover_ms))
        spare = whole.escalated.cost(prices) - served[policy].escalated.cost(prices)
        for by, at_none, worth in (("time", spare_ms, 1.0), ("cost", float(weights @ spare), price)):

            def rising(missing: Array, at_none: float = at_none, worth: float = worth) -> Array:
                # over 1 − c, since the less is cached, the better a hand-off is
                held = latencies.saved_ms(np.outer(1 - missing, contexts.lengths)) @ weights
                return at_none - worth * held

            better, missing = better_from(rising, np.array([0.0, 1.0]))
            value = None if missing is None else 1 - missing
            better = "below" if better == "above" else better
            note = "share of the context that the target holds cached"
            rows.append(_row("cached_share", policy, "cached_re_prefill", by, better, value, note))
    return rows


def in_words(row: Row) -> str:
    """A break-even in one sentence.

    Args:
        row: of `break_even_rows`.
    """
    what = {
        "length": "{:,.0f} tokens",
        "gbit_per_s": "{:,.3g} Gb/s",
        "escalation_rate": "an escalation rate of {:.3f}",
        "price_ratio": "a price ratio of {:.3g}",
        "cached_share": "a cached share of {:.3f}",
    }[row["what"]]
    gain = "is faster" if row["by"] == "time" else "costs less"
    subject = f"{spoken(row['policy'])} {gain} than {spoken(row['against'])}"
    if row["better"] == "never":
        return f"{subject} at no {_measure(row['what'])}"
    if row["better"] == "always":
        return f"{subject} at every {_measure(row['what'])}"
    value = row["value"]
    return f"{subject} {row['better']} {what.format(math.nan if value is None else value)}"


def _measure(what: str) -> str:
    names = {"length": "known length", "gbit_per_s": "bandwidth"}
    return names.get(what, what.replace("_", " "))


def spoken(policy: str) -> str:
    """A policy as people write it."""
    names = {
        "always_small": "always small",
        "always_large": "always large",
        "re_prefill": "re-prefill",
        "cached_re_prefill": "cached re-prefill",
        "hand_off_warm": "warm hand-off",
        "hand_off_cold": "cold hand-off",
    }
    return names.get(policy, policy.replace("_", " "))
