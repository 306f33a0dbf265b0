"""Whether the engine turns keys as the model's config says: read off its own table of cosines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from kvmap.models.rope import Rotation
from kvmap.serving.compatibility import EngineFacts, Incompatible

_POSITIONS = (0, 1, 2, 7, 31, 63)


def check_rotary(model: nn.Module, attention_names: Sequence[str], facts: EngineFacts) -> None:
    """Compare every layer's table with its rotation.

    Args:
        model: vLLM's.
        attention_names: of its attention layers, in order; a layer's rotary module stands beside it.
        facts: with the rotations read off the config.

    Raises:
        Incompatible: cause "layout", naming the layer.
    """
    seen: set[tuple[int, int]] = set()
    for number, (name, rotation) in enumerate(zip(attention_names, facts.rotations, strict=True)):
        rotary: Any = getattr(model.get_submodule(name.rpartition(".")[0]), "rotary_emb", None)
        table = getattr(rotary, "cos_sin_cache", None)
        if rotation is None or (id(rotary), id(rotation)) in seen:
            continue
        seen.add((id(rotary), id(rotation)))
        if table is None:
            raise Incompatible(
                "layout", f"layer {number} has no table of cosines to compare its rotation with"
            )
        if not _agrees(table, rotation, bool(rotary.is_neox_style)):
            raise Incompatible("layout", f"layer {number} turns keys otherwise than its model's config says")


def _agrees(table: torch.Tensor, rotation: Rotation, is_neox_style: bool) -> bool:
    if is_neox_style != (rotation.layout == "half") or table.shape[1] != rotation.rotary_dim:
        return False
    positions = torch.tensor([p for p in _POSITIONS if p < len(table)])
    angle = positions[:, None].float() * rotation.inv_freq
    wanted = torch.cat((angle.cos(), angle.sin()), dim=-1) * rotation.scaling
    # a table in bfloat16 is rounded by up to 2⁻⁹ of its numbers
    return torch.allclose(
        table[positions].float(), wanted, atol=6e-3 if table.dtype.itemsize == 2 else 1e-4, rtol=0
    )
