"""Tiny multimodal models around text models of supported families, by their own config classes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import transformers
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

from tests.tiny_random_models import build_config, randomise

WINDOW = 12
_SIZES = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_VISION: Mapping[str, dict[str, Any]] = {
    "clip": {**_SIZES, "model_type": "clip_vision_model", "projection_dim": 16},
    "siglip": {**_SIZES, "model_type": "siglip_vision_model"},
    "pixtral": {**_SIZES, "model_type": "pixtral", "head_dim": 8},
    "idefics3": {**_SIZES, "model_type": "idefics3_vision"},
    "smolvlm": {**_SIZES, "model_type": "smolvlm_vision"},
    "internvl": {
        **_SIZES,
        "model_type": "internvl_vision",
        "image_size": [28, 28],
        "patch_size": [14, 14],
    },
}
# ids of the placeholders that stand for images; tests keep their texts above them
_IMAGE, _VIDEO, FIRST_TEXT_ID = 9, 10, 11
_SLIDING = {"sliding_window": WINDOW}

#: wrapper -> (its class, text family and settings, vision model, settings of the wrapper)
WRAPPERS: Mapping[str, tuple[str, str, dict[str, Any], str, dict[str, Any]]] = {
    "aya_vision": ("AyaVision", "cohere2", _SLIDING, "siglip", {"image_token_index": _IMAGE}),
    "cohere2_vision": ("Cohere2Vision", "cohere2", _SLIDING, "siglip", {"image_token_id": _IMAGE}),
    "gemma3": (
        "Gemma3",
        "gemma3",
        _SLIDING,
        "siglip",
        {"mm_tokens_per_image": 4, "image_token_index": _IMAGE, "boi_token_index": 7, "eoi_token_index": 8},
    ),
    "idefics3": ("Idefics3", "llama_llama3", {}, "idefics3", {"image_token_id": _IMAGE}),
    "internvl": ("InternVL", "qwen3", {}, "internvl", {"image_token_id": _IMAGE}),
    "llava": ("Llava", "llama", {}, "clip", {"image_token_index": _IMAGE}),
    "llava_next": ("LlavaNext", "mistral_sliding", _SLIDING, "clip", {"image_token_index": _IMAGE}),
    "llava_onevision": (
        "LlavaOnevision",
        "qwen2",
        {},
        "siglip",
        {"image_token_index": _IMAGE, "video_token_index": _VIDEO},
    ),
    "mistral3": ("Mistral3", "ministral3", {}, "pixtral", {"image_token_index": _IMAGE}),
    "mistral3, sliding": ("Mistral3", "ministral3", _SLIDING, "pixtral", {"image_token_index": _IMAGE}),
    "smolvlm": ("SmolVLM", "llama", {}, "smolvlm", {"image_token_id": _IMAGE}),
    "vipllava": (
        "VipLlava",
        "llama",
        {},
        "clip",
        {"image_token_index": _IMAGE, "vision_feature_layers": [0, 1]},
    ),
}


def wrapper_config(name: str, **text: Any) -> Any:
    """The config of one of `WRAPPERS`; `text` are settings of its text model."""
    class_name, family, own, vision, settings = WRAPPERS[name]
    return getattr(transformers, f"{class_name}Config")(
        text_config=build_config(family, **own, **text).to_dict(), vision_config=_VISION[vision], **settings
    )


def build_wrapper(name: str, seed: int = 0, **text: Any) -> PreTrainedModel:
    """A random float32 model of a wrapper, of the class that transformers loads its checkpoints as."""
    config = wrapper_config(name, **text)
    causal = type(config) in AutoModelForCausalLM._model_mapping
    model = (AutoModelForCausalLM if causal else AutoModelForImageTextToText).from_config(config)
    randomise(model, seed)
    return model.float().eval().requires_grad_(False)
