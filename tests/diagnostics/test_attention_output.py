"""The cosine of attention outputs against loops over every sequence, head, query and column in float64."""

from __future__ import annotations

import math
import tempfile

import pytest

from kvmap.diagnostics import attention_output as room
from kvmap.diagnostics.attention_output import attention_output_metrics, attention_output_rows
from kvmap.errors import KvmapError
from kvmap.fit.features import geometry_shape
from kvmap.mappers import FittedFor, IdentityMapper, MapperMismatch, RawMapper
from kvmap.models.capture import prefill
from kvmap.models.pair import LoadedModel, ModelPair
from kvmap.models.queries import read_queries
from kvmap.transfer import TransferOptions, transfer
from tests.tiny_random_models import FAMILIES, left_padding, random_ids

IDS, MASK = random_ids(3, 9), left_padding(3, 9)


class NegatedValues(IdentityMapper):
    """Keys as they are, values turned about."""

    def map_layer(self, layer, keys, values, *native):
        return keys[layer], -values[layer]


def pair_of(source, target, **settings):
    return ModelPair(
        LoadedModel.from_model(FAMILIES[source](seed=1, n_layers=3), name="source"),
        LoadedModel.from_model(FAMILIES[target](seed=2, **settings), name="target"),
    )


@pytest.fixture(scope="module")
def pair():
    return pair_of("llama_yarn", "llama")


def raw(pair):
    return RawMapper(*(geometry_shape(m.geometry) for m in (pair.source, pair.target)))


def itself(pair):
    return IdentityMapper(geometry_shape(pair.target.geometry))


def output(q, keys, values, scaling, softcap):
    s = [scaling * float(k @ q) for k in keys]
    s = [softcap * math.tanh(x / softcap) if softcap else x for x in s]
    a = [math.exp(x - max(s)) for x in s]
    return sum(x * v for x, v in zip(a, values, strict=True)) / sum(a)


def by_loops(pair, mapper, options):
    """Cosines by (layer, head), one row at a time, without pads."""
    cosines = {}
    for ids, mask in zip(IDS, MASK, strict=True):
        ids = ids[mask.bool()][None]
        source_kv = prefill(pair.source, ids)
        kv = transfer(
            source_kv, mapper, pair.target, ids, native_head=options.native_head, rope=options.rope
        ).kv

        def on_layer(layer, query, key, value, scaling, softcap, kv=kv):
            for head in range(query.shape[1]):
                shared = head // (query.shape[1] // key.shape[1])
                for u in range(options.native_head, query.shape[2] - 1):
                    own, found = (
                        output(
                            query[0, head, u].double(),
                            k[0, shared, : u + 1].double(),
                            v[0, shared, : u + 1].double(),
                            scaling,
                            softcap,
                        )
                        for k, v in ((key, value), (kv.keys[layer], kv.values[layer]))
                    )
                    cosine = float(own @ found / (own.norm() * found.norm()))
                    cosines.setdefault((layer, head), []).append(cosine)

        read_queries(pair.target, ids, None, on_layer)
    return cosines


@pytest.mark.parametrize("rope", ["strip", "coupled", "no_rerotate"])
@pytest.mark.parametrize("native_head", [0, 1, 3])
@pytest.mark.parametrize(
    ("source", "target", "settings"),
    [
        ("llama_yarn", "llama", {"num_attention_heads": 8, "head_dim": 8}),
        ("qwen3", "gemma2", {"attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 2}),
    ],
)
def test_cosines_are_those_of_plain_loops(source, target, settings, native_head, rope):
    pair = pair_of(source, target, **settings)
    options = TransferOptions(native_head=native_head, rope=rope)
    rows = attention_output_rows(pair, raw(pair), IDS, options, MASK, batch_size=2, query_block=3)
    expected = by_loops(pair, raw(pair), options)
    assert [(row["layer"], row["head"]) for row in rows] == sorted(expected)
    for row in rows:
        cosines = expected[row["layer"], row["head"]]
        assert row["n"] == len(cosines) == 8 + 5 + 2 - 3 * native_head + (native_head == 3)
        # float32 forwards, padded and alone
        assert row["cosine"] == pytest.approx(sum(cosines) / len(cosines), abs=2e-5)


def test_layers_that_the_target_computes_itself_count_as_the_exact_ones_they_are(pair):
    mapper = RawMapper(*(geometry_shape(m.geometry) for m in (pair.source, pair.target)), native_layers=1)
    options = TransferOptions(native_head=1)
    expected = by_loops(pair, mapper, options)
    for row in attention_output_rows(pair, mapper, IDS, options, MASK):
        cosines = expected[row["layer"], row["head"]]
        assert row["cosine"] == pytest.approx(sum(cosines) / len(cosines), abs=2e-5)
        assert (row["cosine"] == pytest.approx(1.0, abs=1e-6)) == (row["layer"] == 0)


@pytest.mark.parametrize("name", ["llama", "gemma2", "phi3_longrope", "gpt_neox", "ministral3"])
def test_the_identity_of_a_model_with_itself_gives_one(name):
    model = LoadedModel.from_model(FAMILIES[name]())
    both = ModelPair(model, model)
    rows = attention_output_rows(both, itself(both), IDS, TransferOptions(native_head=0), MASK)
    assert len(rows) == 2 * model.geometry.n_heads
    # float32 keys stripped and rotated again
    assert all(row["cosine"] == pytest.approx(1.0, abs=1e-6) for row in rows)


def test_values_turned_about_turn_the_outputs_about():
    model = LoadedModel.from_model(FAMILIES["llama"]())
    both = ModelPair(model, model)
    mapper = NegatedValues(geometry_shape(model.geometry))
    rows = attention_output_rows(both, mapper, IDS, TransferOptions(native_head=0), MASK)
    assert all(row["cosine"] == pytest.approx(-1.0, abs=1e-6) for row in rows)
    with_head = attention_output_rows(both, mapper, IDS, TransferOptions(native_head=1), MASK)
    assert all(-1 < row["cosine"] < 1 for row in with_head)


def test_the_held_back_token_and_how_many_are_held_back_do_not_matter(pair):
    ids = IDS.clone()
    ids[:, -1] = 5
    expected = attention_output_rows(pair, raw(pair), IDS, TransferOptions(hold_back=4), MASK)
    found = attention_output_rows(pair, raw(pair), ids, TransferOptions(), MASK)
    for one, other in zip(expected, found, strict=True):
        assert one["n"] == other["n"]
        assert one["cosine"] == pytest.approx(other["cosine"], abs=1e-6)


@pytest.mark.parametrize(("batch_size", "query_block"), [(1, 128), (3, 1), (2, 4)])
def test_batches_and_blocks_change_nothing(pair, batch_size, query_block):
    expected = attention_output_rows(pair, raw(pair), IDS, TransferOptions(), MASK)
    found = attention_output_rows(
        pair, raw(pair), IDS, TransferOptions(), MASK, batch_size=batch_size, query_block=query_block
    )
    for one, other in zip(expected, found, strict=True):
        assert one["cosine"] == pytest.approx(other["cosine"], abs=1e-6)


def test_one_model_at_a_time_is_released_before_the_other_reads(monkeypatch, pair, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    expected = attention_output_rows(pair, raw(pair), IDS, TransferOptions(), MASK, batch_size=2)
    events = []
    monkeypatch.setattr(pair, "release", lambda side: events.append(f"release {side}"))
    for name in ("prefill", "read_queries"):
        actual = getattr(room, name)
        monkeypatch.setattr(
            room, name, lambda model, *given, a=actual: events.append(model.identity.name) or a(model, *given)
        )
    found = attention_output_rows(
        pair, raw(pair), IDS, TransferOptions(), MASK, batch_size=2, sequential=True
    )
    assert found == expected
    assert events == ["release target", "source", "source", "release source", "target", "target"]
    assert list(tmp_path.iterdir()) == []


def test_the_metric_is_the_mean_over_layers_and_heads():
    rows = [{"layer": n, "head": 0, "cosine": cosine, "n": 7} for n, cosine in enumerate((0.5, 0.75))]
    (name, metric), *none = attention_output_metrics(rows, "raw").items()
    assert not none
    assert name == "diagnose/attention_output/raw/cosine"
    assert (metric.value, metric.n) == (0.625, 2)


def test_what_cannot_be_read_or_leaves_nothing_to_map_is_refused(pair):
    mapper, options = raw(pair), TransferOptions()
    with pytest.raises(KvmapError, match=r"shape \(3, 0\)"):
        attention_output_rows(pair, mapper, IDS[:, :0], options)
    with pytest.raises(KvmapError, match=r"attention_mask has shape \(3, 8\)"):
        attention_output_rows(pair, mapper, IDS, options, MASK[:, 1:])
    with pytest.raises(KvmapError, match="contexts of 2 tokens leave nothing to map"):
        attention_output_rows(pair, mapper, IDS[:, :2], options)
    with pytest.raises(KvmapError, match="query_block=0"):
        attention_output_rows(pair, mapper, IDS, options, query_block=0)
    fitted = raw(pair)
    fitted.fitted_for = FittedFor(pair.source_identity, pair.target_identity, "coupled")
    with pytest.raises(MapperMismatch, match="rope: 'coupled'"):
        attention_output_rows(pair, fitted, IDS, options)
