"""Logits of hidden states that a model's body has computed, as many at a time as there is room for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from kvmap.models.loaded import LoadedModel


@contextmanager
def keep_hidden_states(loaded: LoadedModel) -> Iterator[list[Tensor]]:
    """Within it, the last hidden states of each run of the model's body are put into the list.

    Each (batch, tokens, hidden_size) in the model's dtype, after the last norm: what its head reads.
    """
    kept: list[Tensor] = []

    def keep(_module: nn.Module, _given: Any, output: Any) -> None:
        kept.append(output.last_hidden_state)

    handle = loaded.body.register_forward_hook(keep)
    try:
        yield kept
    finally:
        handle.remove()


@torch.no_grad()
def logits_of(loaded: LoadedModel, hidden: Tensor) -> Tensor:
    """Logits (batch, tokens, vocab_size) float32 of last hidden states (batch, tokens, hidden_size).

    They are the model's own: its head, and whatever bias, scale or soft cap its forward puts on it. The model
    runs with a body that gives these hidden states back; no other thread may run it meanwhile.
    """
    from transformers.modeling_outputs import MoeModelOutputWithPast

    # has every field that the heads of dense and sparse models look at
    computed = MoeModelOutputWithPast(last_hidden_state=hidden)
    body: Any = loaded.body
    # a device map puts a forward of its own on the instance
    own = vars(body).get("forward")
    body.forward = lambda *_given, **_named: computed
    try:
        ids = torch.zeros(hidden.shape[:2], dtype=torch.long, device=loaded.device)
        logits: Tensor = loaded.model(input_ids=ids).logits
    finally:
        del body.forward
        if own is not None:
            body.forward = own
    return logits.float()
