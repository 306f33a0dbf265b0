"""A model's parameters and products from its config alone: it is built on no device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from kvmap.models.geometry import Geometry, geometry_from_config
from kvmap.models.load import load_config
from kvmap.models.quantisation import quantisation_of
from kvmap.models.shapes import SHAPES, shape_config
from kvmap.models.spec import ModelNotFound, ModelSpec
from kvmap.transfer.cost import DecoderWork, work_of

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_QUANTISED_BYTES = {"fp8": 1.0, "bitsandbytes-8bit": 1.0, "bitsandbytes-4bit": 0.5}


@dataclass(frozen=True)
class ModelFacts:
    """What a plan needs of a model.

    Attributes:
        geometry: of its cache.
        dtype: that it will compute in, by name.
        parameters: all of them, tied ones once.
        matrices: those of its layers' matrices, which quantisation stores in fewer bytes.
        head: those of an output head of its own, which only logits need.
        mlp: the widest intermediate of a layer, for one token.
        work: what a token is multiplied with.
        quantisation: of the checkpoint, see `kvmap.models.quantisation`; "none".
        origin: "config", or "shipped facts" where the model's own config is out of reach.
    """

    geometry: Geometry
    dtype: str
    parameters: int
    matrices: int
    head: int
    mlp: int
    work: DecoderWork
    quantisation: str
    origin: str

    @property
    def item_bytes(self) -> int:
        """Bytes of one number of its cache."""
        return ITEM_BYTES[self.dtype]

    def weights_bytes(self, *, fp8: bool = False, dtype: str | None = None) -> int:
        """Bytes of its weights in memory.

        Args:
            fp8: whether the device computes with fp8 weights; one that does not has them dequantised.
            dtype: as if they were plain weights of this one; None: as they are.
        """
        if dtype is not None:
            return self.parameters * ITEM_BYTES[dtype]
        name = self.quantisation
        if name.startswith("fp8"):
            name = "fp8" if fp8 else "none"
        wide = float(self.item_bytes)
        stored = _QUANTISED_BYTES.get(name, wide)
        return round(self.matrices * stored + (self.parameters - self.matrices) * wide)

    @property
    def head_bytes(self) -> int:
        """Bytes of an output head of its own."""
        return self.head * self.item_bytes

    def prefill_bytes(self, n_tokens: int) -> int:
        """Bytes that a forward of so many tokens takes besides weights and cache, about.

        Of one layer at a time: four hidden states in the model's dtype and two in float32 (norms), queries,
        keys, values and the attention's output, and three times the MLP's width.
        """
        geometry, layer = self.geometry, self.geometry.layers[0]
        heads = 2 * (geometry.n_heads + layer.n_kv_heads) * layer.head_dim
        numbers = 4 * geometry.hidden_size + heads + 3 * self.mlp
        return n_tokens * (numbers * self.item_bytes + 8 * geometry.hidden_size)


def read_facts(spec: ModelSpec) -> ModelFacts:
    """The facts of a model: of its own config, or of one of its shape where that is out of reach.

    Raises:
        ModelNotFound: no config to be had, and no shipped shape.
        UnsupportedModel: a model that kvmap cannot use.
    """
    try:
        config, origin = load_config(spec), "config"
    except ModelNotFound:
        if spec.id not in SHAPES:
            raise
        config, origin = shape_config(spec), "shipped facts"
    return facts_of(config, spec, origin)


def facts_of(config: Any, spec: ModelSpec, origin: str = "config") -> ModelFacts:
    """The facts of a model of some transformers config.

    Args:
        config: of the whole model.
        spec: of which dtype and GGUF file count; one in `SHAPES` whose config is not its own says what that
            leaves out.
        origin: of the config.
    """
    geometry = geometry_from_config(config)
    text = config.get_text_config(decoder=True)
    model = _on_no_device(config)
    body = model.get_decoder()
    weights = list(body.layers.named_parameters())
    matrices = sum(weight.numel() for _, weight in weights if weight.ndim >= 2)
    shape = SHAPES.get(spec.id) if origin != "config" else None
    quantisation = "gguf" if spec.gguf_file else quantisation_of(config)
    return ModelFacts(
        geometry=geometry,
        dtype=_dtype(spec, config, text),
        parameters=sum(weight.numel() for weight in model.parameters()) + (shape.beside if shape else 0),
        matrices=matrices,
        head=0 if _tied(model) else model.get_output_embeddings().weight.numel(),
        mlp=_mlp(text, geometry),
        work=work_of(body, geometry, text),
        quantisation="fp8" if shape is not None and shape.fp8 else quantisation,
        origin=origin,
    )


def _tied(model: Any) -> bool:
    return model.get_output_embeddings().weight is model.get_input_embeddings().weight


def _on_no_device(config: Any) -> Any:
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    causal = type(config) in AutoModelForCausalLM._model_mapping
    auto_class = AutoModelForCausalLM if causal else AutoModelForImageTextToText
    with torch.device("meta"):
        return auto_class.from_config(config)


def _dtype(spec: ModelSpec, config: Any, text: Any) -> str:
    """What the model will compute in; "auto" is the config's, or bfloat16 where it names none."""
    if spec.dtype != "auto":
        return spec.dtype
    if spec.gguf_file:
        return "float32"
    said = (getattr(section, "dtype", None) for section in (config, text))
    name = str(next((dtype for dtype in said if dtype is not None), "bfloat16")).removeprefix("torch.")
    return name if name in ITEM_BYTES else "bfloat16"


def _mlp(text: Any, geometry: Geometry) -> int:
    width = getattr(text, "intermediate_size", None) or 4 * geometry.hidden_size
    return int(max(width) if isinstance(width, list | tuple) else width)
