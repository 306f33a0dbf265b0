"""Part of stage `evaluate`: multiple-choice questions, of the shipped world and of files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvmap.errors import KvmapError
from kvmap.evaluation.arms import unavailable
from kvmap.evaluation.choices import evaluate_items
from kvmap.evaluation.items import Item, jsonl_items, world_items
from kvmap.evaluation.summary import summarise_items
from kvmap.mappers import Mapper
from kvmap.stages.context import Context
from kvmap.stages.evaluate.ledger import kept


def run(ctx: Context, arms: Mapping[str, Mapper | KvmapError | None]) -> list[dict[str, Any]]:
    """Score every arm on the run's questions; each answer goes to table `items`, the metrics to the run."""
    if not (items := _items(ctx)):
        return []
    evaluation = ctx.cfg.evaluation
    with kept(ctx, "items") as ledger:
        results = evaluate_items(
            ctx.pair,
            arms,
            items,
            options=ctx.options,
            batch_size=evaluation.batch_size,
            max_tokens=evaluation.max_tokens,
            generate=evaluation.generate,
            max_new_tokens=evaluation.max_new_tokens,
            stop=evaluation.stop,
            sequential=evaluation.sequential,
            on_batch=lambda found: ledger.add(result.row() for result in found),
        )
    metrics, rows = summarise_items(
        results,
        unavailable=unavailable(arms),
        n_resamples=evaluation.bootstrap_samples,
        seed=evaluation.seed,
    )
    ctx.run.log(metrics)
    return rows


def _items(ctx: Context) -> list[Item]:
    evaluation = ctx.cfg.evaluation
    items: list[Item] = []
    if evaluation.world.n_per_kind:
        items += world_items(evaluation.world.seed, evaluation.world.n_per_kind, evaluation.world.kinds)
    for path in evaluation.jsonl.paths:
        items += jsonl_items(Path(path), evaluation.jsonl.limit, evaluation.jsonl.seed)
    return items
