"""Judges the settings of `evaluation`: tasks, conversations, relays, long contexts, room for sequences."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kvmap.config.judging import is_integer, unknown_keys, unknown_name
from kvmap.config.schema import (
    CARRIES,
    CONVERSATION_MODES,
    FEEDS,
    NEEDLE_KINDS,
    PACKINGS,
    Config,
    ConversationConfig,
    TaskConfig,
)


def evaluation_mistakes(cfg: Config) -> Iterator[str]:
    """Every mistake in what is evaluated, as one line each."""
    yield from _nothing_asked(cfg)
    yield from _perplexity_room(cfg)
    yield from _conversation(cfg)
    yield from _relay(cfg)
    yield from _long_context(cfg)
    yield from _long_context_lists(cfg)
    yield from _tasks(cfg)


def _nothing_asked(cfg: Config) -> Iterator[str]:
    """A stage that would do nothing."""
    evaluation = cfg.evaluation
    asked = (
        evaluation.world.n_per_kind,
        evaluation.jsonl.paths,
        evaluation.jsonl.folder is not None,
        evaluation.perplexity.n_sequences,
        evaluation.conversation.limit != 0,
        evaluation.tasks,
        evaluation.cost.lengths,
    )
    long_context_asked = evaluation.long_context.n_needles or evaluation.long_context.n_sequences
    if "evaluate" in cfg.stages and not any(asked) and not long_context_asked:
        yield (
            "stages names evaluate, but evaluation asks nothing: set evaluation.world.n_per_kind, "
            "evaluation.jsonl.paths, evaluation.tasks, evaluation.perplexity.n_sequences, "
            "evaluation.conversation.limit or evaluation.cost.lengths, take evaluation=long, or leave the "
            "stage out"
        )


def _perplexity_room(cfg: Config) -> Iterator[str]:
    """Sequences of perplexity and relay are not cut, so they have to fit what a context may be at most."""
    evaluation, perplexity = cfg.evaluation, cfg.evaluation.perplexity
    length = perplexity.prefix_tokens + perplexity.continuation_tokens
    asked = "evaluate" in cfg.stages and perplexity.n_sequences > 0
    if asked and evaluation.max_tokens is not None and length > evaluation.max_tokens:
        yield (
            f"evaluation.max_tokens={evaluation.max_tokens}: evaluation.perplexity.prefix_tokens + "
            f"continuation_tokens = {length} tokens do not fit, and its sequences are not cut; raise the "
            "one, lower the others, or set evaluation.perplexity.n_sequences=0"
        )


def _tasks(cfg: Config) -> Iterator[str]:
    """The entries of `evaluation.tasks`, and the folders that questions come from."""
    evaluation, titles = cfg.evaluation, list[str]()
    for place, entry in enumerate(evaluation.tasks):
        key = f"evaluation.tasks[{place}]"
        settings: Any = {"name": entry} if isinstance(entry, str) else entry
        if not isinstance(settings, Mapping) or not isinstance(settings.get("name"), str):
            yield f"{key}={entry!r}: expected a task's name, or settings with name=<task>"
            continue
        yield from unknown_keys(settings, TaskConfig, f"{key}.")
        for name, low in (("num_fewshot", 0), ("limit", 1)):
            value = settings.get(name)
            if value is not None and not (is_integer(value) and value >= low):
                yield f"{key}.{name}={value!r}: expected a whole number of at least {low}, or null"
        title = str(settings.get("label") or Path(settings["name"]).stem)
        if not title or "/" in title:
            yield f"{key}.label={title!r}: expected a name without slashes, under which results are counted"
        titles.append(title)
    for title in dict.fromkeys(titles):
        if titles.count(title) > 1:
            yield f"evaluation.tasks: {title!r} stands {titles.count(title)} times; give each its own label"
    if evaluation.include_path is not None and not Path(evaluation.include_path).expanduser().is_dir():
        yield f"evaluation.include_path={evaluation.include_path}: no such folder; expected one of YAML tasks"
    folder = evaluation.jsonl.folder
    if folder == "":
        yield "evaluation.jsonl.folder is not set: set evaluation.jsonl.folder=<folder of *.jsonl files>"
    elif folder is not None and not Path(folder).expanduser().is_dir():
        yield f"evaluation.jsonl.folder={folder}: no such folder; expected one of *.jsonl files"


def _long_context_lists(cfg: Config) -> Iterator[str]:
    """Which lengths, depths and kinds of facts `evaluation.long_context` asks about."""
    long, key = cfg.evaluation.long_context, "evaluation.long_context"
    if not long.multiples or not all(0 < multiple < math.inf for multiple in long.multiples):
        yield f"{key}.multiples={list(long.multiples)}: expected one or more finite numbers above 0"
    if not long.depths or not all(0 <= depth <= 1 for depth in long.depths):
        yield f"{key}.depths={list(long.depths)}: expected one or more shares between 0 and 1"
    for name in ("multiples", "depths", "kinds"):
        if len(set(getattr(long, name))) < len(getattr(long, name)):
            yield f"{key}.{name}={list(getattr(long, name))}: a value stands twice; name each once"
    if not long.kinds:
        yield f"{key}.kinds=[]: expected at least one of {', '.join(NEEDLE_KINDS)}"
    for kind in long.kinds:
        if kind not in NEEDLE_KINDS:
            yield unknown_name(f"{key}.kinds", kind, NEEDLE_KINDS)


def _long_context(cfg: Config) -> Iterator[str]:
    """How much `evaluation.long_context` asks."""
    long, key = cfg.evaluation.long_context, "evaluation.long_context"
    for name in ("n_needles", "n_sequences", "growth_tokens"):
        if getattr(long, name) < 0:
            yield f"{key}.{name}={getattr(long, name)}: expected 0, which is off, or more"
    if long.continuation_tokens < 2 and long.continuation_tokens != 0:
        yield (
            f"{key}.continuation_tokens={long.continuation_tokens}: expected 0, which is off, or at least 2, "
            "of which the second is the first that is scored"
        )
    if long.packing not in PACKINGS:
        yield unknown_name(f"{key}.packing", long.packing, PACKINGS)
    if not 0 < long.growth_multiple < math.inf:
        yield f"{key}.growth_multiple={long.growth_multiple}: expected a finite number above 0"
    if long.growth_windows < 1 or 0 < long.growth_tokens < long.growth_windows:
        yield (
            f"{key}.growth_windows={long.growth_windows}: expected at least 1, and no more than "
            f"{key}.growth_tokens={long.growth_tokens}"
        )


def _conversation(cfg: Config) -> Iterator[str]:
    """What `evaluation.conversation` asks for."""
    talk, key = cfg.evaluation.conversation, "evaluation.conversation"
    for name, known in (("mode", CONVERSATION_MODES), ("feed", FEEDS), ("carry", CARRIES)):
        if getattr(talk, name) not in known:
            yield unknown_name(f"{key}.{name}", getattr(talk, name), known)
    for name, low in (("limit", 0), ("turn", 1), ("max_turns", 1), ("max_new_tokens", 1)):
        value = getattr(talk, name)
        if value is not None and value < low:
            yield f"{key}.{name}={value}: expected at least {low}"
    if talk.path is not None and not Path(talk.path).expanduser().is_file():
        yield f"{key}.path={talk.path}: no such file; expected one of CoQA's, or of JSON lines"
    if talk.path is not None and talk.limit == 0:
        yield f"{key}.limit=0: no conversation of {key}.path would be held; give a number, or null for all"
    if talk.path is None and talk.limit is None:
        yield f"{key}.limit=null: the shipped world has no last conversation; give a number, or {key}.path"
    if talk.mode == "at_turn" and talk.max_turns is not None and talk.turn > talk.max_turns:
        yield f"{key}.turn={talk.turn}: comes after the last turn, {key}.max_turns={talk.max_turns}; lower it"
    yield from _hand_off(talk)
    if talk.limit != 0 and cfg.evaluation.sequential and "evaluate" in cfg.stages:
        yield (
            f"evaluation.sequential=true: in a conversation ({key}.limit={talk.limit}) the two models take "
            f"turns, and both are held in memory; set it to false, or {key}.limit=0"
        )


def _hand_off(talk: ConversationConfig) -> Iterator[str]:
    """What is of one hand-off alone."""
    key = "evaluation.conversation"
    if talk.carry in CARRIES and talk.carry != "everything":
        if talk.mode == "every_turn":
            yield (
                f"{key}.carry={talk.carry}: at every turn the whole conversation is handed over; set "
                f"{key}.mode=at_turn and {key}.turn to 2 or more, or {key}.carry=everything"
            )
        elif talk.mode == "at_turn" and talk.turn == 1:
            yield (
                f"{key}.carry={talk.carry}: before {key}.turn=1 nothing is left out; set it to 2 or "
                f"more, or {key}.carry=everything"
            )
    if talk.re_prefill and talk.mode == "every_turn":
        yield (
            f"{key}.re_prefill=true: at every turn that is the arm target; set {key}.mode=at_turn, or leave "
            "it false"
        )


def _relay(cfg: Config) -> Iterator[str]:
    """What `evaluation.relay` asks for."""
    relay, key = cfg.evaluation.relay, "evaluation.relay"
    if relay.hops < 0:
        yield f"{key}.hops={relay.hops}: expected at least 0, which skips the relay"
    if relay.reverse_mapper is not None and not Path(relay.reverse_mapper).expanduser().is_dir():
        yield f"{key}.reverse_mapper={relay.reverse_mapper}: no such folder; expected a mapper's artifact"
    if relay.hops < 1 or "evaluate" not in cfg.stages:
        return
    if not cfg.evaluation.perplexity.n_sequences:
        yield f"{key}.hops={relay.hops}: relays the sequences of perplexity; set its n_sequences"
    if cfg.rope.strategy == "no_rerotate":
        yield f"{key}.hops={relay.hops}: a cache of rope.strategy=no_rerotate cannot be handed on; take strip"
    if cfg.evaluation.sequential or cfg.calibration.sequential:
        yield (
            f"{key}.hops={relay.hops}: the two models take turns, and both are held in memory; set "
            f"evaluation.sequential and calibration.sequential to false, or {key}.hops=0"
        )
