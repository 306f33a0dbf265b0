"""The cost of the streaming diagnostics, measured."""

from __future__ import annotations

import json

import pytest

from kvmap.benchmark.diagnostics import diagnostics_row, main
from kvmap.benchmark.random_models import random_mapper_of
from kvmap.errors import KvmapError
from kvmap.fit.features import geometry_shape
from tests.diagnostics.plain_loops import pair_of


@pytest.fixture(scope="module")
def pair():
    return pair_of("llama_yarn", "llama")


def test_a_row_says_what_was_measured(pair):
    row = diagnostics_row(pair, random_mapper_of(pair, 2), n_sequences=3, length=24, batch_size=2, repeats=2)
    assert (row["n_sequences"], row["length"], row["batch_size"], row["n_repeats"]) == (3, 24, 2, 2)
    assert row["native_seconds"] > 0
    assert row["ratio"] > 0
    assert 0 < row["native_cpu_seconds"] < row["diagnostics_cpu_seconds"]
    assert row["cpu_ratio"] > 1, "the diagnostics read what native reads, and more"


@pytest.mark.parametrize("top_k", [1, 3])
def test_the_random_map_reads_as_many_layers_as_asked(pair, top_k):
    mapper = random_mapper_of(pair, top_k)
    assert mapper.target_shape == geometry_shape(pair.target.geometry)
    for layer in range(len(mapper.target_shape)):
        assert len(mapper.recipe.sources("key", layer)) == top_k


def test_sizes_that_cannot_be_are_refused(pair):
    with pytest.raises(KvmapError, match="top_k=4: the source has 3 layers; expected an integer from 1 to 3"):
        random_mapper_of(pair, 4)
    with pytest.raises(KvmapError, match="repeats=0: expected 1 or more"):
        diagnostics_row(pair, random_mapper_of(pair, 1), n_sequences=1, length=8, repeats=0)


def test_the_command_ends_with_its_row(capsys, tmp_path):
    file = tmp_path / "row.json"
    models = ["--source", "zoo:tiny-small", "--target", "zoo:tiny-small"]
    sizes = ["--sequences", "2", "--length", "32", "--top-k", "1", "--output", str(file)]
    assert main([*models, *sizes]) == 0
    *_, last = capsys.readouterr().out.splitlines()
    assert json.loads(last) == json.loads(file.read_text())
    assert json.loads(last)["cpu_ratio"] > 1
    assert main([*models, "--top-k", "1", "--sequences", "0"]) == 1
    assert "n_sequences=0" in capsys.readouterr().err
