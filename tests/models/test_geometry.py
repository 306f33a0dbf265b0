"""Geometry from configs alone: what is read, and what is refused with layer and reason."""

from __future__ import annotations

import pytest
import transformers

from kvmap.models.geometry import UnsupportedModel, geometry_from_config
from tests.tiny_random_models import WINDOW, build_config, rope

REFUSALS = [
    ("Gemma3nTextConfig", {"num_hidden_layers": 6, "num_kv_shared_layers": 2}, "layer 4: it owns no KV"),
    ("Gemma4TextConfig", {"num_hidden_layers": 6, "num_kv_shared_layers": 2}, "layer 4: it owns no KV"),
    ("MambaConfig", {}, "layer 0: it is recurrent"),
    ("Mamba2Config", {}, "layer 0: it is recurrent"),
    ("JambaConfig", {"num_hidden_layers": 8}, "layer 0: it is recurrent"),
    ("BambaConfig", {"num_hidden_layers": 2, "attn_layer_indices": [0]}, "layer 1: it is recurrent"),
    ("Qwen3NextConfig", {"num_hidden_layers": 4}, "layer 0: it is recurrent"),
    (
        "Lfm2Config",
        {"num_hidden_layers": 3, "layer_types": ["full_attention", "full_attention", "conv"]},
        "layer 2: it is recurrent",
    ),
    ("RecurrentGemmaConfig", {"num_hidden_layers": 3}, "layer 0: it is recurrent"),
    ("FalconH1Config", {"num_hidden_layers": 2}, "it is recurrent"),
    ("HunYuanDenseV1Config", {"head_dim": 16}, "layer 0: it normalises keys after the rotation"),
    ("Llama4TextConfig", {}, "layer 0: it normalises keys after the rotation"),
    ("DeepseekV3Config", {}, "layer 0: it caches a compressed latent"),
    ("GptOssConfig", {}, "sink logits"),
    ("GPT2Config", {}, "learned position embeddings"),
    ("OPTConfig", {}, "learned position embeddings"),
    ("BloomConfig", {}, "ALiBi"),
]


@pytest.mark.parametrize(("name", "settings", "message"), REFUSALS, ids=[case[0] for case in REFUSALS])
def test_models_without_transferable_kv_are_refused_with_layer_and_reason(name, settings, message):
    config = getattr(transformers, name)(**settings)
    with pytest.raises(UnsupportedModel, match=message) as caught:
        geometry_from_config(config)
    assert repr(config.get_text_config(decoder=True).model_type) in str(caught.value)


def test_an_unknown_type_is_refused_with_the_way_to_add_it():
    config = transformers.FalconConfig()
    with pytest.raises(UnsupportedModel, match=r"'falcon'.*modeling_falcon.py.*CONTRIBUTING"):
        geometry_from_config(config)


def test_values_of_another_width_than_keys_are_refused():
    config = build_config("llama")
    config.v_head_dim = 16
    with pytest.raises(UnsupportedModel, match="layer 0 has values of 16 channels a head but keys of 8"):
        geometry_from_config(config)


def test_a_layer_of_an_unknown_kind_is_refused():
    config = build_config("qwen3")
    config.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(UnsupportedModel, match="layer 1 is of type 'linear_attention'"):
        geometry_from_config(config)


def test_shared_kv_in_a_known_family_is_refused():
    config = build_config("llama", n_layers=4)
    config.num_kv_shared_layers = 1
    with pytest.raises(UnsupportedModel, match="layer 3 owns no KV"):
        geometry_from_config(config)


def test_bidirectional_attention_is_refused():
    with pytest.raises(UnsupportedModel, match="both directions"):
        geometry_from_config(build_config("gemma3", use_bidirectional_attention=True))


@pytest.mark.parametrize(
    ("name", "windows"),
    [
        ("llama", [None, None]),
        ("qwen2", [None, None]),
        ("qwen2_sliding", [None, WINDOW]),
        ("mistral", [None, None]),
        ("mistral_sliding", [WINDOW, WINDOW]),
        ("gemma3", [WINDOW, None]),
        ("cohere2", [WINDOW, None]),
        ("exaone4_full", [None, None]),
    ],
)
def test_windows_are_read_layer_by_layer(name, windows):
    geometry = geometry_from_config(build_config(name))
    assert [layer.window for layer in geometry.layers] == windows
    assert geometry.windows == ((WINDOW,) if any(windows) else ())
    assert geometry.seen_tokens(10) == (10, 10)
    assert geometry.seen_tokens(500) == tuple(WINDOW - 1 if window else 500 for window in windows)


def test_the_published_geometry_of_llama_3_1_70b():
    config = transformers.LlamaConfig(
        hidden_size=8192,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=131072,
        rope_parameters=rope(
            "llama3",
            theta=5e5,
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=8192,
        ),
    )
    geometry = geometry_from_config(config)
    assert (geometry.n_layers, geometry.n_kv_heads, geometry.head_dim) == (80, 8, 128)
    assert geometry.layers[0].rope_type == "llama3"
    assert geometry.kv_bytes(1, 2) == 2 * 80 * 8 * 128 * 2


def test_the_text_model_of_a_multimodal_wrapper_is_read():
    text = build_config("ministral3")
    wrapper = transformers.Mistral3Config(text_config=text.to_dict(), vision_config={"model_type": "pixtral"})
    assert geometry_from_config(wrapper) == geometry_from_config(text)


def test_a_refused_text_model_within_a_wrapper_is_named():
    wrapper = transformers.Gemma3nConfig()
    with pytest.raises(UnsupportedModel, match="gemma3n_text"):
        geometry_from_config(wrapper)
