"""Rows of made-up pairs in the numbering of a layout, and the moments of them taken by a slow oracle."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvmap.fit.features import CacheShape, Layout
from kvmap.fit.moments import Moments


@dataclass
class PairRows:
    """Rows of all features and all targets of a pair, by split; it cuts moments as `PairMoments` does."""

    layout: Layout
    rows: dict[str, tuple[Tensor, Tensor]]

    def cut(self, split: str, features: Tensor, targets: Tensor) -> Moments:
        """Two-pass moments of the rows themselves."""
        x, y = self.rows[split][0][:, features], self.rows[split][1][:, targets]
        mean_x, mean_y = x.mean(0), y.mean(0)
        x, y = x - mean_x, y - mean_y
        return Moments(len(x), float(len(x)), mean_x, mean_y, x.T @ x, x.T @ y, (y * y).sum(0))

    def source_head(self, kind: str, layer: int, head: int, split: str = "fit") -> np.ndarray:
        """(n, d_s) rows of one source head, found by counting channels."""
        start = self._start(self.layout.source_shape, kind, layer, head)
        width = self.layout.source_shape[layer][1]
        return self.rows[split][0][:, start : start + width].numpy()

    def target_head(self, kind: str, layer: int, head: int, split: str = "fit") -> np.ndarray:
        """(n, d_t) rows of one target head."""
        start = self._start(self.layout.target_shape, kind, layer, head)
        width = self.layout.target_shape[layer][1]
        return self.rows[split][1][:, start : start + width].numpy()

    def _start(self, shape: CacheShape, kind: str, layer: int, head: int) -> int:
        channels = [
            (k, i, h)
            for k in ("key", "value")
            for i, (n, d) in enumerate(shape)
            for h in range(n)
            for _ in range(d)
        ]
        return channels.index((kind, layer, head))


def random_rows(
    source_shape: CacheShape,
    target_shape: CacheShape,
    *,
    native_layers: int = 0,
    n: int = 60,
    noise: float = 1.0,
    seed: int = 0,
) -> PairRows:
    """Correlated source features, and targets that mix them by one law for both splits, with noise.

    Source layers share a common part, so that what one adds depends on which others are there.
    """
    layout = Layout(source_shape, target_shape, native_layers)
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    n_source = 2 * sum(heads * width for heads, width in source_shape)
    common, law = normal(6, n_source), normal(n_source, layout.n_targets)
    strength = normal(n_source, 1).exp()
    offset = normal(layout.n_features), normal(layout.n_targets)
    rows = {}
    for split in ("fit", "held_out"):
        source = normal(n, n_source) + normal(n, 6) @ common
        target = source @ (strength * law) + 5 * noise * normal(n, layout.n_targets)
        native = [
            target[:, layout.targets(kind, layer)]
            for kind in ("key", "value")
            for layer in range(native_layers)
        ]
        x = torch.cat([source, *native], 1) + offset[0]
        rows[split] = (x, target + offset[1])
    return PairRows(layout, rows)
