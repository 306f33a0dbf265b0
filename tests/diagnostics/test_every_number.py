"""Every table of the streaming pass against plain loops in float64."""

from __future__ import annotations

from collections import defaultdict
from statistics import fmean

import pytest
import torch

from kvmap.diagnostics.findings import text_metrics, text_tables
from kvmap.diagnostics.texts import Text
from kvmap.diagnostics.token_kinds import TOKEN_KINDS
from kvmap.transfer import TransferOptions
from tests.diagnostics.plain_loops import (
    CONTEXTS,
    KINDS_OF_TOKENS,
    QUESTIONS,
    ROWS,
    diagnosed,
    mixed,
    observe,
    pair_of,
    predictions,
    tokens_of,
)
from tests.tiny_random_models import random_ids


def named(options):
    return (
        f"{options.rope}-head={options.native_head}-tail={options.hold_back}-again={options.recompute_share}"
    )


MODELS = [
    # grouped queries: eight heads read two
    ("llama_yarn", "llama", {"num_attention_heads": 8, "head_dim": 8}),
    # unlike head dimensions, soft-capped scores
    ("llama", "gemma2", {"attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 2}),
    # scaled rotation of one model, queries scaled by position of the other
    ("llama_yarn", "ministral3", {}),
]
OPTIONS = [
    TransferOptions(native_head=0),
    TransferOptions(native_head=1),
    TransferOptions(native_head=3, rope="coupled"),
    TransferOptions(native_head=1, rope="no_rerotate"),
    TransferOptions(native_head=1, recompute_share=0.4, recompute_rule="random"),
]
# float32 forwards, padded here and alone there
CLOSE = {"rel": 2e-4, "abs": 2e-5}


@pytest.fixture(scope="module", params=MODELS, ids=[target for _, target, _ in MODELS])
def models(request):
    source, target, settings = request.param
    return pair_of(source, target, **settings)


@pytest.fixture(scope="module", params=OPTIONS, ids=named)
def case(request, models):
    """Both texts' tables, and the same contexts as plain loops see them."""
    options, mapper = request.param, mixed(models)
    texts = diagnosed(models, mapper, options=options, batch_size=2, query_block=3)
    observed = {
        "questions": [observe(models, mapper, ids, options) for ids in CONTEXTS],
        "evaluation": [observe(models, mapper, ids, options) for ids in ROWS],
    }
    return models, options, text_tables(texts.values()), observed


def test_attention_and_concentration_are_those_of_plain_loops(case):
    _, _, tables, observed = case
    d = observed["questions"][0].layers[0].query.shape[-1]
    for row in tables["attention_output"]:
        head, n, cosines, sinks = row["head"], 0, 0.0, [0.0, 0.0]
        directions, queries, squared, weighed, weights, errors = [], [], 0.0, 0.0, 0.0, 0.0
        for context in observed[row["text"]]:
            layer = context.layers[row["layer"]]
            shared = layer.shared(head)
            assert row["kv_head"] == shared
            r = defaultdict(float)
            for u in context.counted:
                one, other = (layer.output(head, u, cache) for cache in (layer.own, layer.found))
                cosines += float(one @ other / (one.norm() * other.norm()))
                own = layer.weights(head, u, layer.own)
                sinks[0] += own[0]
                sinks[1] += layer.weights(head, u, layer.found)[0]
                for i in range(context.counted.start, u + 1):
                    r[i] += own[i] ** 2
                queries.append(layer.query[head, u])
                directions.append(layer.found[0][shared, u] - layer.own[0][shared, u])
                n += 1
            for i in context.counted:
                e = float((layer.found[1][shared, i] - layer.own[1][shared, i]).square().sum())
                weighed, weights, errors = weighed + r[i] * e, weights + r[i], errors + e
        # by singular vectors, as the paper writes it
        _, sigma, vectors = torch.linalg.svd(torch.stack(queries), full_matrices=False)
        off = torch.stack(directions)
        squared = float(off.square().sum())
        along = sum(float(s**2 * (off @ v).square().sum()) for s, v in zip(sigma, vectors, strict=True))
        assert row["n"] == n
        assert row["cosine"] == pytest.approx(cosines / n, **CLOSE)
        assert row["sink_mass"] == pytest.approx(sinks[0] / n, **CLOSE)
        assert row["sink_mass_mapped"] == pytest.approx(sinks[1] / n, **CLOSE)
        expected = along / float(sigma.square().sum()) / (squared / d)
        assert row["concentration_key"] == pytest.approx(expected, **CLOSE)
        assert row["concentration_value"] == pytest.approx(weighed / weights / (errors / n), **CLOSE)


def test_r2_is_that_of_plain_loops(case):
    pair, _, tables, observed = case
    assert len(tables["r2"]) == 2 * 2 * len(pair.target.geometry.layers) * 2
    for row in tables["r2"]:
        vectors = [
            tuple(part[row["head"], u] for part in layer.view[row["kind"]])
            for layer, u, _ in tokens_of(observed[row["split"]], row["layer"])
        ]
        mean = sum(y for _, y in vectors) / len(vectors)
        error = sum(float(e @ e) for e, _ in vectors)
        spread = sum(float((y - mean) @ (y - mean)) for _, y in vectors)
        assert row["r2"] == pytest.approx(1 - error / spread, **CLOSE)


@pytest.mark.parametrize("table", ["errors_by_token", "errors_by_position"])
def test_errors_by_group_are_those_of_plain_loops(case, table):
    _, _, tables, observed = case

    def within(row, u, kind):
        return (
            TOKEN_KINDS[kind] == row["token_kind"] if "token_kind" in row else row["low"] <= u <= row["high"]
        )

    counted = defaultdict(int)
    for row in tables[table]:
        tokens = list(tokens_of(observed[row["text"]], row["layer"]))
        chosen = [(layer, u) for layer, u, kind in tokens if within(row, u, kind)]
        assert row["n"] == len(chosen) > 0
        counted[row["text"], row["layer"]] += row["n"]
        for kind in ("key", "value"):
            error = spread = 0.0
            for head in range(len(tokens[0][0].own[0])):
                mean = sum(layer.view[kind][1][head, u] for layer, u, _ in tokens) / len(tokens)
                for layer, u in chosen:
                    error += float(layer.view[kind][0][head, u].square().sum())
                    spread += float((layer.view[kind][1][head, u] - mean).square().sum())
            assert row[f"{kind}_error"] == pytest.approx(error / spread, **CLOSE)
        cosines = [
            torch.cosine_similarity(*(layer.output(head, u, c) for c in (layer.own, layer.found)), dim=0)
            for layer, u in chosen
            for head in range(len(layer.query))
        ]
        assert row["cosine"] == pytest.approx(float(sum(cosines)) / len(cosines), **CLOSE)
    for (text, layer), n in counted.items():
        assert n == len(list(tokens_of(observed[text], layer)))


def test_spectra_are_those_of_singular_values(case):
    _, _, tables, observed = case
    for row in tables["spectrum_summary"]:
        tokens = list(tokens_of(observed[row["text"]], row["layer"]))
        error, y = (
            torch.stack([layer.view[row["kind"]][part][row["head"], u] for layer, u, _ in tokens])
            for part in (0, 1)
        )
        place = (row["text"], row["kind"], row["layer"], row["head"])
        components = [
            part
            for part in tables["spectrum"]
            if (part["text"], part["kind"], part["layer"], part["head"]) == place
        ]
        assert [part["component"] for part in components] == list(range(1, error.shape[1] + 1))
        for name, suffix, x in (("error", "", error), ("target", "_target", y - y.mean(0))):
            powers = torch.linalg.svdvals(x).square()
            powers = torch.cat([powers, powers.new_zeros(error.shape[1])])[: error.shape[1]]
            share = powers / powers.sum()
            assert [part[f"{name}_share"] for part in components] == pytest.approx(share.tolist(), **CLOSE)
            assert row[f"effective_rank{suffix}"] == pytest.approx(1 / float(share.square().sum()), **CLOSE)
            assert row[f"share_top8{suffix}"] == pytest.approx(float(share[:8].sum()), **CLOSE)


@pytest.mark.parametrize(
    "options", [*OPTIONS[::2], TransferOptions(hold_back=2, rope="no_rerotate")], ids=named
)
def test_predictions_are_those_of_one_token_at_a_time(models, options):
    mapper = mixed(models)
    long = Text.of_sequences("evaluation", random_ids(2, 17, seed=6))
    found = diagnosed(models, mapper, [QUESTIONS, long], options, batch_size=2)
    rows = text_tables(found.values())["next_token"]
    asked = [predictions(models, mapper, ids, len(ids), options)[0] for ids in CONTEXTS]
    (question,) = [row for row in rows if row["text"] == "questions"]
    assert (question["low"], question["high"], question["token_kind"]) == (1, 1, None)
    assert question["kl_nats"] == pytest.approx(fmean(kl for kl, _ in asked), **CLOSE)
    assert question["top1_agreement"] == fmean(same for _, same in asked)
    continued = [predictions(models, mapper, ids, 8, options) for ids in long.contexts]
    kinds = [KINDS_OF_TOKENS.of(torch.tensor(ids[8:]), torch.ones(9)).tolist() for ids in long.contexts]
    for row in [row for row in rows if row["text"] == "evaluation"]:
        chosen = [
            token
            for context, of_kind in zip(continued, kinds, strict=True)
            for place, (token, kind) in enumerate(zip(context, of_kind, strict=True), start=1)
            if (
                row["token_kind"] == TOKEN_KINDS[kind]
                if row["low"] is None
                else row["low"] <= place <= row["high"]
            )
        ]
        assert row["n"] == len(chosen)
        assert row["kl_nats"] == pytest.approx(fmean(kl for kl, _ in chosen), **CLOSE)
        assert row["top1_agreement"] == fmean(same for _, same in chosen)
    metric = text_metrics(found["evaluation"])["diagnose/evaluation/mapped/kl_nats"]
    by_context = [fmean(kl for kl, _ in context) for context in continued]
    assert metric.value == pytest.approx(fmean(by_context), **CLOSE)
    assert metric.n == 18
    assert metric.standard_error == pytest.approx(abs(by_context[0] - by_context[1]) / 2, **CLOSE)
