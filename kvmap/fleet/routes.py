"""Which ways a cache can take through a fleet, and what they come to: pairs, relays, hubs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, TypeAlias

from kvmap.evaluation import statistics
from kvmap.evaluation.statistics import Estimate
from kvmap.fleet.judge import Judged

Row: TypeAlias = dict[str, Any]

_NO_WORST: Row = {"source": "", "target": "", "context_carried": math.nan}


@dataclass(frozen=True)
class Route:
    """How a cache goes from one model to another.

    Attributes:
        source, target: names of models.
        via: the model in between; None: one mapper takes it all the way.
    """

    source: str
    target: str
    via: str | None = None

    @property
    def steps(self) -> tuple[tuple[str, str], ...]:
        """The ordered pairs whose mappers it needs."""
        if self.via is None:
            return ((self.source, self.target),)
        return (self.source, self.via), (self.via, self.target)

    def __str__(self) -> str:
        """`a -> c`, or `a -> b -> c`."""
        return " -> ".join([self.source, *([self.via] if self.via else []), self.target])


def routes_into(models: Sequence[str], last: str, target: str) -> list[Route]:
    """Every route that ends with last -> target: the direct one, and a relay from each other model."""
    others = [model for model in models if model not in (last, target)]
    return [Route(last, target), *(Route(source, target, last) for source in others)]


def route_row(
    route: Route, judged: Sequence[Judged], *, n_resamples: int = statistics.N_RESAMPLES, seed: int = 0
) -> Row:
    """The measures of one route, with 95 % intervals over sequences.

    * kl_nats, top1_agreement, nll_nats: per scored token, against the target on its own cache
    * context_carried: (NLL_none − NLL) / (NLL_none − NLL_native)
    * key_r2, value_r2: of the mapped columns, see `kvmap.evaluation.relay.cache_r2`

    Returns:
        {source, via, target, n, <metric>, <metric>_low, <metric>_high, note}.
    """
    row: Row = {"source": route.source, "via": route.via or "", "target": route.target, "n": len(judged)}
    notes = []
    for metric, estimate in _estimates(judged, n_resamples, seed).items():
        row |= {metric: estimate.value, f"{metric}_low": estimate.low, f"{metric}_high": estimate.high}
        notes += [f"{metric}: {estimate.note}"] if estimate.note else []
    return row | {"note": "; ".join(notes)}


def best_relays(rows: Sequence[Row], weights_bytes: Mapping[tuple[str, str], int]) -> list[Row]:
    """For each ordered pair, the way round whose KL is least, beside the direct one.

    Args:
        rows: of `route_row`, all routes.
        weights_bytes: of the mapper of each ordered pair.

    Returns:
        One row a pair, none where there is no third model: {source, target, via, direct_<metric>,
        relay_<metric>, direct_bytes, relay_bytes} for kl_nats, context_carried, key_r2 and value_r2.
    """
    found = []
    for direct in (row for row in rows if not row["via"]):
        pair = (direct["source"], direct["target"])
        relays = [row for row in rows if row["via"] and (row["source"], row["target"]) == pair]
        if not relays:
            continue
        best = min(relays, key=lambda row: float(row["kl_nats"]))
        row: Row = {"source": pair[0], "target": pair[1], "via": best["via"], "n": best["n"]}
        for metric in ("kl_nats", "context_carried", "key_r2", "value_r2"):
            row |= {f"direct_{metric}": direct[metric], f"relay_{metric}": best[metric]}
        steps = Route(*pair, best["via"]).steps
        row |= {"direct_bytes": weights_bytes[pair], "relay_bytes": sum(weights_bytes[s] for s in steps)}
        found.append(row)
    return found


def hubs(
    models: Sequence[str], rows: Sequence[Row], weights_bytes: Mapping[tuple[str, str], int]
) -> list[Row]:
    """What it saves and costs to keep the mappers to and from one model alone, and go through it.

    With hub h the pairs that h is one of go directly, all others by way of h: 2(n − 1) mappers in place of
    n(n − 1). Means are over all ordered pairs, each counting alike; of the context carried over those of
    which it is defined, `n_carried`.

    Args:
        models: of the fleet, at least three for a hub to mean anything.
        rows: of `route_row`, all routes.
        weights_bytes: of the mapper of each ordered pair.

    Returns:
        A row for no hub ("", every pair has its mapper) and one for each: {hub, n_mappers, weights_bytes,
        bytes_share, kl_nats, context_carried, n_carried, context_carried_lost, worst_source, worst_target,
        worst_context_carried}.
    """
    by_route = {Route(row["source"], row["target"], row["via"] or None): row for row in rows}
    found = []
    for hub in ["", *(models if len(models) > 2 else ())]:
        routes = [
            Route(source, target, hub if hub and hub not in (source, target) else None)
            for source in models
            for target in models
            if source != target
        ]
        used = {step for route in routes for step in route.steps}
        through = [by_route[route] for route in routes]
        carried = [row for row in through if math.isfinite(float(row["context_carried"]))]
        worst = min(carried, key=lambda row: float(row["context_carried"]), default=_NO_WORST)
        found.append(
            {
                "hub": hub,
                "n_mappers": len(used),
                "weights_bytes": sum(weights_bytes[step] for step in used),
                "bytes_share": sum(weights_bytes[step] for step in used) / sum(weights_bytes.values()),
                "kl_nats": fmean(float(row["kl_nats"]) for row in through),
                "context_carried": fmean([float(row["context_carried"]) for row in carried] or [math.nan]),
                "n_carried": len(carried),
                "worst_source": worst["source"],
                "worst_target": worst["target"],
                "worst_context_carried": worst["context_carried"],
            }
        )
    return [
        row | {"context_carried_lost": found[0]["context_carried"] - row["context_carried"]} for row in found
    ]


def _estimates(judged: Sequence[Judged], n_resamples: int, seed: int) -> dict[str, Estimate]:
    per_token = {"kl_nats": "kl", "top1_agreement": "agreement", "nll_nats": "nll"}
    estimates = {
        metric: statistics.mean([getattr(one, name) / one.n_tokens for one in judged])
        for metric, name in per_token.items()
    }
    estimates["context_carried"] = statistics.context_carried(
        [one.nll for one in judged],
        [one.nll_native for one in judged],
        [one.nll_none for one in judged],
        n_resamples=n_resamples,
        seed=seed,
    )
    for metric in ("key_r2", "value_r2"):
        estimates[metric] = statistics.mean([getattr(one, metric) for one in judged])
    return estimates
