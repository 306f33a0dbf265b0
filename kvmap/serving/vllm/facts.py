"""What kvmap must know of an engine, from its configuration alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig

from kvmap.fit.features import geometry_shape
from kvmap.models.families import FAMILIES
from kvmap.models.geometry import Geometry, geometry_from_config
from kvmap.models.identity import tokenizer_files_hash
from kvmap.models.load import load_config, read_identity
from kvmap.models.rope import Rotation
from kvmap.models.rotary import prepare_rotary, read_rotations
from kvmap.models.spec import ModelSpec
from kvmap.serving.compatibility import EngineFacts


def engine_facts(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> EngineFacts:
    """The model, its geometry and rotations, and what speaks against serving it.

    Raises:
        KvmapError: a model whose files cannot be had, or whose cache kvmap cannot transfer.
    """
    model = vllm_config.model_config
    dtype = str(model.dtype).removeprefix("torch.")
    spec = ModelSpec(id=model.model, revision=model.revision, dtype=dtype)
    identity = read_identity(spec)
    if model.tokenizer != model.model and Path(model.tokenizer).is_dir():
        identity = replace(identity, tokenizer=tokenizer_files_hash(Path(model.tokenizer)))
    config = load_config(spec)
    geometry = geometry_from_config(config)
    return EngineFacts(
        identity=identity,
        shape=geometry_shape(geometry),
        rope_types=tuple(layer.rope_type for layer in geometry.layers),
        rotations=config_rotations(config, geometry, model.dtype),
        dtype=dtype,
        block_tokens=vllm_config.cache_config.block_size,
        refusals=tuple(_refusals(vllm_config, kv_cache_config, geometry)),
    )


def config_rotations(config: Any, geometry: Geometry, dtype: torch.dtype) -> tuple[Rotation | None, ...]:
    """The rotation of every layer, from the config: the rotary module alone is made, no weights.

    The model is laid out on the meta device, and its rotary module made anew on the CPU.
    """
    from transformers import AutoModel

    text = config.get_text_config(decoder=True)
    with torch.device("meta"):
        laid_out = AutoModel.from_config(text)
    body = nn.Module()
    body.rotary_emb = type(laid_out.rotary_emb)(text)
    prepare_rotary(body, text, geometry, 1, dtype)
    return read_rotations(body, text, geometry, FAMILIES[geometry.model_type])


def _refusals(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, geometry: Geometry) -> list[str]:
    """Why this engine's pages cannot be read or written."""
    found = []
    parallel, cache = vllm_config.parallel_config, vllm_config.cache_config
    for name in ("tensor_parallel_size", "pipeline_parallel_size", "decode_context_parallel_size"):
        if getattr(parallel, name, 1) != 1:
            found.append(f"{name}={getattr(parallel, name)}: expected 1, one worker with the whole cache")
    if cache.cache_dtype not in ("auto", str(vllm_config.model_config.dtype).removeprefix("torch.")):
        found.append(f"kv_cache_dtype={cache.cache_dtype}: expected auto, pages in the model's dtype")
    if vllm_config.model_config.use_mla:
        found.append("the model keeps one latent vector a token (MLA) and no keys and values by head")
    if geometry.windows:
        found.append(f"layers attend within {geometry.windows[0]} tokens; only full attention is served")
    if len(kv_cache_config.kv_cache_groups) != 1:
        found.append(f"{len(kv_cache_config.kv_cache_groups)} groups of cached layers; expected 1")
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    found += [
        f"pages of {type(s).__name__}; expected FullAttentionSpec"
        for s in specs
        if type(s) is not FullAttentionSpec
    ]
    if vllm_config.speculative_config is not None:
        found.append("speculative decoding, whose draft keeps a cache of its own")
    if vllm_config.lora_config is not None:
        found.append("LoRA adapters, which change the cache from request to request")
    if vllm_config.model_config.hf_overrides:
        found.append("hf_overrides, by which the model is another than its files say")
    return found
