"""Part of stage `evaluate`: conversations, of the shipped world and of CoQA's files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvmap.errors import KvmapError
from kvmap.evaluation.arms import available, unavailable
from kvmap.evaluation.conversation import TurnResult, evaluate_conversations
from kvmap.evaluation.conversation_carry import carry_rows, flop_shares
from kvmap.evaluation.conversation_items import Conversation, world_conversations
from kvmap.evaluation.conversation_settings import RE_PREFILL, ConversationSettings
from kvmap.evaluation.conversation_summary import drift_rows, summarise_conversations
from kvmap.evaluation.coqa import coqa_conversations
from kvmap.figures.conversation import conversation_lines
from kvmap.mappers import Mapper
from kvmap.metrics import Metric
from kvmap.stages.context import Context
from kvmap.stages.evaluate.book import answers_for, reuse_noted
from kvmap.stages.evaluate.ledger import kept

WORLD_TURNS = 8
PROTOCOL = {"name": "conversation", "version": 1}
"""What a conversation's own key does not say; the version goes up when the same key means other answers."""


def run(ctx: Context, arms: Mapping[str, Mapper | KvmapError | None]) -> list[dict[str, Any]]:
    """Hold the run's conversations under every arm: tables `conversations`, `drift`, `carry`, a figure."""
    if ctx.cfg.evaluation.conversation.limit == 0:
        return []
    evaluation, settings = ctx.cfg.evaluation, _settings(ctx)
    conversations = _conversations(ctx, settings)
    asked = [*available(arms), *([RE_PREFILL] if settings.re_prefill else [])]
    answers = {arm: answers_for(ctx, arm, PROTOCOL) for arm in asked}
    with kept(ctx, "conversations") as ledger, reuse_noted(ctx, "conversation", answers):
        results = evaluate_conversations(
            ctx.pair,
            arms,
            conversations,
            options=ctx.options,
            settings=settings,
            max_tokens=evaluation.max_tokens,
            answers=answers,
            on_conversation=lambda found: ledger.add(result.row() for result in found),
        )
    metrics, rows = summarise_conversations(
        results,
        first_turn=settings.first_turn,
        unavailable=unavailable(arms),
        n_resamples=evaluation.bootstrap_samples,
        seed=evaluation.seed,
    )
    drifts = drift_rows(results)
    ctx.run.table("drift", drifts)
    if settings.hand_off is not None:
        _note_carry(ctx, arms, results, settings)
    ctx.run.log(metrics)
    ctx.run.figure("conversations", conversation_lines(drifts, rows, settings.first_turn))
    return rows


def _note_carry(
    ctx: Context,
    arms: Mapping[str, Mapper | KvmapError | None],
    results: Sequence[TurnResult],
    settings: ConversationSettings,
) -> None:
    """What the one hand-off took: table `carry`, and its numbers as metrics of each arm."""
    mappers = available(arms)

    def flops(arm: str, result: TurnResult) -> tuple[float, float]:
        return flop_shares(ctx.pair, mappers.get(arm), result, ctx.options)

    rows = carry_rows(results, settings.turn, settings.carry, flops)
    ctx.run.table("carry", rows)
    measures = ("mapped_tokens", "source_tokens", "target_tokens", "target_flop_share", "source_flop_share")
    ctx.run.log(
        {
            f"evaluate/{row['task']}/{row['arm']}/hand_off_{name}": Metric(row[name], row["n"])
            for row in rows
            for name in measures
        }
    )


def _settings(ctx: Context) -> ConversationSettings:
    talk = ctx.cfg.evaluation.conversation
    return ConversationSettings(
        mode=talk.mode,
        turn=talk.turn,
        carry=talk.carry,
        re_prefill=talk.re_prefill,
        feed=talk.feed,
        max_new_tokens=talk.max_new_tokens,
        stop=tuple(ctx.cfg.evaluation.stop),
    )


def _conversations(ctx: Context, settings: ConversationSettings) -> list[Conversation]:
    """Those that are long enough for the hand-off, of which the run notes how many there are."""
    talk = ctx.cfg.evaluation.conversation
    if talk.path is None:
        n_turns = WORLD_TURNS if talk.max_turns is None else talk.max_turns
        found = world_conversations(talk.seed, talk.limit or 0, max(n_turns, settings.first_turn))
    else:
        found = coqa_conversations(Path(talk.path), talk.limit, talk.seed, talk.max_turns)
    long_enough = [one for one in found if len(one.turns) >= settings.first_turn]
    if not long_enough:
        raise KvmapError(
            f"evaluation.conversation.turn={talk.turn}: the longest of {len(found)} conversations has "
            f"{max(len(one.turns) for one in found)} turns; lower it"
        )
    counts = {"n": len(long_enough), "n_too_short": len(found) - len(long_enough)}
    ctx.run.note(conversation=counts)
    return long_enough
