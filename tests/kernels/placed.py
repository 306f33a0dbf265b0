"""Maps and caches on a device, and between numbers that must be neither read nor written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from kvmap.kernels.map_cache import CacheMap, Columns, Inputs, Output, Product, Side

GUARD = 7.0

Place = Callable[[Tensor], Tensor]


def fill_of(tensor: Tensor, guard: float) -> float | int | bool:
    """What stands around a tensor: NaN in numbers, True in masks, positions that no test has."""
    if tensor.dtype == torch.bool:
        return True
    return guard if tensor.is_floating_point() else 10**6


def surrounded(tensor: Tensor, guard: float, margin: int = 8) -> Tensor:
    """The same numbers as a view, with others on all sides; its channels stay aligned to 16 bytes."""
    shape = [length + 2 * margin for length in tensor.shape]
    wide = tensor.to(torch.float32) if tensor.dtype.itemsize == 1 and tensor.is_floating_point() else tensor
    storage = torch.full(shape, fill_of(tensor, guard), dtype=wide.dtype, device=tensor.device)
    storage = storage.to(tensor.dtype)
    view = storage[tuple(slice(margin, margin + length) for length in tensor.shape)]
    view.copy_(tensor)
    return view


def between(tensor: Tensor) -> Tensor:
    """The same numbers, contiguous, with NaN before and after."""
    flat = surrounded(tensor.flatten(), float("nan"), 64)
    return flat.view(tensor.shape)


def guards_hold(view: Tensor, guard: float = GUARD, margin: int = 8) -> bool:
    """Whether what surrounds a view is still there."""
    storage = view._base
    assert storage is not None
    outside = torch.ones_like(storage, dtype=torch.bool)
    outside[tuple(slice(margin, length - margin) for length in storage.shape)] = False
    return bool((storage[outside] == guard).all())


def place_map(cache_map: CacheMap, place: Place) -> CacheMap:
    """Every tensor of a map through `place`."""

    def placed(product: Product) -> Product:
        scale = None if product.scale is None else place(product.scale)
        return Product(product.slots, place(product.weight), place(product.bias), scale)

    return CacheMap(
        {
            kind: {layer: placed(product) for layer, product in layers.items()}
            for kind, layers in cache_map.products.items()
        }
    )


def place_inputs(inputs: Inputs, place: Place) -> Inputs:
    """Every tensor of the inputs through `place`."""

    def side(given: Side) -> Side:
        return Side([*map(place, given.keys)], [*map(place, given.values)], given.rotations)

    return Inputs(
        side(inputs.source),
        place(inputs.positions),
        None if inputs.native is None else side(inputs.native),
        None if inputs.keep is None else place(inputs.keep),
    )


def place_output(output: Output, place: Place) -> Output:
    """Every cache of an output through `place`; block tables are moved, not surrounded."""
    keys = {layer: place(tensor) for layer, tensor in output.keys.items()}
    values = {layer: place(tensor) for layer, tensor in output.values.items()}
    if isinstance(output, Columns):
        return Columns(keys, values, output.rotations)
    device = next(iter(keys.values())).device
    first = None if output.first is None else output.first.to(device)
    table = output.block_table.to(device)
    return replace(output, keys=keys, values=values, block_table=table, first=first, _places={})


def clones(output: Output) -> Output:
    """An output of its own, of the same layout."""
    return place_output(output, lambda tensor: torch.empty_like(tensor).copy_(tensor))


def moved(cache_map: CacheMap, inputs: Inputs, device: torch.device) -> tuple[CacheMap, Inputs]:
    """Both on a device."""
    return place_map(cache_map, lambda x: x.to(device)), place_inputs(inputs, lambda x: x.to(device))
