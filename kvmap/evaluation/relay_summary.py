"""A relay to numbers: one line a hop, with how much worse it is than the holder's first."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any, TypeAlias

import numpy as np

from kvmap.evaluation import statistics
from kvmap.evaluation.relay import HopResult
from kvmap.evaluation.statistics import Estimate
from kvmap.metrics import Metric

Row: TypeAlias = dict[str, Any]


def summarise_relay(
    results: Iterable[HopResult], *, n_resamples: int = statistics.N_RESAMPLES, seed: int = 0
) -> tuple[dict[str, Metric], list[Row], list[Row]]:
    """Every measure after every hop; intervals are over sequences.

    * kl_nats, top1_agreement, nll_nats: per scored token, of the holder on the relayed cache, against the
      holder on its own
    * context_carried: (NLL_none − NLL) / (NLL_none − NLL_native), all of the holder
    * key_r2, value_r2: of the cache, see `kvmap.evaluation.relay.cache_r2`
    * kl_over_first: KL(hop) / KL(the holder's first hop): 1 where going round again adds nothing

    Args:
        results: of `evaluate_relay`.
        n_resamples: bootstrap resamples.
        seed: of the bootstrap.

    Returns:
        Metrics by `evaluate/relay_<hop>/mapped/<metric>`; rows {task, arm, metric, value, n, standard_error,
        low, high, note}; and one row a hop {hop, holder, n, <metric>, <metric>_low, <metric>_high, ...}.
    """
    by_hop: dict[int, list[HopResult]] = {}
    for result in results:
        by_hop.setdefault(result.hop, []).append(result)
    rows, table = [], []
    for hop, found in sorted(by_hop.items()):
        estimates = _estimates(found, by_hop[2 - hop % 2], n_resamples, seed)
        line: Row = {"hop": hop, "holder": found[0].holder, "n": len(found)}
        for metric, estimate in estimates.items():
            rows.append({"task": f"relay_{hop}", "arm": "mapped", "metric": metric, **asdict(estimate)})
            line |= {metric: estimate.value, f"{metric}_low": estimate.low, f"{metric}_high": estimate.high}
        table.append(line)
    return {_key(row): _metric(row) for row in rows}, rows, table


def _estimates(
    found: Sequence[HopResult], first: Sequence[HopResult], n_resamples: int, seed: int
) -> dict[str, Estimate]:
    """The measures of one hop, given the same sequences after the holder's first."""
    counts = np.array([result.n_tokens for result in found], dtype=np.float64)
    kl = [result.kl for result in found]
    per_token = {
        "kl_nats": kl,
        "top1_agreement": [result.agreement for result in found],
        "nll_nats": [result.nll for result in found],
    }
    estimates = {metric: statistics.mean(np.array(sums) / counts) for metric, sums in per_token.items()}
    estimates["context_carried"] = statistics.context_carried(
        [result.nll for result in found],
        [result.nll_native for result in found],
        [result.nll_none for result in found],
        n_resamples=n_resamples,
        seed=seed,
    )
    for metric in ("key_r2", "value_r2"):
        estimates[metric] = statistics.mean([getattr(result, metric) for result in found])
    columns = [kl, [result.kl for result in first]]
    what = "the KL after the holder's first hop"
    estimates["kl_over_first"] = statistics.paired_ratio(columns, (0,), (1,), what, n_resamples, seed)
    return estimates


def _key(row: Row) -> str:
    return f"evaluate/{row['task']}/{row['arm']}/{row['metric']}"


def _metric(row: Row) -> Metric:
    error = row["standard_error"]
    return Metric(row["value"], row["n"], None if math.isnan(error) else error)
