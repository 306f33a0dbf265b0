"""What the target's own layers compute beside the map: native layers, and all layers of the first tokens."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from kvmap.errors import KvmapError

Past = Callable[[int], tuple[Tensor, Tensor]]
"""By layer, keys and values (1, n_kv_heads, tokens, width) of the tokens before, as the pages hold them."""

_LAYER_NAME = re.compile(r"(.*\.)?layers\.(\d+)\.(.+)")


class UnknownDecoder(KvmapError):
    """A model whose decoder layers cannot be run one by one."""


class NativeLayers:
    """A vLLM model's decoder layers, run in plain PyTorch over a few tokens.

    Each layer is a shallow copy that shares all weights with the engine's own, but for its attention, which
    is torch's and notes the keys and values it is given. The engine's modules are not touched.
    """

    def __init__(self, model: nn.Module, attention_layers: dict[str, Any]) -> None:
        """Args: vLLM's model, and its attention modules by name, as "model.layers.3.self_attn.attn".

        Raises:
            UnknownDecoder: names that are not `….layers.<n>.…`, or a body without an embedding of ids.
        """
        found: dict[int, tuple[str, Any]] = {}
        bodies = set()
        for name, attention in attention_layers.items():
            match = _LAYER_NAME.fullmatch(name)
            if match is None:
                raise UnknownDecoder(
                    f"attention layer {name!r}: expected a name as model.layers.3.self_attn.attn"
                )
            found[int(match[2])] = (match[3], attention)
            bodies.add((match[1] or "").rstrip("."))
        if len(bodies) != 1 or sorted(found) != list(range(len(found))):
            raise UnknownDecoder(
                f"attention layers in {sorted(bodies)}: expected one stack, layers 0 to {len(found) - 1}"
            )
        self._body = model.get_submodule(bodies.pop())
        layers: Any = self._body.layers
        self._attentions = []
        self._layers = []
        for number in range(len(found)):
            path, attention = found[number]
            noting = _NotingAttention(attention)
            self._attentions.append(noting)
            self._layers.append(_with_replaced(layers[number], path.split("."), noting))

    def embed(self, token_ids: Tensor) -> Tensor:
        """(tokens,) int64 to (tokens, hidden_size)."""
        embed: Any = getattr(self._body, "embed_input_ids", None) or self._body.embed_tokens
        hidden: Tensor = embed(token_ids)
        return hidden

    def run(
        self, token_ids: Tensor, start: int, n_first: int, n_layers: int, past: Past | None
    ) -> tuple[list[tuple[Tensor, Tensor]], list[tuple[Tensor, Tensor]]]:
        """Keys and values of some tokens in the first layers, and of the first of them in all layers.

        Args:
            token_ids: (tokens,) int64, from token `start` of the context on.
            start: tokens before, whose keys and values `past` has.
            n_first: of these tokens, the first so many run through all layers.
            n_layers: first layers that all of them run through.
            past: None where `start` is 0.

        Returns:
            Of the first `n_layers` layers, over all tokens; of the layers above, over the first `n_first`.
            Each (1, n_kv_heads, tokens, width), rotated as the engine rotates. None above if `n_first` is 0.
        """
        positions = torch.arange(start, start + len(token_ids), device=token_ids.device)
        state = _State(positions, self.embed(token_ids), None)
        below: list[tuple[Tensor, Tensor]] = []
        above: list[tuple[Tensor, Tensor]] = []
        for number in range(n_layers):
            # of the last of them no more than keys and values is wanted
            is_last = number == n_layers - 1
            following, pair = self._run_layer(number, state, past, leaves=is_last)
            below.append(pair)
            state = state if is_last else following
        if n_first == 0:
            return below, above
        state = state.first(n_first)
        for number in range(max(n_layers - 1, 0), len(self._layers)):
            state, pair = self._run_layer(number, state, past, leaves=False)
            if number >= n_layers:
                above.append(pair)
        return below, above

    def _run_layer(
        self, number: int, state: _State, past: Past | None, leaves: bool
    ) -> tuple[_State, tuple[Tensor, Tensor]]:
        """What comes behind a layer, and its keys and values; with `leaves` it ends at its attention."""
        attention = self._attentions[number]
        attention.past, attention.leaves = None if past is None else past(number), leaves
        try:
            output = self._layers[number](state.positions, state.hidden, state.residual)
        except _Left:
            return state, attention.take()
        if not (isinstance(output, tuple) and len(output) == 2):
            raise UnknownDecoder(
                f"layer {number} gives {type(output).__name__}: expected hidden states and residual"
            )
        return _State(state.positions, *output), attention.take()


@dataclass(frozen=True, eq=False)
class _State:
    """Some tokens between two layers: positions (tokens,), hidden states and residual (tokens, hidden)."""

    positions: Tensor
    hidden: Tensor
    residual: Tensor | None

    def first(self, n: int) -> _State:
        residual = None if self.residual is None else self.residual[:n]
        return _State(self.positions[:n], self.hidden[:n], residual)


class _Left(Exception):
    """Leaves a layer whose keys and values are known. Not an error; never seen from outside."""


class _NotingAttention(nn.Module):
    """Causal attention over past and own tokens, in place of vLLM's paged one."""

    def __init__(self, attention: Any) -> None:
        super().__init__()
        self.n_heads, self.n_kv_heads = attention.num_heads, attention.num_kv_heads
        self.width, self.scale = attention.head_size, float(attention.impl.scale)
        if (
            getattr(attention.impl, "logits_soft_cap", None)
            or getattr(attention.impl, "sinks", None) is not None
        ):
            raise UnknownDecoder("attention with a soft cap or with sinks cannot be run beside the engine")
        self.past: tuple[Tensor, Tensor] | None = None
        self.leaves = False
        self._held: tuple[Tensor, Tensor] | None = None

    def take(self) -> tuple[Tensor, Tensor]:
        """Keys and values of the last run."""
        assert self._held is not None
        held, self._held, self.past = self._held, None, None
        return held

    def forward(self, query: Tensor, key: Tensor, value: Tensor, **_others: Any) -> Tensor:
        n = query.shape[0]
        q = query.view(n, self.n_heads, self.width).transpose(0, 1).unsqueeze(0)
        k, v = (x.reshape(n, self.n_kv_heads, self.width).transpose(0, 1).unsqueeze(0) for x in (key, value))
        self._held = (k.contiguous(), v.contiguous())
        if self.leaves:
            raise _Left
        mask = None
        if self.past is not None:
            n_past = self.past[0].shape[2]
            k, v = (torch.cat(pair, dim=2) for pair in zip(self.past, (k, v), strict=True))
            mask = torch.ones(n, n_past + n, dtype=torch.bool, device=q.device).tril(n_past)
        out = scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=self.scale, enable_gqa=True
        )
        return out.squeeze(0).transpose(0, 1).reshape(n, self.n_heads * self.width)


def _with_replaced(module: nn.Module, path: Sequence[str], replacement: nn.Module) -> nn.Module:
    """A shallow copy in which the child at `path` is another; modules on the way are copied, none changed."""
    shallow = copy.copy(module)
    shallow.__dict__["_modules"] = dict(module._modules)
    child = module._modules[path[0]]
    assert child is not None
    shallow._modules[path[0]] = (
        replacement if len(path) == 1 else _with_replaced(child, path[1:], replacement)
    )
    return shallow
