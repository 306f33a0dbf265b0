"""With the identity map every item comes out as lm-eval's own Hugging Face model has it, alone in a batch."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from lm_eval.evaluator import evaluate
from lm_eval.models.huggingface import HFLM

from kvmap.harness.adapter import KvmapLM
from kvmap.harness.catalogue import LoadedTask, TaskSpec, load_tasks
from kvmap.harness.runner import ChatOptions, run_task
from kvmap.models.pair import ModelSpec, load_model
from kvmap.transfer import TransferOptions
from tests.harness.conftest import MAX_LENGTH, Family, LocalTasks, identity_pool, instances

SPECS = (
    TaskSpec("local_choices", num_fewshot=1),
    TaskSpec("local_pairs", limit=4),
    TaskSpec("local_words"),
    TaskSpec("local_texts", limit=3),
)
# Two orders of adding up float32 products; single log-likelihoods here are about −5 to −60 nats.
TOLERANCE = 1e-4
# Sums over 200 to 500 tokens, which lm-eval's own model adds up in float32: 6e-8 of about 2,000 nats.
ROLLING_TOLERANCE = 1e-6

Samples = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def tasks(local_tasks: LocalTasks) -> list[LoadedTask]:
    return load_tasks(SPECS, str(local_tasks.folder))


def stock_samples(tasks: list[LoadedTask], family: Family, max_length: int = MAX_LENGTH) -> Samples:
    stock = HFLM(
        pretrained=family.loaded.model,
        tokenizer=family.tokenizer,
        batch_size=1,
        max_length=max_length,
    )
    samples: Samples = {}
    for task in tasks:
        for one in task.tasks.values():
            one.set_fewshot_seed(seed=5)
        samples |= evaluate(stock, task.found, limit=task.spec.limit, bootstrap_iters=0)["samples"]
    return samples


@pytest.fixture(scope="module")
def stock(tasks: list[LoadedTask], family: Family) -> Samples:
    return stock_samples(tasks, family)


def check_equal(found: Samples, expected: Samples) -> None:
    assert found.keys() == expected.keys()
    for name, samples in expected.items():
        assert len(found[name]) == len(samples)
        for ours, theirs in zip(found[name], samples, strict=True):
            assert (ours["doc_id"], ours["filter"]) == (theirs["doc_id"], theirs["filter"])
            assert ours["prompt_hash"] == theirs["prompt_hash"]
            for answer, wanted in zip(ours["resps"], theirs["resps"], strict=True):
                check_answer(answer[0], wanted[0])
            for metric in theirs["metrics"]:
                if metric not in ("word_perplexity", "bits_per_byte"):
                    assert ours[metric] == theirs[metric]


def check_answer(answer: Any, wanted: Any) -> None:
    if isinstance(wanted, str):
        assert answer == wanted
    elif isinstance(wanted, tuple):
        assert answer[0] == pytest.approx(wanted[0], abs=TOLERANCE)
        assert answer[1] == wanted[1]
    else:
        assert answer == pytest.approx(wanted, rel=ROLLING_TOLERANCE)


@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_every_item_equals_stock(
    tasks: list[LoadedTask], family: Family, stock: Samples, batch_size: int
) -> None:
    arms = ("mapped", "target", "source") if batch_size == 3 else ("mapped",)
    pool = identity_pool(family, *arms, batch_size=batch_size)
    results = [run_task(task, pool, ChatOptions(), fewshot_seed=5) for task in tasks]
    for arm in arms:
        samples = {name: of for result in results for name, of in result.by_arm[arm]["samples"].items()}
        check_equal(samples, stock)
    for result in results[:3]:
        assert all(facts.n_mapped > 0 for facts in result.facts["mapped"].values())
        assert not any(facts.n_mapped for arm in arms[1:] for facts in result.facts[arm].values())


@pytest.mark.parametrize(
    "options", [TransferOptions(hold_back=5, native_head=0), TransferOptions(rope="coupled")]
)
def test_however_the_cache_is_handed_over(
    tasks: list[LoadedTask], qwen: Family, options: TransferOptions
) -> None:
    pool = identity_pool(qwen, options=options, batch_size=4)
    result = run_task(tasks[0], pool, ChatOptions(), fewshot_seed=5)
    check_equal(result.by_arm["mapped"]["samples"], stock_samples(tasks[:1], qwen))


def test_cut_contexts_are_cut_as_stock_cuts_them(tasks: list[LoadedTask], family: Family) -> None:
    """A limit that some contexts exceed and others do not; what is cut is counted."""
    limit = 64
    pool = identity_pool(family, batch_size=3, max_tokens=limit)
    results = [run_task(task, pool, ChatOptions(), fewshot_seed=5) for task in tasks]
    samples = {name: of for result in results for name, of in result.by_arm["mapped"]["samples"].items()}
    check_equal(samples, stock_samples(tasks, family, limit))
    (choices, _, words, _) = results
    assert any(facts.n_truncated for facts in choices.facts["mapped"].values())
    assert any(facts.n_truncated for facts in words.facts["mapped"].values())
    assert max(facts.n_context for facts in words.facts["mapped"].values()) == limit - 10


def test_an_empty_context_and_a_single_token(family: Family) -> None:
    """lm-eval then scores after its prefix token: nothing is left to map, and nothing may break."""
    asked = instances("loglikelihood", [("", " anna is in the garden"), ("anna", " is"), ("a", " b")])
    stock = HFLM(
        pretrained=family.loaded.model, tokenizer=family.tokenizer, batch_size=1, max_length=MAX_LENGTH
    )
    ours = KvmapLM(identity_pool(family, batch_size=2), "mapped").loglikelihood(asked)
    for answer, wanted in zip(ours, stock.loglikelihood(asked, disable_tqdm=True), strict=True):
        check_answer(answer, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_smollm2_equals_stock(tasks: list[LoadedTask], batch_size: int) -> None:
    """On a real model, in float32: KVMAP_SMOLLM2 names the folder of SmolLM2-135M-Instruct."""
    folder = os.environ.get("KVMAP_SMOLLM2")
    if not folder:
        pytest.skip("KVMAP_SMOLLM2 names no folder")
    family = Family("smollm2", load_model(ModelSpec(folder, dtype="float32", device="cpu")))
    pool = identity_pool(family, batch_size=batch_size, max_tokens=1024)
    samples: Samples = {}
    for task in tasks:
        samples |= run_task(task, pool, ChatOptions(), fewshot_seed=5).by_arm["mapped"]["samples"]
    check_equal(samples, stock_samples(tasks, family, 1024))


def test_bfloat16_is_no_worse_than_stock_between_batch_sizes(qwen: Family) -> None:
    """What batching alone changes in bfloat16: rounding, here as in lm-eval's own model."""
    model = qwen.loaded.model
    low = Family("bf16", type(qwen.loaded).from_model(_copy(model).to(torch.bfloat16), qwen.tokenizer))
    asked = instances("loglikelihood", [(f"anna is in the {word}", " garden .") for word in "abcdefgh"])
    ours = [
        [score for score, _ in KvmapLM(identity_pool(low, batch_size=size), "mapped").loglikelihood(asked)]
        for size in (1, 8)
    ]
    theirs = [
        [
            score
            for score, _ in HFLM(
                pretrained=low.loaded.model, tokenizer=low.tokenizer, batch_size=size, max_length=MAX_LENGTH
            ).loglikelihood(asked, disable_tqdm=True)
        ]
        for size in (1, 8)
    ]
    spread = max(abs(a - b) for a, b in zip(*ours, strict=True))
    stock_spread = max(abs(a - b) for a, b in zip(*theirs, strict=True))
    # 8 bits of mantissa: logits of about 5 are rounded to 0.03, a sum over three tokens moves by as much
    assert spread <= max(stock_spread, 0.1)


def _copy(model: Any) -> Any:
    import copy

    return copy.deepcopy(model)
