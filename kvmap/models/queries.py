"""The queries of every layer as its attention product sees them, taken while the model reads."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from kvmap.errors import KvmapError
from kvmap.models.cache import KVCache
from kvmap.models.capture import prefill
from kvmap.models.geometry import UnsupportedModel
from kvmap.models.loaded import LoadedModel

_PREFIX = "kvmap_observed_"
# What an attention function may be given that moves the scores or joins the softmax beside q, k and softcap.
_ADDED_TERMS = ("position_bias", "s_aux", "sinks", "head_mask")


class OnLayer(Protocol):
    """What is called with each layer's attention, in the order of the layers."""

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, softcap: float | None, /
    ) -> None:
        """Look at one layer; nothing given may be changed, and what is not copied out is freed afterwards.

        Args:
            layer: decoder layer.
            query: (batch, n_heads, n, head_dim) of the n tokens the model is reading, rotated, normed and
                scaled by position as the model does it. Head h reads KV head ⌊h / (n_heads / n_kv_heads)⌋.
            key: (batch, n_kv_heads, columns, head_dim), rotated; the queries' own columns are the last n.
            value: the same of values.
            scaling: what q·k is multiplied by.
            softcap: the bound c of soft-capped scores `c·tanh(scaling·q·k / c)`; None: they have none.
        """
        ...


def read_queries(
    loaded: LoadedModel, input_ids: Tensor, attention_mask: Tensor | None, on_layer: OnLayer
) -> KVCache:
    """Read contexts as `prefill` does, and show each layer's queries, keys and values while they are there.

    What each query sees is `visible_columns`, with the window of its layer. One layer's queries exist at a
    time; keys and values are the cache's, of all columns.

    Args:
        loaded: the model.
        input_ids: (batch, tokens) int64; attention_mask: (batch, tokens), left padding, or None. Queries of
            pads are shown too, and mean nothing.
        on_layer: called once a layer, under `torch.no_grad`.

    Returns:
        The cache, as of `prefill`.

    Raises:
        UnsupportedModel: see `observe_attention` and `prefill`.
    """
    with observe_attention(loaded, on_layer):
        return prefill(loaded, input_ids, attention_mask)


@contextmanager
def observe_attention(loaded: LoadedModel, on_layer: OnLayer) -> Iterator[None]:
    """Within it, each attention of the model's decoder is shown to `on_layer` before it is computed.

    transformers lets a model's attention be any registered function. For the time of the context the model's
    is one that shows what it was given and calls the function the model would have called, on the mask it
    would have made. Numbers do not change, and the model's own choice comes back in the end, whatever
    happens. Other models, and other threads that run them, are not touched.

    Raises:
        UnsupportedModel: naming the first layer whose attention does not go through transformers' interface
            (told once the model has run), or that adds a term to its scores which q and k do not give.
        KvmapError: a model that is being observed already.
    """
    observer = _Observer(on_layer, _layers_of_modules(loaded), loaded.identity.name)
    found: list[Any] = [getattr(module, "config", None) for module in loaded.body.modules()]
    configs = {id(config): config for config in found if hasattr(config, "_attn_implementation")}
    own = {key: config._attn_implementation for key, config in configs.items()}
    names = {key: _register(name or "eager") for key, name in own.items()}
    token = _OBSERVER.set(observer)
    try:
        for key, config in configs.items():
            config._attn_implementation = names[key]
        yield
    finally:
        for key, config in configs.items():
            config._attn_implementation = own[key]
        _OBSERVER.reset(token)
    observer.check_complete(loaded.geometry.n_layers)


def visible_columns(mask: Tensor, queries: Tensor, window: int | None) -> Tensor:
    """Which columns each query sees: real ones up to its own, and of these the last `window`.

    Args:
        mask: (batch, columns) bool, real tokens side by side; padding before or after them.
        queries: (n,) or (batch, n) int64, the column each query stands in.
        window: of the layer (`LayerGeometry.window`), the query's own column included; None: no bound.

    Returns:
        (batch, n, columns) bool.
    """
    columns, own = torch.arange(mask.shape[1], device=mask.device), queries.to(mask.device).unsqueeze(-1)
    seen = columns <= own
    if window is not None:
        seen = seen & (columns > own - window)
    return mask.unsqueeze(1) & seen


def attention_scores(query: Tensor, key: Tensor, scaling: float, softcap: float | None = None) -> Tensor:
    """`s = scaling·q·k`, or `s = c·tanh(scaling·q·k / c)`, in the dtype given.

    Args:
        query: (batch, n_heads, n, head_dim); key: (batch, n_kv_heads, columns, head_dim).

    Returns:
        (batch, n_kv_heads, n_heads / n_kv_heads, n, columns): the heads that share a KV head side by side.
    """
    n_kv_heads, n = key.shape[1], query.shape[2]
    grouped = query.unflatten(1, (n_kv_heads, -1))
    # one product for a group: keys are not repeated
    scores = (grouped.flatten(2, 3) @ key.transpose(2, 3)) * scaling
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    return scores.unflatten(2, (-1, n))


def attention_weights(scores: Tensor, visible: Tensor) -> Tensor:
    """`a = softmax(s)` over the visible columns.

    Args:
        scores: (batch, n_kv_heads, group, n, columns); visible: (batch, n, columns) bool. A query that sees
            nothing, such as a pad, weighs all columns alike.
    """
    hidden = ~visible[:, None, None]
    return scores.masked_fill(hidden, torch.finfo(scores.dtype).min).softmax(-1)


def attention_outputs(weights: Tensor, value: Tensor) -> Tensor:
    """`o = Σ_i a_i v_i`, (batch, n_kv_heads, group, n, head_dim).

    Args:
        weights: (batch, n_kv_heads, group, n, columns); value: (batch, n_kv_heads, columns, head_dim).
    """
    return (weights.flatten(2, 3) @ value).unflatten(2, weights.shape[2:4])


@dataclass(eq=False)
class _Observer:
    on_layer: OnLayer
    layer_of: dict[int, int]
    """decoder layer by the id of each module within it"""
    name: str
    seen: set[int] = field(default_factory=set)

    def show(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, given: Any) -> None:
        layer = self.layer_of.get(id(module))
        if layer is None:
            return
        for term in _ADDED_TERMS:
            if given.get(term) is not None:
                raise UnsupportedModel(
                    f"{self.name}: layer {layer} adds {term} to its attention, so queries and keys alone do "
                    "not give its weights; kvmap cannot weigh its rows or compare its outputs"
                )
        scaling, softcap = given.get("scaling"), given.get("softcap")
        self.seen.add(layer)
        self.on_layer(
            layer,
            query,
            key,
            value,
            query.shape[-1] ** -0.5 if scaling is None else float(scaling),
            None if softcap is None else float(softcap),
        )

    def check_complete(self, n_layers: int) -> None:
        missed = [layer for layer in range(n_layers) if layer not in self.seen]
        if missed:
            raise UnsupportedModel(
                f"{self.name}: the attention of layer {missed[0]} did not go through transformers' attention "
                "interface (ALL_ATTENTION_FUNCTIONS), so its queries cannot be had; use a family whose "
                "modeling file calls ALL_ATTENTION_FUNCTIONS.get_interface"
            )


_OBSERVER: ContextVar[_Observer | None] = ContextVar("kvmap attention observer", default=None)


def _layers_of_modules(loaded: LoadedModel) -> dict[int, int]:
    layers: Any = loaded.body.layers
    return {id(module): number for number, layer in enumerate(layers) for module in layer.modules()}


def _register(own: str) -> str:
    """Make the observing twin of an attention implementation known; its name.

    The name contains that of the original, as transformers looks for "flash" in it; the mask is the
    original's, and none where that has none.

    Raises:
        KvmapError: the model is observed already.
    """
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    if own.startswith(_PREFIX):
        raise KvmapError("the attention of this model is being observed already: leave that first")
    name = _PREFIX + own
    AttentionInterface.register(name, partial(_observed, own))
    if own in ALL_MASK_ATTENTION_FUNCTIONS:
        AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[own])
    return name


def _observed(
    own: str, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
) -> Any:
    """Show one attention, and compute it as the module would have."""
    observer = _OBSERVER.get()
    if observer is not None:
        observer.show(module, query, key, value, kwargs)
    return _function_of(module, own)(module, query, key, value, *args, **kwargs)


def _function_of(module: nn.Module, own: str) -> Callable[..., Any]:
    """What the module's own forward looks up for an implementation: a modeling file has an eager attention of
    its own, and may have an interface of its own.
    """
    scope = inspect.unwrap(type(module).forward).__globals__
    function = scope["ALL_ATTENTION_FUNCTIONS"].get_interface(own, scope.get("eager_attention_forward"))
    if function is None:
        raise UnsupportedModel(
            f"{type(module).__name__} has no {own} attention that kvmap can find beside it"
        )
    return function
