from __future__ import annotations

import time

import pytest
import torch

from kvmap.benchmark.latency import (
    ARMS,
    break_even,
    latency_metrics,
    latency_rows,
    ratio_rows,
    time_interleaved,
    transport_rows,
)
from kvmap.errors import KvmapError
from kvmap.mappers import RawMapper
from kvmap.models.pair import LoadedModel, ModelPair
from kvmap.transfer import TransferOptions
from tests.tiny_random_models import build

SHAPE = ((2, 8), (2, 8))


def quiet(iterable, total=None, description=""):
    return iterable


@pytest.fixture(scope="module")
def pair():
    return ModelPair(*(LoadedModel.from_model(build("llama", seed=seed)) for seed in (1, 2)))


@pytest.fixture(scope="module")
def rows(pair):
    return latency_rows(
        pair, RawMapper(SHAPE, SHAPE), [8, 16], batch_size=2, repeats=3, warmup=1, progress=quiet
    )


def test_every_arm_has_a_row_at_every_length_with_ordered_percentiles(rows):
    assert [(row["length"], row["arm"]) for row in rows] == [(n, arm) for n in (8, 16) for arm in ARMS]
    for row in rows:
        assert 0 < row["p20_ms"] <= row["p50_ms"] <= row["p80_ms"]
        assert (row["n_repeats"], row["device"], row["dtype"]) == (3, "cpu", "float32")
        assert row["threads"] == torch.get_num_threads()


def test_bytes_are_those_of_both_caches(rows):
    for row in rows:
        # 2 (keys, values) · 2 layers · 2 heads · 8 channels · tokens · 2 contexts · 4 bytes
        assert row["source_bytes"] == row["mapped_bytes"] == 2 * 2 * 2 * 8 * row["length"] * 2 * 4
        assert row["bytes_moved"] > row["mapped_bytes"]


def test_native_layers_are_read_once_more_before_the_map():
    models = [LoadedModel.from_model(build("llama", seed=seed, n_layers=3)) for seed in (1, 2)]
    shape = SHAPE + SHAPE[:1]
    moved = {}
    for m in (0, 2):
        mapper = RawMapper(shape, shape, m)
        rows = latency_rows(ModelPair(*models), mapper, [8], repeats=1, warmup=0, progress=quiet)
        moved[m] = {row["arm"]: row["bytes_moved"] for row in rows}
    layers = models[1].body.layers
    extra = sum(weight.nbytes for weight in layers[0].parameters()) + sum(
        projection.weight.nbytes for projection in (layers[1].self_attn.k_proj, layers[1].self_attn.v_proj)
    )
    assert moved[2].pop("map") == moved[0].pop("map") + extra
    assert moved[2] == moved[0]


def test_arms_take_turns_after_a_warm_up_that_is_not_timed():
    order = []
    calls = {name: lambda name=name: order.append(name) for name in "abc"}
    seconds = time_interleaved(calls, repeats=3, warmup=1)
    assert "".join(order) == "abc" + "bca" + "cab" + "abc"
    assert {name: len(times) for name, times in seconds.items()} == {"a": 3, "b": 3, "c": 3}


def test_times_are_wall_clock():
    seconds = time_interleaved({"nap": lambda: time.sleep(0.01)}, repeats=2, warmup=0)
    assert all(0.01 <= value < 1 for value in seconds["nap"])


def measured(**p50):
    """Rows of made-up medians: arm → one median per length 64, 128, 256."""
    return [
        {"length": length, "arm": arm, "p50_ms": medians[i], "source_bytes": 10**6, "mapped_bytes": 2 * 10**6,
         "n_repeats": 5}
        for arm, medians in p50.items()
        for i, length in enumerate((64, 128, 256))
    ]  # fmt: skip


def test_break_even_is_the_length_from_which_a_hand_off_stays_faster():
    made = measured(source_prefill=(4, 4, 4), map=(2, 2, 2), re_prefill=(3, 1, 5))
    assert [row["warm_ratio"] for row in ratio_rows(made)] == [1.5, 0.5, 2.5]
    found = break_even(made)
    assert (found["warm_length"], found["cold_length"]) == (256, None)
    assert found["note"] == (
        "a hand-off is faster than re-prefill: warm from 256 tokens on, cold never "
        "(measured: 64 to 256 tokens)"
    )


def test_transport_takes_eight_bits_a_byte():
    made = transport_rows(measured(map=(1, 1, 1)), gbit_per_s=(10, 100))
    assert len(made) == 3 * 2 * 2
    mapped = next(r for r in made if (r["length"], r["cache"], r["gbit_per_s"]) == (64, "mapped", 10))
    assert mapped["transport_ms"] == pytest.approx(2e6 * 8 / 10e9 * 1000)


def test_metrics_name_length_arm_and_unit(rows):
    metrics = latency_metrics(rows)
    by_arm = {row["arm"]: row for row in rows if row["length"] == 16}
    assert metrics["benchmark/16/map/p50_ms"].value == by_arm["map"]["p50_ms"]
    assert metrics["benchmark/16/map/p50_ms"].n == 3
    assert (
        metrics["benchmark/16/map/warm_ratio"].value
        == by_arm["re_prefill"]["p50_ms"] / by_arm["map"]["p50_ms"]
    )
    assert metrics["benchmark/16/map/cache_bytes"].value == by_arm["map"]["mapped_bytes"]


@pytest.mark.parametrize(
    ("lengths", "settings", "complaint"),
    [
        ([2], {}, "length 2: expected at least 3"),
        ([4], {"options": TransferOptions(hold_back=4)}, "expected at least 6"),
        ([128], {}, "takes 128"),
        ([8], {"repeats": 0}, "repeats=0"),
        ([8], {"warmup": -1}, "warmup=-1"),
        ([8], {"batch_size": 0}, "batch_size=0"),
    ],
)
def test_what_cannot_be_measured_is_refused(pair, lengths, settings, complaint):
    with pytest.raises(KvmapError, match=complaint):
        latency_rows(pair, RawMapper(SHAPE, SHAPE), lengths, progress=quiet, **settings)


@pytest.mark.gpu
def test_on_a_gpu_the_device_is_named():
    model = LoadedModel.from_model(build("llama").to("cuda"))
    rows = latency_rows(ModelPair(model, model), RawMapper(SHAPE, SHAPE), [16], repeats=2, progress=quiet)
    assert {row["device"] for row in rows} == {torch.cuda.get_device_name()}
