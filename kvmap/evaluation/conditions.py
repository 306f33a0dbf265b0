"""What a model answers by, besides its identity: facts under which answers may be kept and found again."""

from __future__ import annotations

from typing import Any

import torch

from kvmap.models.families import FAMILIES
from kvmap.models.geometry import geometry_from_config
from kvmap.models.load import load_config
from kvmap.models.loaded import LoadedModel
from kvmap.models.spec import ModelSpec, config_folder


def loaded_conditions(model: LoadedModel) -> dict[str, Any]:
    """What changes a loaded model's answers and stands in no `ModelIdentity`.

    Returns:
        {attention, device, end_of_text_ids, repetition_penalty, torch, transformers}: the attention that
        runs; the kind of device, or the device map; ids that end a text by its generation config or its
        tokenizer, ascending; the penalty of its generation config, 1 where it has none; both versions.
    """
    spec = model.spec
    device = model.device.type if spec is None or spec.device_map is None else _map_name(spec)
    generation = getattr(model.model, "generation_config", None)
    return _conditions(str(model.text_config._attn_implementation), device, generation, model.tokenizer)


def spec_conditions(spec: ModelSpec, tokenizer: Any) -> dict[str, Any]:
    """What `loaded_conditions` will say of the model of a spec, from its files alone.

    Args:
        spec: where the model is and how it is loaded.
        tokenizer: the model's; None: none.

    Raises:
        ModelNotFound, UnsupportedModel: as loading the model does.
    """
    config = load_config(spec)
    attention = spec.attn_implementation or "sdpa"
    if attention == "sdpa" and FAMILIES[geometry_from_config(config).model_type].eager_only:
        attention = "eager"
    if spec.device_map is not None:
        device = _map_name(spec)
    elif spec.device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    else:
        device = spec.device.split(":")[0]
    return _conditions(attention, device, _generation_config(spec, config), tokenizer)


def _generation_config(spec: ModelSpec, config: Any) -> Any:
    """The generation config that transformers gives the loaded model."""
    from transformers import GenerationConfig

    if spec.gguf_file:
        return GenerationConfig.from_model_config(config)
    folder = config_folder(spec)
    try:
        return GenerationConfig.from_pretrained(folder)
    except OSError:  # the folder has none: transformers reads the model's config as one
        return GenerationConfig.from_pretrained(
            folder, config_file_name="config.json", _from_model_config=True
        )


def _map_name(spec: ModelSpec) -> str:
    return f"device_map={spec.device_map}"


def _conditions(attention: str, device: str, generation: Any, tokenizer: Any) -> dict[str, Any]:
    import transformers

    named = getattr(generation, "eos_token_id", None)
    ends = [
        *(named if isinstance(named, list | tuple) else [named]),
        getattr(tokenizer, "eos_token_id", None),
    ]
    return {
        "attention": attention,
        "device": device,
        "end_of_text_ids": sorted({int(end) for end in ends if end is not None}),
        "repetition_penalty": float(getattr(generation, "repetition_penalty", None) or 1.0),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
