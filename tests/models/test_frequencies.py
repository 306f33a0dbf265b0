"""Frequencies that change: dynamic and longrope models, bfloat16 casts, thresholds."""

from __future__ import annotations

import pytest
import torch

from kvmap.models.cache import InvalidCache
from kvmap.models.capture import forward, positions_from_mask, prefill
from kvmap.models.loaded import LoadedModel
from tests.models.recorded_keys import pre_rotation_keys
from tests.tiny_random_models import FAMILIES, ORIGINAL_MAX, random_ids

stateful = pytest.mark.parametrize("name", ["llama_dynamic", "phi3_longrope"])
LONG, SHORT = 3 * ORIGINAL_MAX, ORIGINAL_MAX // 2


@stateful
def test_a_long_cache_strips_right_after_a_short_prefill(name, monkeypatch):
    loaded = LoadedModel.from_model(FAMILIES[name]())
    ids = random_ids(1, LONG)
    mask = torch.ones_like(ids)
    long = prefill(loaded, ids)
    short = prefill(loaded, ids[:, :SHORT])
    assert not long.rotations[0].matches(short.rotations[0])
    expected = pre_rotation_keys(monkeypatch, loaded, ids, mask, positions_from_mask(mask))
    prefill(loaded, ids[:, :SHORT])
    for stripped, keys in zip(long.strip().keys, expected, strict=True):
        torch.testing.assert_close(stripped, keys, atol=1e-5, rtol=1e-5)


@stateful
def test_rotations_are_those_of_a_prefill_of_that_length(name):
    loaded = LoadedModel.from_model(FAMILIES[name]())
    for n_tokens in (SHORT, LONG, SHORT, LONG):
        announced = loaded.rotations(n_tokens)
        used = prefill(loaded, random_ids(1, n_tokens)).rotations
        assert all(a.matches(b) for a, b in zip(announced, used, strict=True))


@stateful
@pytest.mark.parametrize("pads", [0, 2])
def test_the_beginning_of_a_longer_context_is_read_with_its_frequencies(name, pads):
    loaded = LoadedModel.from_model(FAMILIES[name]())
    ids = random_ids(2, LONG)
    mask = torch.ones_like(ids)
    mask[1, :pads] = 0
    whole = prefill(loaded, ids, mask)
    with torch.no_grad():
        full = loaded.model(ids, attention_mask=mask, position_ids=positions_from_mask(mask)).logits
    for n in (1, 5, LONG):
        loaded.rotations(SHORT)  # what was read before must not matter
        begun = prefill(loaded, ids[:, :n], mask[:, :n], length=LONG)
        assert all(a.matches(b) for a, b in zip(begun.rotations, whole.rotations, strict=True))
        expected = whole.slice_tokens(0, n)
        assert torch.equal(begun.positions, expected.positions)
        assert torch.equal(begun.mask, expected.mask)
        real = expected.mask[:, None, :, None]
        for got, wanted in zip((*begun.keys, *begun.values), (*expected.keys, *expected.values), strict=True):
            assert ((got - wanted) * real).abs().max() <= 1e-5
        stop = min(n + 3, LONG)
        logits, grown = forward(loaded, ids[:, n:stop], begun, mask[:, n:stop], length=LONG)
        assert (grown.n_tokens, grown.mixed) == (stop, False)
        expected = whole.slice_tokens(0, stop)
        for got, wanted in zip(grown.keys, expected.keys, strict=True):
            assert ((got - wanted) * expected.mask[:, None, :, None]).abs().max() <= 1e-5
        real = mask[:, n:stop, None].bool()
        torch.testing.assert_close(logits * real, full[:, n:stop] * real, rtol=0, atol=1e-4)
    # without the length they are a context of their own
    assert not prefill(loaded, ids[:, :5]).rotations[0].matches(whole.rotations[0])


def test_a_length_changes_nothing_where_frequencies_do_not_depend_on_it():
    loaded = LoadedModel.from_model(FAMILIES["llama_yarn"]())
    ids = random_ids(1, 5)
    plain, long = prefill(loaded, ids), prefill(loaded, ids, length=LONG)
    assert all(torch.equal(a, b) for a, b in zip(plain.keys, long.keys, strict=True))


@stateful
def test_a_snapshot_does_not_change_with_the_module(name):
    loaded = LoadedModel.from_model(FAMILIES[name]())
    kept = loaded.rotations(SHORT)[0]
    before = kept.inv_freq.clone()
    loaded.rotations(LONG)
    assert torch.equal(kept.inv_freq, before)


@stateful
def test_a_cache_that_crosses_the_threshold_goes_on_but_is_never_stripped(name):
    loaded = LoadedModel.from_model(FAMILIES[name]())
    ids = random_ids(1, ORIGINAL_MAX + 8)
    kv = prefill(loaded, ids[:, : ORIGINAL_MAX - 2])
    _, grown = forward(loaded, ids[:, ORIGINAL_MAX - 2 :], kv)
    assert grown.mixed
    assert not kv.mixed
    with pytest.raises(InvalidCache, match="prefill the whole context"):
        grown.strip()


@stateful
def test_crossing_the_threshold_still_reads_the_cache_given(name):
    loaded = LoadedModel.from_model(FAMILIES[name]())
    ids = random_ids(1, ORIGINAL_MAX + 8)
    kv = prefill(loaded, ids[:, : ORIGINAL_MAX - 2])
    suffix = ids[:, ORIGINAL_MAX - 2 :]
    logits, _ = forward(loaded, suffix, kv)
    zeroed = type(kv)(
        tuple(torch.zeros_like(key) for key in kv.keys),
        tuple(torch.zeros_like(value) for value in kv.values),
        kv.positions,
        kv.mask,
        kv.rotations,
    )
    changed, _ = forward(loaded, suffix, zeroed)
    assert (logits - changed).abs().amax(dim=-1).min() > 1e-2


@pytest.mark.parametrize("name", ["llama_llama3", "ministral3", "gemma3"])
def test_a_model_wide_bfloat16_cast_is_inverted_with_its_rounded_frequencies(name, monkeypatch):
    loaded = LoadedModel.from_model(FAMILIES[name]().to(torch.bfloat16))
    exact = LoadedModel.from_model(FAMILIES[name]()).rotations(80)[0].inv_freq
    held = loaded.rotations(80)[0].inv_freq
    assert not torch.equal(held, exact)
    assert torch.equal(held, exact.bfloat16().float())
    ids = random_ids(1, 80)
    mask = torch.ones_like(ids)
    expected = pre_rotation_keys(monkeypatch, loaded, ids, mask, positions_from_mask(mask))
    for stripped, keys in zip(prefill(loaded, ids).strip().keys, expected, strict=True):
        # bfloat16 keeps 8 bits: cos, sin and the rotated key are each rounded by up to 2⁻⁹
        error = (stripped - keys.float()).norm(dim=-1) / keys.float().norm(dim=-1)
        assert error.max() < 0.02


def test_loading_in_bfloat16_keeps_exact_frequencies(tmp_path):
    from transformers import AutoModelForCausalLM

    model = FAMILIES["llama_llama3"]()
    model.save_pretrained(tmp_path)
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    rotations = LoadedModel.from_model(reloaded).rotations(80)
    assert torch.equal(rotations[0].inv_freq, LoadedModel.from_model(model).rotations(80)[0].inv_freq)
