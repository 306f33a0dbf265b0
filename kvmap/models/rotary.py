"""Reading the frequencies that a model's own rotary module holds."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from kvmap.models.families import Family
from kvmap.models.geometry import Geometry, UnsupportedModel
from kvmap.models.rope import Rotation


def rotary_module(body: nn.Module) -> nn.Module:
    """The module of a decoder body that turns positions into cos and sin.

    Raises:
        UnsupportedModel: if the body has none.
    """
    module = getattr(body, "rotary_emb", None)
    if not isinstance(module, nn.Module):
        raise UnsupportedModel(
            f"{type(body).__name__} has no module rotary_emb to read frequencies from; see 'Add a model "
            "family' in CONTRIBUTING.md"
        )
    return module


def _frequency_names(module: nn.Module, text_config: Any, layer: int) -> tuple[str, str, str | None]:
    """Attribute names of inv_freq and attention scaling for a layer, and its type where those are kept per
    type.
    """
    if hasattr(module, "inv_freq"):
        return "inv_freq", "attention_scaling", None
    kind = text_config.layer_types[layer]
    return f"{kind}_inv_freq", f"{kind}_attention_scaling", kind


def read_rotations(
    body: nn.Module, text_config: Any, geometry: Geometry, family: Family
) -> tuple[Rotation | None, ...]:
    """The rotation of every layer, as the rotary module holds it at this moment.

    Right after a forward this is what that forward used. Values are copied: dynamic and longrope modules
    overwrite theirs, and a model cast to bfloat16 holds rounded frequencies, which are the ones to invert.

    Returns:
        One `Rotation` a layer; None for layers that do not rotate.
    """
    module = rotary_module(body)
    known: dict[str, Rotation] = {}
    rotations: list[Rotation | None] = []
    for layer, layer_geometry in enumerate(geometry.layers):
        if layer_geometry.rope_type is None:
            rotations.append(None)
            continue
        frequencies, scaling, _ = _frequency_names(module, text_config, layer)
        if frequencies not in known:
            inv_freq = getattr(module, frequencies).detach().to(torch.float32, copy=True)
            known[frequencies] = Rotation(inv_freq, float(getattr(module, scaling, 1.0)), family.layout)
        rotations.append(known[frequencies])
    return tuple(rotations)


def prepare_rotary(
    body: nn.Module, text_config: Any, geometry: Geometry, n_tokens: int, dtype: torch.dtype
) -> None:
    """Bring the rotary module into the state that a prefill of `n_tokens` leaves it in.

    Dynamic and longrope modules choose their frequencies from the largest position they are called with.
    """
    module = rotary_module(body)
    kinds = {
        _frequency_names(module, text_config, layer): None
        for layer, layer_geometry in enumerate(geometry.layers)
        if layer_geometry.rope_type is not None
    }
    for frequencies, _, kind in kinds:
        device = getattr(module, frequencies).device
        positions = torch.arange(max(n_tokens, 1), device=device)[None]
        like = torch.zeros(1, device=device, dtype=dtype)
        with torch.no_grad():
            module(like, positions) if kind is None else module(like, positions, kind)
