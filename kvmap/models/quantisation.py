"""How a checkpoint's weights are quantised, and whether that is how they will be computed with."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from kvmap.models.geometry import UnsupportedModel
from kvmap.models.gguf_header import read_gguf_header

NONE = "none"
# Number formats of a GGUF file by its `general.file_type`.
_GGUF_TYPES = {0: "f32", 1: "f16", 2: "q4_0", 3: "q4_1", 7: "q8_0", 8: "q5_0", 9: "q5_1", 10: "q2_k"}
_GGUF_TYPES |= {11: "q3_k_s", 12: "q3_k_m", 13: "q3_k_l", 14: "q4_k_s", 15: "q4_k_m", 16: "q5_k_s"}
_GGUF_TYPES |= {17: "q5_k_m", 18: "q6_k", 32: "bf16"}
_FLOATS = ("F64", "F32", "BF16", "F16")
# compute capability from which transformers runs fp8 weights as they are; below it dequantises them
_FP8_CAPABILITY = (8, 9)


def quantisation_of(config: Any, gguf: Path | None = None) -> str:
    """A name for how weights are stored and computed with, such as "fp8" or "bitsandbytes-4bit".

    A model of 8-bit weights is another model than the one it was made of, and than itself dequantised: what
    it caches differs. fp8 checkpoints are dequantised where no GPU runs them ("fp8-dequantised"); weights of
    a GGUF file always are.

    Args:
        config: the transformers config, of the whole model.
        gguf: the GGUF file that holds it.

    Returns:
        The name; "none" for plain weights.
    """
    if gguf is not None:
        number = read_gguf_header(gguf).settings.get("general.file_type")
        return "gguf" if number is None else f"gguf-{_GGUF_TYPES.get(number, number)}"
    settings = _settings(config)
    if settings is None:
        return NONE
    method = _text(settings.get("quant_method", "unnamed"))
    if method.startswith("bitsandbytes") or settings.get("load_in_4bit") or settings.get("load_in_8bit"):
        return f"bitsandbytes-{'4bit' if settings.get('load_in_4bit') else '8bit'}"
    if method == "fp8" and (settings.get("dequantize") or not _runs_fp8()):
        return "fp8-dequantised"
    return method


def check_quantisation(config: Any, name: str, files: list[Path]) -> None:
    """Refuse quantised weights that would be read as if they were plain, or not at all.

    Args:
        config: the transformers config, of the whole model.
        name: of the model, for the message.
        files: its safetensors files; only their heads are read.

    Raises:
        UnsupportedModel: weights in other than floating-point numbers and a config that does not say what
            they mean, or a package that is missing.
    """
    if _settings(config) is None:
        found = next(filter(None, map(_quantised_weight, files)), None)
        if found is not None:
            tensor, dtype = found
            raise UnsupportedModel(
                f"{name}: {tensor} is stored as {dtype}, but config.json has no quantization_config that "
                "says how weights are scaled, so they would be read without their scales; use a checkpoint "
                "in transformers' own format, or the unquantised one"
            )
        return
    method = quantisation_of(config)
    if method.startswith("bitsandbytes") and importlib.util.find_spec("bitsandbytes") is None:
        raise UnsupportedModel(
            f"{name} is quantised by {method}, which needs a GPU and the package bitsandbytes: "
            "pip install bitsandbytes, or use the unquantised checkpoint"
        )


def _settings(config: Any) -> dict[str, Any] | None:
    found = getattr(config, "quantization_config", None)
    if found is None:
        return None
    return dict(found) if isinstance(found, Mapping) else dict(found.to_dict())


def _text(method: Any) -> str:
    return str(getattr(method, "value", method))


def _runs_fp8() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= _FP8_CAPABILITY


def _quantised_weight(path: Path) -> tuple[str, str] | None:
    """The first weight of a safetensors file that is no floating-point number of 16 bits or more.

    None also for a file that cannot be read: who loads it says what is wrong with it.
    """
    try:
        with path.open("rb") as file:
            header = dict(json.loads(file.read(int.from_bytes(file.read(8), "little"))))
    except (OSError, ValueError, TypeError, OverflowError, MemoryError):
        return None
    for tensor, entry in header.items():
        if tensor.endswith(("weight", "weight_packed")) and entry["dtype"] not in _FLOATS:
            return tensor, entry["dtype"]
    return None
