"""The world's texts: the same from the same seed, never shared between splits, and true to themselves."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from kvmap.errors import KvmapError, UnknownName
from kvmap.zoo import world
from kvmap.zoo.words import NUMBERS

# Each sentence that changes the state, as a reader of the text sees it; written apart from the generator.
NAME = r"(?P<name>the \w+|\w+)"
PLACED = (
    re.compile(rf"^{NAME} (?:is|lies|waits) in (?P<place>\w+)$"),
    re.compile(rf"^{NAME} (?:left (?P<old>\w+) for|went to) (?P<place>\w+)$"),
    re.compile(rf"^someone moved {NAME} (?:from (?P<old>\w+) )?to (?P<place>\w+)$"),
)
CARRIED = re.compile(rf"^{NAME} (?:is with|belongs to) (?P<person>\w+)$")
COLOURED = (
    re.compile(r"^(?P<name>the \w+) is (?P<colour>\w+)$"),
    re.compile(r"^the colour of (?P<name>the \w+) is (?P<colour>\w+)$"),
)
REPEATED = (
    re.compile(rf"^{NAME} (?:stayed|was still) in (?P<place>\w+)$"),
    re.compile(r"^\w+ thought of (?P<name>the \w+) , and it was (?P<colour>\w+)$"),
    re.compile(r"^(?P<person>\w+) still carried (?P<name>the \w+)$"),
)
ASKED = (
    (re.compile(rf"^question : where is {NAME} \? answer : (?P=name) is in$"), "where"),
    (re.compile(rf"^question : what colour is {NAME} \? answer : (?P=name) is$"), "colour"),
    (re.compile(rf"^question : who has {NAME} \? answer : (?P=name) is with$"), "holder"),
    (re.compile(rf"^question : how many things does {NAME} have \? answer : (?P=name) has$"), "count"),
)


class Reader:
    """Reads sentences one by one and knows what follows from them."""

    def __init__(self) -> None:
        self.place: dict[str, str] = {}
        self.colour: dict[str, str] = {}
        self.holder: dict[str, str] = {}
        self.moves: Counter[str] = Counter()

    def read(self, sentence: str) -> None:
        if sentence.startswith("question"):
            prompt, answer = sentence.rsplit(" ", 1)
            assert self.answer(prompt)[0] == answer, sentence
            return
        for form in PLACED:
            if found := form.match(sentence):
                name = found["name"]
                if "old" in found.groupdict() and found["old"]:
                    assert self.place[name] == found["old"], sentence
                self.moves[name] += name in self.place
                self.place[name] = found["place"]
                return
        if found := CARRIED.match(sentence):
            self.holder[found["name"]] = found["person"]
            return
        for form in COLOURED:
            if found := form.match(sentence):
                self.colour[found["name"]] = found["colour"]
                return
        for form in REPEATED:
            if found := form.match(sentence):
                for attribute, value in found.groupdict().items():
                    if attribute != "name":
                        assert getattr(self, attribute.replace("person", "holder"))[found["name"]] == value

    def answer(self, prompt: str) -> tuple[str, str]:
        """The right answer and the question's kind."""
        for form, kind in ASKED:
            if found := form.match(prompt):
                name = found["name"]
                if kind == "where" and name in self.holder:
                    return self.place[self.holder[name]], "two_hop"
                if kind == "where":
                    return self.place[name], "moved" if self.moves[name] else "where"
                if kind == "count":
                    return NUMBERS[sum(holder == name for holder in self.holder.values())], kind
                return getattr(self, kind)[name], kind
        raise AssertionError(f"no such question: {prompt}")


def sentences(text: str) -> list[str]:
    return [sentence.strip() for sentence in text.split(" .") if sentence.strip()]


def test_every_question_is_answered_by_reading_its_context() -> None:
    for question in world.questions(seed=3, n=120):
        reader = Reader()
        for sentence in sentences(question.context):
            reader.read(sentence)
        answer, kind = reader.answer(question.question.strip())
        assert question.choices[question.answer] == f" {answer}"
        assert question.kind == kind


def test_documents_hold_true_repetitions_and_answers() -> None:
    n_questions = 0
    for text in world.documents(seed=3, n=20, min_words=400):
        reader = Reader()
        for sentence in sentences(text):
            reader.read(sentence)
        n_questions += text.count("question :")
    assert n_questions > 100


def test_kinds_come_in_turn_and_choices_hold_the_answer_once() -> None:
    asked = world.questions(seed=0, n=3 * len(world.KINDS))
    assert [question.kind for question in asked] == list(world.KINDS) * 3
    for question in asked:
        assert len(set(question.choices)) == len(question.choices) == len(world.CHOICES[question.kind])


@pytest.mark.parametrize("kind", world.KINDS)
def test_no_answer_is_favoured(kind: str) -> None:
    """No blind guess is right more often than chance, within five binomial standard errors."""
    asked = world.questions(seed=1, n=200, kinds=[kind])
    chance = 1 / len(world.CHOICES[kind])
    commonest = max(Counter(question.answer for question in asked).values()) / len(asked)
    assert commonest < chance + 5 * (chance * (1 - chance) / len(asked)) ** 0.5


def test_contexts_are_as_long_as_asked() -> None:
    lengths = [len(question.context.split()) for question in world.questions(seed=0, n=60)]
    assert min(lengths) >= 100
    assert max(lengths) < 240 + 15  # the mark may be passed by one sentence


def test_documents_are_as_long_as_asked() -> None:
    assert all(len(text.split()) >= 512 for text in world.documents(seed=0, n=10, min_words=512))


def test_the_same_seed_gives_the_same_text() -> None:
    told, asked = list(world.documents(seed=5, n=4)), world.questions(seed=5, n=12)
    for kept in (world._document, world._question):
        kept.cache_clear()
    assert list(world.documents(seed=5, n=4)) == told
    assert world.questions(seed=5, n=12) == asked


def test_more_documents_begin_with_fewer() -> None:
    assert list(world.documents(seed=5, n=6))[:3] == list(world.documents(seed=5, n=3))


def test_splits_and_seeds_are_disjoint() -> None:
    texts = [
        text
        for split in world.SPLITS
        for seed in (0, 1)
        for text in [
            *world.documents(seed, 20, split=split),
            *(question.context for question in world.questions(seed, 20, split=split)),
        ]
    ]
    openings = {" ".join(text.split()[: world.OPENING_WORDS]) for text in texts}
    assert len(openings) == len(texts)


@pytest.mark.parametrize("split", world.SPLITS)
def test_a_text_of_one_split_cannot_come_up_in_another(split: world.Split) -> None:
    for text in world.documents(seed=2, n=20, split=split):
        assert world.split_of(text) == split
        assert world.split_of(text + " and more") == split  # the opening alone decides
    for question in world.questions(seed=2, n=20, split=split):
        assert world.split_of(question.context) == split


def test_unknown_names_are_refused() -> None:
    with pytest.raises(UnknownName, match="two_hop"):
        world.questions(seed=0, n=1, kinds=["twohop"])
    with pytest.raises(UnknownName, match="evaluation"):
        next(world.documents(0, 1, split="evaluate"))
    with pytest.raises(KvmapError, match="min_words=5"):
        next(world.documents(0, 1, min_words=5))
