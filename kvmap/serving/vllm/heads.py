"""The target's own keys and values of contexts' first tokens, kept: many prompts begin alike."""

from __future__ import annotations

from collections import OrderedDict

from torch import Tensor

Layers = list[tuple[Tensor, Tensor]]
"""Of some layers keys and values, each (1, n_kv_heads, tokens, width)."""


class KeptHeads:
    """By the ids of the first tokens, keys and values of all layers; those not used for longest go first.

    Causal attention makes them a function of these ids alone. One token through a whole model costs as much
    as a step of decoding, more than the map of a short prompt.
    """

    def __init__(self, n_most: int = 64) -> None:
        """Args: how many are kept."""
        self._n_most = n_most
        self._held: OrderedDict[tuple[int, ...], Layers] = OrderedDict()

    def get(self, token_ids: tuple[int, ...]) -> Layers | None:
        """Each layer's (1, n_kv_heads, tokens, width); None where they are not known."""
        if token_ids not in self._held:
            return None
        self._held.move_to_end(token_ids)
        return self._held[token_ids]

    def put(self, token_ids: tuple[int, ...], layers: Layers) -> None:
        """Keep a copy."""
        n = len(token_ids)
        self._held[token_ids] = [(k[:, :, :n].clone(), v[:, :, :n].clone()) for k, v in layers]
        while len(self._held) > self._n_most:
            self._held.popitem(last=False)
