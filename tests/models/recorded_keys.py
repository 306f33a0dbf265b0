"""The keys a model's own code had in hand just before it rotated them: an oracle independent of kvmap's
code.
"""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from kvmap.models.loaded import LoadedModel


def pre_rotation_keys(
    monkeypatch: pytest.MonkeyPatch, loaded: LoadedModel, ids: Tensor, mask: Tensor, positions: Tensor
) -> list[Tensor]:
    """Per layer (batch, heads, tokens, channels), channels being those the family hands to its rotation.

    Rotating layers: the k argument of the modelling module's own apply_rotary_pos_emb. Layers without
    rotation: the output of their key projection.
    """
    recorded: list[Tensor] = []
    module = sys.modules[type(loaded.body).__module__]
    original = module.apply_rotary_pos_emb

    def recording(q: Tensor, k: Tensor, *args: Any, **kwargs: Any) -> Any:
        recorded.append(k.clone())
        return original(q, k, *args, **kwargs)

    handles, unrotated = [], {}
    for index, layer in enumerate(loaded.body.layers):
        if loaded.geometry.layers[index].rope_type is None:
            attention = layer.self_attn
            projection = getattr(attention, "k_norm", attention.k_proj)
            handles.append(projection.register_forward_hook(_keeper(unrotated, index, loaded)))
    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr(module, "apply_rotary_pos_emb", recording)
        loaded.body(input_ids=ids, attention_mask=mask, position_ids=positions)
    for handle in handles:
        handle.remove()
    rotating = iter(recorded)
    return [unrotated[i] if i in unrotated else next(rotating) for i in range(loaded.geometry.n_layers)]


def _keeper(kept: dict[int, Tensor], index: int, loaded: LoadedModel) -> Any:
    heads = loaded.geometry.layers[index].n_kv_heads

    def keep(module: Any, args: Any, output: Tensor) -> None:
        if output.ndim == 4:  # a norm over heads
            kept[index] = output if output.shape[1] == heads else output.transpose(1, 2)
        else:
            kept[index] = output.unflatten(-1, (heads, -1)).transpose(1, 2)

    return keep
