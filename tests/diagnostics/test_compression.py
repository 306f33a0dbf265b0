from __future__ import annotations

import math
from statistics import stdev

import pytest
import torch
from scipy.special import rel_entr

from kvmap.diagnostics import compression as room
from kvmap.diagnostics.compression import (
    UNCOMPRESSED,
    CompressionGate,
    compression_metrics,
    compression_rows,
    gate_r2,
    next_token_kl,
)
from kvmap.errors import KvmapError
from kvmap.fit.features import KINDS, Layout, Recipe, both, geometry_shape
from kvmap.fit.linear import LinearWeights, Penalty, fit_linear, r2_of
from kvmap.fit.pair_moments import PairMoments, selected_tables
from kvmap.fit.view import calibration_view
from kvmap.mappers import FittedFor, LinearMapper, Mapper, MapperMismatch
from kvmap.mappers.compressed import CompressedLinearMapper
from kvmap.models.capture import forward, prefill
from kvmap.models.pair import LoadedModel, ModelPair
from kvmap.transfer import TransferOptions, native, transfer
from tests.tiny_random_models import FAMILIES, random_ids

PREFIX, TOKENS = 12, 20
IDS = random_ids(3, TOKENS, seed=5)
OPTIONS = TransferOptions(hold_back=2, native_head=1)


@pytest.fixture(scope="module")
def pair():
    source = LoadedModel.from_model(FAMILIES["llama_yarn"](seed=1, n_layers=3), name="source")
    return ModelPair(source, LoadedModel.from_model(FAMILIES["llama"](seed=2), name="target"))


def calibrated(pair, native_layers):
    shapes = [geometry_shape(model.geometry) for model in (pair.source, pair.target)]
    every = both(((0, 1, 2),) * 2)
    recipe = Recipe(*shapes, "full_head", every, "both_kinds", native_layers)
    moments = PairMoments.zeros(Layout(*shapes, native_layers), selected_tables(recipe))
    for seed, split in enumerate(("fit", "held_out")):
        ids = random_ids(64, 24, seed=seed)
        caches = (prefill(model, ids) for model in (pair.source, pair.target))
        moments.update(split, *calibration_view(*caches))
    return LinearMapper(fit_linear(moments, recipe, Penalty(0.01))), moments


@pytest.fixture(scope="module", params=[0, 1], ids=["", "native layer"])
def fitted(pair, request):
    return calibrated(pair, request.param)


@pytest.fixture(scope="module")
def variants(fitted):
    mapper, moments = fitted
    made = {
        method: CompressedLinearMapper.from_linear(mapper, method, moments, tolerance=0.02)
        for method in ("bfloat16", "fp8", "low_rank")
    }
    made["mean"] = CompressedLinearMapper.from_linear(mapper, "low_rank", moments, tolerance=1e9)
    return made


@pytest.fixture(scope="module")
def rows(pair, fitted, variants):
    found = compression_rows(pair, fitted[0], variants, fitted[1], IDS, OPTIONS, prefix_tokens=PREFIX)
    return {row["variant"]: row for row in found}


def logits_by_hand(pair, mapper, ids):
    """(tokens after the prefix, vocabulary): one sequence, one token at a time; None: the target's own."""
    prefix = ids[None, :PREFIX]
    if mapper is None:
        hand_off = native(pair.target, prefix, hold_back=2)
    else:
        hand_off = transfer(
            prefill(pair.source, prefix), mapper, pair.target, prefix, hold_back=2, native_head=1
        )
    found, kv = [hand_off.logits[0]], hand_off.kv
    for token in ids[PREFIX:-1]:
        logits, kv = forward(pair.target, token.view(1, 1), kv)
        found.append(logits[0, -1])
    return torch.stack(found)


def test_the_divergences_are_those_of_a_plain_loop(pair, fitted, variants, rows):
    mappers = {UNCOMPRESSED: fitted[0], **variants}
    assert list(rows) == list(mappers)
    by_hand = {
        name: [logits_by_hand(pair, mapper, ids).double().softmax(-1).numpy() for ids in IDS]
        for name, mapper in {"native": None, **mappers}.items()
    }
    for name, row in rows.items():
        for column, reference in (("kl", UNCOMPRESSED), ("kl_native", "native")):
            means = [
                rel_entr(p, q).sum(-1).mean() for p, q in zip(by_hand[reference], by_hand[name], strict=True)
            ]
            # float32 forwards of one token and of several
            assert row[f"{column}_nats"] == pytest.approx(sum(means) / 3, rel=1e-3, abs=1e-6)
            error = stdev(means) / math.sqrt(3)
            assert row[f"{column}_standard_error"] == pytest.approx(error, rel=1e-2, abs=1e-6)
        assert (row["n_tokens"], row["n_sequences"]) == (3 * (TOKENS - PREFIX), 3)


def test_rows_tell_bytes_and_exact_r2(fitted, variants, rows):
    mapper, moments = fitted
    before = r2_of(mapper, moments, "held_out")
    for name, variant in {UNCOMPRESSED: mapper, **variants}.items():
        row, after = rows[name], r2_of(variant, moments, "held_out")
        assert (row["nbytes"], row["n_weights"]) == (variant.nbytes, variant.n_weights)
        assert row["bytes_ratio"] == variant.nbytes / mapper.nbytes
        worst = {}
        for kind in KINDS:
            loss = before[kind] - after[kind]
            assert row[f"r2_{kind}"] == pytest.approx(float(after[kind].nanmean()))
            assert row[f"r2_loss_{kind}"] == pytest.approx(float(loss.nanmean()), abs=1e-12)
            worst |= {
                f"{kind} {layer}.{head}": float(loss[layer, head])
                for layer in mapper.recipe.mapped_layers
                for head in range(2)
            }
        assert row["worst_r2_loss"] == pytest.approx(max(worst.values()), abs=1e-12)
        assert worst[row["worst_head"]] == max(worst.values())
    assert rows["bfloat16"]["bytes_ratio"] < 0.55
    assert rows["fp8"]["bytes_ratio"] < 0.36


def test_the_uncompressed_mapper_is_no_distance_from_itself(rows):
    own = rows[UNCOMPRESSED]
    assert (own["kl_nats"], own["r2_loss_key"], own["r2_loss_value"], own["bytes_ratio"]) == (0, 0, 0, 1)
    assert own["kl_native_nats"] > 0
    assert own["passes"]


def test_the_gate_lets_a_good_variant_pass_and_refuses_a_bad_one_with_the_reason(rows):
    assert rows["bfloat16"]["passes"]
    assert rows["bfloat16"]["reason"] == ""
    bad = rows["mean"]
    assert not bad["passes"]
    assert (
        f"held-out R² of keys falls by {bad['r2_loss_key']:.4g}, more than max_r2_loss=0.01" in bad["reason"]
    )
    assert f"KL is {bad['kl_nats']:.4g} nats, more than max_kl_nats=0.02" in bad["reason"]


def test_bounds_are_the_callers(pair, fitted, variants, rows):
    strict = CompressionGate(max_r2_loss=0, max_kl_nats=1e-12)
    lenient = CompressionGate(max_r2_loss=2, max_kl_nats=100)
    for gate, expected in ((strict, False), (lenient, True)):
        found = compression_rows(
            pair,
            *fitted_with(fitted, {"mean": variants["mean"]}),
            IDS,
            OPTIONS,
            prefix_tokens=PREFIX,
            gate=gate,
        )
        assert [row["passes"] for row in found] == [True, expected]


def fitted_with(fitted, variants):
    mapper, moments = fitted
    return mapper, variants, moments


@pytest.mark.parametrize("batch_size", [2, 3])
def test_batches_and_chunks_change_nothing(monkeypatch, pair, fitted, variants, rows, batch_size):
    monkeypatch.setattr(room, "CHUNK_TOKENS", 3)
    chosen = {name: variants[name] for name in ("fp8", "mean")}
    found = compression_rows(
        pair, *fitted_with(fitted, chosen), IDS, OPTIONS, prefix_tokens=PREFIX, batch_size=batch_size
    )
    for row in found:
        for name, value in row.items():
            expected = rows[row["variant"]][name]
            if isinstance(value, float):
                expected = pytest.approx(expected, rel=1e-3, abs=1e-6)  # float32 forwards of other batches
            assert value == expected


def test_one_model_at_a_time_is_released_before_the_other_reads(monkeypatch, pair, fitted, variants, rows):
    events = []
    monkeypatch.setattr(pair, "release", lambda side: events.append(f"release {side}"))
    for name, function in (("prefill", prefill), ("native", native)):
        monkeypatch.setattr(
            room,
            name,
            lambda model, *a, f=function, **k: events.append(model.identity.name) or f(model, *a, **k),
        )
    chosen = fitted_with(fitted, {"fp8": variants["fp8"]})
    found = compression_rows(pair, *chosen, IDS, OPTIONS, prefix_tokens=PREFIX, sequential=True)
    assert events == ["release target", *["source"] * 3, "release source", *["target"] * 3]
    assert found == [rows[UNCOMPRESSED], rows["fp8"]]


def test_gate_r2_names_the_worst_head(fitted):
    mapper, moments = fitted
    weights = mapper.linear_weights()
    layer = mapper.recipe.mapped_layers[-1]
    values = [w.clone() for w in weights.weight["value"]]
    values[layer][1] *= -3
    harmed = LinearWeights(weights.recipe, {**weights.weight, "value": tuple(values)}, weights.bias)
    key, value = gate_r2(mapper, harmed, moments)
    assert (key["kind"], key["r2_loss"], key["worst_r2_loss"]) == ("key", 0, 0)
    assert (value["worst_layer"], value["worst_head"]) == (layer, 1)
    assert value["n_heads"] == 2 * len(mapper.recipe.mapped_layers)
    assert value["r2_loss"] == pytest.approx(value["worst_r2_loss"] / value["n_heads"])
    assert value["r2_before"] - value["r2_after"] == pytest.approx(value["r2_loss"])


def test_what_is_not_a_number_does_not_pass(fitted):
    gate = CompressionGate()
    assert gate.reasons({"key": 0.01, "value": -0.5}, 0.02) == []
    assert len(gate.reasons({"key": math.nan, "value": 0.0}, math.nan)) == 2
    mapper, moments = fitted
    weights = mapper.linear_weights()
    layer = mapper.recipe.mapped_layers[0]
    keys = [w.clone() for w in weights.weight["key"]]
    keys[layer][0, 0, 0] = math.nan
    broken = LinearWeights(weights.recipe, {**weights.weight, "key": tuple(keys)}, weights.bias)
    key, value = gate_r2(mapper, broken, moments)
    assert math.isnan(key["r2_loss"])
    assert (key["worst_layer"], key["worst_head"]) == (layer, 0)
    assert value["r2_loss"] == 0


def test_kl_is_scipys_and_zero_of_equals():
    p, q = 4 * torch.randn(2, 5, 50)
    expected = rel_entr(p.double().softmax(-1).numpy(), q.double().softmax(-1).numpy()).sum(-1)
    torch.testing.assert_close(next_token_kl(p, q), torch.tensor(expected), rtol=1e-10, atol=1e-12)
    assert next_token_kl(p, q).dtype == torch.float64
    never = p.clone()
    never[:, 3] = -torch.inf  # a token that neither ever says
    assert float(next_token_kl(never, never).abs().max()) == 0


def test_metrics_carry_their_evidence(rows):
    metrics = compression_metrics(rows.values())
    kl = metrics["diagnose/compression/fp8/kl_nats"]
    assert (kl.value, kl.n) == (rows["fp8"]["kl_nats"], 24)
    assert kl.standard_error == rows["fp8"]["kl_standard_error"]
    assert metrics["diagnose/compression/mean/passes"].value == 0
    assert metrics["diagnose/compression/bfloat16/passes"].value == 1
    assert metrics["diagnose/compression/low_rank/nbytes"].value == rows["low_rank"]["nbytes"]
    assert len(metrics) == 6 * len(rows)


class Curved(Mapper):
    kind = "curved"
    map_layer = settings = tensors = from_state = None


def test_mistakes_are_named_before_a_model_runs(monkeypatch, pair, fitted, variants):
    mapper, moments = fitted
    monkeypatch.setattr(room, "prefill", None)

    def refused(error, match, ids=IDS, prefix=PREFIX, others=variants, options=OPTIONS, held=moments, **more):
        with pytest.raises(error, match=match):
            compression_rows(pair, mapper, others, held, ids, options, prefix_tokens=prefix, **more)

    refused(KvmapError, r"shape \(20,\)", ids=IDS[0])
    refused(KvmapError, "batch_size=0", batch_size=0)
    refused(KvmapError, "prefix_tokens=3 of 20 tokens: expected more than the 3", prefix=3)
    refused(KvmapError, "prefix_tokens=20 of 20", prefix=TOKENS)
    refused(KvmapError, "is called 'uncompressed'", others={UNCOMPRESSED: mapper})
    refused(
        KvmapError, "'curved' is not linear", others={"x": Curved(mapper.source_shape, mapper.target_shape)}
    )
    empty = PairMoments.zeros(moments.layout, selected_tables(mapper.recipe))
    refused(KvmapError, "no held-out rows", held=empty)
    foreign = CompressedLinearMapper.from_linear(mapper, "fp8")
    foreign.fitted_for = FittedFor(pair.source_identity, pair.target_identity, "coupled")
    refused(MapperMismatch, "rope: 'coupled'", others={"x": foreign})


@pytest.mark.parametrize("bounds", [{"max_r2_loss": -0.1}, {"max_kl_nats": math.nan}])
def test_bounds_that_make_no_sense_are_refused(bounds):
    with pytest.raises(KvmapError, match="expected a number >= 0"):
        CompressionGate(**bounds)
