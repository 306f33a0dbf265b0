"""The head of a GGUF file: its settings and the names of its tensors, read without the gguf package."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from kvmap.models.geometry import Geometry, UnsupportedModel
from kvmap.models.spec import ModelNotFound

# GGUF's value types by number: struct formats of the fixed-width ones; 8 is a string, 9 an array.
_FIXED = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
# Tensors by which llama.cpp stretches frequencies: llama3 scaling, and longrope's two sets.
_FREQUENCY_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


@dataclass(frozen=True)
class GgufHeader:
    """What a GGUF file says about itself; arrays are left out of `settings`."""

    settings: dict[str, Any]
    tensor_names: tuple[str, ...]


def read_gguf_header(path: Path) -> GgufHeader:
    """Read settings and tensor names of a GGUF file (versions 2 and 3).

    Raises:
        ModelNotFound: if it is not such a file or ends within its head.
    """
    with path.open("rb") as file:
        try:
            magic, version = file.read(4), _number(file, "I")
            if magic != b"GGUF" or version not in (2, 3):
                raise ModelNotFound(
                    f"{path} is not a GGUF file of version 2 or 3 (it starts with {magic!r}, {version})"
                )
            n_tensors, n_settings = _number(file, "Q"), _number(file, "Q")
            pairs = [(_string(file), _value(file, _number(file, "I"))) for _ in range(n_settings)]
            names = tuple(_tensor_name(file) for _ in range(n_tensors))
        except (struct.error, UnicodeDecodeError, KeyError) as error:
            raise ModelNotFound(
                f"{path} is no whole GGUF file: its head breaks off; download it again"
            ) from error
    return GgufHeader({key: value for key, value in pairs if value is not None}, names)


def check_gguf_rotation(path: Path, geometry: Geometry) -> None:
    """Refuse a GGUF file whose scaled rotation transformers leaves out.

    transformers reads a GGUF file's base frequency but, for most architectures, neither its scaling
    settings nor its frequency tensors. Such a model runs, right at the first positions and worse further
    on.

    Raises:
        UnsupportedModel: naming the setting or tensor.
    """
    if any(layer.rope_type not in (None, "default") for layer in geometry.layers):
        return
    header = read_gguf_header(path)
    kinds = {key: value for key, value in header.settings.items() if key.endswith(".rope.scaling.type")}
    scaled = [f"{key} = {value}" for key, value in kinds.items() if value not in ("", "none")]
    scaled += [f"tensor {name}" for name in header.tensor_names if name in _FREQUENCY_TENSORS]
    if scaled:
        raise UnsupportedModel(
            f"{path.name}: the file scales its rotary frequencies ({scaled[0]}), which transformers leaves "
            "out when it loads a GGUF file, so the model would be wrong at later positions; use its "
            "safetensors"
        )


def _number(file: BinaryIO, kind: str) -> Any:
    size = struct.calcsize("<" + kind)
    return struct.unpack("<" + kind, file.read(size))[0]


def _string(file: BinaryIO) -> str:
    length = _number(file, "Q")
    text = file.read(length)
    if len(text) < length:
        raise struct.error("the file ends within a string")
    return text.decode("utf-8")


def _value(file: BinaryIO, kind: int) -> Any:
    """One setting's value; None for an array, which is skipped."""
    if kind == _STRING:
        return _string(file)
    if kind != _ARRAY:
        return _number(file, _FIXED[kind])
    element, length = _number(file, "I"), _number(file, "Q")
    if element in _FIXED:
        file.seek(length * struct.calcsize("<" + _FIXED[element]), 1)
    else:
        for _ in range(length):
            if element == _STRING:
                file.seek(_number(file, "Q"), 1)
            else:
                _value(file, element)
    return None


def _tensor_name(file: BinaryIO) -> str:
    name = _string(file)
    n_dimensions = _number(file, "I")
    file.seek(8 * n_dimensions + 4 + 8, 1)  # shape, type, offset
    return name
