"""Loading a model from its spec: config and geometry first, then the tokenizer, then the weights."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from kvmap.errors import KvmapError
from kvmap.models.families import FAMILIES
from kvmap.models.geometry import Geometry, UnsupportedModel, geometry_from_config
from kvmap.models.gguf_header import check_gguf_rotation
from kvmap.models.identity import ModelIdentity, identity_of_files
from kvmap.models.loaded import LoadedModel
from kvmap.models.placement import expected_offload, placement_arguments
from kvmap.models.spec import (
    InvalidSpec,
    ModelNotFound,
    ModelSpec,
    config_folder,
    tokenizer_folder,
    weight_files,
    weights_folder,
)
from kvmap.models.verify import check_rotation

DTYPES = ("float32", "bfloat16", "float16")
_SAFETENSORS_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


# What readers raise about a file that is cut short or is not what its name says.
_UNREADABLE = (OSError, json.JSONDecodeError, UnicodeDecodeError)


class IncompleteWeights(KvmapError):
    """A checkpoint that lacks tensors of the model, which would stay random, or cannot be read to its end."""


def load_config(spec: ModelSpec) -> Any:
    """The transformers config of a model; no weights are read.

    Raises:
        ModelNotFound: if its files cannot be had or read.
        UnsupportedModel: if transformers does not know the architecture.
    """
    folder = config_folder(spec)
    from transformers import AutoConfig  # after the folder: a mistyped name is answered at once

    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False, **_gguf(spec))
    except _UNREADABLE as error:
        raise ModelNotFound(_damaged(spec, folder, "config", error)) from error
    except (ValueError, KeyError, IndexError, struct.error) as error:
        raise UnsupportedModel(f"{spec.name}: transformers cannot read its config: {error}") from error


def read_geometry(spec: ModelSpec) -> Geometry:
    """The KV geometry of a model from its config alone.

    Raises:
        ModelNotFound: if its files cannot be had.
        UnsupportedModel: naming model type, layer and reason.
    """
    return _geometry(spec, load_config(spec))


def _geometry(spec: ModelSpec, config: Any) -> Geometry:
    geometry = geometry_from_config(config)
    if spec.gguf_file:
        check_gguf_rotation(config_folder(spec) / spec.gguf_file, geometry)
    return geometry


def load_tokenizer(spec: ModelSpec) -> Any:
    """The model's tokenizer, padding on the left.

    Raises:
        ModelNotFound: if it has none, or one that cannot be read.
    """
    folder = tokenizer_folder(spec)
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, **_gguf(spec))
    except Exception as error:  # the tokenizers library raises bare Exception about a damaged file
        files = [spec.gguf_file] if spec.gguf_file else sorted(path.name for path in folder.glob("*token*"))
        # a package that is missing is named, with how to install it, in the error itself
        remedy = "" if isinstance(error, ImportError) else f". {_remedy(spec)}"
        raise ModelNotFound(
            f"{spec.name}: no tokenizer could be loaded from {folder} (tokenizer files there: "
            f"{', '.join(files) or 'none'}): {type(error).__name__}: {str(error).rstrip(' .')}{remedy}"
        ) from error
    tokenizer.padding_side = "left"
    return tokenizer


def read_identity(spec: ModelSpec) -> ModelIdentity:
    """Which model the files of a spec hold, without loading weights.

    Raises:
        ModelNotFound: if its files cannot be had.
        UnsupportedModel: if it cannot be used.
        IncompleteWeights: if a file is damaged.
    """
    config = load_config(spec)
    return _identity(spec, config, _geometry(spec, config))


def _identity(spec: ModelSpec, config: Any, geometry: Geometry) -> ModelIdentity:
    folder = weights_folder(spec)
    try:
        files = weight_files(spec, folder)
        dtype = resolve_dtype(spec, config, files)
        return identity_of_files(spec.name, folder, files, spec.gguf_file, config, geometry, dtype)
    # the last two: bytes read as a length that are none
    except (*_UNREADABLE, KeyError, OverflowError, MemoryError) as error:
        raise IncompleteWeights(_damaged(spec, folder, "files", error)) from error


def resolve_dtype(spec: ModelSpec, config: Any, files: list[Path]) -> str:
    """The dtype a model will compute in: the spec's, else the config's, else the checkpoint's first float
    tensor's.

    Raises:
        InvalidSpec: if the spec names another dtype than the offered ones.
    """
    if spec.dtype != "auto":
        if spec.dtype not in DTYPES:
            raise InvalidSpec(f"{spec.name}: dtype {spec.dtype!r}; expected auto, {', '.join(DTYPES)}")
        return spec.dtype
    if spec.gguf_file:
        return "float32"  # what dequantising yields
    for section in (config, config.get_text_config(decoder=True)):
        if getattr(section, "dtype", None) is not None:
            return str(section.dtype).removeprefix("torch.")
    with files[0].open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    kinds = (entry["dtype"] for name, entry in header.items() if name != "__metadata__")
    return next((_SAFETENSORS_DTYPES[kind] for kind in kinds if kind in _SAFETENSORS_DTYPES), "float32")


def load_model(spec: ModelSpec) -> LoadedModel:
    """Load a model: its geometry is refused before anything big is read, its rotation checked at the end.

    Raises:
        ModelNotFound: if its files cannot be had.
        UnsupportedModel: if its KV cannot be transferred or its rotation is not the one expected.
        IncompleteWeights: if the checkpoint lacks tensors or is damaged.
        InvalidSpec: if dtype, device or attention cannot be had.
    """
    config = load_config(spec)
    geometry = _geometry(spec, config)
    tokenizer = load_tokenizer(spec)
    identity = _identity(spec, config, geometry)
    model = _load_weights(spec, config, geometry, identity.dtype)
    loaded = LoadedModel(model, tokenizer, geometry, identity, spec)
    check_rotation(loaded)
    return loaded


def _load_weights(spec: ModelSpec, config: Any, geometry: Geometry, dtype: str) -> Any:
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    folder = weights_folder(spec)
    causal = type(config) in AutoModelForCausalLM._model_mapping
    auto_class = AutoModelForCausalLM if causal else AutoModelForImageTextToText
    attention = spec.attn_implementation
    if attention == "sdpa" and FAMILIES[geometry.model_type].eager_only:
        attention = "eager"
    device = _device(spec) if spec.device_map is None else None
    placement = placement_arguments(spec)
    try:
        # safetensors only: a pickled checkpoint executes what it likes
        with expected_offload():
            model, report = auto_class.from_pretrained(
                folder,
                dtype=getattr(torch, dtype),
                **placement,
                attn_implementation=attention,
                trust_remote_code=False,
                use_safetensors=None if spec.gguf_file else True,
                output_loading_info=True,
                **_gguf(spec),
            )
    except (SafetensorError, *_UNREADABLE) as error:
        raise IncompleteWeights(_damaged(spec, folder, "weights", error)) from error
    except (ValueError, ImportError) as error:
        raise InvalidSpec(
            f"{spec.name}: transformers cannot load it with dtype={dtype}, device_map={spec.device_map}, "
            f"attn_implementation={attention}: {error}"
        ) from error
    missing = sorted(report["missing_keys"]) + sorted(str(key) for key in report.get("mismatched_keys", ()))
    if missing:
        raise IncompleteWeights(
            f"{spec.name}: {len(missing)} tensors of the model are missing or of another shape in {folder}, "
            f"the first is {missing[0]}. {_remedy(spec)}"
        )
    if device is not None:
        model = model.to(device)
    return model.eval().requires_grad_(False)


def _device(spec: ModelSpec) -> torch.device:
    if spec.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(spec.device)
    except RuntimeError as error:
        raise InvalidSpec(
            f"{spec.name}: device {spec.device!r}; expected auto, cpu, cuda or cuda:<n>"
        ) from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InvalidSpec(f"{spec.name}: device {spec.device!r}, but torch finds no GPU here; use device=cpu")
    return device


def _damaged(spec: ModelSpec, folder: Path, what: str, error: Exception) -> str:
    return (
        f"{spec.name}: its {what} in {folder} cannot be read, a file there is missing, cut short or "
        f"damaged ({_in_short(error)}). {_remedy(spec)}"
    )


def _in_short(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _remedy(spec: ModelSpec) -> str:
    if spec.id.startswith("zoo:"):
        return "Install kvmap again: the weights come with it"
    if Path(spec.id).expanduser().is_dir():
        return "Copy or download that folder again, and see that it is complete"
    revision = f" --revision {spec.revision}" if spec.revision else ""
    return f"Download it again: hf download {spec.id}{revision} --force-download"


def _gguf(spec: ModelSpec) -> dict[str, str]:
    return {"gguf_file": spec.gguf_file} if spec.gguf_file else {}
