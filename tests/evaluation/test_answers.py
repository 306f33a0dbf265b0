from __future__ import annotations

import dataclasses
import json
import logging
import math
import multiprocessing
import os
import subprocess
import sys

import pytest

from kvmap.evaluation.answers import ANSWERS_FILE, CONDITIONS_FILE, Answers, canonical_hash, item_key, lacking
from kvmap.evaluation.choices import evaluate_items
from kvmap.evaluation.perplexity import evaluate_perplexity
from kvmap.files import StorageError
from kvmap.transfer import TransferOptions
from tests.evaluation.test_choices import count_prefills, quiet

CONDITIONS = {"arm": "mapped", "hold_back": 1, "lambda": 0.01}
ROW = {"logliks": [-1.25, 0.1 + 0.2, math.nan, -math.inf], "generated": "é\u2028\n{", "n_mapped": 3}


@pytest.fixture
def answers(tmp_path):
    return Answers.open(tmp_path, CONDITIONS)


def same(row, other):
    return json.dumps(row) == json.dumps(other)


class TestOnDisk:
    def test_rows_come_back_exactly_and_count_as_reused_once(self, tmp_path, answers):
        answers.add({"a": ROW, "b": {"nll": 1.0}})
        assert same(answers.get("a"), ROW)
        assert answers.n_reused == 0, "it was answered just now"
        again = Answers.open(tmp_path, CONDITIONS)
        assert same(again.get("a"), ROW)
        assert again.get("a") is not None
        assert again.get("c") is None
        assert again.n_reused == 1

    def test_they_lie_under_the_hash_of_their_conditions_which_lie_beside_them(self, tmp_path, answers):
        assert answers.folder == tmp_path / canonical_hash(CONDITIONS)
        assert json.loads((answers.folder / CONDITIONS_FILE).read_text()) == CONDITIONS
        assert Answers.open(tmp_path, dict(reversed(CONDITIONS.items()))).folder == answers.folder
        assert Answers.open(tmp_path, CONDITIONS | {"hold_back": 2}).folder != answers.folder

    def test_answers_to_one_set_of_conditions_are_none_to_another(self, tmp_path, answers):
        answers.add({"a": ROW})
        assert Answers.open(tmp_path, CONDITIONS | {"arm": "raw"}).get("a") is None

    @pytest.mark.parametrize("conditions", [{"x": math.inf}, {"x": math.nan}, {"x": {1, 2}}])
    def test_conditions_that_json_cannot_hold_are_refused(self, tmp_path, conditions):
        with pytest.raises((TypeError, ValueError)):
            Answers.open(tmp_path, conditions)

    def test_a_torn_last_line_is_left_out_and_swallows_nothing(self, tmp_path, answers, caplog):
        answers.add({"a": ROW, "b": ROW})
        file = answers.folder / ANSWERS_FILE
        file.write_bytes(file.read_bytes()[:-20])
        with caplog.at_level(logging.WARNING):
            torn = Answers.open(tmp_path, CONDITIONS)
        assert [record.getMessage() for record in caplog.records] == [
            f"{file}, line 2 is damaged: left out, and asked again where needed"
        ]
        assert torn.get("a") is not None
        assert torn.get("b") is None
        torn.add({"b": ROW, "c": ROW})
        whole = Answers.open(tmp_path, CONDITIONS)
        assert all(whole.get(key) is not None for key in "abc")

    @pytest.mark.parametrize("line", [b"\xff\x00", b"[1]", b'{"key": "b"}', b'{"key": 1, "row": {}}', b"7"])
    def test_a_damaged_line_between_others_is_left_out(self, tmp_path, answers, line, caplog):
        answers.add({"a": ROW})
        with (answers.folder / ANSWERS_FILE).open("ab") as stream:
            stream.write(line + b"\n")
        answers.add({"c": ROW})
        found = Answers.open(tmp_path, CONDITIONS)
        assert (found.get("a") is None, found.get("b") is None, found.get("c") is None) == (
            False,
            True,
            False,
        )
        assert "line 2 is damaged" in caplog.text

    def test_several_processes_may_keep_answers_at_once(self, tmp_path):
        context = multiprocessing.get_context("fork")
        writers = [context.Process(target=keep_many, args=(tmp_path, name)) for name in ("x", "y", "z")]
        for writer in writers:
            writer.start()
        for writer in writers:
            writer.join(timeout=60)
        assert [writer.exitcode for writer in writers] == [0, 0, 0]
        found = Answers.open(tmp_path, CONDITIONS)
        keys = ["shared", *(f"{name}{number}" for name in "xyz" for number in range(30))]
        assert all(found.get(key) is not None for key in keys)

    def test_a_folder_that_cannot_be_written_to_is_one_message(self, tmp_path):
        (tmp_path / "file").write_text("")
        with pytest.raises(StorageError, match="cannot write"):
            Answers.open(tmp_path / "file", CONDITIONS)

    def test_in_memory_nothing_is_kept(self):
        answers = Answers.in_memory()
        answers.add({"a": ROW})
        assert answers.folder is None
        assert answers.get("a") == ROW
        assert answers.n_reused == 0


def keep_many(folder, name):
    for number in range(30):
        answers = Answers.open(folder, CONDITIONS)
        answers.add({f"{name}{number}": ROW, "shared": {"text": "long " * 5000}})


def test_a_key_is_the_same_in_every_process_and_differs_with_the_content():
    program = "from kvmap.evaluation.answers import item_key; print(item_key({'b': 1, 'a': [2]}, 'x'))"
    keys = {
        subprocess.run(
            [sys.executable, "-c", program],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed in ("1", "2")
    }
    assert keys == {item_key({"a": [2], "b": 1}, "x")}
    assert item_key([1, 23]) != item_key([12, 3])
    assert item_key("a", "b") != item_key("ab")


def test_what_lacks_the_same_arms_goes_together():
    books = {arm: Answers.in_memory() for arm in ("target", "mapped")}
    books["target"].add({"1": {}, "2": {}, "4": {}})
    books["mapped"].add({"2": {}})
    assert lacking(books, ["0", "1", "2", "3", "4"]) == {("target", "mapped"): [0, 3], ("mapped",): [1, 4]}


OPTIONS = TransferOptions()


class Interrupted(Exception):
    pass


def stopping_after(n):
    """An `on_batch` that takes n batches and then does as Ctrl-C does, and the list of what it took."""
    taken = []

    def on_batch(found):
        if len(taken) == n:
            raise Interrupted
        taken.append(found)

    return on_batch, taken


def books_of(folder, arms):
    return {arm: Answers.open(folder, {"arm": arm}) for arm in arms}


def ask(pair, arms, items, **settings):
    settings = {"batch_size": 2, "max_new_tokens": 3, "options": OPTIONS, "progress": quiet} | settings
    return evaluate_items(pair, arms, items, **settings)


def read(pair, arms, blocks, **settings):
    settings = {"prefix_tokens": 20, "batch_size": 2, "options": OPTIONS, "progress": quiet} | settings
    return evaluate_perplexity(pair, arms, blocks, **settings)


class TestQuestions:
    @pytest.mark.parametrize("sequential", [False, True])
    @pytest.mark.parametrize(
        "n_batches", [pytest.param(0, marks=pytest.mark.slow), 1, 3, pytest.param(4, marks=pytest.mark.slow)]
    )
    def test_an_interrupted_evaluation_begins_at_the_item_reached(
        self, tmp_path, pair, arms, items, n_batches, sequential
    ):
        whole = ask(pair, arms, items)
        on_batch, taken = stopping_after(n_batches)
        settings = {"sequential": sequential}
        with pytest.raises(Interrupted):
            ask(pair, arms, items, answers=books_of(tmp_path, arms), on_batch=on_batch, **settings)
        books, seen = books_of(tmp_path, arms), []
        found = ask(pair, arms, items, answers=books, on_batch=seen.append, **settings)
        # Batches are those of the whole run, so the numbers are the very same.
        assert found == whole
        kept = sum(book.n_reused for book in books.values())
        assert kept >= sum(len(batch) for batch in taken)
        assert sorted(map(str, (result for batch in seen for result in batch))) == sorted(map(str, whole))
        if kept:
            assert len(seen[0]) == kept, "what was kept is handed over first"

    def test_once_all_is_answered_no_model_is_asked(self, monkeypatch, tmp_path, pair, arms, items):
        whole = ask(pair, arms, items, answers=books_of(tmp_path, arms))
        readers = count_prefills(monkeypatch)
        books = books_of(tmp_path, arms)
        assert ask(pair, arms, items, answers=books) == whole
        assert readers == []
        assert {book.n_reused for book in books.values()} == {len(items)}

    def test_another_mapper_leaves_target_and_source_alone(self, monkeypatch, tmp_path, pair, arms, items):
        natives = {arm: arms[arm] for arm in ("target", "source", "no_context")}
        ask(pair, natives, items, answers=books_of(tmp_path, natives))
        some = natives | {"mapped": arms["mapped"]}
        expected = ask(pair, some, items)
        readers = count_prefills(monkeypatch)
        ask(pair, {"mapped": arms["mapped"]}, items)
        for_it_alone, books = list(readers), books_of(tmp_path, some)
        readers.clear()
        assert ask(pair, some, items, answers=books) == expected
        assert readers == for_it_alone
        assert [books[arm].n_reused for arm in some] == [5, 5, 5, 0]

    def test_without_a_mapped_arm_that_lacks_answers_the_source_reads_nothing(
        self, monkeypatch, tmp_path, pair, arms, items
    ):
        some = {arm: arms[arm] for arm in ("source", "mapped")}
        ask(pair, some, items, answers=books_of(tmp_path, some))
        readers = count_prefills(monkeypatch)
        more = some | {"target": None}
        ask(pair, more, items, answers=books_of(tmp_path, more))
        assert set(readers) == {"target"}

    def test_items_added_later_are_asked_alone(self, tmp_path, pair, arms, items):
        ask(pair, arms, items[:3], answers=books_of(tmp_path, arms))
        books = books_of(tmp_path, arms)
        found = ask(pair, arms, items, answers=books)
        assert {book.n_reused for book in books.values()} == {3}
        for one, other in zip(found, ask(pair, arms, items), strict=True):
            # Other rows share a batch: float32 rounding.
            assert one.logliks == pytest.approx(other.logliks, abs=1e-4)
            assert dataclasses.replace(one, logliks=()) == dataclasses.replace(other, logliks=())

    def test_the_judgement_is_made_anew(self, tmp_path, pair, arms, items):
        some = {"target": None}
        first = ask(pair, some, items, answers=books_of(tmp_path, some))
        moved = [dataclasses.replace(item, answer=(item.answer + 1) % len(item.choices)) for item in items]
        books = books_of(tmp_path, some)
        found = ask(pair, some, moved, answers=books)
        assert books["target"].n_reused == len(items)
        assert [r.predicted for r in found] == [r.predicted for r in first]
        assert [r.correct for r in found] == [
            r.predicted == item.answer for r, item in zip(first, moved, strict=True)
        ]
        assert all(a.content != b.content for a, b in zip(first, found, strict=True))

    @pytest.mark.parametrize(
        "change", [{"context": "anna is in the hall . where ?"}, {"choices": (" a", " b")}, {"stop": (" x",)}]
    )
    def test_another_question_is_asked(self, tmp_path, pair, items, change):
        some = {"target": None}
        ask(pair, some, items[:1], answers=books_of(tmp_path, some))
        books = books_of(tmp_path, some)
        ask(pair, some, [dataclasses.replace(items[0], answer=0, **change)], answers=books)
        assert books["target"].n_reused == 0


class TestPerplexity:
    @pytest.mark.parametrize("sequential", [False, True])
    @pytest.mark.parametrize("n_batches", [0, 1, 2])
    def test_an_interrupted_evaluation_begins_at_the_sequence_reached(
        self, tmp_path, pair, arms, blocks, n_batches, sequential
    ):
        whole = read(pair, arms, blocks)
        on_batch, _ = stopping_after(n_batches)
        settings = {"sequential": sequential}
        with pytest.raises(Interrupted):
            read(pair, arms, blocks, answers=books_of(tmp_path, arms), on_batch=on_batch, **settings)
        books, seen = books_of(tmp_path, arms), []
        assert read(pair, arms, blocks, answers=books, on_batch=seen.append, **settings) == whole
        # The batch that was handed over as the interruption came is kept as well.
        assert {book.n_reused for book in books.values()} == {min(5, 2 * (n_batches + 1))}
        numbers = sorted(n for found in seen for n in found["mapped"].sequence)
        assert numbers == [0, 1, 2, 3, 4]

    def test_once_all_is_scored_no_model_is_asked(self, monkeypatch, tmp_path, pair, arms, blocks):
        whole = read(pair, arms, blocks, answers=books_of(tmp_path, arms))
        readers = count_prefills(monkeypatch)
        assert read(pair, arms, blocks, answers=books_of(tmp_path, arms)) == whole
        assert readers == []

    def test_an_arm_added_later_is_held_against_native_and_scored_alone(self, tmp_path, pair, arms, blocks):
        some = {arm: arms[arm] for arm in ("target", "no_context", "source")}
        read(pair, some, blocks, answers=books_of(tmp_path, some))
        more = some | {"mapped": arms["mapped"]}
        books, seen = books_of(tmp_path, more), []
        assert read(pair, more, blocks, answers=books, on_batch=seen.append) == read(pair, more, blocks)
        assert [books[arm].n_reused for arm in more] == [5, 5, 5, 0]
        assert [tuple(found) for found in seen] == [tuple(some), ("mapped",), ("mapped",), ("mapped",)]

    def test_a_score_without_its_kl_is_not_kept(self, tmp_path, pair, arms, blocks):
        some = {arm: arms[arm] for arm in ("target", "source")}
        poor = read(pair, some, blocks, answers=books_of(tmp_path, some), sequential=True, max_spill_bytes=10)
        assert all(math.isnan(kl) for kl in poor["source"].kl)
        books = books_of(tmp_path, some)
        assert read(pair, some, blocks, answers=books) == read(pair, some, blocks)
        assert (books["target"].n_reused, books["source"].n_reused) == (5, 0)

    def test_another_cut_of_the_same_text_is_scored(self, tmp_path, pair, blocks):
        some = {"target": None}
        read(pair, some, blocks, answers=books_of(tmp_path, some))
        books = books_of(tmp_path, some)
        read(pair, some, blocks, answers=books, prefix_tokens=21)
        assert books["target"].n_reused == 0
