"""What the target computes itself of a context whose rest is mapped, and its way into the pages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvmap.serving.compatibility import EngineFacts
from kvmap.serving.vllm.heads import KeptHeads, Layers
from kvmap.serving.vllm.mapper_files import EngineMapper
from kvmap.serving.vllm.messages import Take
from kvmap.serving.vllm.native import NativeLayers
from kvmap.serving.vllm.pages import LayerPages, write_columns


@dataclass(frozen=True, eq=False)
class TargetParts:
    """What filling pages needs of the engine.

    Attributes:
        facts: the engine's.
        mapper: of this pair.
        pages: of every layer.
        native: the engine's own layers; may raise until the model has been seen.
        heads: the first tokens of contexts, kept.
    """

    facts: EngineFacts
    mapper: EngineMapper
    pages: Sequence[LayerPages]
    native: Callable[[], NativeLayers]
    heads: KeptHeads


def compute_own(parts: TargetParts, take: Take, block_ids: Tensor, first: int) -> tuple[Layers, bool]:
    """Have the target run its native layers over all tokens, and all layers over those before `first`.

    Args:
        parts: of the engine.
        take: whose pages are filled; what it has of its own is read from them.
        block_ids: (blocks,) int64, its pages.
        first: the first token that is mapped.

    Returns:
        Keys and values of its native layers from token `take.n_own` on, which the pages have too. Whether any
        layer has run: first tokens may be known.
    """
    n_layers, start = parts.mapper.mapper.native_layers, take.n_own
    head = take.token_ids[start:first]
    kept = parts.heads.get(head) if start == 0 and head else None
    n_first = 0 if kept is not None else len(head)
    for layer, (keys, values) in enumerate(kept or ()):
        write_columns(parts.pages[layer], block_ids, 0, keys, values)
    if n_first == 0 and n_layers == 0:
        return [], False
    token_ids = take.token_ids[start:] if n_layers else head
    below, above = _run(parts, token_ids, block_ids, start, n_first, n_layers)
    for layer, (keys, values) in enumerate([*below, *above]):
        write_columns(parts.pages[layer], block_ids, start, keys, values)
    if start == 0 and n_first:
        parts.heads.put(head, [*below, *above])
    return below, True


def _run(
    parts: TargetParts,
    token_ids: tuple[int, ...],
    block_ids: Tensor,
    start: int,
    n_first: int,
    n_layers: int,
) -> tuple[Layers, Layers]:
    """See `NativeLayers.run`; tokens before `start` are read from the pages."""

    def past(layer: int) -> tuple[Tensor, Tensor]:
        return parts.pages[layer].read(block_ids, 0, start)

    ids = torch.tensor(token_ids, dtype=torch.long, device=parts.pages[0].device)
    return parts.native().run(ids, start, n_first, n_layers, past if start else None)
