from __future__ import annotations

import itertools
import json
import sys
import types

import pytest

from kvmap.data import TextSpec, UnreadableCorpus, read_json_lines, read_texts
from kvmap.errors import UnknownName
from kvmap.zoo import world


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_the_world_is_read_lazily_by_seed_and_split():
    spec = TextSpec("world", seed=3, split="evaluation", min_words=40)
    read = list(itertools.islice(read_texts(spec), 3))
    assert read == list(world.documents(3, 3, min_words=40, split="evaluation"))
    assert "evaluation" in spec.describe()
    assert "seed=3" in spec.describe()


def test_the_world_calibrates_on_its_calibration_split_unless_told_otherwise():
    assert next(read_texts(TextSpec("world"))) == next(world.documents(0, 1, split="calibration"))


def test_jsonl_reads_one_field_of_the_rows_that_where_keeps(tmp_path):
    rows = [{"domain": "a", "body": "one"}, {"domain": "b", "body": "two"}, {"domain": "a", "body": "three"}]
    path = write_rows(tmp_path / "x.jsonl", rows)
    spec = TextSpec("jsonl", path=str(path), field="body", where={"domain": "a"})
    assert list(read_texts(spec)) == ["one", "three"]


def test_a_folder_is_read_in_the_order_of_its_names(tmp_path):
    write_rows(tmp_path / "b.jsonl", [{"text": "second"}])
    write_rows(tmp_path / "a.jsonl", [{"text": "first"}])
    (tmp_path / "a.txt").write_text("plain ö", encoding="utf-8")
    assert list(read_texts(TextSpec("jsonl", path=str(tmp_path)))) == ["first", "second"]
    assert list(read_texts(TextSpec("text", path=str(tmp_path)))) == ["plain ö"]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{broken", "not JSON"),
        ('["a list"]', "JSON object"),
        ('{"other": "x"}', "no field 'text'"),
        ('{"text": 3}', "int"),
    ],
)
def test_a_malformed_line_is_named_by_file_and_number(tmp_path, line, complaint):
    path = tmp_path / "x.jsonl"
    path.write_text('{"text": "fine"}\n\n' + line + "\n", encoding="utf-8")
    with pytest.raises(UnreadableCorpus, match=rf"x\.jsonl, line 3.*{complaint}"):
        list(read_texts(TextSpec("jsonl", path=str(path))))


def test_bytes_that_are_no_text_are_refused_by_name(tmp_path):
    (tmp_path / "x.jsonl").write_bytes(b'{"text": "\xff"}\n')
    (tmp_path / "x.txt").write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(UnreadableCorpus, match=r"x\.jsonl, line 1"):
        list(read_json_lines(tmp_path / "x.jsonl"))
    with pytest.raises(UnreadableCorpus, match=r"x\.txt.*UTF-8"):
        list(read_texts(TextSpec("text", path=str(tmp_path / "x.txt"))))


def test_a_where_that_keeps_nothing_says_what_there_is(tmp_path):
    path = write_rows(
        tmp_path / "x.jsonl", [{"domain": "news", "text": "one"}, {"domain": "wiki", "text": "two"}]
    )
    with pytest.raises(UnreadableCorpus, match=r"no row where.*wikipedia.*news \(1\), wiki \(1\)"):
        list(read_texts(TextSpec("jsonl", path=str(path), where={"domain": "wikipedia"})))


@pytest.mark.parametrize("kind", ["jsonl", "text"])
def test_a_missing_path_is_named(kind, tmp_path):
    with pytest.raises(UnreadableCorpus, match="needs `path`"):
        list(read_texts(TextSpec(kind)))
    with pytest.raises(UnreadableCorpus, match="nowhere"):
        list(read_texts(TextSpec(kind, path=str(tmp_path / "nowhere"))))


def test_an_unknown_kind_answers_with_the_nearest():
    with pytest.raises(UnknownName, match="Did you mean 'jsonl'"):
        read_texts(TextSpec("json"))


def test_the_hub_is_streamed_with_its_name_config_split_and_revision(monkeypatch):
    asked = {}

    def load_dataset(name, config, **settings):
        asked.update(name=name, config=config, **settings)
        return iter([{"text": "one"}, {"text": "two"}])

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    spec = TextSpec("hf", name="org/set", config="small", split="test", revision="abc")
    assert list(read_texts(spec)) == ["one", "two"]
    assert asked == {
        "name": "org/set", "config": "small", "split": "test", "revision": "abc", "streaming": True,
    }  # fmt: skip


def test_a_hub_out_of_reach_is_one_clear_error(monkeypatch):
    def load_dataset(*_, **__):
        raise ConnectionError("no route to host")

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    with pytest.raises(UnreadableCorpus, match=r"org/set.*ConnectionError: no route to host.*local files"):
        list(read_texts(TextSpec("hf", name="org/set")))
    with pytest.raises(UnreadableCorpus, match="needs `name`"):
        list(read_texts(TextSpec("hf")))


def test_without_the_datasets_package_the_remedy_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UnreadableCorpus, match="pip install datasets"):
        list(read_texts(TextSpec("hf", name="org/set")))
