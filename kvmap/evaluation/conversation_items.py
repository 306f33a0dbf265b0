"""Conversations: a story, and questions about it that are asked one after the other."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from kvmap.errors import KvmapError
from kvmap.zoo import world

WORLD_TASK = "world_conversation"
WORLD_WORDS = (100, 200)
TRIES, TRIES_PER_TURN = 500, 20


@dataclass(frozen=True)
class Form:
    """How a conversation is written: story, then for each turn `before_question` + question +
    `before_answer` + a space and the answer + `after_answer`.

    Attributes:
        before_question: as in lm-eval's CoQA.
        before_answer: where the model is asked to go on.
        after_answer: what ends an answer in the text; it is not part of the answer.
        stop: where a generated answer ends, besides the end of text.
    """

    before_question: str = "\n\nQ: "
    before_answer: str = "\n\nA:"
    after_answer: str = ""
    stop: tuple[str, ...] = ("\n",)


QUESTION_AND_ANSWER = Form()
WORLD_FORM = Form(before_question=" ", before_answer="", after_answer=" .", stop=("\n", " ."))


@dataclass(frozen=True)
class Turn:
    """A question and what people answered; the first answer is what stands in the text where gold is fed."""

    question: str
    answers: tuple[str, ...]


@dataclass(frozen=True)
class Conversation:
    """One story with its questions in their order.

    Attributes:
        task: what its scores are counted under.
        id: tells it from the other conversations of its task, in every run.
        story: what the questions are about.
        turns: at least one.
        form: how it is written.
    """

    task: str
    id: str
    story: str
    turns: tuple[Turn, ...]
    form: Form = QUESTION_AND_ANSWER

    def first(self, n_turns: int | None) -> Conversation:
        """Its first turns; None: all."""
        return replace(self, turns=self.turns[:n_turns])


def world_conversations(seed: int, n: int, n_turns: int) -> list[Conversation]:
    """Several different questions about one context of the shipped world's evaluation split, in turn.

    They stand in the text as the world's own documents have them: `question : … ? answer : … .`

    Args:
        seed: which conversations; with a conversation's number it fixes it.
        n: how many.
        n_turns: questions in each.

    Raises:
        KvmapError: more questions than a story of the world has answers for.
    """
    return [
        Conversation(WORLD_TASK, f"{seed}/{number}", story, turns, WORLD_FORM)
        for number in range(n)
        for story, turns in [_told(random.Random(f"conversation/{seed}/{number}"), n_turns)]
    ]


def _told(rng: random.Random, n_turns: int) -> tuple[str, tuple[Turn, ...]]:
    """A story of the evaluation split that has so many questions, and the questions."""
    for _ in range(TRIES):
        story = world.Story(rng, n_people=rng.randint(3, 8), n_things=rng.randint(4, 16))
        n_words = rng.randint(*WORLD_WORDS)
        while story.n_words < n_words:
            story.tell()
        text = " ".join(story.sentences)
        n_subjects = sum(len(story.subjects(kind)) for kind in world.KINDS)
        if world.split_of(text) != "evaluation" or n_subjects < n_turns:
            continue
        drawn = (story.ask(rng.choice(world.KINDS)) for _ in range(TRIES_PER_TURN * n_turns))
        asked = list(dict.fromkeys(question for question in drawn if question is not None))
        if len(asked) >= n_turns:
            return text, tuple(Turn(question, (answer,)) for question, answer in asked[:n_turns])
    raise KvmapError(
        f"{n_turns} turns about one story of the shipped world: no story answers so many different "
        "questions; lower max_turns"
    )
