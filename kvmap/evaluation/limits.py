"""The longest sequence both models of a pair take."""

from __future__ import annotations

from kvmap.models.pair import ModelPair


def context_limit(pair: ModelPair) -> int:
    """Tokens of context and continuation together: the positions of both models; reads no weights.

    Windows set no limit: a windowed layer sees the last tokens of a longer context, as it does natively.
    """
    return min(pair.source_geometry.max_positions, pair.target_geometry.max_positions)
