"""Rotary position embedding: the rotation a prefill used, taking it off and putting one on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Layout = Literal["half", "interleaved"]


@dataclass(frozen=True, eq=False)
class Rotation:
    """R(position) of one layer, as one particular prefill applied it to its keys.

    Channel pairs (a, b) turn by the angle position·inv_freq and are stretched by s:
    ``a' = s (a cos − b sin), b' = s (b cos + a sin)``.

    Attributes:
        inv_freq: (rotary_dim/2,) float32, the frequencies really used, radians per position. Dynamic and
            longrope models change them from one prefill to the next.
        scaling: s, the factor yarn and longrope multiply cos and sin by; 1 elsewhere.
        layout: which channels pair up: i with i + rotary_dim/2 ("half") or 2i with 2i + 1 ("interleaved").
    """

    inv_freq: Tensor
    scaling: float
    layout: Layout

    @property
    def rotary_dim(self) -> int:
        """How many leading channels of a head turn; the rest pass untouched."""
        return 2 * self.inv_freq.numel()

    def matches(self, other: Rotation | None) -> bool:
        """Whether `other` turns keys in exactly the same way."""
        if other is self:
            return True
        return (
            other is not None
            and self.layout == other.layout
            and self.scaling == other.scaling
            and torch.equal(self.inv_freq, other.inv_freq.to(self.inv_freq.device))
        )


def same_rotations(a: Sequence[Rotation | None], b: Sequence[Rotation | None]) -> bool:
    """Whether two per-layer lists describe the same rotations; None is a layer without one."""
    # Layers share their Rotation objects: each distinct pair is compared once, which on a GPU waits for it
    # once.
    pairs = {(id(x), id(y)): (x, y) for x, y in zip(a, b, strict=False)}
    return len(a) == len(b) and all(y is None if x is None else x.matches(y) for x, y in pairs.values())


def apply_rotation(keys: Tensor, positions: Tensor, rotation: Rotation | None) -> Tensor:
    """R(position) k.

    Args:
        keys: (batch, n_kv_heads, tokens, head_dim), content keys.
        positions: (batch, tokens) int64.
        rotation: the layer's rotation; None for a layer without one returns the keys unchanged.

    Returns:
        Rotated keys, same shape, float32 (float64 for float64 keys). [H] step 4.
    """
    if rotation is None:
        return keys.to(_compute_dtype(keys))
    return _turn(keys, positions, rotation, direction=1.0, scale=rotation.scaling)


def strip_rotation(keys: Tensor, positions: Tensor, rotation: Rotation | None) -> Tensor:
    """R(position)⁻¹ k = R(position)ᵀ k / s².

    Args:
        keys: (batch, n_kv_heads, tokens, head_dim), keys as a cache holds them.
        positions: (batch, tokens) int64.
        rotation: the rotation those keys carry; None returns the keys unchanged.

    Returns:
        Content keys, same shape, float32 (float64 for float64 keys). [H] step 1.
    """
    if rotation is None:
        return keys.to(_compute_dtype(keys))
    return _turn(keys, positions, rotation, direction=-1.0, scale=1.0 / rotation.scaling)


def _compute_dtype(keys: Tensor) -> torch.dtype:
    return torch.float64 if keys.dtype == torch.float64 else torch.float32


def _turn(keys: Tensor, positions: Tensor, rotation: Rotation, direction: float, scale: float) -> Tensor:
    """Turn each channel pair by direction·position·inv_freq and multiply by `scale`."""
    dtype = _compute_dtype(keys)
    # The angle is the float32 product that models compute: at position 10⁵ its rounding is no longer small,
    # and only the same rounding cancels.
    angle = positions.to(keys.device)[:, None, :, None].float() * rotation.inv_freq.to(keys.device).float()
    cos = angle.to(dtype).cos() * scale
    sin = angle.to(dtype).sin() * (scale * direction)
    turning = keys[..., : rotation.rotary_dim].to(dtype)
    if rotation.layout == "half":
        a, b = turning.chunk(2, dim=-1)
        turned = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    else:
        a, b = turning[..., 0::2], turning[..., 1::2]
        turned = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
    if rotation.rotary_dim == keys.shape[-1]:
        return turned
    return torch.cat((turned, keys[..., rotation.rotary_dim :].to(dtype)), dim=-1)
