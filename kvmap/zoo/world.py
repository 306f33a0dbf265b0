"""A small world of people, things and places, told in text, with questions the text answers.

A story starts empty and grows by one sentence at a time: someone or something is introduced, gets a
colour, is carried, moves; other sentences repeat what is known or say nothing of use. The state after
any sentence is known exactly, so each question has one right answer.

Texts of different splits are disjoint by construction: the SHA-256 of a text's first `OPENING_WORDS`
words decides which split it belongs to, and a text of another split is drawn again. Within a split every
(seed, number) pair has a random stream of its own.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal, get_args

from kvmap.errors import KvmapError, UnknownName
from kvmap.zoo.words import COLOURS, FILLERS, NUMBERS, OBJECTS, PEOPLE, PLACES, QUESTIONS, SENTENCES

Split = Literal["train", "calibration", "evaluation"]
SPLITS: tuple[Split, ...] = get_args(Split)
OPENING_WORDS = 24

KINDS = ("where", "colour", "holder", "two_hop", "moved", "count")
ONE_HOP = ("where", "colour", "holder")
CHOICES: dict[str, tuple[str, ...]] = {
    "where": PLACES,
    "colour": COLOURS,
    "holder": PEOPLE,
    "two_hop": PLACES,
    "moved": PLACES,
    "count": NUMBERS,
}

# How often each next sentence is tried: introductions and moves first, repetition and filler between.
EVENTS: dict[str, int] = {
    "new_person": 5,
    "new_thing": 4,
    "new_carried": 6,
    "new_colour": 5,
    "person_moves": 3,
    "thing_moves": 3,
    "repeat": 4,
    "filler": 3,
}
PLAIN_EVENTS = {name: weight for name, weight in EVENTS.items() if name.startswith("new_")}


@dataclass(frozen=True)
class Question:
    """A question about a context, with its choices.

    `context + question` is the prompt (`… question : where is anna ? answer : anna is in`); each choice
    is a continuation of it with its leading space (` paris`); `answer` is the index of the right one.
    """

    context: str
    question: str
    choices: tuple[str, ...]
    answer: int
    kind: str


@dataclass
class Story:
    """The state of one story and the sentences that led to it.

    A plain story only introduces, each fact in the first of its forms: training starts with these.
    """

    rng: random.Random
    n_people: int
    n_things: int
    plain: bool = False
    sentences: list[str] = field(default_factory=list)
    place_of: dict[str, str] = field(default_factory=dict)  # people and things that lie somewhere
    holder_of: dict[str, str] = field(default_factory=dict)
    colour_of: dict[str, str] = field(default_factory=dict)
    moved: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        """Draw who and what this story is about."""
        self.people = self.rng.sample(PEOPLE, self.n_people)
        self.things = self.rng.sample(OBJECTS, self.n_things)
        self.tell()

    @property
    def n_words(self) -> int:
        """Words told so far."""
        return sum(sentence.count(" ") + 1 for sentence in self.sentences)

    def tell(self) -> None:
        """Add one sentence, drawing again while the event drawn cannot happen; none if nothing can."""
        events = dict(PLAIN_EVENTS if self.plain else EVENTS)
        while events:
            event = self.rng.choices(tuple(events), tuple(events.values()))[0]
            if getattr(self, "_" + event)():
                return
            del events[event]

    def holdings(self, person: str) -> int:
        """How many things a person carries."""
        return sum(holder == person for holder in self.holder_of.values())

    def _say(self, form: str, **words: str) -> bool:
        forms = SENTENCES[form][:1] if self.plain else SENTENCES[form]
        self.sentences.append(self.rng.choice(forms).format(**words))
        return True

    def _pick(self, names: Sequence[str], allowed: Callable[[str], bool]) -> str | None:
        candidates = [name for name in names if allowed(name)]
        return self.rng.choice(candidates) if candidates else None

    def _mentioned(self, thing: str) -> bool:
        return thing in self.place_of or thing in self.holder_of

    def _new_person(self) -> bool:
        person = self._pick(self.people, lambda name: name not in self.place_of)
        if person is None:
            return False
        self.place_of[person] = self.rng.choice(PLACES)
        return self._say("person_in", person=person, place=self.place_of[person])

    def _new_thing(self) -> bool:
        thing = self._pick(self.things, lambda name: not self._mentioned(name))
        if thing is None:
            return False
        self.place_of[thing] = self.rng.choice(PLACES)
        return self._say("thing_in", thing=thing, place=self.place_of[thing])

    def _new_carried(self) -> bool:
        thing = self._pick(self.things, lambda name: not self._mentioned(name))
        person = self._pick(self.people, lambda name: self.holdings(name) < len(NUMBERS) - 1)
        if thing is None or person is None:
            return False
        self.holder_of[thing] = person
        return self._say("has", person=person, thing=thing)

    def _new_colour(self) -> bool:
        thing = self._pick(self.things, lambda name: self._mentioned(name) and name not in self.colour_of)
        if thing is None:
            return False
        self.colour_of[thing] = self.rng.choice(COLOURS)
        return self._say("colour", thing=thing, colour=self.colour_of[thing])

    def _move(self, names: Sequence[str], form: str, role: str) -> bool:
        name = self._pick(names, self.place_of.__contains__)
        if name is None:
            return False
        old = self.place_of[name]
        self.place_of[name] = self.rng.choice([place for place in PLACES if place != old])
        self.moved.add(name)
        return self._say(form, **{role: name}, old=old, place=self.place_of[name])

    def _person_moves(self) -> bool:
        return self._move(self.people, "person_moves", "person")

    def _thing_moves(self) -> bool:
        return self._move(self.things, "thing_moves", "thing")

    def _repeat(self) -> bool:
        """Say again something that follows from the story so far: what perplexity can gain from a prefix."""
        form = self.rng.choice(("person_stays", "thing_stays", "colour_again", "has_again"))
        if form == "person_stays":
            person = self._pick(self.people, self.place_of.__contains__)
            return person is not None and self._say(form, person=person, place=self.place_of[person])
        known = {"thing_stays": self.place_of, "colour_again": self.colour_of, "has_again": self.holder_of}[
            form
        ]
        thing = self._pick(self.things, known.__contains__)
        if thing is None:
            return False
        if form == "thing_stays":
            return self._say(form, thing=thing, place=known[thing])
        if form == "has_again":
            return self._say(form, thing=thing, person=known[thing])
        return self._say(form, thing=thing, person=self.rng.choice(self.people), colour=known[thing])

    def _filler(self) -> bool:
        self.sentences.append(self.rng.choice(FILLERS))
        return True

    def subjects(self, kind: str) -> list[tuple[str, str]]:
        """Everything a question of this kind can be about now, as (name, right answer)."""
        if kind in ("where", "moved"):
            wanted = kind == "moved"
            return [(name, place) for name, place in self.place_of.items() if (name in self.moved) == wanted]
        if kind == "colour":
            return list(self.colour_of.items())
        if kind == "holder":
            return list(self.holder_of.items())
        if kind == "two_hop":
            return [
                (thing, self.place_of[person])
                for thing, person in self.holder_of.items()
                if person in self.place_of
            ]
        present = {name for name in self.place_of if name in self.people}.union(self.holder_of.values())
        return [(name, NUMBERS[self.holdings(name)]) for name in sorted(present)]

    def ask(self, kind: str, answer: str | None = None) -> tuple[str, str] | None:
        """A question of this kind, `question : … ? answer : …`, and its answer; None if there is none to ask.

        Counts are drawn evenly over the answers on offer, or a guess at the commonest would do well.
        """
        subjects = self.subjects(kind)
        if kind == "count" and answer is None and subjects:
            answer = self.rng.choice(sorted({found for _, found in subjects}))
        subjects = [(name, found) for name, found in subjects if answer in (None, found)]
        if not subjects:
            return None
        name, found = self.rng.choice(subjects)
        form = QUESTIONS["where" if kind in ("two_hop", "moved") else kind]
        subject = name if name in self.people else f"the {name}"
        return form.format(subject=subject), found


def _new_story(rng: random.Random, size: float, plain: bool = False) -> Story:
    """A story with 2 to 8 people and 3 to 16 things; `size` in (0, 1] bounds how many."""
    return Story(
        rng,
        n_people=rng.randint(2, max(2, round(8 * size))),
        n_things=rng.randint(3, max(3, round(16 * size))),
        plain=plain,
    )


def sample_document(rng: random.Random, min_words: int, size: float = 1.0, plain: bool = False) -> str:
    """One document of at least `min_words` words: stretches of story, each followed by answered questions.

    Args:
        rng: where the choices come from.
        min_words: the document ends with the first group of questions at or past this length.
        size: how much there is to remember, in (0, 1]: bounds the people, things and sentences
            before questions come. Training starts small; the world's own texts have 1.
        plain: only introductions, see `Story`.
    """
    story = _new_story(rng, size, plain)
    parts: list[str] = []
    n_words = 0
    while n_words < min_words:
        for _ in range(rng.randint(2, max(4, round(24 * size)))):
            story.tell()
        parts += story.sentences
        asked = filter(None, (story.ask(rng.choice(KINDS)) for _ in range(rng.randint(4, 12))))
        parts += [f"{question} {answer} ." for question, answer in dict.fromkeys(asked)]
        n_words = sum(part.count(" ") + 1 for part in parts)
        story.sentences.clear()
    return " ".join(parts)


def split_of(text: str) -> Split:
    """The split a text belongs to: SHA-256 of its first `OPENING_WORDS` words, modulo three."""
    opening = " ".join(text.split()[:OPENING_WORDS])
    return SPLITS[int.from_bytes(hashlib.sha256(opening.encode()).digest()[:8]) % len(SPLITS)]


def _check_split(split: str) -> None:
    if split not in SPLITS:
        raise UnknownName("split", split, SPLITS)


def documents(
    seed: int, n: int, *, min_words: int = 256, split: Split = "calibration", size: float = 1.0
) -> Iterator[str]:
    """`n` documents for calibration, perplexity or training.

    Args:
        seed: together with the split and a document's number, fixes its text.
        n: how many.
        min_words: least length in words; one word is one token of the zoo's tokenizer, and BOS is one more.
        split: `train`, `calibration` or `evaluation`; texts of different splits never agree.
        size: see `sample_document`.

    Raises:
        UnknownName: no such split.
        KvmapError: `min_words` is too short to tell the splits apart.
    """
    _check_split(split)
    if min_words < OPENING_WORDS:
        raise KvmapError(
            f"min_words={min_words}: expected at least {OPENING_WORDS}, the words that decide a text's split"
        )
    for number in range(n):
        yield _document(seed, number, min_words, split, size)


# Telling stories takes a run of a sweep longer than its models do, and all runs of a seed are told the same.
@lru_cache(maxsize=4096)
def _document(seed: int, number: int, min_words: int, split: Split, size: float) -> str:
    rng = random.Random(f"document/{split}/{seed}/{number}")
    text = sample_document(rng, min_words, size)
    while split_of(text) != split:
        text = sample_document(rng, min_words, size)
    return text


def questions(
    seed: int,
    n: int,
    kinds: Sequence[str] | None = None,
    *,
    words: tuple[int, int] = (100, 240),
    split: Split = "evaluation",
) -> list[Question]:
    """`n` questions in all, the kinds in turn, each about a story of its own.

    Args:
        seed: together with the split and a question's number, fixes it.
        n: how many in all; a multiple of the number of kinds gives each kind the same count.
        kinds: which of `KINDS`; all by default.
        words: least and most words at which the context stops growing (it may pass the mark by one sentence).
        split: as in `documents`.

    Raises:
        UnknownName: no such kind or split.
    """
    _check_split(split)
    kinds = KINDS if kinds is None else tuple(kinds)
    for kind in kinds:
        if kind not in KINDS:
            raise UnknownName("kind of question", kind, KINDS)
    return [_question(seed, number, kinds[number % len(kinds)], words, split) for number in range(n)]


@lru_cache(maxsize=4096)
def _question(seed: int, number: int, kind: str, words: tuple[int, int], split: Split) -> Question:
    rng = random.Random(f"question/{split}/{seed}/{number}")
    answer = rng.choice(NUMBERS) if kind == "count" else None
    while True:
        story = _new_story(rng, 1.0)
        n_words = rng.randint(*words)
        while story.n_words < n_words:
            story.tell()
        context = " ".join(story.sentences)
        asked = story.ask(kind, answer) if split_of(context) == split else None
        if asked is not None:
            choices = CHOICES[kind]
            return Question(
                context,
                f" {asked[0]}",
                tuple(f" {choice}" for choice in choices),
                choices.index(asked[1]),
                kind,
            )
