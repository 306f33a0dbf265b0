"""Every supported family and scaling: rotation, native identity, and the check made at loading."""

from __future__ import annotations

import pytest
import torch

from kvmap.models.capture import forward, positions_from_mask, prefill
from kvmap.models.families import FAMILIES as SUPPORTED
from kvmap.models.loaded import LoadedModel
from kvmap.models.verify import check_rotation
from tests.models.recorded_keys import pre_rotation_keys
from tests.tiny_random_models import FAMILIES, left_padding, random_ids

# More than twice the 32 positions that scaled families were "trained" on, within every window of 96.
N_TOKENS, N_SUFFIX = 80, 5
# float32: products of a few dozen terms of order one round to about 1e-6.
KEY_TOLERANCE = 1e-5
# float32, METHOD.md: native logits to 1e-4.
LOGIT_TOLERANCE = 1e-4

every_family = pytest.mark.parametrize("name", FAMILIES)
batch_sizes = pytest.mark.parametrize("batch", [1, 3])


@pytest.fixture(scope="module")
def models() -> dict[str, LoadedModel]:
    return {}


def loaded_model(models: dict[str, LoadedModel], name: str) -> LoadedModel:
    if name not in models:
        models[name] = LoadedModel.from_model(FAMILIES[name](seed=3), name=name)
    return models[name]


def test_every_supported_model_type_has_a_tiny_model():
    built = {FAMILIES[name]().config.model_type for name in FAMILIES}
    assert built == set(SUPPORTED)


@every_family
@batch_sizes
def test_stripped_keys_are_the_keys_before_rotation(models, name, batch, monkeypatch):
    loaded = loaded_model(models, name)
    ids, mask = random_ids(batch, N_TOKENS), left_padding(batch, N_TOKENS)
    kv = prefill(loaded, ids, mask)
    expected = pre_rotation_keys(monkeypatch, loaded, ids, mask, positions_from_mask(mask))
    stripped = kv.strip()
    assert stripped.stripped
    for layer, keys in enumerate(expected):
        handed = keys.shape[-1]  # Phi, StableLM and Persimmon hand over the turning channels only
        real = kv.mask[:, None, :, None]
        difference = (stripped.keys[layer][..., :handed] - keys) * real
        assert difference.abs().max() <= KEY_TOLERANCE * keys.abs().max(), f"layer {layer}"
        assert torch.equal(stripped.keys[layer][..., handed:], kv.keys[layer][..., handed:])


@every_family
def test_strip_then_rotate_gives_the_cached_keys(models, name):
    loaded = loaded_model(models, name)
    kv = prefill(loaded, random_ids(2, N_TOKENS), left_padding(2, N_TOKENS))
    again = kv.strip().rotate(kv.rotations)
    for layer in range(kv.n_layers):
        torch.testing.assert_close(again.keys[layer], kv.keys[layer], atol=KEY_TOLERANCE, rtol=KEY_TOLERANCE)
        assert torch.equal(again.values[layer], kv.values[layer])


@every_family
@batch_sizes
def test_prefill_then_forward_equals_one_full_forward(models, name, batch):
    loaded = loaded_model(models, name)
    ids, mask = random_ids(batch, N_TOKENS, seed=1), left_padding(batch, N_TOKENS)
    with torch.no_grad():
        full = loaded.model(ids, attention_mask=mask, position_ids=positions_from_mask(mask)).logits
    kv = prefill(loaded, ids[:, :-N_SUFFIX], mask[:, :-N_SUFFIX])
    logits, grown = forward(loaded, ids[:, -N_SUFFIX:], kv)
    assert (logits - full[:, -N_SUFFIX:]).abs().max() <= LOGIT_TOLERANCE
    assert (kv.n_tokens, grown.n_tokens) == (N_TOKENS - N_SUFFIX, N_TOKENS)
    assert not grown.mixed


@every_family
def test_a_stripped_and_rotated_cache_continues_like_the_native_one(models, name):
    loaded = loaded_model(models, name)
    ids, mask = random_ids(3, N_TOKENS, seed=2), left_padding(3, N_TOKENS)
    kv = prefill(loaded, ids[:, :-N_SUFFIX], mask[:, :-N_SUFFIX])
    native, _ = forward(loaded, ids[:, -N_SUFFIX:], kv)
    turned = kv.strip().rotate(loaded.rotations(N_TOKENS - N_SUFFIX), dtype=loaded.dtype)
    logits, _ = forward(loaded, ids[:, -N_SUFFIX:], turned)
    assert (logits - native).abs().max() <= LOGIT_TOLERANCE


@every_family
def test_keys_of_a_constant_sequence_are_constant_once_stripped(models, name):
    loaded = loaded_model(models, name)
    deviations = check_rotation(loaded)
    assert len(deviations) == loaded.geometry.n_layers
    assert max(deviations) < 1e-5


@every_family
def test_geometry_is_what_the_cache_holds(models, name):
    loaded = loaded_model(models, name)
    kv = prefill(loaded, random_ids(1, 7))
    shapes = [(layer.n_kv_heads, layer.head_dim) for layer in loaded.geometry.layers]
    assert [(key.shape[1], key.shape[3]) for key in kv.keys] == shapes
    assert [rotation is None for rotation in kv.rotations] == [
        layer.rope_type is None for layer in loaded.geometry.layers
    ]
    assert loaded.geometry.kv_bytes(7, 4) == kv.nbytes


@pytest.mark.parametrize("name", ["smollm3", "cohere2", "exaone4"])
def test_layers_without_rotation_are_recognised(models, name):
    loaded = loaded_model(models, name)
    assert {rotation is None for rotation in loaded.rotations(10)} == {True, False}


def test_layers_of_different_kinds_keep_their_own_frequencies(models):
    rotations = loaded_model(models, "gemma3").rotations(10)
    assert not rotations[0].matches(rotations[1])
    assert [layer.rope_type for layer in loaded_model(models, "gemma3").geometry.layers] == [
        "default",
        "linear",
    ]


def test_head_dim_is_the_configs_not_hidden_over_heads(models):
    geometry = loaded_model(models, "llama_wide_heads").geometry
    assert geometry.head_dim == 12 != geometry.hidden_size // geometry.n_heads


def test_yarn_and_longrope_stretch_keys(models):
    for name in ("llama_yarn", "ministral3", "phi3_longrope"):
        assert loaded_model(models, name).rotations(N_TOKENS)[0].scaling > 1.1
