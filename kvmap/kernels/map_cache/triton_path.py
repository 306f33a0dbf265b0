"""`map_cache` in Triton: all layers in a few launches, rotations in the kernels, written where it belongs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Self

import torch
from torch import Tensor

from kvmap.kernels.map_cache.spec import KINDS, CacheMap, Inputs, Output, Pages, Product
from kvmap.kernels.map_cache.triton_launch import INTERPRETED, TRITON_DTYPES
from kvmap.kernels.map_cache.triton_plan import Plan
from kvmap.kernels.map_cache.triton_tiles import Tile

__all__ = ["GraphedMap", "Plan", "Tile", "map_cache_triton", "unsupported_reason"]

_CACHE_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_LARGEST_DIM = 256


def map_cache_triton(
    cache_map: CacheMap,
    inputs: Inputs,
    output: Output,
    layers: Iterable[int] | None = None,
    *,
    chunk_tokens: int | None = None,
    strip: str = "auto",
    tile: Tile | None = None,
) -> Tensor:
    """As `map_cache_reference`, for what `unsupported_reason` has nothing against.

    Blocks of a page table are taken as they are: one that is out of bounds is written out of bounds.

    Args:
        cache_map: the weights.
        inputs: what is mapped.
        output: where it goes.
        layers: target layers to write; None: all that are mapped.
        chunk_tokens: tokens over all rows of which content is held at once; None: 4,096. Where nothing has
            to be set down before, all are worked on at once.
        strip: where rotations are undone: "fused" in the step, where that can be; "before"; "auto" by shape.
        tile: in place of that of `triton_tiles.TILES`.

    Returns:
        (layers, 2, 2) int64 on the device: not finite, clamped.

    Raises:
        KernelError: tensors that do not fit together, or another `strip`.
    """
    wanted = None if layers is None else tuple(layers)
    plan = Plan(cache_map, inputs, output, wanted, chunk_tokens=chunk_tokens, strip=strip, tile=tile)
    return plan.run()


class GraphedMap:
    """One plan, captured as a CUDA graph: replaying it costs a few microseconds of host
    time. It reads and writes the tensors that it was captured with, whose content may change.
    """

    def __init__(self, plan: Plan, graph: torch.cuda.CUDAGraph) -> None:
        """Use `capture`."""
        self._plan = plan
        self._graph = graph

    @classmethod
    def capture(cls, plan: Plan) -> Self:
        """Run a plan once, which compiles, then capture it. Positions, `keep` and block tables have to be on
        the device: of others, the copy that the plan made is read ever after.
        """
        stream = torch.cuda.Stream(plan.counts.device)
        stream.wait_stream(torch.cuda.current_stream(plan.counts.device))
        with torch.cuda.stream(stream):
            plan.run()
        torch.cuda.current_stream(plan.counts.device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            plan.run()
        return cls(plan, graph)

    def replay(self) -> Tensor:
        """Map again; returns the counts, which the next replay overwrites."""
        self._graph.replay()
        return self._plan.counts


def unsupported_reason(
    cache_map: CacheMap, inputs: Inputs, output: Output, layers: Iterable[int] | None = None
) -> str | None:
    """Why the kernels cannot serve these tensors, for some layers or all; None where they can."""
    return next(_reasons(cache_map, inputs, output, cache_map.layers if layers is None else layers), None)


def _reasons(cache_map: CacheMap, inputs: Inputs, output: Output, layers: Iterable[int]) -> Iterator[str]:
    devices: set[torch.device] = set()
    seen: set[tuple[str, str, int]] = set()
    for layer in layers:
        for kind in KINDS:
            product = cache_map.products[kind][layer]
            where = f"{kind}s of target layer {layer}"
            yield from _product_reasons(where, product)
            out = output.tensor(kind, layer)
            devices |= {product.weight.device, out.device}
            if out.dtype not in _CACHE_DTYPES:
                yield f"{where} are written in {out.dtype}"
            for slot in product.slots:
                if slot in seen:
                    continue
                seen.add(slot)
                if slot.origin == "native" and inputs.native is None:
                    continue  # an error of its own, that says more
                tensor = inputs.side(slot.origin).tensor(slot.kind, slot.layer)
                devices.add(tensor.device)
                if tensor.dtype not in _CACHE_DTYPES:
                    yield f"{slot.origin} layer {slot.layer} holds {tensor.dtype}"
                if tensor.shape[3] % 2 or tensor.shape[3] > _LARGEST_DIM:
                    yield f"{slot.origin} layer {slot.layer} has heads of {tensor.shape[3]} channels"
    if len(devices) > 1:
        yield f"weights and caches are on {', '.join(sorted(map(str, devices)))}"
    if isinstance(output, Pages) and output.block_table.dtype not in (torch.int32, torch.int64):
        yield f"the block table is {output.block_table.dtype}"
    yield from _device_reasons(devices, cache_map)


def _product_reasons(where: str, product: Product) -> Iterator[str]:
    dim = product.bias.shape[1]
    if dim % 2 or dim > _LARGEST_DIM:
        yield f"{where} have heads of {dim} channels; kernels serve even numbers up to {_LARGEST_DIM}"
    if product.weight.dtype not in TRITON_DTYPES:
        yield f"weights of {where} are {product.weight.dtype}"


def _device_reasons(devices: set[torch.device], cache_map: CacheMap) -> Iterator[str]:
    device = next(iter(devices), torch.device("cpu"))
    if INTERPRETED:
        if device.type != "cpu":
            yield "Triton interprets its kernels (TRITON_INTERPRET=1), which works on CPU tensors"
        return
    if device.type != "cuda":
        yield f"tensors are on {device}, and Triton's kernels are compiled for CUDA devices"
        return
    capability = torch.cuda.get_device_capability(device)
    scaled = any(product.scale is not None for kind in KINDS for product in cache_map.products[kind].values())
    if capability < (8, 0):
        yield f"the kernels need compute capability 8.0, {device} has {capability[0]}.{capability[1]}"
    if scaled and capability < (8, 9):
        yield f"float8 weights need compute capability 8.9, {device} has {capability[0]}.{capability[1]}"
