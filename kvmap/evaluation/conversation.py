"""Conversations under every arm: who answers each turn, from whose cache, and what it is worth.

| arm | what answers | from |
|---|---|---|
| `target` | target | its own cache of the conversation, all along |
| `source` | source | its own cache, all along |
| `mapped`, `bias_only`, `raw`, `random` | target | the source's cache through the mapper |
| `no_context` | target | its own cache of the questions and answers, without the story |
| `re_prefill` | target | its own cache of the text whose cache `mapped` is handed at a turn |

When a cache is handed over, and of which text, `kvmap.evaluation.conversation_settings` says.

Every arm holds its own conversation: what it has answered stands in the text it reads next, unless gold
answers are fed. Conversations and arms are run one at a time, and a cache always grows by the same pieces, so
no answer depends on a batch, on the other arms, or on where an earlier run was interrupted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch

from kvmap.errors import KvmapError
from kvmap.evaluation.answers import CONTENT_CHARACTERS, Answers, item_key
from kvmap.evaluation.arms import (
    Arms,
    Batch,
    Progress,
    available,
    check_arms,
    check_something_maps,
    placed,
    target_hand_offs,
    tokenizer_of,
)
from kvmap.evaluation.conversation_carry import Carried, Taken, carried_text
from kvmap.evaluation.conversation_encoding import (
    EncodedConversation,
    Ids,
    encode,
    encode_answer,
    encode_conversation,
)
from kvmap.evaluation.conversation_items import Conversation
from kvmap.evaluation.conversation_settings import RE_PREFILL, ConversationSettings
from kvmap.evaluation.conversation_speakers import (
    HandedOver,
    OwnSpeaker,
    Reader,
    Replying,
    Said,
    Speaker,
    as_batch,
)
from kvmap.evaluation.coqa import score_answer
from kvmap.evaluation.limits import context_limit
from kvmap.mappers import Mapper
from kvmap.models.cache import KVCache
from kvmap.models.pair import ModelPair
from kvmap.progress import track
from kvmap.transfer import HandOff, TransferOptions, native

ANSWERS_VERSION = 2
"""Of how conversations are held; it is part of the key under which answers are kept."""


@dataclass(frozen=True)
class TurnResult:
    """One turn of one conversation under one arm.

    Attributes:
        task, id: of the conversation; results of different arms and runs are paired by (task, id, turn).
        arm: which arm.
        turn: from 1.
        answered_by: `source` or `target`.
        question: what was asked.
        answer: what was answered.
        f1, exact_match: see `kvmap.evaluation.coqa.score_answer`.
        n_context: tokens in the cache that the answer was made from, the question included.
        n_truncated: tokens of the story cut off on its left, the same for every arm.
        n_mapped: of the context, tokens whose columns are mapped.
        n_handed: at a hand-off, tokens of the text that is handed over; 0 at other turns.
        n_left_out: tokens of the conversation so far that the target does not go on from, less those of what
            stands before an answer that is carried alone.
        n_source_read: at a hand-off, tokens that the source read for it, see
            `kvmap.evaluation.conversation_carry.Taken`.
        content: hash of the story, the questions so far and the gold answers as text, by which runs know that
            they asked the same.
    """

    task: str
    id: str
    arm: str
    turn: int
    answered_by: str
    question: str
    answer: str
    f1: float
    exact_match: float
    n_context: int
    n_truncated: int
    n_mapped: int
    content: str
    n_handed: int = 0
    n_left_out: int = 0
    n_source_read: int = 0

    def row(self) -> dict[str, Any]:
        """The result as one row of a table."""
        return dict(self.__dict__)


def evaluate_conversations(
    pair: ModelPair,
    arms: Arms,
    conversations: Sequence[Conversation],
    *,
    options: TransferOptions,
    settings: ConversationSettings | None = None,
    max_tokens: int | None = None,
    answers: Mapping[str, Answers] | None = None,
    progress: Progress = track,
    on_conversation: Callable[[list[TurnResult]], None] | None = None,
) -> list[TurnResult]:
    """Holds every conversation under every arm.

    Args:
        pair: source and target, both in memory.
        arms: arm to mapper; see `kvmap.evaluation.arms`. Arms given as an error are left out here: report
            them with `unavailable(arms)`.
        conversations: each with at least `settings.first_turn` turns.
        options: how a cache is transferred.
        settings: how conversations are held; None: the defaults.
        max_tokens: room for a whole conversation; None: what both models take.
        answers: by arm, where whole conversations are kept; those kept already are not held again. An arm
            that is not named here holds all.
        progress: wraps the loop over conversations.
        on_conversation: called with the results of each conversation as they are had.

    Returns:
        By conversation, arm and turn, in the order given.

    Raises:
        KvmapError: an arm without the mapper it needs, a pair without a tokenizer, two conversations of one
            task and id, one that ends before the hand-off or does not fit, or nothing that would be mapped.
    """
    settings = settings or ConversationSettings()
    check_arms(arms)
    _check(conversations, settings)
    usable = available(arms)
    if not conversations or not usable:
        return []
    tokenizer = tokenizer_of(pair)
    limit = context_limit(pair) if max_tokens is None else min(max_tokens, context_limit(pair))
    encoded = [
        encode_conversation(
            tokenizer,
            conversation,
            limit,
            max_new_tokens=settings.max_new_tokens,
            feed_gold=settings.feed == "gold",
        )
        for conversation in conversations
    ]
    lengths = (len(one.prefix) + len(one.story) + len(one.questions[0]) for one in encoded)
    check_something_maps(usable, lengths, options)
    if settings.re_prefill:
        usable = {**usable, RE_PREFILL: None}
    found: list[TurnResult] = []
    kept = {arm: (answers or {}).get(arm) or Answers.in_memory() for arm in usable}
    hosts = _Hosts(pair, tokenizer, usable, options, settings)
    for conversation, ids in progress(
        list(zip(conversations, encoded, strict=True)), len(encoded), "evaluate conversations"
    ):
        table = _Table(hosts, conversation, ids)
        results = [result for arm in usable for result in table.results(arm, kept[arm])]
        found += results
        if on_conversation is not None:
            on_conversation(results)
    return found


def turn_content(conversation: Conversation, turn: int) -> str:
    """Hash of what is asked at a turn, and after which questions; the same for every model and tokenizer."""
    asked = [past.question for past in conversation.turns[:turn]]
    gold = conversation.turns[turn - 1].answers
    return item_key(conversation.story, asked, gold)[:CONTENT_CHARACTERS]


def _check(conversations: Sequence[Conversation], settings: ConversationSettings) -> None:
    seen: set[tuple[str, str]] = set()
    for conversation in conversations:
        name = (conversation.task, conversation.id)
        if name in seen:
            raise KvmapError(f"two conversations of task {name[0]!r} have the id {name[1]!r}: rename one")
        seen.add(name)
        if len(conversation.turns) < settings.first_turn:
            raise KvmapError(
                f"{name[0]}, {name[1]}: {len(conversation.turns)} turns, and the hand-off is at turn "
                f"{settings.turn}; leave it out, or lower turn"
            )


class _Hosts:
    """What all conversations of an evaluation share."""

    def __init__(
        self,
        pair: ModelPair,
        tokenizer: Any,
        arms: Mapping[str, Mapper | None],
        options: TransferOptions,
        settings: ConversationSettings,
    ) -> None:
        self.pair, self.tokenizer, self.options, self.settings = pair, tokenizer, options, settings
        self._arms = arms

    @cached_property
    def arms(self) -> dict[str, Mapper | None]:
        """The arms with their mappers where the target is; the target is loaded for it."""
        return placed(self._arms, self.pair.target)

    def maps(self, arm: str) -> bool:
        """Whether an arm reads the source's cache."""
        return self._arms[arm] is not None

    def handed(self, arm: str) -> bool:
        """Whether an arm's target is handed something, mapped or to read."""
        return self.maps(arm) or arm == RE_PREFILL

    def hand_over(self, arm: str, ids: Ids, cache: KVCache) -> HandOff:
        """The target's hand-off of the source's cache of these ids."""
        input_ids = as_batch(ids)
        batch = Batch((0,), input_ids, torch.ones_like(input_ids, dtype=torch.bool))
        arms = {arm: self.arms[arm]}
        hand_offs = target_hand_offs(self.pair.target, self.tokenizer, batch, arms, cache, self.options)
        return next(hand_off for _, hand_off in hand_offs)


class _Table:
    """One conversation and those who hold it; they share the source's reading of it."""

    def __init__(self, hosts: _Hosts, conversation: Conversation, ids: EncodedConversation) -> None:
        self.hosts, self.conversation, self.ids = hosts, conversation, ids
        stop = (*conversation.form.stop, *hosts.settings.stop)
        self.replying = Replying(hosts.tokenizer, hosts.settings.max_new_tokens, stop)

    @cached_property
    def source(self) -> OwnSpeaker:
        """The source model: it answers for its own arm and before a hand-off, and its cache is mapped."""
        return OwnSpeaker("source", Reader(self.hosts.pair.source), self.replying)

    @cached_property
    def shorter(self) -> Reader:
        """The source reading the text that is handed over where that is not the whole conversation."""
        return Reader(self.hosts.pair.source)

    @cached_property
    def lead(self) -> Ids:
        """What stands before an answer in the text."""
        text = self.conversation.form.before_answer
        return encode(self.hosts.tokenizer, text) if text else ()

    def results(self, arm: str, kept: Answers) -> Iterator[TurnResult]:
        """What the arm answers, from what is kept, or held now and kept."""
        key = item_key(ANSWERS_VERSION, self._content(arm))
        row = kept.get(key)
        if row is None:
            row = {"turns": [dict(said.__dict__) for said in self._converse(arm)]}
            kept.add({key: row})
        turns = zip(self.conversation.turns, row["turns"], strict=True)
        for number, (turn, said) in enumerate(turns, start=1):
            score = score_answer(turn.answers, said["answer"])
            yield TurnResult(
                task=self.conversation.task,
                id=self.conversation.id,
                arm=arm,
                turn=number,
                question=turn.question,
                f1=score.f1,
                exact_match=score.exact_match,
                n_truncated=self.ids.n_truncated,
                content=turn_content(self.conversation, number),
                **said,
            )

    def _content(self, arm: str) -> dict[str, Any]:
        """All that decides what the arm answers, but for its models and mapper."""
        settings = self.hosts.settings
        content: dict[str, Any] = {
            "opening": self._opening(arm),
            "questions": self.ids.questions,
            "gold": self.ids.gold[:-1] if settings.feed == "gold" else None,
            "after_answer": self.conversation.form.after_answer,
            "stop": self.replying.stop,
            "max_new_tokens": settings.max_new_tokens,
        }
        if self.hosts.handed(arm):
            content |= {"hand_off": settings.hand_off, "carry": settings.carry}
            content["lead"] = self.lead if settings.carry == "artifacts" else ()
        return content

    def _opening(self, arm: str) -> Ids:
        return self.ids.prefix + (() if arm == "no_context" else self.ids.story)

    def _converse(self, arm: str) -> Iterator[Said]:
        speaker, settings = self._speaker(arm), self.hosts.settings
        segments: list[Ids] = []
        fed = self._opening(arm)
        for question, gold in zip(self.ids.questions, self.ids.gold, strict=True):
            segments.append(fed + question)
            said = speaker.say(segments)
            yield said
            fed = gold
            if settings.feed == "generated":
                fed = encode_answer(
                    self.hosts.tokenizer, self.conversation, said.answer, settings.max_new_tokens
                )

    def _speaker(self, arm: str) -> Speaker:
        if arm == "source":
            return self.source
        target = self.hosts.pair.target
        if not self.hosts.handed(arm):
            return OwnSpeaker("target", Reader(target), self.replying)
        take = partial(self._take, arm)
        return HandedOver(self.source, target, take, self.replying, self.hosts.settings.hand_off)

    def _take(self, arm: str, segments: Sequence[Ids]) -> Taken:
        """The hand-off at the turn that the last segment asks."""
        carried = self._carried(segments)
        if arm == RE_PREFILL:
            return Taken(native(self.hosts.pair.target, as_batch(carried.ids)), len(carried.ids), 0)
        whole = self.hosts.settings.carry == "everything"
        reader = self.source.reader if whole else self.shorter
        hand_off = self.hosts.hand_over(arm, carried.ids, reader.read(carried.segments).kv)
        n_known = 0 if reader.anew else carried.n_known
        n_asked = len(carried.ids) - self.hosts.options.hold_back
        return Taken(hand_off, len(carried.ids), max(0, n_asked - n_known))

    def _carried(self, segments: Sequence[Ids]) -> Carried:
        opening, question = self._opening("mapped"), self.ids.questions[len(segments) - 1]
        return carried_text(self.hosts.settings.carry, segments, opening, question, self.lead)
