from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from kvmap.errors import KvmapError
from kvmap.evaluation import perplexity as room
from kvmap.evaluation.arms import ARMS
from kvmap.evaluation.perplexity import divergence, evaluate_perplexity, predictions
from kvmap.evaluation.summary import summarise_perplexity
from kvmap.models.capture import prefill
from kvmap.models.pair import LoadedModel, ModelPair
from kvmap.transfer import TransferOptions
from tests.evaluation.test_choices import count_prefills, quiet
from tests.tiny_random_models import FAMILIES

OPTIONS = TransferOptions()
PREFIX = 20


def run(pair, arms, blocks, **settings):
    settings = {"prefix_tokens": PREFIX, "batch_size": 2} | settings
    return evaluate_perplexity(pair, arms, blocks, options=OPTIONS, progress=quiet, **settings)


@pytest.fixture(scope="module")
def results(pair, arms, blocks):
    return run(pair, arms, blocks)


def native_log_probs(model, blocks):
    """(n_sequences, scored, vocabulary): what one full forward per block predicts of the scored tokens."""
    return torch.cat(
        [model(input_ids=ids[None]).logits.log_softmax(-1)[:, PREFIX:-1] for ids in blocks.input_ids]
    )


def nll(log_probs, blocks):
    return -log_probs.gather(-1, blocks.input_ids[:, PREFIX + 1 :, None]).sum((1, 2))


def test_mapped_tokens_are_counted_of_every_sequence(results):
    mapped = PREFIX - OPTIONS.native_head - OPTIONS.hold_back
    for arm, result in results.items():
        expected = 0 if arm in ("target", "source", "no_context") else mapped
        assert result.n_mapped == (expected,) * 5
        assert {row["n_mapped"] for row in result.rows()} == {expected}


@pytest.mark.parametrize("arm", ["target", "source"])
def test_native_nll_is_that_of_a_plain_full_forward(results, models, blocks, arm):
    expected = nll(native_log_probs(models[arm], blocks), blocks)
    assert results[arm].nll == pytest.approx(expected.tolist(), abs=1e-3)
    assert results[arm].n_tokens == (blocks.length - PREFIX - 1,) * 5
    assert results[arm].perplexity == pytest.approx(
        math.exp(expected.sum() / (5 * (blocks.length - PREFIX - 1)))
    )


def test_without_context_the_model_is_fed_bos_and_the_continuation_alone(results, models, blocks, tokenizer):
    bos = torch.full((5, 1), tokenizer.bos_token_id)
    fed = torch.cat([bos, blocks.input_ids[:, PREFIX:]], dim=1)
    log_probs = models["target"](input_ids=fed).logits.log_softmax(-1)[:, 1:-1]
    assert results["no_context"].nll == pytest.approx(nll(log_probs, blocks).tolist(), abs=1e-3)


def test_kl_and_agreement_are_those_of_the_full_distributions(results, models, blocks):
    p = native_log_probs(models["target"], blocks)
    q = native_log_probs(models["source"], blocks)
    kl = torch.nn.functional.kl_div(q, p, log_target=True, reduction="none").sum((1, 2))
    assert results["source"].kl == pytest.approx(kl.tolist(), rel=1e-4)
    assert results["source"].agreement == tuple((p.argmax(-1) == q.argmax(-1)).sum(1).tolist())


def test_native_agrees_with_itself(results):
    assert results["target"].kl == (0.0,) * 5
    assert results["target"].agreement == results["target"].n_tokens


def test_every_arm_scores_the_same_tokens_each_once(results):
    assert tuple(results) == ARMS
    assert len({result.n_tokens for result in results.values()}) == 1
    assert len({round(result.nll_sum, 3) for result in results.values()}) == len(ARMS)


@pytest.mark.parametrize("chunk", [1, 7, 26, 27, 64])
def test_chunks_score_each_token_once_and_change_nothing(monkeypatch, models, pair, blocks, chunk):
    monkeypatch.setattr(room, "CHUNK_TOKENS", chunk)
    kv = prefill(pair.target, blocks.input_ids[:, :PREFIX])
    chunks = list(predictions(pair.target, kv, blocks.input_ids[:, PREFIX:]))
    token = torch.cat([part["token"] for part in chunks], dim=1)
    assert token.shape == (5, blocks.length - PREFIX - 1)
    assert -token.sum(1) == pytest.approx(nll(native_log_probs(models["target"], blocks), blocks), abs=1e-3)
    assert kv.n_tokens == PREFIX


@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_numbers_do_not_depend_on_the_batch_size(results, pair, arms, blocks, batch_size):
    again = run(pair, arms, blocks, batch_size=batch_size)
    for arm, result in results.items():
        # Sums over 27 tokens in kernels of other shapes: float32 rounding.
        assert again[arm].nll == pytest.approx(result.nll, abs=1e-4)
        assert again[arm].kl == pytest.approx(result.kl, abs=1e-4)
        assert again[arm].agreement == result.agreement


def test_the_identity_pair_carries_all_of_the_context(identity_pair, identity_arms, blocks):
    results = run(identity_pair, identity_arms, blocks)
    metrics, _ = summarise_perplexity(results)
    assert abs(metrics["evaluate/perplexity/mapped/kl_nats"].value) < 1e-6
    assert metrics["evaluate/perplexity/mapped/top1_agreement"].value == 1
    assert results["mapped"].nll == pytest.approx(results["target"].nll, abs=1e-3)
    # Whether a context is worth anything to a random model is chance; the ratio itself is exact all the same.
    none, native, mapped = (results[arm].nll_sum for arm in ("no_context", "target", "mapped"))
    assert (none - mapped) / (none - native) == pytest.approx(1, abs=1e-4)


def test_padded_vocabularies_are_compared_on_the_ids_both_have(tokenizer, models, blocks):
    padded = FAMILIES["llama"](seed=1, vocab_size=len(tokenizer) + 18, max_position_embeddings=64)
    both = ModelPair(*(LoadedModel.from_model(model, tokenizer) for model in (padded, models["target"])))
    results = run(both, {"target": None, "source": None}, blocks)
    assert all(math.isfinite(kl) and kl > 0 for kl in results["source"].kl)


def test_divergence_is_over_shared_ids_and_zero_only_for_equals():
    logits = torch.tensor([1.0, 2.0, 3.0])
    wide = torch.tensor([1.0, 2.0, 3.0, 9.0]).log_softmax(-1)
    assert divergence(logits.log_softmax(-1), wide).item() == pytest.approx(0, abs=1e-7)
    p, q = torch.tensor([0.5, 0.5]), torch.tensor([0.25, 0.75])
    expected = 0.5 * math.log(2) + 0.5 * math.log(2 / 3)
    assert divergence(p.log(), q.log()).item() == pytest.approx(expected)


def test_rows_and_the_callback_hold_each_sequence_once(pair, arms, blocks, results):
    seen = []
    run(pair, arms, blocks, on_batch=lambda batch: seen.append(batch["target"].nll))
    assert [value for batch in seen for value in batch] == pytest.approx(results["target"].nll)
    rows = results["mapped"].rows()
    assert len({row["content"] for row in rows}) == 5
    assert [row["content"] for row in rows] == [row["content"] for row in results["target"].rows()]
    assert [row["sequence"] for row in rows] == [0, 1, 2, 3, 4]
    assert rows[0]["nll_nats"] == results["mapped"].nll[0]


def test_the_source_reads_each_batch_once(monkeypatch, pair, arms, blocks):
    readers = count_prefills(monkeypatch)
    run(pair, arms, blocks)
    assert readers.count("source") == 3


def test_arms_that_would_map_nothing_of_the_prefix_are_refused(pair, arms, blocks):
    some = {"target": None, "bias_only": arms["bias_only"]}
    with pytest.raises(KvmapError, match=r"native_head=1 and hold_back=1 cover .* has 2 tokens\): bias_only"):
        run(pair, some, blocks, prefix_tokens=2)
    run(pair, {"target": None, "no_context": None}, blocks, prefix_tokens=2)


@pytest.mark.parametrize("prefix", [0, 47, 60])
def test_a_prefix_that_leaves_nothing_to_score_is_refused(pair, blocks, prefix):
    with pytest.raises(KvmapError, match=f"prefix_tokens={prefix}"):
        run(pair, {"target": None}, blocks, prefix_tokens=prefix)


def test_blocks_too_long_for_a_model_and_a_missing_target_are_refused(tokenizer, models, pair, blocks):
    small = FAMILIES["llama"](seed=1, vocab_size=len(tokenizer), max_position_embeddings=40)
    both = ModelPair(*(LoadedModel.from_model(model, tokenizer) for model in (small, models["target"])))
    with pytest.raises(KvmapError, match=r"48 tokens.*takes 40"):
        run(both, {"target": None}, blocks)
    with pytest.raises(KvmapError, match="'target' is needed"):
        run(pair, {"source": None}, blocks)


def test_perplexity_of_a_hopeless_arm_is_infinite_not_an_error(results):
    hopeless = dataclasses.replace(results["target"], nll=(1e6,) * 5)
    assert hopeless.perplexity == math.inf
