"""Judges `pair.alignment`, and what cannot be asked of two models with different tokenizers."""

from __future__ import annotations

from collections.abc import Iterator

from kvmap.config.judging import unknown_name
from kvmap.config.schema import ALIGNMENT_RULES, ALIGNMENTS, Config


def alignment_mistakes(cfg: Config) -> Iterator[str]:
    """Every mistake in how tokenizers are aligned, as one line each."""
    pair, evaluation = cfg.pair, cfg.evaluation
    if pair.alignment not in ALIGNMENTS:
        yield unknown_name("pair.alignment", pair.alignment, ALIGNMENTS)
    if pair.alignment_rule not in ALIGNMENT_RULES:
        yield unknown_name("pair.alignment_rule", pair.alignment_rule, ALIGNMENT_RULES)
    if pair.alignment != "spans":
        return
    stated = "pair.alignment=spans: the source reads with a tokenizer of its own"
    if "benchmark" in cfg.stages:
        yield f"{stated}, and ids drawn at random, which benchmark times, have no text; leave that stage out"
    if "evaluate" not in cfg.stages:
        return
    if "source" in evaluation.arms:
        arms = ",".join(arm for arm in evaluation.arms if arm != "source")
        yield f"{stated}, so it cannot score the target's tokens; set evaluation.arms=[{arms}]"
    if evaluation.conversation.limit != 0:
        yield f"{stated}, and cannot go on from the target's; set evaluation.conversation.limit=0"
    if evaluation.relay.hops != 0:
        yield f"{stated}, and cannot take the target's cache back; set evaluation.relay.hops=0"
