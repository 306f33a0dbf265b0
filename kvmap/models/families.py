"""What kvmap knows of each model family: how its keys are rotated, and which families it cannot serve and
why.

Every entry was read off transformers' modelling code and is held by tests/models to a recorded pre-rotation
key.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from kvmap.models.rope import Layout

# Which layers attend to a window of the last tokens only: "none"; "all" where config.sliding_window is set;
# or those that config.layer_types calls "sliding_attention".
Windows = Literal["none", "all", "by_type"]
LayerTest = Callable[[Any, int], bool]


def every_layer(config: Any, layer: int) -> bool:
    """True: the usual answer."""
    return True


def _smollm3_rotates(config: Any, layer: int) -> bool:
    return bool(config.no_rope_layers[layer])  # despite its name, 1 marks the layers that do rotate


def _cohere2_rotates(config: Any, layer: int) -> bool:
    return config.sliding_window is not None and config.layer_types[layer] == "sliding_attention"


def _exaone4_rotates(config: Any, layer: int) -> bool:
    return config.sliding_window is None or config.layer_types[layer] == "sliding_attention"


@dataclass(frozen=True)
class Family:
    """The traits of a supported model_type.

    Attributes:
        layout: how rotated channels pair up.
        rotates: whether a layer's keys are rotated at all.
        windows: which layers see only a window.
        eager_only: transformers gives the model no sdpa attention.
    """

    layout: Layout = "half"
    rotates: LayerTest = every_layer
    windows: Windows = "none"
    eager_only: bool = False


#: model_type of the text config -> traits. All apply their key norm, if any, before the rotation.
FAMILIES: Mapping[str, Family] = {
    "apertus": Family(),
    "arcee": Family(),
    "cohere": Family(layout="interleaved"),
    "cohere2": Family(layout="interleaved", rotates=_cohere2_rotates, windows="by_type"),
    "ernie4_5": Family(layout="interleaved"),
    "exaone4": Family(rotates=_exaone4_rotates, windows="by_type"),
    "gemma": Family(),
    "gemma2": Family(windows="by_type", eager_only=True),
    "gemma3_text": Family(windows="by_type"),
    "glm": Family(layout="interleaved"),
    "glm4": Family(layout="interleaved"),
    "gpt_neox": Family(),
    "granite": Family(),
    "helium": Family(layout="interleaved"),
    "hyperclovax": Family(),
    "llama": Family(),
    "ministral": Family(windows="by_type"),
    "ministral3": Family(windows="all"),
    "mistral": Family(windows="all"),
    "mixtral": Family(windows="all"),
    "nemotron": Family(),
    "olmo": Family(),
    "olmo2": Family(),
    "olmo3": Family(windows="by_type"),
    "olmoe": Family(),
    "persimmon": Family(),
    "phi": Family(),
    "phi3": Family(windows="all"),
    "qwen2": Family(windows="by_type"),
    "qwen3": Family(windows="by_type"),
    "qwen3_moe": Family(windows="all"),
    "seed_oss": Family(),
    "smollm3": Family(rotates=_smollm3_rotates, windows="by_type"),
    "stablelm": Family(),
    "starcoder2": Family(windows="all"),
}

_SHARED = "it owns no KV but reads an earlier layer's, so there is nothing to map there"
_RECURRENT = "it is recurrent or linear attention: its state is not a key and a value per token"
_NORM_AFTER = "it normalises keys after the rotation, so the rotation cannot be taken off the cached key"
_LATENT = "it caches a compressed latent (multi-head latent attention) instead of keys and values per head"
_LEARNED = "it knows positions from learned position embeddings, which cannot be taken off the cached keys"
_ALIBI = "it knows positions from ALiBi biases; kvmap serves rotary models only"
_SINKS = (
    "it adds learned sink logits to the attention, so the rotation check made at loading does not hold for "
    "it, and queries and keys alone do not give its attention weights"
)
_THREE_POSITIONS = "it gives each token three positions (time, height, width), and kvmap hands over one"
_CROSS = "some of its layers attend to the image instead of the text, and hold no key and value per token"

#: model_type -> why it is refused
REFUSED: Mapping[str, str] = {
    **dict.fromkeys(
        ("gemma3n", "gemma3n_text", "gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text"), _SHARED
    ),
    **dict.fromkeys(
        (
            "bailing_hybrid",
            "bamba",
            "falcon_h1",
            "falcon_mamba",
            "granitemoehybrid",
            "jamba",
            "kimi_linear",
            "lfm2",
            "lfm2_moe",
            "mamba",
            "mamba2",
            "minimax",
            "nemotron_h",
            "olmo_hybrid",
            "qwen3_5",
            "qwen3_5_moe",
            "qwen3_5_moe_text",
            "qwen3_5_text",
            "qwen3_next",
            "recurrent_gemma",
            "rwkv",
            "xlstm",
            "zamba",
            "zamba2",
        ),
        _RECURRENT,
    ),
    **dict.fromkeys(("hunyuan_v1_dense", "hunyuan_v1_moe", "llama4", "llama4_text", "nanochat"), _NORM_AFTER),
    **dict.fromkeys(
        (
            "deepseek_v2",
            "deepseek_v3",
            "deepseek_v32",
            "deepseek_v4",
            "glm4_moe_lite",
            "glm_moe_dsa",
            "longcat_flash",
            "minicpm3",
            "mistral4",
            "youtu",
        ),
        _LATENT,
    ),
    **dict.fromkeys(("biogpt", "gpt2", "gpt_bigcode", "gpt_neo", "opt", "xglm"), _LEARNED),
    **dict.fromkeys(("bloom", "mpt"), _ALIBI),
    **dict.fromkeys(
        (
            "glm4v_moe_text",
            "glm4v_text",
            "qwen2_5_vl_text",
            "qwen2_vl_text",
            "qwen3_vl_moe_text",
            "qwen3_vl_text",
        ),
        _THREE_POSITIONS,
    ),
    "mllama_text_model": _CROSS,
    "gpt_oss": _SINKS,
}


def _first_shared(config: Any) -> int | None:
    shared = getattr(config, "num_kv_shared_layers", 0) or 0
    return config.num_hidden_layers - shared if shared else None


def _first_recurrent(config: Any) -> int | None:
    layer_types = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ()
    attends = ("attention", "full_attention", "sliding_attention")
    return next((layer for layer, kind in enumerate(layer_types) if kind not in attends), None)


def refused_layer(config: Any, model_type: str) -> str:
    """The first layer that a refusal is about, as words."""
    reason = REFUSED[model_type]
    layer = (
        _first_shared(config)
        if reason is _SHARED
        else _first_recurrent(config)
        if reason is _RECURRENT
        else 0
    )
    return f"layer {layer or 0}"
