"""`map_cache`, the reference: one head after another, every step as the equation has it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from kvmap.kernels.map_cache.spec import KINDS, CacheMap, Inputs, Output, Product
from kvmap.models.rope import apply_rotation, strip_rotation


def map_cache_reference(
    cache_map: CacheMap, inputs: Inputs, output: Output, layers: Iterable[int] | None = None
) -> Tensor:
    """Map a cache, writing into `output`. See `kvmap.kernels.map_cache.spec` for the equation.

    Factors are rounded to `Product.compute_dtype`; their products are summed, biases added and rotations
    applied in at least float32; numbers past the output's finite range are clamped to it.

    Args:
        cache_map: the weights.
        inputs: what is mapped.
        output: where it goes.
        layers: target layers to write; None: all that are mapped.

    Returns:
        (layers, 2, 2) int64, by layer in the order of `layers` and by kind: numbers that are not finite,
        and numbers that were clamped.
    """
    counts = []
    for layer in cache_map.layers if layers is None else layers:
        row = []
        for kind in KINDS:
            mapped = _mapped(cache_map.products[kind][layer], inputs)
            mapped = apply_rotation(mapped, inputs.positions, output.rotation(kind, layer))
            if inputs.keep is not None:
                mapped = mapped.masked_fill(~inputs.keep[:, None, :, None].to(mapped.device), 0.0)
            cast, count = saturated(mapped, output.dtype(kind, layer))
            output.write(kind, layer, 0, cast)
            row.append(count)
        counts.append(torch.stack(row))
    return torch.stack(counts) if counts else torch.zeros(0, 2, 2, dtype=torch.int64)


def saturated(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """To `dtype`, clamped to its finite range; and int64 (numbers not finite, numbers clamped)."""
    largest = torch.finfo(dtype).max
    n_bad = (~torch.isfinite(x)).sum()
    if largest >= torch.finfo(x.dtype).max:
        return x.to(dtype), torch.stack([n_bad, torch.zeros_like(n_bad)])
    n_clamped = (x.abs() > largest).sum() - torch.isinf(x).sum()
    return x.clamp(-largest, largest).to(dtype), torch.stack([n_bad, n_clamped])


def _mapped(product: Product, inputs: Inputs) -> Tensor:
    """Content of one kind of one target layer, (batch, H_t, tokens, d_t)."""
    n_heads, width = product.bias.shape
    accumulator = torch.promote_types(product.compute_dtype, torch.float32)
    heads = []
    for head in range(n_heads):
        features = torch.cat([*_features(product, inputs, head)], dim=-1)
        columns = product.weight[:, head * width : (head + 1) * width]
        weight = columns if product.shared else product.weight[head]
        rounded = features.to(product.compute_dtype).to(accumulator)
        found = rounded @ weight.to(product.compute_dtype).to(accumulator)
        if product.scale is not None:
            found = found * product.scale[head]
        heads.append(found.to(torch.promote_types(accumulator, product.bias.dtype)) + product.bias[head])
    return torch.stack(heads, dim=1)


def _features(product: Product, inputs: Inputs, head: int) -> Iterable[Tensor]:
    """What one head reads, slot by slot and source head by source head: (batch, tokens, d_s) each."""
    for origin, kind, layer in product.slots:
        side = inputs.side(origin)
        content = strip_rotation(side.tensor(kind, layer), inputs.positions, side.rotation(kind, layer))
        count = content.shape[1]
        for source_head in range(count) if product.shared else [product.head_of(count, head)]:
            yield content[:, source_head]
