"""The texts that a run's diagnostics read: held-out sequences, those of the evaluation, its questions."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kvmap.diagnostics.texts import Text, evenly
from kvmap.evaluation.encoding import encode_item
from kvmap.evaluation.limits import context_limit
from kvmap.stages.context import Context
from kvmap.stages.evaluate import prefix_perplexity, questions


def texts_of(ctx: Context) -> list[Text]:
    """Those of `diagnostics.texts` that the run has, up to `diagnostics.n_sequences` of each.

    What it has not is noted in run.json, as `diagnostics.left_out`, with the setting that would give it.
    """
    found, missing = [], {}
    for name in ctx.cfg.diagnostics.texts:
        text, reason = READERS[name](ctx), LACKING.get(name, "")
        if text is None:
            missing[name] = reason
        else:
            found.append(text)
    read = {text.name: len(text.contexts) for text in found}
    ctx.run.note(diagnostics={"read": read, "left_out": missing})
    return found


def _held_out(ctx: Context) -> Text | None:
    numbers = ctx.calibrated.splits["held_out"][: ctx.cfg.diagnostics.n_sequences]
    return Text.of_sequences("held_out", ctx.tokens.input_ids[numbers])


def _evaluation(ctx: Context) -> Text | None:
    if not ctx.cfg.evaluation.perplexity.n_sequences:
        return None
    blocks = prefix_perplexity.blocks_of(ctx)
    return Text.of_sequences("evaluation", blocks.input_ids[: ctx.cfg.diagnostics.n_sequences])


def _questions(ctx: Context) -> Text | None:
    """Of the contexts, some of each task, cut where the evaluation would cut them."""
    items = questions.items_of(ctx)
    if not items:
        return None
    evaluation, limit = ctx.cfg.evaluation, context_limit(ctx.pair)
    room = limit if evaluation.max_tokens is None else min(evaluation.max_tokens, limit)
    reserve = evaluation.max_new_tokens if evaluation.generate else 0
    chosen = [items[number] for number in evenly(len(items), ctx.cfg.diagnostics.n_sequences)]
    encoded = [encode_item(ctx.pair.tokenizer, item, room, reserve=reserve) for item in chosen]
    return Text.of_contexts("questions", [item.context_ids for item in encoded])


READERS: Mapping[str, Callable[[Context], Text | None]] = {
    "held_out": _held_out,
    "evaluation": _evaluation,
    "questions": _questions,
}
LACKING = {
    "evaluation": "evaluation.perplexity.n_sequences=0: the run has no sequences of prefix perplexity",
    "questions": "evaluation.world.n_per_kind=0, evaluation.jsonl.paths=[]: the run asks no questions",
}
