from __future__ import annotations

import json

import pytest

from kvmap.benchmark.command import main

MODELS = ["--source", "zoo:tiny-small", "--target", "zoo:tiny-medium"]
SMALL = [*MODELS, "--lengths", "8", "--repeats", "1", "--warmup", "0", "--top-k", "2"]


def last_line(capsys):
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_two_models_give_every_table_and_one_json_object(capsys, tmp_path):
    output = tmp_path / "found.json"
    assert main([*SMALL, "--at-least-map", "0", "--at-least-batched", "0", "--output", str(output)]) == 0
    found = last_line(capsys)
    assert json.loads(output.read_text())["n_weights"] == found["n_weights"]
    assert {row["arm"] for row in found["latency"]} >= {"map", "hand_off", "re_prefill"}
    assert [row["path"] for row in found["paths"]] == ["auto", "batched", "per_head", "per_head_stripped"]
    assert found["ratios"][0]["map_ratio"] > 0
    assert found["roofline"]["gflop_per_s"] > 0
    assert [row["reached"] for row in found["reach"]] == [True, True]


def test_what_is_not_reached_shows_in_the_status(capsys):
    assert main([*SMALL, "--paths", "auto", "--at-least-map", "1e9", "--at-least-batched", "2"]) == 2
    found = last_line(capsys)
    assert [row["reached"] for row in found["reach"]] == [False, False]
    assert found["reach"][1]["got"] is None


def test_random_weights_are_shortened_and_labelled(capsys):
    assert main([*SMALL, "--random-weights", "--max-layers", "2", "--dtype", "float32"]) == 0
    found = last_line(capsys)
    assert found["source"] == "random weights in the shape of zoo:tiny-small"
    assert all("scaled from 2 of" in row["how"] for row in found["latency"])


@pytest.mark.parametrize(
    ("more", "complaint"),
    [
        (["--max-layers", "2"], "add --random-weights"),
        (["--top-k", "9"], "top_k=9: the source has 3 layers; expected an integer from 1 to 3"),
        (["--lengths", "2"], "length 2: expected at least 3"),
    ],
)
def test_what_cannot_be_measured_is_one_line(capsys, more, complaint):
    assert main([*SMALL, *more]) == 1
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: ")
    assert complaint in error
