"""Logits made of hidden states, against those of the whole forward."""

from __future__ import annotations

import functools

import pytest
import torch

from kvmap.models.capture import prefill
from kvmap.models.logits import keep_hidden_states, logits_of
from kvmap.models.pair import LoadedModel
from tests.tiny_random_models import FAMILIES, build_config, left_padding, random_ids

IDS, MASK = random_ids(2, 7), left_padding(2, 7)


# every family: each head has scales, soft caps and biases of its own
@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_a_head_on_kept_states_gives_the_logits_of_the_whole_forward(name):
    loaded = LoadedModel.from_model(FAMILIES[name]())
    with torch.no_grad():
        expected = loaded.model(input_ids=IDS).logits
    with keep_hidden_states(loaded) as states:
        prefill(loaded, IDS)
    (hidden,) = states
    found = torch.cat([logits_of(loaded, hidden[:, :3]), logits_of(loaded, hidden[:, 3:])], dim=1)
    assert found.dtype == torch.float32
    # the same products of other shapes
    assert torch.allclose(found, expected, atol=1e-5)
    with torch.no_grad():
        assert torch.equal(loaded.model(input_ids=IDS).logits, expected), "the model is as it was"


def test_a_model_within_a_multimodal_wrapper_has_its_own_head_too():
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration
    from transformers.models.siglip import SiglipVisionConfig

    vision = SiglipVisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=28
    )
    config = Gemma3Config(text_config=build_config("gemma3"), vision_config=vision, mm_tokens_per_image=4)
    loaded = LoadedModel.from_model(Gemma3ForConditionalGeneration(config).eval())
    with keep_hidden_states(loaded) as states:
        prefill(loaded, IDS)
    with torch.no_grad():
        expected = loaded.model(input_ids=IDS).logits
    assert torch.allclose(logits_of(loaded, states[0]), expected, atol=1e-5)


def test_a_forward_of_the_instances_own_comes_back():
    loaded = LoadedModel.from_model(FAMILIES["llama"]())
    actual, calls = loaded.body.forward, []

    @functools.wraps(actual)
    def own(*given, **named):
        calls.append(1)
        return actual(*given, **named)

    loaded.body.forward = own
    with keep_hidden_states(loaded) as states:
        prefill(loaded, IDS, MASK)
    logits_of(loaded, states[0])
    assert loaded.body.forward is own
    assert len(calls) == 1, "no layer runs again"


def test_the_body_is_itself_again_after_a_failure(monkeypatch):
    loaded = LoadedModel.from_model(FAMILIES["llama"]())
    with pytest.raises(RuntimeError):
        logits_of(loaded, torch.zeros(1, 1, 3))
    assert "forward" not in vars(loaded.body)


def test_states_are_no_longer_kept_outside():
    loaded = LoadedModel.from_model(FAMILIES["llama"]())
    with keep_hidden_states(loaded) as states:
        prefill(loaded, IDS)
    prefill(loaded, IDS)
    assert len(states) == 1
