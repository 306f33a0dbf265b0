"""Stage `evaluate`: what a mapped cache is worth, held against the target, the source and controls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from kvmap.errors import KvmapError
from kvmap.evaluation.arms import unavailable
from kvmap.mappers import Mapper
from kvmap.stages.build import build_arms
from kvmap.stages.context import Context
from kvmap.stages.evaluate import conversation, cost, long_context, prefix_perplexity, questions, relay, tasks

Part: TypeAlias = Callable[[Context, Mapping[str, Mapper | KvmapError | None]], list[dict[str, Any]]]

PARTS: tuple[Part, ...] = (
    questions.run,
    tasks.run,
    prefix_perplexity.run,
    long_context.run,
    conversation.run,
    relay.run,
    cost.run,
)
"""Each does nothing where the configuration asks nothing of it, and returns its rows of table `arms`."""


def run(ctx: Context) -> None:
    """Score every arm on the same material, part by part; what one part found is kept if the next fails."""
    arms = build_arms(ctx)
    if isinstance(arms.get("mapped"), Mapper):
        ctx.run.note(artifacts={"mapper": ctx.mapper_artifact.path.name})
    rows: list[dict[str, Any]] = []
    for part in PARTS:
        if found := part(ctx, arms):
            rows += found
            ctx.run.table("arms", rows)
    ctx.run.table("arms", rows)
    if reasons := unavailable(arms):
        ctx.run.note(unavailable_arms=reasons)
