"""With the identity map every item comes out as lm-eval's own Hugging Face model has it, alone in a batch."""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from lm_eval.evaluator import evaluate
from lm_eval.models.huggingface import HFLM

from kvmap.harness.adapter import KvmapLM
from kvmap.harness.catalogue import LoadedTask, TaskSpec, load_tasks
from kvmap.harness.runner import ChatOptions, run_task
from kvmap.models.pair import LoadedModel, ModelSpec, load_model
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
BATCH_SIZES = (1, 3, 8)

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


@pytest.mark.parametrize("batch_size", BATCH_SIZES)
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
@pytest.mark.parametrize("batch_size", BATCH_SIZES)
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


@pytest.mark.parametrize("name", ["qwen", "llama"])
def test_bfloat16_is_no_worse_than_stock_between_batch_sizes(
    name: str, request: pytest.FixtureRequest, record_property: Callable[[str, object], None]
) -> None:
    """What batching alone changes in bfloat16, over contexts of mixed length: rounding, as in lm-eval's own.

    Bound: twice what stock's own answers differ by between the same batch sizes, and an allowance, since on
    some machines stock differs by nothing (it pads on the right, so a row's columns stand where they stood).
    A logit of size 4 to 8 is rounded to 2^-5 in bfloat16 (8 bits), so it has an error of variance 2^-10 / 12;
    the difference of two sums of n of them has a standard deviation of 2^-5 sqrt(n / 6). Three of these.
    """
    family: Family = request.getfixturevalue(name)
    low = Family("bf16", LoadedModel.from_model(_bfloat16(family.loaded.model), family.tokenizer))
    text = "anna is in the kitchen and bob has the red ball . carl went far away to the garden . " * 3
    scored = " garden and the box ."
    asked = instances("loglikelihood", [(text[-n:], scored) for n in (6, 11, 20, 37, 60, 90, 130, 200)])
    n_tokens = len(family.tokenizer(scored, add_special_tokens=False)["input_ids"])
    largest = low.loaded.model(torch.tensor([family.tokenizer(text)["input_ids"]])).logits.abs().max()
    rounded_to = 2.0 ** (math.floor(math.log2(largest)) - 7)
    allowance = 3 * rounded_to * math.sqrt(n_tokens / 6)

    def stock(of: Family, batch_size: int) -> list[float]:
        model = HFLM(
            pretrained=of.loaded.model,
            tokenizer=of.tokenizer,
            batch_size=batch_size,
            max_length=MAX_LENGTH,
        )
        return [score for score, _ in model.loglikelihood(asked, disable_tqdm=True)]

    ours = {
        size: [s for s, _ in KvmapLM(identity_pool(low, batch_size=size), "mapped").loglikelihood(asked)]
        for size in BATCH_SIZES
    }
    theirs = {size: stock(low, size) for size in BATCH_SIZES}
    record_property("spread", _spread(ours.values()))
    record_property("stock_spread", _spread(theirs.values()))
    assert _spread(ours.values()) <= 2 * _spread(theirs.values()) + allowance
    exact = stock(family, 1)
    error = max(_spread([exact, answers]) for answers in ours.values())
    assert error <= max(_spread([exact, answers]) for answers in theirs.values()) + allowance


def _spread(answers: Iterable[Sequence[float]]) -> float:
    """The largest difference between answers to one question."""
    return max(max(of_one) - min(of_one) for of_one in zip(*answers, strict=True))


def _bfloat16(model: Any) -> Any:
    return copy.deepcopy(model).to(torch.bfloat16)
