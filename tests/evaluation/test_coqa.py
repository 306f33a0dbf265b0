from __future__ import annotations

import json

import pytest

from kvmap.data import UnreadableCorpus
from kvmap.errors import KvmapError
from kvmap.evaluation.conversation_items import Turn
from kvmap.evaluation.coqa import Score, coqa_conversations, normalise_answer, score_answer, word_f1

STORY = "Mina keeps a red kite in the shed."
TURNS = [
    {"question": "Where is the kite?", "answers": ["In the shed", "the shed", "a shed", "shed"]},
    {"question": "What colour?", "answers": ["red", "Red", "it is red", "red."]},
]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The quick, brown  FOX!", "quick brown fox"),
        ("a-n apple", "apple"),  # punctuation goes first, so "a-n" has become an article
        ("theatre", "theatre"),  # articles are whole words
        ("\tAn  answer\n", "answer"),
        ("the... a", ""),
        ("naïve café", "naïve café"),
        ("“quoted”", "“quoted”"),  # only ASCII punctuation is dropped
    ],
)
def test_normalising_lowers_drops_punctuation_then_articles_then_blanks(text, expected):
    assert normalise_answer(text) == expected


@pytest.mark.parametrize(
    ("gold", "predicted", "expected"),
    [
        ("the white cat", "A white dog.", 0.5),  # one of two words each way
        ("no no yes", "no yes yes", 2 / 3),  # bags: one no and one yes are shared
        ("in the old shed", "shed", 0.5),  # P 1, R 1/3
        ("red", "blue", 0.0),
        ("the", "a!", 1.0),  # nothing is left of either
        ("the", "cat", 0.0),
        ("cat", "", 0.0),
    ],
)
def test_f1_is_the_harmonic_mean_over_bags_of_words(gold, predicted, expected):
    assert word_f1(gold, predicted) == pytest.approx(expected)


def test_each_gold_answer_is_left_out_once():
    # Against each gold: F1 1, 2/3, 0. Best of the others: 2/3 without the first, 1 without either other one.
    assert score_answer(["white", "white cat", "a dog"], "White") == Score(
        pytest.approx((2 / 3 + 1 + 1) / 3), pytest.approx(2 / 3)
    )


def test_one_gold_answer_is_compared_with_whole():
    assert score_answer(["the shed"], "shed") == Score(1.0, 1.0)
    with pytest.raises(KvmapError, match="at least one gold answer"):
        score_answer([], "shed")


def test_two_gold_answers_are_each_the_other_s_judge():
    assert score_answer(["yes", "no"], "yes") == Score(0.5, 0.5)


def test_agreeing_answers_score_one():
    assert score_answer(["red", "Red", "red.", "the red"], "red") == Score(1.0, 1.0)


@pytest.fixture
def lines(tmp_path):
    file = tmp_path / "talks.jsonl"
    rows = [{"story": f"{STORY} {number}", "turns": TURNS} for number in range(6)]
    file.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    return file


@pytest.fixture
def official(tmp_path):
    """The same conversations in CoQA's own layout."""
    data = []
    for number in range(6):
        answers = [
            [{"input_text": turn["answers"][person], "turn_id": i} for i, turn in enumerate(TURNS, start=1)]
            for person in range(4)
        ]
        asked = [{"input_text": turn["question"], "turn_id": i} for i, turn in enumerate(TURNS, start=1)]
        data.append(
            {
                "id": f"id{number}",
                "source": "made up",
                "story": f"{STORY} {number}",
                "questions": asked,
                "answers": answers[0],
                "additional_answers": {str(person - 1): answers[person] for person in (1, 2, 3)},
            }
        )
    file = tmp_path / "coqa-dev.json"
    file.write_text(json.dumps({"version": "1.0", "data": data}))
    return file


def test_both_layouts_give_the_same_conversations(lines, official):
    ours, theirs = coqa_conversations(lines), coqa_conversations(official)
    assert [(c.story, c.turns) for c in ours] == [(c.story, c.turns) for c in theirs]
    assert ours[0].turns[1] == Turn("What colour?", ("red", "Red", "it is red", "red."))
    assert (ours[2].task, ours[2].id) == ("talks", "line 3")
    assert (theirs[2].task, theirs[2].id) == ("coqa-dev", "id2")


def test_a_smaller_limit_keeps_a_subset_in_the_file_s_order(lines):
    every = [c.id for c in coqa_conversations(lines)]
    four, two = ([c.id for c in coqa_conversations(lines, n, seed=3)] for n in (4, 2))
    assert set(two) < set(four) < set(every)
    assert four == [name for name in every if name in four]
    assert [c.id for c in coqa_conversations(lines, 4, seed=4)] != four


def test_first_turns_alone(lines):
    assert [len(c.turns) for c in coqa_conversations(lines, max_turns=1)] == [1] * 6


@pytest.mark.parametrize(
    ("row", "named"),
    [
        ({"turns": TURNS}, "story=None"),
        ({"story": " ", "turns": TURNS}, "story=' '"),
        ({"story": STORY}, "questions=None"),
        ({"story": STORY, "turns": []}, r"turns=\[\]"),
        ({"story": STORY, "turns": [{"question": "?", "answers": []}]}, r"turn 1: answers=\[\]"),
        ({"story": STORY, "turns": [TURNS[0], {"question": "", "answers": ["a"]}]}, "turn 2: question=''"),
        ({"story": STORY, "turns": ["what"]}, "turn 1: question=None"),
        (
            {
                "story": STORY,
                "questions": [{"input_text": "?", "turn_id": 1}],
                "answers": [{"input_text": "x", "turn_id": 2}],
            },
            r"turn_id of answers=\[2\]",
        ),
    ],
)
def test_a_malformed_conversation_is_named_with_its_place(tmp_path, row, named):
    file = tmp_path / "bad.jsonl"
    file.write_text(json.dumps({"story": STORY, "turns": TURNS}) + "\n" + json.dumps(row) + "\n")
    with pytest.raises(UnreadableCorpus, match=rf"bad\.jsonl, line 2.*{named}"):
        coqa_conversations(file)


def test_a_damaged_line_an_empty_file_and_a_missing_one(tmp_path):
    file = tmp_path / "talks.jsonl"
    file.write_text('{"story": "a"\n')
    with pytest.raises(UnreadableCorpus, match="line 1: not JSON"):
        coqa_conversations(file)
    file.write_text("")
    with pytest.raises(UnreadableCorpus, match="no conversations"):
        coqa_conversations(file)
    with pytest.raises(UnreadableCorpus, match="found none"):
        coqa_conversations(tmp_path / "nothing.jsonl")


def test_limits_below_one_are_refused(lines):
    with pytest.raises(KvmapError, match="limit=0"):
        coqa_conversations(lines, 0)
    with pytest.raises(KvmapError, match="max_turns=0"):
        coqa_conversations(lines, max_turns=0)
