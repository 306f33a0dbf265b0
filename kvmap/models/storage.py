"""KV caches on disk: what lets source and target take turns in memory. One safetensors file per cache."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvmap.files import ArtifactCorrupt, load_metadata, load_tensors, save_tensors
from kvmap.models.cache import InvalidCache, KVCache
from kvmap.models.rope import Rotation, strip_rotation


def save_kv(kv: KVCache, path: Path) -> None:
    """Write a cache whole or not at all; `load_kv` gives back the same numbers in the same dtypes.

    The owner's identity is not kept: whoever stores a cache for another model to use records it beside it.
    `exact` is: a cache that was mapped comes back as one that was.
    """
    tensors = {"positions": kv.positions, "mask": kv.mask}
    rotations: list[dict[str, object] | None] = []
    for layer, (key, value) in enumerate(zip(kv.keys, kv.values, strict=True)):
        tensors[f"keys.{layer}"], tensors[f"values.{layer}"] = key, value
        rotation = kv.rotations[layer] if kv.rotations is not None else None
        if rotation is not None:
            tensors[f"inv_freq.{layer}"] = rotation.inv_freq
            rotations.append({"scaling": rotation.scaling, "layout": rotation.layout})
        else:
            rotations.append(None)
    head = {
        "n_layers": kv.n_layers,
        "stripped": kv.stripped,
        "rotations": rotations,
        "exact": kv.exact,
        "mixed": kv.mixed,
    }
    save_tensors(path, tensors, {"kv": json.dumps(head)})


def load_kv(path: Path, device: torch.device | str = "cpu") -> KVCache:
    """Read what `save_kv` wrote.

    Raises:
        ArtifactMissing, ArtifactCorrupt: the file is not there, or is not whole.
    """
    head = _read_head(path)
    tensors = {name: tensor.to(device) for name, tensor in load_tensors(path).items()}
    layers = range(head["n_layers"])
    rotations = tuple(
        Rotation(tensors[f"inv_freq.{layer}"], **entry) if entry else None
        for layer, entry in zip(layers, head["rotations"], strict=True)
    )
    return KVCache(
        keys=tuple(tensors[f"keys.{layer}"] for layer in layers),
        values=tuple(tensors[f"values.{layer}"] for layer in layers),
        positions=tensors["positions"],
        mask=tensors["mask"],
        rotations=None if head["stripped"] else rotations,
        exact=head["exact"],
        mixed=head["mixed"],
    )


def load_layers(path: Path, kind: str, layers: Sequence[int], *, stripped: bool = True) -> list[Tensor]:
    """Some layers of a cache that `save_kv` wrote; nothing else of the file is read.

    Args:
        path: the file.
        kind: "key" or "value".
        layers: which, in this order.
        stripped: content keys ``R(position)⁻¹ k`` in float32 rather than what the file holds.

    Returns:
        Per layer (batch, n_kv_heads, tokens, head_dim); float32 (float64 stays).

    Raises:
        ArtifactMissing, ArtifactCorrupt: the file is not there, or is not whole.
        InvalidCache: content keys of a cache whose columns carry different rotations; see `KVCache.strip`.
    """
    head = _read_head(path)
    turned = kind == "key" and stripped and not head["stripped"]
    if turned and head["mixed"]:
        raise InvalidCache(
            f"the columns of {path} carry different rotations and cannot be stripped: prefill the whole "
            f"context in one call instead"
        )
    names = [f"{kind}s.{layer}" for layer in layers]
    if turned:
        names += ["positions", *(f"inv_freq.{layer}" for layer in layers if head["rotations"][layer])]
    tensors = load_tensors(path, names)
    found = []
    for layer in layers:
        tensor = tensors[f"{kind}s.{layer}"]
        entry = head["rotations"][layer]
        if turned and entry:
            tensor = strip_rotation(
                tensor, tensors["positions"], Rotation(tensors[f"inv_freq.{layer}"], **entry)
            )
        found.append(tensor if tensor.dtype == torch.float64 else tensor.float())
    return found


def require_exact(kv: KVCache) -> KVCache:
    """The cache itself, where it may be kept as a prefix that serves other requests.

    Whoever keeps caches by their tokens calls this before: what was mapped for one request is near to what
    the model would have computed, and would be taken for it by every later request with these tokens.

    Raises:
        InvalidCache: a column was mapped, or the keys are stripped.
    """
    if not kv.exact or kv.stripped:
        what = "holds stripped keys" if kv.exact else "holds mapped columns"
        raise InvalidCache(
            f"the cache {what}, so it is no exact prefix for other requests: keep the model's own prefill "
            f"instead, and use this one for its own request alone"
        )
    return kv


def _read_head(path: Path) -> dict[str, Any]:
    """What `save_kv` noted beside the tensors.

    Raises:
        ArtifactMissing, ArtifactCorrupt: the file is not there, or no such note.
    """
    try:
        head: dict[str, Any] = json.loads(load_metadata(path)["kv"])
    except (KeyError, ValueError) as error:
        raise ArtifactCorrupt(f"{path} is no KV cache that save_kv wrote: capture it again") from error
    return head
