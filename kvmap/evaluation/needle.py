"""A question about one fact of the shipped world, told at a chosen depth of a text of a chosen length.

The text is a story of the world that never mentions whom the fact is about, so the fact is said once, the
story is full of facts of the same form about others, and nothing but the fact gives the answer. The answers
are drawn evenly: whatever is known of the world, a reader who misses the fact is right one time in twelve.
All of it is plain words, for any tokenizer.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TypeAlias

from kvmap.errors import KvmapError, UnknownName
from kvmap.evaluation.items import WORLD_STOP, Item
from kvmap.zoo.words import FILLERS, OBJECTS, PEOPLE, QUESTIONS, SENTENCES
from kvmap.zoo.world import CHOICES, ONE_HOP, Story, split_of

NEEDLE_KINDS = ONE_HOP
_FORMS = {"where": ("thing_in", "place"), "colour": ("colour", "colour"), "holder": ("has", "person")}

Count: TypeAlias = Callable[[str], int]


@dataclass(frozen=True)
class Needle:
    """One question, and where in its context the fact stands.

    Attributes:
        item: context, choices and answer, as `kvmap.evaluation.choices` scores them.
        kind: what is asked; one of `NEEDLE_KINDS`.
        subject: the name that the fact is about.
        n_tokens: length asked for.
        depth: depth asked for, in [0, 1]: the share of the story's tokens that stand before the fact.
        n_context: tokens of the context, those that the tokenizer puts before any text included; at most
            `n_tokens`, and less than that by no more than a sentence.
        start: the fact's first token, counted from 0.
        stop: the token after its last.
        n_story: tokens of the story around the fact.
        n_before: tokens that the tokenizer puts before any text.
    """

    item: Item
    kind: str
    subject: str
    n_tokens: int
    depth: float
    n_context: int
    start: int
    stop: int
    n_story: int
    n_before: int

    @property
    def depth_found(self) -> float:
        """The depth at which the fact really stands; as near to `depth` as whole sentences allow."""
        return (self.start - self.n_before) / self.n_story


@dataclass(frozen=True)
class _Fact:
    kind: str
    subject: str
    sentence: str
    question: str
    answer: int


def draw_needles(
    tokenizer: Any,
    *,
    n_tokens: int,
    depth: float,
    n: int,
    kinds: Sequence[str] = NEEDLE_KINDS,
    seed: int = 0,
) -> list[Needle]:
    """`n` questions whose contexts have `n_tokens` tokens, the fact at `depth` of each.

    Every question has a fact and a story of its own, also across lengths and depths, so that all of them are
    independent and an interval over them is right. All texts belong to the world's split `evaluation`.

    Args:
        tokenizer: counts the tokens.
        n_tokens: of a whole context, question included.
        depth: share of the story before the fact: 0 puts it first, 1 last, before the question.
        n: how many.
        kinds: what to ask, in turn; some of `NEEDLE_KINDS`.
        seed: which ones.

    Raises:
        UnknownName: no such kind.
        KvmapError: a depth outside [0, 1], or so few tokens that fact and question leave no room for a story.
    """
    if unknown := [kind for kind in kinds if kind not in NEEDLE_KINDS]:
        raise UnknownName("kind of needle", unknown[0], NEEDLE_KINDS)
    if not 0 <= depth <= 1 or not kinds:
        raise KvmapError(
            f"depth={depth}, kinds={list(kinds)}: expected a depth in [0, 1] and one kind or more"
        )
    count = _counter(tokenizer)
    return [_needle(tokenizer, count, kinds, seed, number, n_tokens, depth) for number in range(n)]


def longest_answer(tokenizer: Any, kinds: Sequence[str] = NEEDLE_KINDS) -> int:
    """Tokens of the longest choice of these kinds: the room to leave after a context."""
    count = _counter(tokenizer)
    return max(count(choice) for kind in kinds for choice in CHOICES[kind])


def _counter(tokenizer: Any) -> Count:
    """Tokens that a text adds to a sentence before it, where it follows a space."""
    known: dict[str, int] = {}

    before = len(_plain(tokenizer, "."))

    def count(text: str) -> int:
        if text not in known:
            known[text] = len(_plain(tokenizer, f". {text}")) - before
        return known[text]

    return count


def _fact(rng: random.Random, kind: str) -> _Fact:
    answer = rng.randrange(len(CHOICES[kind]))
    form, role = _FORMS[kind]
    if kind == "where" and rng.random() < 0.5:
        subject, form, words = rng.choice(PEOPLE), "person_in", "person"
    else:
        subject, words = rng.choice(OBJECTS), "thing"
    filled = {words: subject, role: CHOICES[kind][answer]}
    named = subject if words == "person" else f"the {subject}"
    return _Fact(
        kind=kind,
        subject=subject,
        sentence=rng.choice(SENTENCES[form]).format(**filled),
        question=QUESTIONS[kind].format(subject=named),
        answer=answer,
    )


def _needle(
    tokenizer: Any, count: Count, kinds: Sequence[str], seed: int, number: int, n_tokens: int, depth: float
) -> Needle:
    name = f"{seed}/{number}/{n_tokens}/{depth:g}"
    rng = random.Random(f"needle/{name}")
    fact = _fact(rng, kinds[number % len(kinds)])
    n_before = len(_encode(tokenizer, fact.sentence)) - len(_plain(tokenizer, fact.sentence))
    around = n_before + count(fact.sentence) + count(fact.question)
    before, after, n_context = _haystack(rng, tokenizer, count, fact, n_tokens, around, depth)
    choices = CHOICES[fact.kind]
    return Needle(
        item=Item(
            task=f"needle_{n_tokens}",
            id=name,
            context=" ".join((*before, fact.sentence, *after, fact.question)),
            choices=tuple(f" {choice}" for choice in choices),
            answer=fact.answer,
            stop=WORLD_STOP,
        ),
        kind=fact.kind,
        subject=fact.subject,
        n_tokens=n_tokens,
        depth=depth,
        n_context=n_context,
        start=len(_encode(tokenizer, " ".join(before))) if before else n_before,
        stop=len(_encode(tokenizer, " ".join((*before, fact.sentence)))),
        n_story=n_context - around,
        n_before=n_before,
    )


def _haystack(
    rng: random.Random, tokenizer: Any, count: Count, fact: _Fact, n_tokens: int, around: int, depth: float
) -> tuple[list[str], list[str], int]:
    """Sentences to put before and after a fact, and the tokens of the context that comes of it.

    Args:
        rng: where the stories come from; one is drawn again until its text belongs to the split.
        tokenizer, count: measure them.
        fact: what to hide.
        n_tokens: of the context, at most.
        around: tokens that are not the story's.
        depth: where to hide it.
    """
    # Two sentences of filler: then a story is never empty, nor one of a few.
    least = 2 * max(count(sentence) for sentence in FILLERS)
    room = n_tokens - around
    while True:
        if room < least:
            raise KvmapError(
                f"a context of {n_tokens} tokens leaves {room} for the story around the fact "
                f"{fact.sentence!r} and its question, expected at least {least}; ask for longer contexts"
            )
        story = _story(rng, fact.subject, room, count)
        place = _place(story, depth, count)
        context = " ".join((*story[:place], fact.sentence, *story[place:], fact.question))
        if split_of(context) != "evaluation":
            continue
        n_context = len(_encode(tokenizer, context))
        if n_context <= n_tokens:
            return story[:place], story[place:], n_context
        # tokens that merge or part between sentences, which single counts do not see
        room -= n_context - n_tokens


def _story(rng: random.Random, absent: str, n_tokens: int, count: Count) -> list[str]:
    """Sentences of at most `n_tokens` tokens, of a story that does not know the name `absent`.

    The last sentence that would not fit is left out, and the story is as long as it can be.
    """
    while True:
        story = Story(rng, n_people=rng.randint(2, 8), n_things=rng.randint(3, 16))
        if absent not in story.people and absent not in story.things:
            break
    told, n_told = 0, 0
    while True:
        for sentence in story.sentences[told:]:
            n_told += count(sentence)
            if n_told > n_tokens:
                return story.sentences[:told]
            told += 1
        story.tell()


def _place(story: Sequence[str], depth: float, count: Count) -> int:
    """How many sentences to put before the fact, so that it stands as near to the depth as they allow."""
    before = [0, *accumulate(count(sentence) for sentence in story)]
    wanted = depth * before[-1]
    place = bisect_left(before, wanted)
    if place > 0 and wanted - before[place - 1] <= before[place] - wanted:
        place -= 1
    return place


def _encode(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, verbose=False)["input_ids"])


def _plain(tokenizer: Any, text: str) -> list[int]:
    """Without what the tokenizer puts before any text."""
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])
