"""Which model is this: a name for its weights, config, tokenizer and rotation, the same in every process."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvmap.models.families import FAMILIES
from kvmap.models.geometry import Geometry
from kvmap.models.quantisation import NONE, check_quantisation, quantisation_of

BLOCK_BYTES = 64 * 1024
BLOCKS_PER_FILE = 64
GGUF_HEAD_BYTES = 16 * 1024 * 1024
_TENSOR_BLOCKS, _TENSOR_BLOCK_ELEMENTS = 16, 2048

# Fields of a config that say nothing about what the model computes from token ids.
_VOLATILE = frozenset(
    {
        "_attn_implementation",
        "_attn_implementation_autoset",
        "_commit_hash",
        "_name_or_path",
        "architectures",
        "dtype",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "tekken.json",
)
# Of tokenizer_config.json: how a chat is laid out or a batch padded changes no token id of a given text.
_TOKENIZER_VOLATILE = frozenset(
    {
        "chat_template",
        "name_or_path",
        "model_max_length",
        "padding_side",
        "truncation_side",
        "backend",
        "is_local",
    }
)


@dataclass(frozen=True)
class ModelIdentity:
    """What must agree for a cache or a mapper of one model to be used with another.

    Attributes:
        name: hub id, folder or given name; for people, never compared.
        weights: fingerprint of the weights, see `fingerprint_file` and `fingerprint_state`.
        config: hash of the config without fields that change no output; behind `quantisation` and a colon
            where weights are quantised.
        tokenizer: hash of the tokenizer's files or its serialised form; "none" without one.
        rope: hash of the rotation of every layer as configured.
        dtype: what the model computes in, such as "bfloat16".
    """

    name: str
    weights: str
    config: str
    tokenizer: str
    rope: str
    dtype: str

    @property
    def quantisation(self) -> str:
        """How its weights are stored and computed with, see `kvmap.models.quantisation`; "none" if plain."""
        return self.config.rpartition(":")[0] or NONE

    def mismatches(self, other: ModelIdentity) -> list[str]:
        """One line for each part in which `other` is a different model; the name does not count."""
        lines = []
        for field in fields(self):
            mine, theirs = getattr(self, field.name), getattr(other, field.name)
            if field.name != "name" and mine != theirs:
                lines.append(f"{field.name}: {mine[:16]} of {self.name} is not {theirs[:16]} of {other.name}")
        return lines


def _with_quantisation(config_part: str, quantisation: str) -> str:
    """Plain models keep the bare hash."""
    return config_part if quantisation == NONE else f"{quantisation}:{config_part}"


def _hash_json(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()


def _without(mapping: Mapping[str, Any], volatile: frozenset[str]) -> dict[str, Any]:
    return {
        key: _without(value, volatile) if isinstance(value, Mapping) else value
        for key, value in mapping.items()
        if key not in volatile
    }


def config_hash(config: Mapping[str, Any]) -> str:
    """Hash of a config as a mapping, nested sections included, without dtype, versions and names."""
    return _hash_json(_without(config, _VOLATILE))


def rope_hash(config: Any, geometry: Geometry) -> str:
    """Hash of the rotation of every layer: layout, scaling type, parameters and maximum length."""
    text = config.get_text_config(decoder=True)
    return _hash_json(
        {
            "layout": FAMILIES[geometry.model_type].layout,
            "layers": [(layer.rope_type, layer.head_dim) for layer in geometry.layers],
            "parameters": text.rope_parameters,
            "max_positions": geometry.max_positions,
        }
    )


def fingerprint_file(path: Path) -> str:
    """Fingerprint of a weights file: its size, its head in full, and 64 evenly spaced blocks of 64 KiB.

    The head is a safetensors file's whole header (names, shapes, offsets) or a GGUF file's first 16 MiB
    (metadata and vocabulary). Files up to 4 MiB are hashed whole. 64 blocks of a 5 GB shard touch every few
    tensors, so another checkpoint of the same shape differs in nearly all of them, while reading costs
    milliseconds; a copy that was altered in a single tensor can go unnoticed: this guards against mix-ups,
    not against forgery.
    """
    size = path.stat().st_size
    content = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        if size <= BLOCK_BYTES * BLOCKS_PER_FILE:
            content.update(file.read())
            return content.hexdigest()
        head = GGUF_HEAD_BYTES if path.suffix == ".gguf" else 8 + int.from_bytes(file.read(8), "little")
        file.seek(0)
        content.update(file.read(min(head, GGUF_HEAD_BYTES)))
        for block in range(BLOCKS_PER_FILE):
            file.seek(block * (size - BLOCK_BYTES) // (BLOCKS_PER_FILE - 1))
            content.update(file.read(BLOCK_BYTES))
    return content.hexdigest()


def fingerprint_files(paths: list[Path]) -> str:
    """One fingerprint over several weights files, by file name and `fingerprint_file`."""
    return _hash_json([(path.name, fingerprint_file(path)) for path in sorted(paths)])


def fingerprint_state(state: Mapping[str, Tensor]) -> str:
    """Fingerprint of weights in memory: names, types, shapes, and up to 16 blocks of 2,048 elements of each
    tensor.
    """
    content = hashlib.sha256()
    for name in sorted(state):
        tensor = state[name].detach()
        content.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        flat = tensor.reshape(-1)
        if flat.numel() > _TENSOR_BLOCKS * _TENSOR_BLOCK_ELEMENTS:
            last = flat.numel() - _TENSOR_BLOCK_ELEMENTS
            starts = [block * last // (_TENSOR_BLOCKS - 1) for block in range(_TENSOR_BLOCKS)]
            flat = torch.cat([flat[start : start + _TENSOR_BLOCK_ELEMENTS] for start in starts])
        content.update(flat.contiguous().cpu().view(torch.uint8).numpy().tobytes())
    return content.hexdigest()


def tokenizer_files_hash(folder: Path) -> str:
    """Hash of a tokenizer's files in `folder`; "none" where there are none."""
    entries: list[tuple[str, str]] = []
    for name in _TOKENIZER_FILES:
        path = folder / name
        if not path.is_file():
            continue
        if name == "tokenizer_config.json":
            settings = json.loads(path.read_text(encoding="utf-8"))
            entries.append((name, _hash_json(_without(settings, _TOKENIZER_VOLATILE))))
        else:
            entries.append((name, hashlib.sha256(path.read_bytes()).hexdigest()))
    return _hash_json(entries) if entries else "none"


def tokenizer_hash(tokenizer: Any) -> str:
    """Hash of a tokenizer in memory; "none" for None."""
    if tokenizer is None:
        return "none"
    backend = getattr(tokenizer, "backend_tokenizer", None)
    content = backend.to_str() if backend is not None else sorted(tokenizer.get_vocab().items())
    return _hash_json([content, tokenizer.bos_token_id, tokenizer.eos_token_id])


def identity_of_files(
    name: str,
    folder: Path,
    weights: list[Path],
    gguf_file: str | None,
    config: Any,
    geometry: Geometry,
    dtype: str,
) -> ModelIdentity:
    """The identity of a model that lies in files, without loading weights.

    A GGUF file carries config and tokenizer in its head: for these the head's hash stands.

    Raises:
        UnsupportedModel: weights whose quantisation nothing says, see `check_quantisation`.
    """
    if gguf_file is None:
        check_quantisation(config, name, weights)
        config_part = config_hash(json.loads((folder / "config.json").read_text(encoding="utf-8")))
        tokenizer_part = tokenizer_files_hash(folder)
    else:
        with (folder / gguf_file).open("rb") as file:
            config_part = tokenizer_part = hashlib.sha256(file.read(GGUF_HEAD_BYTES)).hexdigest()
    return ModelIdentity(
        name=name,
        weights=fingerprint_files(weights),
        config=_with_quantisation(
            config_part, quantisation_of(config, folder / gguf_file if gguf_file else None)
        ),
        tokenizer=tokenizer_part,
        rope=rope_hash(config, geometry),
        dtype=dtype,
    )


def identity_in_memory(name: str, model: Any, tokenizer: Any, geometry: Geometry) -> ModelIdentity:
    """The identity of a model that was built in memory."""
    return ModelIdentity(
        name=name,
        weights=fingerprint_state(model.state_dict()),
        config=_with_quantisation(config_hash(model.config.to_dict()), quantisation_of(model.config)),
        tokenizer=tokenizer_hash(tokenizer),
        rope=rope_hash(model.config, geometry),
        dtype=str(model.dtype).removeprefix("torch."),
    )
