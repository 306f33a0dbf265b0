"""What one pass over a text adds up, layer by layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvmap.diagnostics.next_token import Predicted
from kvmap.diagnostics.token_groups import N_KINDS


@dataclass
class TextSums:
    """Sums over the counted tokens of one text.

    A token counts if it is real, lies behind the native head and before the token held back: the columns that
    were mapped, whether the target has recomputed them since or not.

    Attributes:
        text: its name.
        native_layers: first layers of which no column was mapped.
        n_groups: token kinds, and after them the bins of positions.
        counts: (n_groups,) float64 tokens.
        layers: by layer, float64 sums by name, on the CPU; see the functions that make them in `attention`,
            `concentration` and `errors`.
        predicted: next-token predictions, batch by batch.
    """

    text: str
    native_layers: int
    n_groups: int
    counts: Tensor = field(init=False)
    layers: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    predicted: list[Predicted] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Start at nothing."""
        self.counts = torch.zeros(self.n_groups, dtype=torch.float64)

    @property
    def n_tokens(self) -> int:
        """Counted tokens: each is of one kind."""
        return int(self.counts[:N_KINDS].sum())

    @property
    def mapped_layers(self) -> list[int]:
        """Layers above the native ones, in order."""
        return [layer for layer in sorted(self.layers) if layer >= self.native_layers]

    def add(self, layer: int, found: Mapping[str, Tensor]) -> None:
        """Add one batch's sums of one layer."""
        known = self.layers.setdefault(layer, {})
        for name, value in found.items():
            value = value.cpu().double()
            known[name] = known[name] + value if name in known else value
