"""Questions and stories as the shipped world's models were taught them, from how people type them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Protocol

from kvmap.errors import KvmapError
from kvmap.evaluation.conversation_items import QUESTION_AND_ANSWER, WORLD_FORM, Form, world_conversations
from kvmap.zoo.words import OBJECTS, PEOPLE, QUESTIONS, vocabulary

SUGGESTIONS = 5
_MARK, _LEAD = "question :", "answer :"


class NotUnderstood(KvmapError):
    """A question or a story that the pair's models have no words for."""


class Wording(Protocol):
    """How stories and questions of a pair are written.

    Attributes:
        form: of its conversations.
    """

    form: Form

    def story(self, text: str) -> str:
        """A typed story as the models read it."""

    def question(self, text: str) -> str:
        """A typed question as the models read it."""


class PlainWording:
    """Text as it was typed, in the form of lm-eval's CoQA."""

    form = QUESTION_AND_ANSWER

    def story(self, text: str) -> str:
        """See `Wording.story`."""
        return text.strip()

    def question(self, text: str) -> str:
        """See `Wording.question`."""
        return text.strip()


class WorldWording:
    """Lower-case words of the shipped world, each apart; questions with the lead to their answer."""

    form = WORLD_FORM

    def story(self, text: str) -> str:
        """See `Wording.story`.

        Raises:
            NotUnderstood: naming the words that the world does not have.
        """
        return " ".join(_words(text))

    def question(self, text: str) -> str:
        """See `Wording.question`: `where is anna` → `question : where is anna ? answer : anna is in`.

        Raises:
            NotUnderstood: a question of another form, or words that the world does not have.
        """
        words = [word for word in _words(text) if word != "?"]
        if words[:2] == _MARK.split():
            return " ".join(_words(text))
        asked = " ".join(words)
        for form in QUESTIONS.values():
            pattern = re.escape(plain_question(form).removesuffix(" ?")).replace(r"\{subject\}", "(.+)")
            if match := re.fullmatch(pattern, asked):
                return form.format(subject=_subject(match[1]))
        known = ", ".join(repr(plain_question(form)) for form in QUESTIONS.values())
        raise NotUnderstood(f"{text.strip()!r}: the shipped models were taught the questions {known} alone")


def wording_of(*model_ids: str) -> Wording:
    """The world's own wording for shipped models, any other's as it is typed."""
    return WorldWording() if all(name.startswith("zoo:") for name in model_ids) else PlainWording()


def plain_question(question: str) -> str:
    """`question : where is anna ? answer : anna is in` → `where is anna ?`."""
    return question.removeprefix(_MARK).partition(_LEAD)[0].strip()


def world_stories(seed: int) -> Iterator[tuple[str, dict[str, str]]]:
    """Stories of the world's evaluation split, each with questions as models read them and the right answers.

    Args:
        seed: of `kvmap.evaluation.conversation_items.world_conversations`, whose stories these are.
    """
    number = 0
    while True:
        conversation = world_conversations(seed, number + 1, SUGGESTIONS)[number]
        yield conversation.story, {turn.question: turn.answers[0] for turn in conversation.turns}
        number += 1


def _words(text: str) -> list[str]:
    words = re.findall(r"\w+|[^\w\s]", text.lower())
    strange = sorted(set(words) - set(vocabulary()))
    if strange:
        raise NotUnderstood(
            f"the shipped world has no word {', '.join(map(repr, strange))}: its {len(vocabulary())} words "
            "are in kvmap/zoo/words.py; /story without text tells a story that uses them"
        )
    if not words:
        raise NotUnderstood("no words: expected a sentence of the shipped world")
    return words


def _subject(text: str) -> str:
    """`anna`; of things `the key`, with or without the article."""
    name = text.removeprefix("the ")
    if name not in PEOPLE + OBJECTS:
        raise NotUnderstood(
            f"{text!r} is nobody and nothing of the shipped world. People: {', '.join(PEOPLE)}; "
            f"things: {', '.join(OBJECTS)}"
        )
    return name if name in PEOPLE else f"the {name}"
