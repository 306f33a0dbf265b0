"""Tiny random models, one per family and scaling, in float32 and eval mode.

Every weight is redrawn with a spread that makes attention, norms, biases and rotation matter: transformers'
own initialisation is so small that a wrong rotation would hardly show in the logits. Norm weights differ
from one and biases from zero, so that the order of norm, bias and rotation shows too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

VOCAB_SIZE = 101
# Scaled families were "trained" on this many positions and hold four times as many.
ORIGINAL_MAX = 32
MAX_POSITIONS = 128
# The window of families with sliding layers: longer than most tests' contexts.
WINDOW = 96

_BASE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITIONS,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_NO_GQA = {"num_key_value_heads": None}


def rope(rope_type: str = "default", theta: float = 100.0, **settings: Any) -> dict[str, Any]:
    """A rope_parameters entry. A small theta makes every channel turn noticeably within a few positions."""
    return {"rope_type": rope_type, "rope_theta": theta, **settings}


LLAMA3 = rope(
    "llama3",
    factor=4.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=ORIGINAL_MAX,
)
YARN = rope("yarn", factor=4.0, original_max_position_embeddings=ORIGINAL_MAX)
LINEAR = rope("linear", factor=4.0)
DYNAMIC = rope("dynamic", factor=4.0)


def _longrope(n_frequencies: int) -> dict[str, Any]:
    steps = range(n_frequencies)
    return rope(
        "longrope",
        original_max_position_embeddings=ORIGINAL_MAX,
        short_factor=[1.0 + 0.1 * i for i in steps],
        long_factor=[1.5 + 0.5 * i for i in steps],
    )


def _by_type(full: dict[str, Any], sliding: dict[str, Any]) -> dict[str, Any]:
    return {"full_attention": dict(full), "sliding_attention": dict(sliding)}


# Mixtures of experts: two of four experts a token.
_EXPERTS = {"num_experts_per_tok": 2, "num_experts": 4, "moe_intermediate_size": 16}

# name -> (model class, config class, settings over _BASE)
_SPECS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"rope_parameters": rope()}),
    "llama_llama3": ("Llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "llama_linear": ("Llama", {"rope_parameters": LINEAR}),
    "llama_dynamic": ("Llama", {"rope_parameters": DYNAMIC, "max_position_embeddings": ORIGINAL_MAX}),
    "llama_yarn": ("Llama", {"rope_parameters": YARN}),
    # head_dim 12 where hidden/heads is 8
    "llama_wide_heads": ("Llama", {"rope_parameters": LLAMA3, "head_dim": 12, "attention_bias": True}),
    "qwen2": ("Qwen2", {"rope_parameters": rope()}),
    "qwen2_sliding": (
        "Qwen2",
        {
            "rope_parameters": rope(),
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "max_window_layers": 1,
        },
    ),
    "qwen3": ("Qwen3", {"rope_parameters": rope(), "head_dim": 16}),
    "qwen3_yarn": ("Qwen3", {"rope_parameters": YARN, "head_dim": 16}),
    "mistral": ("Mistral", {"rope_parameters": rope(), "head_dim": 8, "sliding_window": None}),
    "mistral_sliding": ("Mistral", {"rope_parameters": rope(), "head_dim": 8, "sliding_window": WINDOW}),
    "ministral3": (
        "Ministral3",
        {
            "rope_parameters": {
                **YARN,
                "beta_fast": 8.0,
                "beta_slow": 1.0,
                "llama_4_scaling_beta": 0.5,
                "attention_factor": 1.3,
            },
            "head_dim": 16,
        },
    ),
    "phi3_longrope": (
        "Phi3",
        {"rope_parameters": _longrope(4), "original_max_position_embeddings": ORIGINAL_MAX},
    ),
    "phi3_partial": ("Phi3", {"rope_parameters": rope(partial_rotary_factor=0.5)}),
    "phi": ("Phi", {"rope_parameters": rope(partial_rotary_factor=0.5)}),
    "gpt_neox": ("GPTNeoX", {**_NO_GQA, "rope_parameters": rope(partial_rotary_factor=0.5)}),
    "gemma": ("Gemma", {"rope_parameters": rope(), "head_dim": 16}),
    "gemma2": ("Gemma2", {"rope_parameters": rope(), "head_dim": 16, "sliding_window": WINDOW}),
    "gemma3": (
        "Gemma3",
        {
            "rope_parameters": _by_type(rope("linear", theta=1000.0, factor=4.0), rope(theta=50.0)),
            "head_dim": 16,
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 16,
        },
    ),
    "olmo2": ("Olmo2", {"rope_parameters": rope()}),
    "olmo3": ("Olmo3", {"rope_parameters": _by_type(YARN, rope()), "sliding_window": WINDOW}),
    "smollm3": ("SmolLM3", {"rope_parameters": rope()}),
    "cohere": ("Cohere", {"rope_parameters": rope(), "use_qk_norm": True}),
    "cohere2": ("Cohere2", {"rope_parameters": rope(), "sliding_window": WINDOW}),
    "granite": ("Granite", {"rope_parameters": rope(), "attention_multiplier": 0.3}),
    "glm4": ("Glm4", {"rope_parameters": rope(partial_rotary_factor=0.5), "head_dim": 16}),
    "starcoder2": ("Starcoder2", {"rope_parameters": rope(), "sliding_window": None}),
    "apertus": ("Apertus", {"rope_parameters": LLAMA3}),
    "arcee": ("Arcee", {"rope_parameters": YARN}),
    "ernie4_5": ("Ernie4_5", {"rope_parameters": rope(), "head_dim": 8}),
    "exaone4": (
        "Exaone4",
        {"rope_parameters": LLAMA3, "sliding_window": WINDOW, "sliding_window_pattern": 2},
    ),
    "exaone4_full": ("Exaone4", {"rope_parameters": rope(), "sliding_window": None}),
    "glm": ("Glm", {"rope_parameters": rope(partial_rotary_factor=0.5), "head_dim": 16}),
    "helium": ("Helium", {"rope_parameters": rope(), "head_dim": 8}),
    "hyperclovax": ("HyperCLOVAX", {"rope_parameters": rope(), "attention_multiplier": 0.3}),
    "ministral": ("Ministral", {"rope_parameters": rope(), "head_dim": 8, "sliding_window": WINDOW}),
    "mixtral": ("Mixtral", {"rope_parameters": rope(), "num_local_experts": 4}),
    "nemotron": ("Nemotron", {"rope_parameters": rope(partial_rotary_factor=0.5), "head_dim": 8}),
    "olmo": ("Olmo", {"rope_parameters": rope(), "clip_qkv": 3.0}),
    "olmoe": ("Olmoe", {"rope_parameters": rope(), **_EXPERTS}),
    "persimmon": ("Persimmon", {**_NO_GQA, "rope_parameters": rope(partial_rotary_factor=0.5)}),
    "qwen3_moe": ("Qwen3Moe", {"rope_parameters": rope(), "head_dim": 16, **_EXPERTS}),
    "seed_oss": ("SeedOss", {"rope_parameters": rope(), "head_dim": 8}),
    "stablelm": ("StableLm", {"rope_parameters": rope(partial_rotary_factor=0.5), "qk_layernorm": True}),
}
_CONFIG_NAMES = {"Gemma3": "Gemma3TextConfig"}


def _layer_settings(name: str, n_layers: int) -> dict[str, Any]:
    """Settings that name every layer, for families whose layers are not alike."""
    alternating = ["full_attention" if i % 2 else "sliding_attention" for i in range(n_layers)]
    if name in ("gemma2", "gemma3", "olmo3", "cohere2", "exaone4", "ministral"):
        return {"layer_types": alternating}
    if name == "exaone4_full":
        return {"layer_types": ["full_attention"] * n_layers}
    if name == "smollm3":
        return {"no_rope_layers": [1 - i % 2 for i in range(n_layers)]}
    return {}


def build_config(name: str, n_layers: int = 2, **overrides: Any) -> Any:
    """The config of one of `FAMILIES`, with `overrides` on top."""
    class_name, settings = _SPECS[name]
    merged = {
        **_BASE,
        "num_hidden_layers": n_layers,
        **settings,
        **_layer_settings(name, n_layers),
        **overrides,
    }
    config_class = getattr(transformers, _CONFIG_NAMES.get(class_name, f"{class_name}Config"))
    return config_class(
        **{key: value for key, value in merged.items() if value is not None or key == "sliding_window"}
    )


def randomise(model: PreTrainedModel, seed: int) -> None:
    """Redraw every weight in place: matrices with variance 1.5²/fan_in, vectors moved by 0.2 of noise."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            if "embed" in name:
                parameter.copy_(noise * 0.5)
            elif parameter.ndim >= 2:
                parameter.copy_(noise * 1.5 / parameter.shape[-1] ** 0.5)
            else:
                parameter.add_(noise * 0.2)


def build(name: str, seed: int = 0, n_layers: int = 2, **overrides: Any) -> PreTrainedModel:
    """A random float32 model of the family `name`; `overrides` are config settings."""
    class_name, _ = _SPECS[name]
    # transformers offers no sdpa for Gemma 2, whose attention logits are soft-capped
    attention = overrides.pop("attn_implementation", "eager" if name == "gemma2" else "sdpa")
    config = build_config(name, n_layers, **overrides)
    config._attn_implementation = attention
    model = getattr(transformers, f"{class_name}ForCausalLM")(config)
    randomise(model, seed)
    return model.float().eval().requires_grad_(False)


def _builder(name: str) -> Callable[..., PreTrainedModel]:
    def builder(seed: int = 0, n_layers: int = 2, **overrides: Any) -> PreTrainedModel:
        return build(name, seed, n_layers, **overrides)

    return builder


#: name -> builder(seed=0, n_layers=2, **config settings), every family and scaling kvmap supports and tests
FAMILIES: Mapping[str, Callable[..., PreTrainedModel]] = {name: _builder(name) for name in _SPECS}


def random_ids(batch: int, n_tokens: int, seed: int = 0) -> torch.Tensor:
    """Token ids (batch, n_tokens), none of them a special token."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB_SIZE, (batch, n_tokens), generator=generator)


def left_padding(batch: int, n_tokens: int, pads: int = 3) -> torch.Tensor:
    """An attention mask (batch, n_tokens) whose row i starts with i·pads padded columns."""
    columns = torch.arange(n_tokens).expand(batch, -1)
    return (columns >= pads * torch.arange(batch)[:, None]).long()
