"""Part of stage `evaluate`: what the run's way of handing over costs, beside what its caches are worth."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from kvmap.benchmark.handback import handback_rows
from kvmap.errors import KvmapError
from kvmap.evaluation.arms import available
from kvmap.mappers import Mapper
from kvmap.metrics import Metric
from kvmap.stages.context import Context

SHARES = ("layer_token_share", "flop_share", "time_share")


def run(ctx: Context, arms: Mapping[str, Mapper | KvmapError | None]) -> list[dict[str, Any]]:
    """Count and time the hand-off: table `hand_back`, and its shares of re-prefill as metrics."""
    settings, mapper = ctx.cfg.evaluation.cost, available(arms).get("mapped")
    if not settings.lengths or mapper is None:
        return []
    table = handback_rows(
        ctx.pair,
        mapper,
        settings.lengths,
        ctx.options,
        batch_size=settings.batch_size,
        repeats=settings.repeats,
        warmup=settings.warmup,
        seed=settings.seed,
    )
    ctx.run.table("hand_back", table)
    rows = [
        {
            "task": f"hand_back_{row['length']}",
            "arm": "mapped",
            "metric": share,
            "value": row[share],
            "n": row["n_repeats"] if share == "time_share" else None,
            "standard_error": math.nan,
            "low": math.nan,
            "high": math.nan,
            "note": "",
        }
        for row in table
        for share in SHARES
    ]
    ctx.run.log(
        {f"evaluate/{row['task']}/mapped/{row['metric']}": Metric(row["value"], row["n"]) for row in rows}
    )
    return rows
