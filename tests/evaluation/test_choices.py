from __future__ import annotations

import copy
import dataclasses
import math
import sys

import pytest
import torch

from kvmap.errors import KvmapError
from kvmap.evaluation.arms import ARMS, unavailable
from kvmap.evaluation.choices import (
    Generation,
    cut_at,
    evaluate_items,
    generate_texts,
    score_choices,
)
from kvmap.evaluation.encoding import EncodedItem, encode_item, left_pad
from kvmap.evaluation.items import Item
from kvmap.evaluation.judging import judge, starts_with_answer
from kvmap.mappers import Unavailable
from kvmap.models import capture
from kvmap.models.pair import LoadedModel, ModelPair
from kvmap.transfer import TransferOptions, native

OPTIONS = TransferOptions()


def quiet(iterable, total=None, description=""):
    return iterable


def run(pair, arms, items, **settings):
    return evaluate_items(pair, arms, items, options=OPTIONS, progress=quiet, **settings)


@pytest.fixture(scope="module")
def results(pair, arms, items):
    return run(pair, arms, items, batch_size=3, max_new_tokens=4)


def full_forward_logliks(model, encoded):
    """One plain forward of transformers per (context + choice)."""
    scores = []
    for choice in encoded.choice_ids:
        ids = torch.tensor([[*encoded.context_ids, *choice]])
        log_probs = model(input_ids=ids).logits[0].log_softmax(-1)
        start = len(encoded.context_ids)
        scores.append(sum(float(log_probs[start + i - 1, token]) for i, token in enumerate(choice)))
    return scores


def test_there_is_one_result_per_item_and_arm_in_the_order_given(results, items):
    assert [(r.task, r.id, r.arm) for r in results] == [
        (item.task, item.id, arm) for item in items for arm in ARMS
    ]


@pytest.mark.parametrize("arm", ["target", "source"])
def test_native_log_likelihoods_are_those_of_one_full_forward_per_choice(
    results, items, models, tokenizer, arm
):
    by_item = {(r.task, r.id): r for r in results if r.arm == arm}
    for item in items:
        encoded = encode_item(tokenizer, item, max_tokens=320)
        expected = full_forward_logliks(models[arm], encoded)
        # Two orders of float32 sums over contexts of up to 280 tokens.
        assert by_item[item.task, item.id].logliks == pytest.approx(expected, abs=2e-4)


def test_generations_are_those_of_transformers_generate(results, items, models, tokenizer):
    model = models["target"]
    for item in items:
        encoded = encode_item(tokenizer, item, max_tokens=320)
        ids = torch.tensor([encoded.context_ids])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False)
        text = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
        found = next(r for r in results if (r.task, r.id, r.arm) == (item.task, item.id, "target"))
        assert found.generated == cut_at(text, item.stop)


def test_the_predicted_choice_is_the_likeliest_and_the_other_the_likeliest_per_character(results, items):
    by_id = {(item.task, item.id): item for item in items}
    for result in results:
        item = by_id[result.task, result.id]
        best = max(range(len(item.choices)), key=lambda n: result.logliks[n])
        per_character = [
            score / len(c.strip()) for score, c in zip(result.logliks, item.choices, strict=True)
        ]
        assert result.predicted == best
        assert result.correct == (best == item.answer)
        assert result.predicted_norm == per_character.index(max(per_character))


@pytest.mark.parametrize("batch_size", [1, 8])
def test_results_do_not_depend_on_the_batch_size(results, pair, arms, items, batch_size):
    again = run(pair, arms, items, batch_size=batch_size, max_new_tokens=4)
    for one, other in zip(results, again, strict=True):
        # The same sums in kernels of other shapes: float32 rounding.
        assert one.logliks == pytest.approx(other.logliks, abs=1e-4)
        assert dataclasses.replace(one, logliks=()) == dataclasses.replace(other, logliks=())


def test_in_bfloat16_the_batch_size_moves_a_mapped_arm_no_more_than_native(models, tokenizer, arms, items):
    rounded = {
        side: LoadedModel.from_model(copy.deepcopy(model).to(torch.bfloat16), tokenizer, name=f"{side} bf16")
        for side, model in models.items()
    }
    both, some = ModelPair(**rounded), {arm: arms[arm] for arm in ("target", "mapped")}
    of_size = [run(both, some, items, batch_size=size, generate=False) for size in (1, 3, 8)]
    spread = {
        arm: max(
            abs(x - y)
            for results in of_size[1:]
            for one, other in zip(of_size[0], results, strict=True)
            for x, y in zip(one.logliks, other.logliks, strict=True)
            if one.arm == arm
        )
        for arm in some
    }
    # Both are noise of the same rounding; which is larger on five items is chance, within a factor of two.
    assert spread["mapped"] <= max(2 * spread["target"], 0.05)


def test_no_context_sees_only_bos_and_the_held_back_token(results, items, models, tokenizer):
    found = [r for r in results if r.arm == "no_context"]
    for item, result in zip(items, found, strict=True):
        encoded = encode_item(tokenizer, item, max_tokens=320)
        left = (tokenizer.bos_token_id, encoded.context_ids[-1])
        expected = full_forward_logliks(models["target"], dataclasses.replace(encoded, context_ids=left))
        assert result.logliks == pytest.approx(expected, abs=1e-4)


def test_controls_differ_from_native_and_from_each_other(results):
    first = {r.arm: r.logliks for r in results if r.id == results[0].id and r.task == results[0].task}
    assert len({tuple(round(x, 3) for x in logliks) for logliks in first.values()}) == len(ARMS)


def test_the_identity_pair_keeps_every_score_prediction_and_text(identity_pair, identity_arms, items):
    by_arm = {arm: {} for arm in identity_arms}
    for result in run(identity_pair, identity_arms, items, batch_size=3, max_new_tokens=4):
        by_arm[result.arm][result.task, result.id] = result
    for key, target in by_arm["target"].items():
        for arm in ("mapped", "source"):
            other = by_arm[arm][key]
            assert other.logliks == pytest.approx(target.logliks, abs=1e-4)
            assert (other.predicted, other.generated) == (target.predicted, target.generated)
        assert by_arm["no_context"][key].logliks != pytest.approx(target.logliks, abs=1e-2)


def count_prefills(monkeypatch):
    """Models by name, one entry each time one reads contexts, in whichever module of kvmap that is asked."""
    readers = []
    real = capture.prefill

    def counted(loaded, *given, **named):
        readers.append(loaded.identity.name)
        return real(loaded, *given, **named)

    for name, module in list(sys.modules.items()):
        if name.startswith("kvmap") and getattr(module, "prefill", None) is real:
            monkeypatch.setattr(module, "prefill", counted)
    return readers


@pytest.mark.parametrize("chosen", [ARMS, ("target", "source"), ("target", "mapped", "bias_only")])
def test_the_source_reads_each_batch_once_whatever_the_arms(monkeypatch, pair, arms, items, chosen):
    readers = count_prefills(monkeypatch)
    run(pair, {arm: arms[arm] for arm in chosen}, items, batch_size=2, generate=False)
    assert readers.count("source") == 3
    assert readers.count("target") >= 3


def test_results_say_how_many_tokens_were_mapped(results):
    for result in results:
        native = result.arm in ("target", "source", "no_context")
        assert result.n_mapped == (0 if native else result.n_context - 2)
        assert result.row()["n_mapped"] == result.n_mapped


def test_arms_that_would_map_nothing_at_all_are_refused(pair, arms, items):
    both = {"target": None, "mapped": arms["mapped"]}
    longest = max(r.n_context for r in run(pair, {"target": None}, items, generate=False))
    options = TransferOptions(native_head=longest - 2, hold_back=2)
    with pytest.raises(KvmapError, match=f"native_head={longest - 2} and hold_back=2 cover every context"):
        evaluate_items(pair, both, items, options=options, progress=quiet)
    # one token of one context is something, and natively all of it is fine
    options = dataclasses.replace(options, hold_back=1)
    found = evaluate_items(pair, both, items, options=options, generate=False, progress=quiet)
    assert sorted(r.n_mapped for r in found if r.arm == "mapped")[-1] == 1
    options = TransferOptions(native_head=longest)
    evaluate_items(pair, {"target": None}, items[:1], options=options, generate=False, progress=quiet)


def test_two_items_that_cannot_be_told_apart_are_refused(pair, items):
    twice = [*items, dataclasses.replace(items[0], context="another file of that name : a b")]
    message = f"task '{items[0].task}' has two items with the id '{items[0].id}'.*rename one"
    with pytest.raises(KvmapError, match=message):
        run(pair, {"target": None}, twice)


def test_truncation_is_shared_by_all_arms_and_counted(pair, arms, items):
    results = run(pair, arms, items[:1], max_tokens=20, max_new_tokens=4)
    assert len({(r.n_context, r.n_truncated) for r in results}) == 1
    assert results[0].n_context == 16
    assert results[0].n_truncated > 50


def test_the_room_is_what_the_smaller_model_takes(tokenizer, models, items):
    from tests.tiny_random_models import FAMILIES

    small = FAMILIES["llama"](seed=1, vocab_size=len(tokenizer), max_position_embeddings=30)
    both = ModelPair(*(LoadedModel.from_model(model, tokenizer) for model in (small, models["target"])))
    result = run(both, {"target": None}, items[:1], generate=False)[0]
    assert result.n_context + 1 == 30


def test_a_batch_does_not_stop_when_one_row_does_and_stops_do_not_leak(pair, tokenizer, items):
    generation = Generation(tokenizer, max_new_tokens=6)
    encoded = [encode_item(tokenizer, item, 320) for item in items]
    free = [dataclasses.replace(item, stop=()) for item in items]
    hand_off = native(pair.target, *left_pad([item.context_ids for item in encoded], 0))
    texts = generate_texts(pair.target, hand_off, free, generation)
    words = texts[0].split()
    assert len(words) == 6
    # A stop of row 0 that is its own second word: row 0 ends there, the others go on as before.
    stopped = [dataclasses.replace(free[0], stop=(f" {words[1]}",)), *free[1:]]
    assert generate_texts(pair.target, hand_off, stopped, generation) == [words[0], *texts[1:]]


def test_all_choices_are_scored_from_one_hand_off_that_does_not_grow(pair, tokenizer, items):
    encoded = [encode_item(tokenizer, item, 320) for item in items]
    hand_off = native(pair.target, *left_pad([item.context_ids for item in encoded], 0))
    length = hand_off.kv.n_tokens
    kept = [key.clone() for key in hand_off.kv.keys]
    choices = [item.choice_ids for item in encoded]
    scores = score_choices(pair.target, hand_off, choices)
    backwards = score_choices(pair.target, hand_off, [tuple(reversed(row)) for row in choices])
    for one, other in zip(scores, backwards, strict=True):
        assert one == pytest.approx(other[::-1], abs=1e-4)
    assert hand_off.kv.n_tokens == length
    assert all(torch.equal(key, old) for key, old in zip(hand_off.kv.keys, kept, strict=True))


def test_an_arm_that_cannot_be_had_is_left_out_and_named(pair, arms, items):
    reason = Unavailable("layers of one shape are needed")
    found = run(pair, {"target": None, "mapped": arms["mapped"], "raw": reason}, items[:1], generate=False)
    assert [r.arm for r in found] == ["target", "mapped"]
    assert unavailable({"target": None, "raw": reason}) == {"raw": "layers of one shape are needed"}


def test_an_arm_without_the_mapper_it_needs_is_refused(pair, arms, items):
    with pytest.raises(KvmapError, match="'mapped' has no mapper"):
        run(pair, {"target": None, "mapped": None}, items)
    with pytest.raises(KvmapError, match="'target' takes no mapper, got 'linear'"):
        run(pair, {"target": arms["mapped"]}, items)


def test_a_pair_without_a_tokenizer_is_refused(models, items):
    bare = LoadedModel.from_model(models["target"])
    with pytest.raises(KvmapError, match="no tokenizer"):
        run(ModelPair(bare, bare), {"target": None}, items)


def test_every_batch_is_handed_to_the_callback(pair, arms, items):
    seen = []
    results = run(pair, arms, items, batch_size=2, generate=False, on_batch=seen.extend)
    assert sorted(seen, key=str) == sorted(results, key=str)


def test_nothing_to_do_gives_nothing(pair):
    assert run(pair, {"target": None}, []) == []


def test_a_result_is_one_row_of_a_table(results):
    row = results[0].row()
    assert row["arm"] == "target"
    assert len(row["logliks"].split()) == len(results[0].logliks)
    assert all(not isinstance(value, (tuple, list)) for value in row.values())


@pytest.mark.parametrize(
    ("text", "answer", "right"),
    [
        (" kitchen", 0, True),
        ("the   kitchen is", 2, True),
        ("kitchens", 0, False),
        ("two hours", 3, False),
        ("two hours", 4, True),
        ("two, maybe", 3, True),
        ("", 0, False),
    ],
)
def test_a_generated_answer_starts_with_the_right_choice(text, answer, right):
    choices = (" kitchen", " garden", "the kitchen", " two", " two hours")
    assert starts_with_answer(text, choices, answer) is right


def test_a_text_is_cut_at_its_first_stop():
    assert cut_at("a . b\nc", ("\n", " .")) == "a"
    assert cut_at("a b", ("\n", "")) == "a b"


def test_scores_that_are_not_numbers_predict_nothing():
    item = Item("task", "1", "context", (" a", " b"), 0)
    result = judge("mapped", item, EncodedItem((1,), ((2,), (3,))), (math.nan, -1.0), None)
    assert (result.predicted, result.correct) == (-1, False)
