"""Next-token KL and agreement: the divergence itself, blocks of logits, and what rows and metrics say."""

from __future__ import annotations

import pytest
import torch

from kvmap.diagnostics import next_token as room
from kvmap.diagnostics.next_token import (
    Predicted,
    compare,
    compare_continuation,
    kl_divergence,
    next_token_metrics,
    next_token_rows,
)
from kvmap.models.capture import forward, prefill
from kvmap.models.logits import keep_hidden_states
from kvmap.models.pair import LoadedModel
from tests.tiny_random_models import FAMILIES, random_ids


def logits(rows, vocabulary, seed):
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * 3


@pytest.mark.parametrize("vocabulary", [2, 101, 5000])
def test_the_divergence_is_its_sum_in_float64(vocabulary):
    x, y = logits(4, vocabulary, 0), logits(4, vocabulary, 1)
    found = kl_divergence(x, y)
    for row in range(4):
        p, q = (z[row].double().softmax(0) for z in (x, y))
        expected = sum(float(a * (a / b).log()) for a, b in zip(p, q, strict=True))
        # float32 log-probabilities
        assert float(found[row]) == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_of_two_tokens_it_is_known_in_closed_form():
    x, y = torch.tensor([[3.0, 1.0]]).log(), torch.tensor([[1.0, 1.0]]).log()
    expected = 0.75 * torch.tensor(1.5).log() + 0.25 * torch.tensor(0.5).log()
    assert float(kl_divergence(x, y)) == pytest.approx(float(expected), abs=1e-7)


def test_of_a_distribution_from_itself_it_is_zero_and_given_logits_stay_as_they_are():
    x = logits(3, 101, 2)
    before = x.clone()
    assert kl_divergence(x, x + 7).tolist() == pytest.approx([0.0] * 3, abs=1e-6)
    assert bool((kl_divergence(x, x + 1e-4) >= 0).all())
    assert torch.equal(x, before)


@pytest.fixture(scope="module")
def model():
    return LoadedModel.from_model(FAMILIES["llama"]())


@pytest.mark.parametrize(("rows_at_once", "tokens_at_once"), [(1, 1), (3, 4), (64, 256)])
def test_blocks_change_nothing(model, monkeypatch, rows_at_once, tokens_at_once):
    ids = random_ids(2, 14)
    with keep_hidden_states(model) as states:
        kv = prefill(model, ids)
    context = kv.slice_tokens(0, 6)
    # another cache than the native one
    other = prefill(model, random_ids(2, 14, seed=3)).slice_tokens(0, 6)
    expected_logits, _ = forward(model, ids[:, 6:], other)
    expected = compare(model, states[0][:, 6:], expected_logits)
    monkeypatch.setattr(room, "ROWS_AT_ONCE", rows_at_once)
    monkeypatch.setattr(room, "TOKENS_AT_ONCE", tokens_at_once)
    kl, same = compare_continuation(model, other, states[0][:, 6:], ids[:, 6:])
    assert torch.allclose(kl, expected[0], atol=1e-5)
    assert torch.equal(same, expected[1])
    kl, same = compare_continuation(model, context, states[0][:, 6:], ids[:, 6:])
    assert torch.allclose(kl, torch.zeros_like(kl), atol=1e-6)
    assert bool(same.all())


KL = torch.tensor([[1.0, 2.0, 4.0], [3.0, 6.0, 8.0]], dtype=torch.float64)
SAME = torch.tensor([[True, False, True], [True, True, True]])
KINDS = torch.tensor([[3, 1, 3], [3, 3, 2]])


def test_rows_are_means_by_place_and_by_kind_of_the_predicted_token():
    rows = next_token_rows(
        "evaluation", [Predicted(KL[:1], SAME[:1], KINDS[:1]), Predicted(KL[1:], SAME[1:], KINDS[1:])]
    )
    found = [(r["low"], r["high"], r["token_kind"], r["kl_nats"], r["top1_agreement"], r["n"]) for r in rows]
    assert found == [
        (1, 1, None, 2.0, 1.0, 2),
        (2, 3, None, 5.0, 0.75, 4),
        (None, None, "newline_punctuation", 2.0, 0.0, 1),
        (None, None, "rare", 8.0, 1.0, 1),
        (None, None, "rest", 3.5, 1.0, 4),
    ]
    assert {row["text"] for row in rows} == {"evaluation"}
    assert [
        row["token_kind"] for row in next_token_rows("questions", [Predicted(KL[:, :1], SAME[:, :1])])
    ] == [None]


def test_metrics_are_means_over_predictions_with_errors_over_contexts():
    found = next_token_metrics("evaluation", [Predicted(KL, SAME, KINDS)], "raw")
    kl, same = (found[f"diagnose/evaluation/raw/{name}"] for name in ("kl_nats", "top1_agreement"))
    assert (kl.value, kl.n) == (4.0, 6)
    # means 7/3 and 17/3 of two contexts
    assert kl.standard_error == pytest.approx((10 / 3) / 2)
    assert same.value == pytest.approx(5 / 6)
    one = next_token_metrics("evaluation", [Predicted(KL[:1], SAME[:1])])
    assert one["diagnose/evaluation/mapped/kl_nats"].standard_error is None
    assert next_token_metrics("evaluation", []) == {}
    assert next_token_rows("evaluation", []) == []
