"""How a fit and a mapper see a cache, by RoPE strategy."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from kvmap.errors import KvmapError, UnknownName
from kvmap.models.cache import KVCache

ROPE_STRATEGIES = ("strip", "coupled", "no_rerotate")


class ViewError(KvmapError):
    """A cache that cannot be seen the way a RoPE strategy needs it."""


def calibration_view(source: KVCache, target: KVCache, rope: str = "strip") -> tuple[KVCache, KVCache]:
    """The two caches as a fit for this strategy must see them, in the form that moments read ([H] §4).

    * "strip": content keys on both sides; mapped keys are rotated for the target.
    * "no_rerotate": the same fit; mapped keys are left as they come out.
    * "coupled": rotated keys on both sides, as they lie in the caches; good for the calibrated length only.

    Raises:
        UnknownName: another strategy.
        ViewError: "coupled" with a cache whose keys were stripped.
    """
    return cache_view(source, rope), cache_view(target, rope)


def cache_view(kv: KVCache, rope: str = "strip") -> KVCache:
    """One cache as a mapper of this strategy reads it, float32 (float64 stays); see `calibration_view`.

    With "coupled" the rotated keys are passed on as if they were content keys: the map does not know the
    difference.
    """
    check_rope(rope)
    if rope != "coupled":
        return kv.strip()
    if kv.stripped:
        raise ViewError("rope='coupled' maps rotated keys, and this cache was stripped: give it as captured")
    return replace(kv, keys=_widened(kv.keys), values=_widened(kv.values), rotations=None)


def check_rope(rope: str) -> None:
    """Refuse an unknown strategy.

    Raises:
        UnknownName: with the nearest and all known names.
    """
    if rope not in ROPE_STRATEGIES:
        raise UnknownName("rope strategy", rope, ROPE_STRATEGIES)


def _widened(layers: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(x if x.dtype == torch.float64 else x.float() for x in layers)
