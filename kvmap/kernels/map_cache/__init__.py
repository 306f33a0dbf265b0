"""`map_cache`: a source's cache into a target's, by a linear map. One operation, several paths, one choice.

`spec` says what it is given and where it writes, `reference` what it computes. Every path writes the same
within the rounding of one product.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Sequence
from types import ModuleType

from torch import Tensor

from kvmap.errors import UnknownName
from kvmap.kernels.map_cache.batched import map_cache_batched
from kvmap.kernels.map_cache.proof import disagreement
from kvmap.kernels.map_cache.reference import map_cache_reference
from kvmap.kernels.map_cache.spec import (
    KINDS,
    CacheMap,
    Columns,
    Inputs,
    KernelError,
    Output,
    Pages,
    Product,
    Side,
    Slot,
)
from kvmap.kernels.settings import MAP_CACHE_PATHS as PATHS
from kvmap.kernels.settings import current

__all__ = [
    "KINDS",
    "PATHS",
    "CacheMap",
    "Columns",
    "Inputs",
    "KernelError",
    "Output",
    "Pages",
    "Product",
    "Side",
    "Slot",
    "choose_path",
    "map_cache",
    "map_cache_batched",
    "map_cache_reference",
    "why_not_triton",
]

_log = logging.getLogger(__name__)


def map_cache(
    cache_map: CacheMap,
    inputs: Inputs,
    output: Output,
    layers: Iterable[int] | None = None,
    *,
    path: str = "auto",
    chunk_tokens: int | None = None,
) -> Tensor:
    """Map a cache, writing into `output`. See `kvmap.kernels.map_cache.spec` for the equation.

    Args:
        cache_map: the weights.
        inputs: what is mapped.
        output: where it goes.
        layers: target layers to write; None: all that are mapped. Of the inputs and the output no more has to
            be there than these need.
        path: one of `PATHS`; "auto" takes that of `choose_path`.
        chunk_tokens: tokens, over all rows, that are worked on at a time (the reference takes all at once);
            None: that of `kvmap.kernels.settings.current()`.

    Returns:
        (layers, 2, 2) int64, by layer in the order of `layers` and by kind: numbers that are not finite,
        and numbers that were clamped to the output's finite range.

    Raises:
        UnknownName: another path.
        KernelError: a path asked for that cannot serve these tensors, or native layers that are missing.
    """
    if path not in PATHS:
        raise UnknownName("map_cache path", path, PATHS)
    wanted = cache_map.layers if layers is None else tuple(layers)
    chosen, reason = (path, "as asked") if path != "auto" else _chosen(cache_map, inputs, output, wanted)
    _log_path(chosen, reason, *_shape_class(cache_map, inputs, output, wanted))
    if chosen == "reference":
        return map_cache_reference(cache_map, inputs, output, wanted)
    chunk_tokens = current().chunk_tokens if chunk_tokens is None else chunk_tokens
    if chosen == "batched":
        return map_cache_batched(cache_map, inputs, output, wanted, chunk_tokens=chunk_tokens)
    missing = why_not_triton(cache_map, inputs, output, wanted) if path != "auto" else None
    module = _triton_path()
    if missing is not None or isinstance(module, str):
        raise KernelError(f"map_cache path 'triton' cannot serve this: {missing}; use 'auto' or 'batched'")
    counts: Tensor = module.map_cache_triton(cache_map, inputs, output, wanted, chunk_tokens=chunk_tokens)
    return counts


def choose_path(cache_map: CacheMap, inputs: Inputs, output: Output) -> str:
    """The path that "auto" takes: "triton" on a CUDA device where it can serve, else "batched".

    The first call of a shape class on a device maps a few columns both ways; where these differ, "batched"
    stays.
    """
    return _chosen(cache_map, inputs, output, cache_map.layers)[0]


def why_not_triton(
    cache_map: CacheMap, inputs: Inputs, output: Output, layers: Iterable[int] | None = None
) -> str | None:
    """Why the path "triton" cannot serve these tensors here, for some layers or all; None where it can."""
    module = _triton_path()
    if isinstance(module, str):
        return module
    reason: str | None = module.unsupported_reason(cache_map, inputs, output, layers)
    return reason


@functools.cache
def _triton_path() -> ModuleType | str:
    """The path's module, or why there is none: triton is installed on few machines, and imported late."""
    try:
        import kvmap.kernels.map_cache.triton_path as triton_path
    except ImportError as error:
        return f"triton cannot be imported ({error})"
    return triton_path


def _chosen(cache_map: CacheMap, inputs: Inputs, output: Output, wanted: Sequence[int]) -> tuple[str, str]:
    """The path that "auto" takes, and why."""
    if inputs.positions.device.type != "cuda":
        return "batched", "the cache is not on a CUDA device"
    reason = why_not_triton(cache_map, inputs, output, wanted) or _doubt(cache_map, inputs, output, wanted)
    return ("batched", reason) if reason is not None else ("triton", "it agrees with batched here")


_doubts: dict[tuple[str, ...], str | None] = {}


def _doubt(cache_map: CacheMap, inputs: Inputs, output: Output, wanted: Sequence[int]) -> str | None:
    """Why the first call of a shape class on this device speaks against "triton"; None where it does not."""
    case = _shape_class(cache_map, inputs, output, wanted)
    module = _triton_path()
    if case not in _doubts and not isinstance(module, str) and inputs.positions.numel() and wanted:
        _doubts[case] = disagreement(cache_map, inputs, output, wanted[0], module.map_cache_triton)
        if _doubts[case] is not None:
            _log.warning("map_cache does without path triton for %s: %s", ", ".join(case), _doubts[case])
    return _doubts.get(case)


def _shape_class(
    cache_map: CacheMap, inputs: Inputs, output: Output, wanted: Sequence[int]
) -> tuple[str, ...]:
    """Device, dtypes and the kind of shape, in words."""
    if not wanted:
        return (str(inputs.positions.device), "no mapped layer")
    layer = wanted[0]
    product = cache_map.products["key"][layer]
    tokens = inputs.positions.numel()
    return (
        str(product.weight.device),
        f"{product.weight.dtype} weights into {output.dtype('key', layer)}",
        "heads share features" if product.shared else "by head",
        "up to 256 tokens" if tokens <= 256 else "more than 256 tokens",
    )


@functools.lru_cache(maxsize=256)
def _log_path(path: str, reason: str, *shape_class: str) -> None:
    """Once in a process for each choice."""
    _log.info("map_cache takes path %s (%s): %s", path, reason, ", ".join(shape_class))
