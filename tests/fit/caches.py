"""Made-up stripped caches whose target is a noisy linear image of their source."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from kvmap.fit.features import CacheShape, Layout, cache_shape
from kvmap.fit.pair_moments import PairMoments, TableSpec
from kvmap.models.cache import KVCache

SOURCE_SHAPE: CacheShape = ((2, 3), (2, 3), (2, 3))
TARGET_SHAPE: CacheShape = ((2, 4), (2, 4))
GROUPED_TARGET_SHAPE: CacheShape = ((4, 2), (4, 2))
UNEVEN_SOURCE_SHAPE: CacheShape = ((2, 3), (4, 2), (1, 5))
UNEVEN_TARGET_SHAPE: CacheShape = ((2, 2), (4, 1), (3, 2))


def stripped(keys: list[Tensor], values: list[Tensor], mask: Tensor | None = None) -> KVCache:
    """A content cache of the given layers (batch, heads, tokens, head_dim)."""
    batch, _, tokens, _ = keys[0].shape
    mask = torch.ones(batch, tokens, dtype=torch.bool) if mask is None else mask.bool()
    positions = (mask.long().cumsum(-1) - 1).clamp(min=0)
    return KVCache(tuple(keys), tuple(values), positions, mask, None)


def random_cache(
    shape: CacheShape, batch: int, tokens: int, generator: torch.Generator, mask: Tensor | None = None
) -> KVCache:
    def layers() -> list[Tensor]:
        return [
            torch.randn(batch, heads, tokens, width, generator=generator, dtype=torch.float64)
            for heads, width in shape
        ]

    return stripped(layers(), layers(), mask)


def linear_image(source: KVCache, shape: CacheShape, seed: int, noise: float = 0.3) -> KVCache:
    """A target cache that mixes all source features of its kind, plus an offset and noise."""
    law, disturbance = (torch.Generator().manual_seed(seed + i) for i in (0, source.batch_size))

    def image(layers: tuple[Tensor, ...]) -> list[Tensor]:
        x = torch.cat([layer.transpose(1, 2).flatten(2) for layer in layers], -1)
        out = []
        for heads, width in shape:
            mix = torch.randn(x.shape[-1], heads * width, generator=law, dtype=torch.float64)
            offset = torch.randn(heads * width, generator=law, dtype=torch.float64)
            y = x @ mix + offset
            y = y + noise * torch.randn(y.shape, generator=disturbance, dtype=torch.float64)
            out.append(y.unflatten(-1, (heads, width)).transpose(1, 2))
        return out

    return stripped(image(source.keys), image(source.values), source.mask)


def rows_of(layers: tuple[Tensor, ...], rows: Tensor | None = None) -> np.ndarray:
    """(n, layers · heads · channels) by explicit loops: the slow oracle of the feature order."""
    batch, _, tokens, _ = layers[0].shape
    wanted = [[True] * tokens] * batch if rows is None else rows.tolist()
    numbers = [layer.tolist() for layer in layers]
    out = []
    for b in range(batch):
        for t in range(tokens):
            if wanted[b][t]:
                out.append([channel for layer in numbers for head in layer[b] for channel in head[t]])
    return np.array(out)


def pair_of_caches(
    target_shape: CacheShape = TARGET_SHAPE, seed: int = 0, source_shape: CacheShape = SOURCE_SHAPE
) -> dict[str, tuple[KVCache, KVCache]]:
    """By split, a source cache and its target, from one linear law; the held-out rows have another mean."""
    generator = torch.Generator().manual_seed(seed)
    pairs = {}
    for split, batch, shift in (("fit", 5, 0.0), ("held_out", 3, 0.7)):
        source = random_cache(source_shape, batch, 17, generator)
        source = stripped([k + shift for k in source.keys], [v - shift for v in source.values])
        pairs[split] = (source, linear_image(source, target_shape, seed=7))
    return pairs


def moments_of(
    pairs: dict[str, tuple[KVCache, KVCache]],
    native_layers: int = 0,
    tables: Callable[[Layout], list[TableSpec]] | None = None,
) -> PairMoments:
    """Moments of both splits; of all source layers and heads unless other tables are asked for."""
    source, target = pairs["fit"]
    layout = Layout(cache_shape(source), cache_shape(target), native_layers)
    moments = PairMoments.zeros(layout, None if tables is None else tables(layout))
    for split, (source, target) in pairs.items():
        moments.update(split, source, target)
    return moments


def kind_layers(kv: KVCache, kind: str) -> tuple[Tensor, ...]:
    return kv.keys if kind == "key" else kv.values
