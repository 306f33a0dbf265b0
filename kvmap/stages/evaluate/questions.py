"""Part of stage `evaluate`: multiple-choice questions, of the shipped world and of files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvmap.config.schema import EvaluationConfig
from kvmap.errors import KvmapError
from kvmap.evaluation.arms import available, unavailable
from kvmap.evaluation.choices import evaluate_items
from kvmap.evaluation.items import Item, jsonl_items, world_items
from kvmap.evaluation.summary import summarise_items
from kvmap.mappers import Mapper
from kvmap.stages.context import Context
from kvmap.stages.evaluate.book import answers_for, reuse_noted, time_noted
from kvmap.stages.evaluate.ledger import kept

PROTOCOL_VERSION = 1
"""Goes up when an answer to the same ids under the same settings becomes another."""


def run(ctx: Context, arms: Mapping[str, Mapper | KvmapError | None]) -> list[dict[str, Any]]:
    """Score every arm on the run's questions; each answer goes to table `items`, the metrics to the run."""
    if not (items := items_of(ctx)):
        return []
    evaluation = ctx.cfg.evaluation
    answers = {arm: answers_for(ctx, arm, _protocol(evaluation)) for arm in available(arms)}
    with (
        kept(ctx, "items") as ledger,
        reuse_noted(ctx, "questions", answers),
        time_noted(ctx, "questions") as watch,
    ):
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
            answers=answers,
            watch=watch,
            on_batch=lambda found: ledger.add(result.row() for result in found),
        )
        ledger.settle(result.row() for result in results)
    metrics, rows = summarise_items(
        results,
        unavailable=unavailable(arms),
        n_resamples=evaluation.bootstrap_samples,
        seed=evaluation.seed,
    )
    ctx.run.log(metrics)
    return rows


def _protocol(evaluation: EvaluationConfig) -> dict[str, Any]:
    """How questions are asked and scored; each item's own key says what is asked."""
    return {
        "name": "questions",
        "version": PROTOCOL_VERSION,
        "batch_size": evaluation.batch_size,
        "max_new_tokens": evaluation.max_new_tokens if evaluation.generate else 0,
    }


def items_of(ctx: Context) -> list[Item]:
    """The run's questions: of the shipped world, then of files."""
    evaluation = ctx.cfg.evaluation
    items: list[Item] = []
    if evaluation.world.n_per_kind:
        items += world_items(evaluation.world.seed, evaluation.world.n_per_kind, evaluation.world.kinds)
    folder = evaluation.jsonl.folder
    for path in [*evaluation.jsonl.paths, *([] if folder is None else [folder])]:
        items += jsonl_items(Path(path), evaluation.jsonl.limit, evaluation.jsonl.seed)
    return items
