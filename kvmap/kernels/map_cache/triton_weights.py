"""What the Triton path keeps of a map from call to call: tensors as kernels read them, tables of steps."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from kvmap.kernels.map_cache.spec import KINDS, CacheMap, Product, Slot

if TYPE_CHECKING:
    from kvmap.kernels.map_cache.triton_layout import Layout

_LAYOUTS = 1024


@dataclass(frozen=True, eq=False)
class Weights:
    """One product's tensors. `weight` is the map's own storage wherever that is contiguous.

    Attributes:
        weight: (p, H_t·d_t) or (H_t, p, d_t), contiguous.
        bias: (H_t, d_t) float32.
        scale: (H_t, d_t) float32 or None.
    """

    weight: Tensor
    bias: Tensor
    scale: Tensor | None

    @property
    def row_stride(self) -> int:
        """Elements between two features."""
        return self.weight.stride(-2)

    @property
    def head_stride(self) -> int:
        """Elements between two heads' weights; 0 where heads are columns."""
        return self.weight.stride(0) if self.weight.ndim == 3 else 0


class Prepared:
    """Of one map. Made on first use, forgotten with the map; holds no second copy of the weights."""

    def __init__(self) -> None:
        """Empty."""
        self._weights: dict[tuple[str, int], Weights] = {}
        self._slots: dict[tuple[int, ...], tuple[Slot, ...]] = {}
        self._layouts: dict[Hashable, Layout] = {}

    def weights(self, kind: str, layer: int, product: Product) -> Weights:
        """Of one product."""
        if (kind, layer) not in self._weights:
            bias = product.bias.to(device=product.weight.device, dtype=torch.float32).contiguous()
            scale = None if product.scale is None else product.scale.float().contiguous()
            self._weights[kind, layer] = Weights(product.weight.contiguous(), bias, scale)
        return self._weights[kind, layer]

    def slots(self, cache_map: CacheMap, layers: tuple[int, ...]) -> tuple[Slot, ...]:
        """All that some layers of the map read, each once."""
        if layers not in self._slots:
            products = (cache_map.products[kind][layer] for layer in layers for kind in KINDS)
            self._slots[layers] = tuple(dict.fromkeys(slot for product in products for slot in product.slots))
        return self._slots[layers]

    def layout(self, key: Hashable, build: Callable[[], Layout]) -> Layout:
        """What `build` gives, kept under a key: streaming asks for the same layers, one by one, each time."""
        if key not in self._layouts:
            if len(self._layouts) >= _LAYOUTS:
                self._layouts.clear()
            self._layouts[key] = build()
        return self._layouts[key]


_PREPARED: WeakKeyDictionary[CacheMap, Prepared] = WeakKeyDictionary()


def prepared(cache_map: CacheMap) -> Prepared:
    """What is kept of a map."""
    if cache_map not in _PREPARED:
        _PREPARED[cache_map] = Prepared()
    return _PREPARED[cache_map]
