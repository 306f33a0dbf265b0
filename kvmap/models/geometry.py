"""The shape of a model's KV cache, read off its config before any weights load, or a refusal with its
reason.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvmap.errors import KvmapError
from kvmap.models.families import FAMILIES, REFUSED, Family, refused_layer


class UnsupportedModel(KvmapError):
    """A model whose cache cannot be transferred: the message names the model, the layer and the reason."""


@dataclass(frozen=True)
class LayerGeometry:
    """One decoder layer's KV.

    Attributes:
        n_kv_heads: KV heads, H.
        head_dim: channels of a head, d.
        window: tokens a query sees, itself included; None for all before it.
        rope_type: transformers' name of the scaling ("default", "llama3", ...); None where keys are not
            rotated.
    """

    n_kv_heads: int
    head_dim: int
    window: int | None
    rope_type: str | None

    def seen_of(self, n_before: int) -> int:
        """How many of the last of `n_before` tokens the next query sees, and with it all later ones.

        A query sees the `window` tokens that end with itself. What lies before is never read again.
        """
        return n_before if self.window is None else min(n_before, self.window - 1)


@dataclass(frozen=True)
class Geometry:
    """The KV cache of a whole model; every layer owns full keys and values."""

    model_type: str
    n_layers: int
    hidden_size: int
    n_heads: int
    vocab_size: int
    max_positions: int
    layers: tuple[LayerGeometry, ...]

    @property
    def n_kv_heads(self) -> int:
        """KV heads of layer 0; they are the same in every layer of the supported families."""
        return self.layers[0].n_kv_heads

    @property
    def head_dim(self) -> int:
        """Channels of a head of layer 0; the same in every layer of the supported families."""
        return self.layers[0].head_dim

    def kv_bytes(self, n_tokens: int, bytes_per_element: int) -> int:
        """Bytes of one context's cache: 2 · Σ_layers H·d · tokens · bytes."""
        return (
            2 * n_tokens * bytes_per_element * sum(layer.n_kv_heads * layer.head_dim for layer in self.layers)
        )

    @property
    def windows(self) -> tuple[int, ...]:
        """The windows of the layers that have one, each once, the shortest first."""
        return tuple(sorted({layer.window for layer in self.layers if layer.window is not None}))

    def seen_tokens(self, n_tokens: int) -> tuple[int, ...]:
        """Of each layer, how many of a context's last tokens anything after it can see."""
        return tuple(layer.seen_of(n_tokens) for layer in self.layers)


def geometry_from_config(config: Any) -> Geometry:
    """The geometry of the text model that `config` describes, itself or within a multimodal wrapper.

    Raises:
        UnsupportedModel: naming the model type, the layer and the reason.
    """
    text = config.get_text_config(decoder=True)
    family = _family(config, text)
    _check_values(text)
    return Geometry(
        model_type=text.model_type,
        n_layers=text.num_hidden_layers,
        hidden_size=text.hidden_size,
        n_heads=text.num_attention_heads,
        vocab_size=text.vocab_size,
        max_positions=text.max_position_embeddings,
        layers=tuple(_layer(text, family, layer) for layer in range(text.num_hidden_layers)),
    )


def _family(config: Any, text: Any) -> Family:
    model_type = text.model_type
    if model_type in REFUSED:
        raise UnsupportedModel(
            f"model type {model_type!r} cannot be used: {refused_layer(text, model_type)}: "
            f"{REFUSED[model_type]}"
        )
    shared = getattr(text, "num_kv_shared_layers", 0) or 0
    if shared:
        raise UnsupportedModel(
            f"model type {model_type!r} cannot be used: layer {text.num_hidden_layers - shared} owns no KV "
            f"but reads an earlier layer's (num_kv_shared_layers = {shared})"
        )
    if model_type not in FAMILIES:
        wrapper = "" if text is config else f" (the text model of a {config.model_type!r})"
        raise UnsupportedModel(
            f"unknown model type {model_type!r}{wrapper}: kvmap does not know how it rotates its keys. "
            f"Known: {', '.join(sorted(FAMILIES))}. To add it, look in transformers' "
            f"modeling_{model_type}.py whether the key norm comes before apply_rotary_pos_emb, how channels "
            "pair up and which layers rotate, then follow 'Add a model family' in CONTRIBUTING.md"
        )
    return FAMILIES[model_type]


def _check_values(text: Any) -> None:
    """Refuse settings of a known family under which a layer's cache is not what its siblings' is."""
    value_dim = getattr(text, "v_head_dim", None)
    if value_dim is not None and value_dim != _head_dim(text):
        raise UnsupportedModel(
            f"model type {text.model_type!r}: layer 0 has values of {value_dim} channels a head but keys of "
            f"{_head_dim(text)}; kvmap needs them alike"
        )
    if getattr(text, "use_bidirectional_attention", None):
        raise UnsupportedModel(
            f"model type {text.model_type!r}: layer 0 attends in both directions "
            "(use_bidirectional_attention), so its cache changes with every later token"
        )
    for layer, kind in enumerate(getattr(text, "layer_types", None) or ()):
        if kind not in ("full_attention", "sliding_attention"):
            raise UnsupportedModel(
                f"model type {text.model_type!r}: layer {layer} is of type {kind!r}; kvmap serves "
                "full_attention and sliding_attention layers, which own a key and a value per token"
            )


def _head_dim(text: Any) -> int:
    return getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads


def _layer(text: Any, family: Family, layer: int) -> LayerGeometry:
    return LayerGeometry(
        n_kv_heads=getattr(text, "num_key_value_heads", None) or text.num_attention_heads,
        head_dim=_head_dim(text),
        window=_window(text, family, layer),
        rope_type=_rope_type(text, layer) if family.rotates(text, layer) else None,
    )


def _window(text: Any, family: Family, layer: int) -> int | None:
    window = getattr(text, "sliding_window", None)
    if family.windows == "none" or window is None:
        return None
    if family.windows == "by_type" and text.layer_types[layer] != "sliding_attention":
        return None
    return int(window)


def _rope_type(text: Any, layer: int) -> str:
    parameters = text.rope_parameters
    layer_types = getattr(text, "layer_types", None)
    if layer_types and layer_types[layer] in parameters:
        parameters = parameters[layer_types[layer]]
    return parameters["rope_type"]
