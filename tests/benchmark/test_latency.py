from __future__ import annotations

import pytest
import torch

from kvmap.benchmark.latency import ARMS, LatencySettings, latency_metrics, latency_rows, path_rows
from kvmap.benchmark.random_models import Depth, random_mapper
from kvmap.benchmark.roofline import Roofline
from kvmap.errors import KvmapError, UnknownName
from kvmap.fit.features import geometry_shape
from kvmap.mappers import RawMapper
from kvmap.models.pair import LoadedModel, ModelPair
from kvmap.transfer import TransferOptions
from tests.tiny_random_models import build

SHAPE = ((2, 8), (2, 8))
QUICK = LatencySettings(batch_size=2, repeats=3, warmup=1, buffers=2)
ROOFLINE = Roofline(1e12, 1e11)


def quiet(iterable, total=None, description=""):
    return iterable


@pytest.fixture(scope="module")
def pair():
    return ModelPair(*(LoadedModel.from_model(build("llama", seed=seed)) for seed in (1, 2)))


@pytest.fixture(scope="module")
def mapper(pair):
    return random_mapper(*(geometry_shape(g) for g in (pair.source_geometry, pair.target_geometry)), 2)


@pytest.fixture(scope="module")
def rows(pair, mapper):
    return latency_rows(pair, mapper, [8, 16], QUICK, roofline=ROOFLINE, progress=quiet)


def test_every_arm_has_a_row_at_every_length_with_ordered_percentiles(rows):
    assert [(row["length"], row["arm"]) for row in rows] == [(n, arm) for n in (8, 16) for arm in ARMS]
    for row in rows:
        assert 0 < row["p20_ms"] <= row["p50_ms"] <= row["p80_ms"]
        assert row["whole_p50_ms"] == row["p50_ms"]
        assert (row["n_repeats"], row["device"], row["dtype"]) == (3, "cpu", "float32")
        assert (row["threads"], row["buffers"], row["path"]) == (torch.get_num_threads(), 2, "auto")


def test_bytes_are_those_of_both_caches(rows):
    for row in rows:
        # 2 (keys, values) · 2 layers · 2 heads · 8 channels · tokens · 2 contexts · 4 bytes
        assert row["source_bytes"] == row["mapped_bytes"] == 2 * 2 * 2 * 8 * row["length"] * 2 * 4


def test_transport_is_computed_where_nothing_is_copied(rows):
    for row in rows:
        if row["arm"] == "transport":
            assert row["how"] == "computed for 100 Gb/s"
            assert row["p50_ms"] == pytest.approx(row["source_bytes"] * 8 / 100e9 * 1e3)
            assert row["roofline_share"] is None
        else:
            assert row["how"] == "measured"


def test_the_roofline_share_is_the_least_time_over_the_time(rows):
    for row in (row for row in rows if row["arm"] != "transport"):
        least = max(row["flops"] / 1e12, row["bytes_moved"] / 1e11) * 1e3
        assert row["roofline_ms"] == pytest.approx(least)
        assert row["roofline_share"] == pytest.approx(least / row["p50_ms"])


def test_mapping_costs_two_operations_a_weight_and_token(rows, mapper):
    for row in (row for row in rows if row["arm"] == "map"):
        assert row["flops"] == 2 * mapper.n_weights * row["length"] * QUICK.batch_size
        assert row["bytes_moved"] == row["source_bytes"] + mapper.nbytes + row["mapped_bytes"]


def test_peak_memory_holds_at_least_what_comes_out(rows):
    by_arm = {row["arm"]: row for row in rows if row["length"] == 16}
    assert by_arm["re_prefill"]["peak_bytes"] >= by_arm["re_prefill"]["mapped_bytes"]
    assert by_arm["hand_off"]["peak_bytes"] >= by_arm["hand_off"]["mapped_bytes"]
    assert by_arm["transport"]["peak_bytes"] is None


def test_native_layers_are_read_once_more_before_the_map():
    models = [LoadedModel.from_model(build("llama", seed=seed, n_layers=3)) for seed in (1, 2)]
    shape = SHAPE + SHAPE[:1]
    moved = {}
    for m in (0, 2):
        settings = LatencySettings(repeats=1, warmup=0, memory=False)
        found = latency_rows(ModelPair(*models), RawMapper(shape, shape, m), [8], settings, progress=quiet)
        moved[m] = {row["arm"]: row["bytes_moved"] for row in found}
        assert {row["path"] for row in found} == {"by_layer"}
    layers = models[1].body.layers
    extra = sum(weight.nbytes for weight in layers[0].parameters()) + sum(
        projection.weight.nbytes for projection in (layers[1].self_attn.k_proj, layers[1].self_attn.v_proj)
    )
    assert moved[2].pop("hand_off") == moved[0].pop("hand_off") + extra
    assert moved[2] == moved[0]


def test_shortened_models_are_scaled_and_say_so(pair, mapper):
    depths = {"source": Depth(2, 6), "target": Depth(2, 10)}
    settings = LatencySettings(repeats=1, warmup=0, memory=False)
    rows = latency_rows(pair, mapper, [8], settings, depths=depths, progress=quiet)
    for row in rows:
        side, of = ("source", 6) if row["arm"] in ("source_prefill", "transport") else ("target", 10)
        assert row["how"].endswith(f"scaled from 2 of {of} layers")
        assert row["whole_p50_ms"] == pytest.approx(row["p50_ms"] * depths[side].scale)
        assert row["source_bytes"] == 3 * 2 * 2 * 2 * 8 * 8 * 4
    assert latency_metrics(rows)["benchmark/8/map/p50_ms"].value == rows[1]["whole_p50_ms"]


def test_models_of_all_their_layers_are_not_scaled(pair, mapper):
    settings = LatencySettings(repeats=1, warmup=0, memory=False)
    depths = {"source": Depth(2, 2), "target": Depth(2, 2)}
    rows = latency_rows(pair, mapper, [8], settings, depths=depths, progress=quiet)
    assert not any("scaled" in row["how"] for row in rows)


def test_metrics_name_length_arm_and_unit(rows):
    metrics = latency_metrics(rows)
    by_arm = {row["arm"]: row["p50_ms"] for row in rows if row["length"] == 16}
    assert metrics["benchmark/16/map/p50_ms"].value == by_arm["map"]
    assert metrics["benchmark/16/map/p50_ms"].n == 3
    ratio = metrics["benchmark/16/hand_off/cold_ratio"].value
    assert ratio == by_arm["re_prefill"] / (by_arm["source_prefill"] + by_arm["hand_off"])
    assert metrics["benchmark/16/map/map_ratio"].value == by_arm["re_prefill"] / by_arm["map"]


def test_every_path_has_a_row_and_one_that_cannot_serve_its_reason(pair, mapper):
    asked = ["auto", "per_head", "reference", "batched", "triton"]
    found = {row["path"]: row for row in path_rows(pair, mapper, [8], asked, QUICK, progress=quiet)}
    assert list(found) == asked
    for path in asked[:4]:
        assert found[path]["note"] is None
        assert found[path]["p20_ms"] <= found[path]["p50_ms"]
        assert found[path]["times_per_head"] > 0
    assert found["per_head"]["times_per_head"] == 1
    triton = found["triton"]
    assert triton.get("p50_ms") is not None or "cannot serve" in triton["note"]


def test_a_mapper_that_is_no_table_of_weights_has_one_path(pair):
    rows = path_rows(pair, RawMapper(SHAPE, SHAPE), [8], ["auto", "batched"], QUICK, progress=quiet)
    assert [row["path"] for row in rows] == ["by_layer"]


@pytest.mark.parametrize(
    ("lengths", "options", "complaint"),
    [
        ([2], TransferOptions(), "length 2: expected at least 3"),
        ([4], TransferOptions(hold_back=4), "expected at least 6"),
        ([128], TransferOptions(), "takes 128"),
    ],
)
def test_lengths_that_cannot_be_measured_are_refused(pair, mapper, lengths, options, complaint):
    with pytest.raises(KvmapError, match=complaint):
        latency_rows(pair, mapper, lengths, options=options, progress=quiet)


@pytest.mark.parametrize("wrong", [{"repeats": 0}, {"warmup": -1}, {"batch_size": 0}, {"buffers": 0}])
def test_settings_out_of_range_are_refused(wrong):
    ((name, value),) = wrong.items()
    with pytest.raises(KvmapError, match=f"{name}={value}: expected"):
        LatencySettings(**wrong)
    with pytest.raises(KvmapError, match="link_gbit_per_s=0"):
        LatencySettings(link_gbit_per_s=0)


def test_an_unknown_path_is_refused_with_the_nearest(pair, mapper):
    with pytest.raises(UnknownName, match="Did you mean 'batched'"):
        LatencySettings(path="batchd")
    with pytest.raises(UnknownName, match="Did you mean 'batched'"):
        path_rows(pair, mapper, [8], ["batchd"], QUICK, progress=quiet)


@pytest.mark.gpu
def test_on_a_gpu_the_device_is_named_and_transport_measured():
    model = LoadedModel.from_model(build("llama").to("cuda"))
    settings = LatencySettings(repeats=2)
    rows = latency_rows(ModelPair(model, model), RawMapper(SHAPE, SHAPE), [16], settings, progress=quiet)
    assert {row["device"] for row in rows} == {torch.cuda.get_device_name()}
    assert {row["how"] for row in rows} == {"measured"}
