"""From tokens to a cache and on from a cache: the cases that have gone wrong elsewhere."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from kvmap.models.cache import InvalidCache, KVCache
from kvmap.models.capture import CacheMismatch, forward, positions_from_mask, prefill
from kvmap.models.loaded import LoadedModel
from tests.tiny_random_models import FAMILIES, ORIGINAL_MAX, left_padding, random_ids

# Families whose masks, positions or biases are made in different ways.
some_families = pytest.mark.parametrize(
    "name", ["llama", "ministral3", "gemma3", "gpt_neox", "cohere2", "phi3_longrope"]
)
attentions = pytest.mark.parametrize("attention", ["sdpa", "eager"])


def load(name="llama", **settings):
    return LoadedModel.from_model(FAMILIES[name](**settings), name=name)


def test_positions_count_real_tokens_from_zero():
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    assert positions_from_mask(mask).tolist() == [[0, 0, 0, 1], [0, 1, 2, 3]]


@some_families
def test_a_suffix_at_once_and_one_by_one_give_the_same_logits_in_eager_and_sdpa(name):
    ids, mask = random_ids(2, 30), left_padding(2, 30)
    results = []
    for attention in ("sdpa", "eager"):
        loaded = load(name, attn_implementation=attention)
        kv = prefill(loaded, ids[:, :26], mask[:, :26])
        results.append(forward(loaded, ids[:, 26:], kv)[0])
        steps, grown = [], kv
        for column in range(26, 30):
            logits, grown = forward(loaded, ids[:, column : column + 1], grown)
            steps.append(logits)
        results.append(torch.cat(steps, dim=1))
    for other in results[1:]:
        assert (other - results[0]).abs().max() <= 1e-4


@some_families
def test_greedy_decoding_equals_generate(name):
    loaded = load(name)
    ids = random_ids(1, 20)
    expected = loaded.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=8,
        eos_token_id=None,
        pad_token_id=0,
    )
    kv = prefill(loaded, ids[:, :-1])
    token, made = ids[:, -1:], []
    for _ in range(8):
        logits, kv = forward(loaded, token, kv)
        token = logits[:, -1:].argmax(-1)
        made.append(token)
    assert torch.equal(torch.cat([ids, *made], dim=1), expected)


@attentions
def test_a_padded_row_equals_the_row_alone(attention):
    loaded = load(attn_implementation=attention)
    ids, mask = random_ids(3, 24), left_padding(3, 24, pads=5)
    logits, _ = forward(loaded, ids[:, 20:], prefill(loaded, ids[:, :20], mask[:, :20]))
    for row in range(3):
        alone = ids[row : row + 1, 5 * row :]
        expected, _ = forward(loaded, alone[:, -4:], prefill(loaded, alone[:, :-4]))
        assert (logits[row] - expected[0]).abs().max() <= 1e-4


@attentions
def test_padding_holds_finite_numbers(attention):
    loaded = load(attn_implementation=attention)
    kv = prefill(loaded, random_ids(3, 9), left_padding(3, 9))
    assert all(tensor.isfinite().all() for tensor in (*kv.keys, *kv.values))


def test_continuations_of_unequal_length_may_be_padded_on_the_right():
    loaded = load()
    kv = prefill(loaded, random_ids(2, 10))
    suffix = random_ids(2, 4, seed=5)
    padded_mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]])
    logits, grown = forward(loaded, suffix, kv, padded_mask)
    expected, _ = forward(loaded, suffix[:1, :2], kv.select_rows([0]))
    assert (logits[0, :2] - expected[0]).abs().max() <= 1e-4
    assert grown.mask[:, 10:].long().tolist() == padded_mask.tolist()
    after, _ = forward(loaded, suffix[:, :1], grown)
    alone = torch.cat((suffix[:1, :2], suffix[:1, :1]), dim=1)
    expected, _ = forward(loaded, alone, kv.select_rows([0]))
    assert (after[0, 0] - expected[0, -1]).abs().max() <= 1e-4


@pytest.mark.parametrize("n_context", [0, 1, 2])
@pytest.mark.parametrize("n_suffix", [1, 3])
def test_the_shortest_contexts_and_continuations(n_context, n_suffix):
    loaded = load()
    ids = random_ids(2, n_context + n_suffix)
    kv = prefill(loaded, ids[:, :n_context]) if n_context else None
    logits, grown = forward(loaded, ids[:, n_context:], kv)
    with torch.no_grad():
        full = loaded.model(ids).logits
    assert (logits - full[:, n_context:]).abs().max() <= 1e-4
    assert grown.n_tokens == n_context + n_suffix


def test_a_cache_without_tokens_counts_as_none():
    loaded = load()
    ids = random_ids(1, 4)
    empty = prefill(loaded, ids).slice_tokens(0, 0)
    assert empty.n_tokens == 0
    assert torch.equal(forward(loaded, ids, empty)[0], forward(loaded, ids, None)[0])


def test_an_empty_suffix_gives_no_logits_and_the_same_cache():
    loaded = load()
    kv = prefill(loaded, random_ids(2, 5))
    logits, same = forward(loaded, random_ids(2, 0), kv)
    assert tuple(logits.shape) == (2, 0, loaded.geometry.vocab_size)
    assert same.n_tokens == 5
    with pytest.raises(InvalidCache, match="token or a cache"):
        forward(loaded, random_ids(2, 0), None)
    with pytest.raises(InvalidCache, match="at least one token"):
        prefill(loaded, random_ids(2, 0))


def test_the_cache_given_is_read_not_recomputed():
    loaded = load()
    ids = random_ids(1, 12)
    kv = prefill(loaded, ids[:, :10])
    zeroed = dataclasses.replace(kv, values=tuple(torch.zeros_like(value) for value in kv.values))
    assert (forward(loaded, ids[:, 10:], kv)[0] - forward(loaded, ids[:, 10:], zeroed)[0]).abs().max() > 1e-2


def test_another_models_cache_is_refused_naming_what_differs():
    one, other = load("llama", seed=1), load("llama_linear", seed=2)
    kv = prefill(one, random_ids(1, 6))
    with pytest.raises(CacheMismatch, match=r"(?s)weights: .*rope: ") as caught:
        forward(other, random_ids(1, 2), kv)
    assert "dtype" not in str(caught.value)
    half = LoadedModel.from_model(FAMILIES["llama"](seed=1).bfloat16())
    with pytest.raises(CacheMismatch, match="dtype: float32"):
        forward(half, random_ids(1, 2), kv)


def test_a_mapped_cache_may_come_from_elsewhere():
    one, other = load("llama", seed=1), load("llama_linear", seed=2)
    kv = dataclasses.replace(prefill(one, random_ids(1, 6)), exact=False)
    _, grown = forward(other, random_ids(1, 2), kv)
    assert not grown.exact


def test_caches_that_do_not_fit_are_refused():
    loaded = load()
    kv = prefill(loaded, random_ids(2, 6))
    with pytest.raises(InvalidCache, match="stripped"):
        forward(loaded, random_ids(2, 1), kv.strip())
    with pytest.raises(InvalidCache, match="2 rows cannot continue with 1"):
        forward(loaded, random_ids(1, 1), kv)
    shallow = KVCache(kv.keys[:1], kv.values[:1], kv.positions, kv.mask, kv.rotations[:1])
    with pytest.raises(InvalidCache, match="1 layers, not 2"):
        forward(loaded, random_ids(2, 1), shallow)
    wide = LoadedModel.from_model(FAMILIES["llama_wide_heads"]())
    foreign = dataclasses.replace(prefill(wide, random_ids(2, 6)), owner=None)
    with pytest.raises(InvalidCache, match=r"layer 0: \(2, 12\), not \(2, 8\)"):
        forward(loaded, random_ids(2, 1), foreign)


def test_a_bfloat16_model_takes_float32_caches_and_gives_float32_logits():
    loaded = LoadedModel.from_model(FAMILIES["llama"]().bfloat16())
    kv = prefill(loaded, random_ids(1, 6))
    assert kv.keys[0].dtype == torch.bfloat16
    logits, grown = forward(loaded, random_ids(1, 2), kv.strip().rotate(kv.rotations))
    assert logits.dtype == torch.float32
    assert grown.keys[0].dtype == torch.bfloat16


def test_a_mask_of_another_shape_is_refused():
    with pytest.raises(InvalidCache, match="mask of the same shape"):
        prefill(load(), random_ids(2, 6), torch.ones(2, 5))


def first_layers(kv, n_layers):
    return (*kv.keys[:n_layers], *kv.values[:n_layers])


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", sorted(set(FAMILIES) - {"gemma2"}))
def test_the_first_layers_alone_are_those_of_the_whole_prefill(name, attention):
    loaded = load(name, n_layers=3, attn_implementation=attention)
    for batch in (1, 3):
        ids, mask = random_ids(batch, 14), left_padding(batch, 14)
        whole = prefill(loaded, ids, mask)
        for m in (1, 2, 3):
            some = prefill(loaded, ids, mask, n_layers=m)
            assert some.n_layers == len(some.rotations) == m
            for mine, theirs in zip(first_layers(some, m), first_layers(whole, m), strict=True):
                assert torch.equal(mine, theirs)
            assert all(a is b or a.matches(b) for a, b in zip(some.rotations, whole.rotations, strict=False))
            assert torch.equal(some.positions, whole.positions)
            assert torch.equal(some.mask, whole.mask)
            assert some.exact
            assert some.owner == loaded.identity


def test_the_first_layers_alone_are_those_of_the_whole_prefill_without_sdpa():
    loaded, ids = load("gemma2", n_layers=3), random_ids(2, 14)
    for mine, theirs in zip(
        first_layers(prefill(loaded, ids, n_layers=2), 2), first_layers(prefill(loaded, ids), 2), strict=True
    ):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("length", [None, 20, ORIGINAL_MAX + 8])
@pytest.mark.parametrize("name", ["llama_dynamic", "phi3_longrope"])
def test_the_first_layers_follow_the_length_of_the_whole_context(name, length):
    loaded = load(name, n_layers=3)
    ids, mask = random_ids(3, 16), left_padding(3, 16)
    whole = prefill(loaded, ids, mask, length=length)
    prefill(loaded, random_ids(1, ORIGINAL_MAX + 2))  # frequencies of another length must not stick
    some = prefill(loaded, ids, mask, length=length, n_layers=2)
    assert some.n_tokens == 16
    for mine, theirs in zip(first_layers(some, 2), first_layers(whole, 2), strict=True):
        assert torch.equal(mine, theirs)
    assert some.rotations[0].matches(whole.rotations[0])
    for mine, theirs in zip(some.strip().keys, whole.strip().keys[:2], strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("m", [1, 2, 4])
def test_no_more_layers_are_run_than_the_last_one_needs(m):
    loaded = load(n_layers=4)
    finished = []
    for index, layer in enumerate(loaded.body.layers):
        layer.mlp.register_forward_hook(lambda *_, index=index: finished.append(index))
    prefill(loaded, random_ids(2, 6), n_layers=m)
    assert finished == list(range(m - 1))


def test_a_model_stopped_early_runs_on_as_before():
    loaded, ids = load(n_layers=3), random_ids(2, 8)
    before, _ = forward(loaded, ids, None)
    prefill(loaded, ids, n_layers=1)
    after, _ = forward(loaded, ids, None)
    assert torch.equal(before, after)


def test_an_error_within_a_model_stopped_early_is_not_swallowed():
    loaded = load(n_layers=3)

    def fail(*_):
        raise RuntimeError("broken layer")

    loaded.body.layers[0].mlp.register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="broken layer"):
        prefill(loaded, random_ids(1, 4), n_layers=2)


@pytest.mark.parametrize("m", [-1, 0, 3])
def test_layers_a_model_does_not_have_are_refused(m):
    with pytest.raises(InvalidCache, match=f"n_layers={m}: llama has 2 layers; expected 1 to 2"):
        prefill(load(), random_ids(1, 4), n_layers=m)


def test_the_first_layers_are_no_cache_to_continue_from():
    loaded = load()
    with pytest.raises(InvalidCache, match="1 layers, not 2"):
        forward(loaded, random_ids(1, 1), prefill(loaded, random_ids(1, 4), n_layers=1))
