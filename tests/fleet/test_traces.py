"""Two traces are the captures of their pair, and a trace that was cut short is gone on with."""

from __future__ import annotations

import pytest
import torch

from kvmap.fit import reading
from kvmap.fit.captures import capture
from kvmap.fleet import PairedTraces, Trace, read_trace
from kvmap.models.pair import ModelPair
from tests.fleet.conftest import SPLITS


@pytest.fixture(scope="module")
def traces(models, blocks, tmp_path_factory) -> dict[str, Trace]:
    root = tmp_path_factory.mktemp("traces")
    return {
        name: read_trace(model, blocks.input_ids, root / name, root / f"{name}.waiting", batch_size=3)
        for name, model in models.items()
    }


def test_paired_traces_stream_what_captures_of_the_pair_stream(traces, models, blocks, tmp_path) -> None:
    for source, target in (("a", "b"), ("c", "a")):
        pair = ModelPair(models[source], models[target])
        wanted = capture(pair, blocks.input_ids, tmp_path / f"{source}{target}", batch_size=3)
        got = PairedTraces.of(traces[source], traces[target])
        for one, other in zip(wanted.stream(SPLITS), got.stream(SPLITS), strict=True):
            assert (one.split, one.sequences) == (other.split, other.sequences)
            for side in ("source", "target"):
                for kind in ("keys", "values"):
                    layers = zip(
                        getattr(getattr(one, side), kind), getattr(getattr(other, side), kind), strict=True
                    )
                    assert all(torch.equal(x, y) for x, y in layers)
        assert torch.equal(wanted.layers("target", "key", [1], 3)[0], got.layers("target", "key", [1], 3)[0])
        assert torch.equal(wanted.mask(0), got.mask(0))


def test_sequences_are_found_in_the_batch_that_holds_them(traces, models, blocks) -> None:
    trace = traces["b"]
    assert Trace.open(trace.folder) == trace
    assert trace.parts([0, 4, 5, 7]) == [(0, [0]), (3, [4, 5]), (6, [7])]
    whole = models["b"]
    kv = trace.load(3, [5, 4])
    wanted = reading.prefill(whole, blocks.input_ids[3:6])
    assert torch.equal(kv.keys[2], wanted.keys[2][[2, 1]])


def test_a_trace_that_was_cut_short_reads_what_is_missing(models, blocks, tmp_path, monkeypatch) -> None:
    read: list[int] = []
    prefill = reading.prefill

    def failing(model, ids):
        if len(read) == 2:
            raise KeyboardInterrupt
        read.append(len(ids))
        return prefill(model, ids)

    monkeypatch.setattr(reading, "prefill", failing)
    arguments = (models["a"], blocks.input_ids, tmp_path / "trace", tmp_path / "waiting")
    with pytest.raises(KeyboardInterrupt):
        read_trace(*arguments, batch_size=3)
    assert not (tmp_path / "trace").exists()
    monkeypatch.setattr(reading, "prefill", lambda model, ids: read.append(len(ids)) or prefill(model, ids))
    read_trace(*arguments, batch_size=3)
    assert read == [3, 3, 2]
