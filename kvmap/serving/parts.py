"""One part of a published cache: keys and values of one layer over some tokens, as safetensors bytes."""

from __future__ import annotations

import hashlib
import json
import struct

import torch
from torch import Tensor

from kvmap.files import ArtifactCorrupt

DTYPES = {
    "float32": ("F32", torch.float32),
    "bfloat16": ("BF16", torch.bfloat16),
    "float16": ("F16", torch.float16),
}


def part_name(part: int, layer: int) -> str:
    """Of a layer in the part-th run of tokens."""
    return f"{part:04d}-{layer:04d}"


def part_bytes(keys: Tensor, values: Tensor) -> tuple[list[bytes | memoryview], str, int]:
    """A safetensors file of the tensors `keys` and `values`, with nothing copied.

    Args:
        keys: (1, n_kv_heads, tokens, head_dim), on the CPU, contiguous.
        values: likewise.

    Returns:
        The file in pieces, the sha256 of its bytes in hex, and their number.
    """
    shape = list(keys.shape)
    n_bytes = keys.numel() * keys.element_size()
    dtype = next(word for word, torch_dtype in DTYPES.values() if torch_dtype == keys.dtype)
    header = json.dumps(
        {
            "keys": {"dtype": dtype, "shape": shape, "data_offsets": [0, n_bytes]},
            "values": {"dtype": dtype, "shape": shape, "data_offsets": [n_bytes, 2 * n_bytes]},
        }
    ).encode()
    header += b" " * (-len(header) % 8)
    pieces: list[bytes | memoryview] = [
        struct.pack("<Q", len(header)) + header,
        _bytes_of(keys),
        _bytes_of(values),
    ]
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
    return pieces, digest.hexdigest(), 8 + len(header) + 2 * n_bytes


def read_part(data: bytearray, sha256: str, shape: tuple[int, int, int], dtype: str) -> tuple[Tensor, Tensor]:
    """Keys and values, over the memory of `data`.

    Args:
        data: the whole file.
        sha256: what its bytes must hash to.
        shape: (n_kv_heads, tokens, head_dim) that it must hold.
        dtype: a key of `DTYPES`.

    Returns:
        Each (1, n_kv_heads, tokens, head_dim).

    Raises:
        ArtifactCorrupt: other bytes, shapes or dtypes than the manifest says.
    """
    if hashlib.sha256(data).hexdigest() != sha256:
        raise ArtifactCorrupt("the checksum of the part's bytes is not the manifest's: it was cut or changed")
    word, torch_dtype = DTYPES[dtype]
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(bytes(data[8 : 8 + length]))
    found = []
    for name in ("keys", "values"):
        entry = header[name]
        if entry["dtype"] != word or tuple(entry["shape"]) != (1, *shape):
            raise ArtifactCorrupt(f"{name}: {entry['dtype']} {entry['shape']}, expected {word} {(1, *shape)}")
        start, stop = entry["data_offsets"]
        n = (stop - start) // torch_dtype.itemsize
        whole = torch.frombuffer(data, dtype=torch_dtype, count=n, offset=8 + length + start)
        found.append(whole.view(1, *shape))
    return found[0], found[1]


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.detach().contiguous().view(torch.uint8).flatten().numpy().data
