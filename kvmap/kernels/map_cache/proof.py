"""Whether a path new to this device gives what the batched one gives: asked once, on a few tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kvmap.kernels.map_cache.batched import map_cache_batched
from kvmap.kernels.map_cache.spec import KINDS, CacheMap, Columns, Inputs, Output

N_COLUMNS = 48
TOLERANCE = {torch.bfloat16: 0.03, torch.float16: 0.01, torch.float32: 0.01}
"""Of the largest number: a few roundings of the output or the factors. A wrong kernel misses by its size."""

Path = Callable[[CacheMap, Inputs, Output, Sequence[int]], Tensor]


def disagreement(cache_map: CacheMap, inputs: Inputs, output: Output, layer: int, path: Path) -> str | None:
    """How a path differs from the batched one on the first columns of one layer.

    Args:
        cache_map, inputs, output: of the call that is to be served; `output` is not written.
        layer: a target layer that is mapped.
        path: called as `map_cache_batched` with the layers to write.

    Returns:
        None where it agrees; else what is wrong, an error of the path included.
    """
    few = inputs.slice_tokens(0, min(N_COLUMNS, inputs.positions.shape[1]))
    expected, found = (_room(cache_map, few, output, layer) for _ in range(2))
    map_cache_batched(cache_map, few, expected, (layer,))
    try:
        path(cache_map, few, found, (layer,))
        return _difference(expected, found, layer)
    except Exception as error:  # whatever a compiler or a driver raises: the batched path serves
        return f"{type(error).__name__}: {error}".splitlines()[0]


def _room(cache_map: CacheMap, inputs: Inputs, output: Output, layer: int) -> Columns:
    """Zeros for one layer of these columns, in the output's dtypes and with its rotations."""
    batch, n_tokens = inputs.positions.shape

    def zeros(kind: str) -> dict[int, Tensor]:
        n_heads, width = cache_map.products[kind][layer].bias.shape
        held = output.tensor(kind, layer)
        return {layer: torch.zeros(batch, n_heads, n_tokens, width, dtype=held.dtype, device=held.device)}

    return Columns(zeros("key"), zeros("value"), output.rotations)


def _difference(expected: Columns, found: Columns, layer: int) -> str | None:
    for kind in KINDS:
        right, got = expected.tensor(kind, layer).double(), found.tensor(kind, layer).double()
        allowed = TOLERANCE.get(expected.dtype(kind, layer), 0.0) * float(right.abs().max())
        apart = float((right - got).abs().nan_to_num(torch.inf).max())
        if apart > allowed:
            return f"{kind}s of layer {layer} are {apart:.3g} off; rounding explains {allowed:.3g}"
    return None
