"""The longest sequence both models of a pair take."""

from __future__ import annotations

from kvmap.models.geometry import Geometry
from kvmap.models.pair import ModelPair


def context_limit(pair: ModelPair) -> int:
    """Tokens of context and continuation together: positions and windows of both models; reads no weights."""
    return min(_limit(pair.source_geometry), _limit(pair.target_geometry))


def _limit(geometry: Geometry) -> int:
    windows = [layer.window for layer in geometry.layers if layer.window is not None]
    return min([geometry.max_positions, *windows])
