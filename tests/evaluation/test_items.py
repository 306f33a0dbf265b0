from __future__ import annotations

import json

import pytest

from kvmap.data import UnreadableCorpus
from kvmap.errors import KvmapError, UnknownName
from kvmap.evaluation.items import jsonl_items, world_items
from kvmap.zoo import world

ROW = {"context": "Q: is it? A:", "choices": [" Yes", " No"], "answer": 1}


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_world_items_ask_each_kind_equally_often_and_stop_at_the_full_stop():
    items = world_items(seed=2, n_per_kind=3, kinds=["where", "colour"])
    assert [item.task for item in items].count("world_where") == 3
    assert [item.task for item in items].count("world_colour") == 3
    question = world.questions(2, 6, ["where", "colour"])[0]
    assert items[0].context == question.context + question.question
    assert items[0].choices == question.choices
    assert items[0].answer == question.answer
    assert items[0].stop == ("\n", " .")
    assert len({item.id for item in items}) == 6


def test_all_kinds_by_default_and_an_unknown_one_refused():
    assert {item.task for item in world_items(0, 1)} == {f"world_{kind}" for kind in world.KINDS}
    with pytest.raises(UnknownName, match="colour"):
        world_items(0, 1, ["color"])


def test_jsonl_items_are_named_after_the_file_and_the_line(tmp_path):
    items = jsonl_items(write(tmp_path / "quiz.jsonl", [ROW, ROW | {"answer": 0}]))
    assert [(item.task, item.id, item.answer) for item in items] == [
        ("quiz", "line 1", 1),
        ("quiz", "line 2", 0),
    ]
    assert items[0].choices == (" Yes", " No")


def test_a_subsample_is_seeded_in_order_and_grows_with_its_limit(tmp_path):
    path = write(tmp_path / "quiz.jsonl", [ROW | {"context": f"Q{n}"} for n in range(30)])
    five = [item.context for item in jsonl_items(path, limit=5, seed=1)]
    assert five == [item.context for item in jsonl_items(path, limit=5, seed=1)]
    assert five == sorted(five, key=lambda context: int(context[1:]))
    assert set(five) < {item.context for item in jsonl_items(path, limit=6, seed=1)}
    assert five != [item.context for item in jsonl_items(path, limit=5, seed=2)]
    assert len(jsonl_items(path, limit=100)) == 30


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"context": "  "}, "context"),
        ({"context": None}, "context=None"),
        ({"choices": [" Yes"]}, "choices"),
        ({"choices": [" Yes", ""]}, "choices"),
        ({"choices": " Yes"}, "choices"),
        ({"answer": 2}, r"answer=2, expected the index of a choice, 0 to 1"),
        ({"answer": "1"}, "answer='1'"),
        ({"answer": True}, "answer=True"),
    ],
)
def test_a_malformed_line_is_named_with_what_was_expected(tmp_path, change, complaint):
    path = write(tmp_path / "quiz.jsonl", [ROW, ROW | change])
    with pytest.raises(UnreadableCorpus, match=rf"quiz\.jsonl, line 2: {complaint}"):
        jsonl_items(path)


def test_missing_empty_and_impossible_are_refused(tmp_path):
    with pytest.raises(UnreadableCorpus, match="nowhere"):
        jsonl_items(tmp_path / "nowhere.jsonl")
    with pytest.raises(UnreadableCorpus, match="no items"):
        jsonl_items(write(tmp_path / "empty.jsonl", []))
    with pytest.raises(KvmapError, match="limit=0"):
        jsonl_items(write(tmp_path / "quiz.jsonl", [ROW]), limit=0)
