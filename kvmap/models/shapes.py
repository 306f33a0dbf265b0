"""Shapes of the public models that the shipped pairs name, so that a model of that shape can be built without
its files.

They say how long a forward takes and how large a cache is, and nothing of what a model answers. A loaded
model never uses them: its own config counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvmap.models.geometry import Geometry, geometry_from_config
from kvmap.models.load import load_config
from kvmap.models.spec import ModelSpec


@dataclass(frozen=True)
class DecoderShape:
    """A dense decoder with grouped queries and a gated MLP.

    Attributes:
        family: name of transformers' config class without "Config".
        n_layers, hidden, n_heads, n_kv_heads, head_dim, mlp, vocab: sizes; `mlp` is the gated width.
        rope: transformers' rope_parameters.
        max_positions: the longest context its config allows.
        tied: whether the head shares the embedding's weights.
        fp8: whether the layers' matrices are stored in 8 bits; in 16 where not.
        beside: parameters of the rest of a multimodal wrapper, about.
    """

    family: str
    n_layers: int
    hidden: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    mlp: int
    vocab: int
    max_positions: int
    rope: Mapping[str, Any] = field(default_factory=dict)
    tied: bool = False
    fp8: bool = False
    beside: int = 0


def _rope(theta: float, rope_type: str = "default", **settings: float) -> dict[str, Any]:
    return {"rope_type": rope_type, "rope_theta": theta, **settings}


def _llama3(factor: float) -> dict[str, Any]:
    return _rope(
        5e5,
        "llama3",
        factor=factor,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    )


_MINISTRAL = _rope(
    1e6,
    "yarn",
    factor=16.0,
    original_max_position_embeddings=16384,
    beta_fast=32.0,
    beta_slow=1.0,
    mscale=1.0,
    mscale_all_dim=1.0,
    llama_4_scaling_beta=0.1,
)


def _qwen3(n_layers: int, hidden: int, n_heads: int, mlp: int, tied: bool = False) -> DecoderShape:
    return DecoderShape("Qwen3", n_layers, hidden, n_heads, 8, 128, mlp, 151936, 40960, _rope(1e6), tied)


def _llama(
    n_layers: int, hidden: int, n_heads: int, mlp: int, factor: float, tied: bool = False
) -> DecoderShape:
    return DecoderShape(
        "Llama", n_layers, hidden, n_heads, 8, 128, mlp, 128256, 131072, _llama3(factor), tied
    )


def _ministral(n_layers: int, hidden: int, mlp: int, tied: bool = False) -> DecoderShape:
    sizes = (n_layers, hidden, 32, 8, 128, mlp, 131072, 262144)
    return DecoderShape("Ministral3", *sizes, _MINISTRAL, tied, fp8=True, beside=400_000_000)


_QWEN25_05B = DecoderShape("Qwen2", 24, 896, 14, 2, 64, 4864, 151936, 32768, _rope(1e6), True)
_QWEN25_15B = DecoderShape("Qwen2", 28, 1536, 12, 2, 128, 8960, 151936, 131072, _rope(1e6), True)
_SMOLLM2_135M = DecoderShape("Llama", 30, 576, 9, 3, 64, 1536, 49152, 8192, _rope(1e5), True)

SHAPES: Mapping[str, DecoderShape] = {
    "Qwen/Qwen3-0.6B": _qwen3(28, 1024, 16, 3072, tied=True),
    "Qwen/Qwen3-1.7B": _qwen3(28, 2048, 16, 6144, tied=True),
    "Qwen/Qwen3-4B": _qwen3(36, 2560, 32, 9728, tied=True),
    "Qwen/Qwen3-8B": _qwen3(36, 4096, 32, 12288),
    "Qwen/Qwen3-14B": _qwen3(40, 5120, 40, 17408),
    "Qwen/Qwen3-32B": _qwen3(64, 5120, 64, 25600),
    "meta-llama/Llama-3.1-8B": _llama(32, 4096, 32, 14336, 8.0),
    "meta-llama/Llama-3.1-70B": _llama(80, 8192, 64, 28672, 8.0),
    "meta-llama/Llama-3.2-3B": _llama(28, 3072, 24, 8192, 32.0, tied=True),
    "mistralai/Ministral-3-3B-Instruct-2512": _ministral(26, 3072, 9216, tied=True),
    "mistralai/Ministral-3-8B-Instruct-2512": _ministral(34, 4096, 14336),
    "mistralai/Ministral-3-14B-Instruct-2512": _ministral(40, 5120, 16384),
    "Qwen/Qwen2.5-1.5B": _QWEN25_15B,
    "Qwen/Qwen2.5-7B": DecoderShape("Qwen2", 28, 3584, 28, 4, 128, 18944, 152064, 131072, _rope(1e6)),
    "Qwen/Qwen2.5-Coder-0.5B": _QWEN25_05B,
    "Qwen/Qwen2.5-Coder-1.5B": _QWEN25_15B,
    "HuggingFaceTB/SmolLM2-135M-Instruct": _SMOLLM2_135M,
}
"""By hub id: every model of the shipped pairs but the shipped family, whose files are here."""


def shape_geometry(spec: ModelSpec, *, n_positions: int = 0, max_layers: int | None = None) -> Geometry:
    """The cache's shape of such a model.

    Args, Raises: see `shape_config`.
    """
    return geometry_from_config(shape_config(spec, n_positions=n_positions, max_layers=max_layers))


def shape_config(spec: ModelSpec, *, n_positions: int = 0, max_layers: int | None = None) -> Any:
    """The transformers config of a model's text part, for a model of that shape with weights of its own.

    Args:
        spec: of the model; one in `SHAPES` needs no file, of another the config is read.
        n_positions: positions that must be allowed; raises the config's number where that is smaller. No
            frequency of the shapes above depends on it.
        max_layers: keep this many layers at most; None: all.

    Raises:
        ModelNotFound, UnsupportedModel: a model that is not in `SHAPES` and has no config to be had.
    """
    import transformers

    shape = SHAPES.get(spec.id)
    if shape is None:
        config = load_config(spec).get_text_config(decoder=True)
    else:
        config = getattr(transformers, f"{shape.family}Config")(
            num_hidden_layers=shape.n_layers,
            hidden_size=shape.hidden,
            num_attention_heads=shape.n_heads,
            num_key_value_heads=shape.n_kv_heads,
            head_dim=shape.head_dim,
            intermediate_size=shape.mlp,
            vocab_size=shape.vocab,
            max_position_embeddings=shape.max_positions,
            rope_parameters=dict(shape.rope),
            tie_word_embeddings=shape.tied,
        )
    if max_layers is not None and max_layers < config.num_hidden_layers:
        config.num_hidden_layers = max_layers
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[:max_layers]
    config.max_position_embeddings = max(config.max_position_embeddings, n_positions)
    return config
