"""One part of a published cache: keys and values of one layer over some tokens, as safetensors bytes.

A part says itself which tokens it holds and what its bytes hash to, so it can be used before the manifest
that will name it is written.
"""

from __future__ import annotations

import hashlib
import json
import struct
from dataclasses import dataclass

import torch
from torch import Tensor

from kvmap.files import ArtifactCorrupt

DTYPES = {
    "float32": ("F32", torch.float32),
    "bfloat16": ("BF16", torch.bfloat16),
    "float16": ("F16", torch.float16),
}


@dataclass(frozen=True, eq=False)
class Part:
    """One layer over tokens start:stop.

    Attributes:
        start, stop: tokens.
        keys: (1, n_kv_heads, stop − start, head_dim).
        values: likewise.
        sha256: of the bytes of keys and values, in hex.
    """

    start: int
    stop: int
    keys: Tensor
    values: Tensor
    sha256: str


def part_name(part: int, layer: int) -> str:
    """Of a layer in the part-th run of tokens."""
    return f"{part:04d}-{layer:04d}"


def part_bytes(keys: Tensor, values: Tensor, start: int) -> tuple[list[bytes | memoryview], str, int]:
    """A safetensors file of the tensors `keys` and `values`, with nothing copied.

    Args:
        keys: (1, n_kv_heads, tokens, head_dim), on the CPU, contiguous.
        values: likewise.
        start: the first of these tokens.

    Returns:
        The file in pieces, the sha256 of the bytes of keys and values in hex, and the file's size.
    """
    shape = (keys.shape[1], keys.shape[2], keys.shape[3])
    data = [_bytes_of(keys), _bytes_of(values)]
    digest = hashlib.sha256()
    for piece in data:
        digest.update(piece)
    dtype = next(name for name, (_, torch_dtype) in DTYPES.items() if torch_dtype == keys.dtype)
    header = _header(start, shape, dtype, digest.hexdigest())
    return [header, *data], digest.hexdigest(), len(header) + sum(piece.nbytes for piece in data)


def read_part(data: bytearray, layer_shape: tuple[int, int], dtype: str) -> Part:
    """A part over the memory of `data`.

    Args:
        data: the whole file.
        layer_shape: (n_kv_heads, head_dim) that it must hold.
        dtype: a key of `DTYPES`.

    Raises:
        ArtifactCorrupt: its bytes are not those that were written, or hold something else.
    """
    try:
        (length,) = struct.unpack_from("<Q", data)
        said = json.loads(bytes(data[8 : 8 + length]))["__metadata__"]
        start, stop, sha256 = int(said["start"]), int(said["stop"]), str(said["sha256"])
    except (struct.error, ValueError, KeyError, TypeError, OverflowError) as error:
        raise ArtifactCorrupt(f"no part of a published cache: {error!r}") from error
    shape = (layer_shape[0], stop - start, layer_shape[1])
    # all of a header follows from these, so one that was changed anywhere is another one
    header = _header(start, shape, dtype, sha256)
    torch_dtype = DTYPES[dtype][1]
    n = shape[0] * shape[1] * shape[2]
    if n < 1 or data[: len(header)] != header or len(data) != len(header) + 2 * n * torch_dtype.itemsize:
        raise ArtifactCorrupt(
            f"a part that says it holds tokens {start}:{stop} is not one of {layer_shape[0]} heads of width "
            f"{layer_shape[1]} in {dtype}, or was cut or changed"
        )
    if hashlib.sha256(memoryview(data)[len(header) :]).hexdigest() != sha256:
        raise ArtifactCorrupt(f"the checksum of the part over tokens {start}:{stop} is not that of its bytes")
    both = torch.frombuffer(data, dtype=torch_dtype, count=2 * n, offset=len(header)).view(2, 1, *shape)
    return Part(start, stop, both[0], both[1], sha256)


def _header(start: int, shape: tuple[int, int, int], dtype: str, sha256: str) -> bytes:
    """Length and JSON of a safetensors file of (1, *shape) keys, then values."""
    word, torch_dtype = DTYPES[dtype]
    n_bytes = shape[0] * shape[1] * shape[2] * torch_dtype.itemsize
    entry = {"dtype": word, "shape": [1, *shape]}
    header = json.dumps(
        {
            "__metadata__": {"start": str(start), "stop": str(start + shape[1]), "sha256": sha256},
            "keys": {**entry, "data_offsets": [0, n_bytes]},
            "values": {**entry, "data_offsets": [n_bytes, 2 * n_bytes]},
        }
    ).encode()
    header += b" " * (-len(header) % 8)
    return struct.pack("<Q", len(header)) + header


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.detach().contiguous().view(torch.uint8).flatten().numpy().data
