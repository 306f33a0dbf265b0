"""Conversations to token ids, with one truncation for every arm and both models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from kvmap.data import prompt_prefix
from kvmap.errors import KvmapError
from kvmap.evaluation.conversation_items import Conversation

Ids: TypeAlias = tuple[int, ...]


@dataclass(frozen=True)
class EncodedConversation:
    """Token ids of one conversation, piece by piece.

    Each piece is encoded by itself, so that what a model has read stays the beginning of what it reads next,
    whatever is answered.

    Attributes:
        prefix: BOS, where the tokenizer adds it.
        story: what is left of the story.
        questions: of each turn, up to where the answer begins.
        gold: of each turn, its first gold answer as the text has it.
        n_truncated: tokens of the story cut off on its left, the same for every arm and both models.
    """

    prefix: Ids
    story: Ids
    questions: tuple[Ids, ...]
    gold: tuple[Ids, ...]
    n_truncated: int


def encode_conversation(
    tokenizer: Any, conversation: Conversation, max_tokens: int, *, max_new_tokens: int, feed_gold: bool
) -> EncodedConversation:
    """Encodes all pieces, and cuts the story so that the whole conversation fits, whatever is answered.

    An answer is counted with `max_new_tokens`, or with the gold answer's own length where that is longer and
    is what will be fed. So every arm reads the same story at every turn, and a cache of it stays good.

    Args:
        tokenizer: the one tokenizer of the pair.
        conversation: what to encode.
        max_tokens: room for story, questions and answers together: what both models take.
        max_new_tokens: of an answer.
        feed_gold: whether gold answers go into the text.

    Raises:
        KvmapError: questions and answers alone leave no room for a token of the story.
    """
    form, turns = conversation.form, conversation.turns
    prefix = tuple(prompt_prefix(tokenizer))
    story = encode(tokenizer, conversation.story)
    questions = tuple(
        encode(tokenizer, form.before_question + turn.question + form.before_answer) for turn in turns
    )
    gold = tuple(encode_answer(tokenizer, conversation, turn.answers[0]) for turn in turns)
    after = len(encode(tokenizer, form.after_answer)) if form.after_answer else 0
    rooms = [max(max_new_tokens + after, len(ids) if feed_gold else 0) for ids in gold]
    room = max_tokens - len(prefix) - sum(map(len, questions)) - sum(rooms)
    if room < 1:
        raise KvmapError(
            f"{conversation.task}, {conversation.id}: {len(turns)} questions and answers of up to "
            f"{max_new_tokens} tokens leave no room for the story within {max_tokens} tokens; lower "
            "max_turns or max_new_tokens"
        )
    n_truncated = max(0, len(story) - room)
    return EncodedConversation(prefix, story[n_truncated:], questions, gold, n_truncated)


def encode_answer(
    tokenizer: Any, conversation: Conversation, answer: str, max_tokens: int | None = None
) -> Ids:
    """An answer as it stands in the text: after a space, followed by what ends answers there.

    Args:
        tokenizer: of the pair.
        conversation: whose form the answer takes.
        answer: its text; a blank one adds nothing but the end.
        max_tokens: of the answer itself; None: all. Text that a model wrote can come back as more tokens.
    """
    said = " ".join(answer.split())
    ids = encode(tokenizer, f" {said}") if said else ()
    end = conversation.form.after_answer
    return ids[:max_tokens] + (encode(tokenizer, end) if end else ())


def encode(tokenizer: Any, text: str) -> Ids:
    """The ids of a piece of text, without BOS."""
    return tuple(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def joined(segments: Sequence[Ids]) -> Ids:
    """Segments as one."""
    return tuple(token for segment in segments for token in segment)
