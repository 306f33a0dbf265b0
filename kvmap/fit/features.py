"""What a map reads: the numbering of features and targets, and the recipe of every target head."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvmap.errors import KvmapError, UnknownName

if TYPE_CHECKING:
    from kvmap.models.cache import KVCache
    from kvmap.models.geometry import Geometry

KINDS = ("key", "value")
SUPPORTS = ("full_head", "head_local", "banded")
REGRESSORS = ("own_kind", "both_kinds")
OWN, CROSS, NATIVE = range(3)
"""Bands of a head's features: its own source heads', the other heads', the target's native layers'."""

CacheShape = tuple[tuple[int, int], ...]
"""`(n_kv_heads, head_dim)` of each layer."""

Selection = tuple[tuple[int, ...], ...]
"""Source layers for each target layer, the best first where a rule ranks them; none for a native layer."""


Layers = Sequence[Tensor] | Mapping[int, Tensor]
"""Tensors by the number of their layer."""


class SelectionError(KvmapError):
    """A rule or a number of source layers that cannot be served."""


@dataclass(frozen=True)
class Block:
    """Channels of one layer and kind, of one head or of all.

    Attributes:
        origin: "source", or "native" for the target's own first layers, which the target computes itself.
        kind: "key" or "value".
        layer: of the origin's model.
        head: one KV head, or None for all of them.
    """

    origin: str
    kind: str
    layer: int
    head: int | None = None


@dataclass(frozen=True)
class Layout:
    """The one numbering of all features and all targets of a pair.

    Features: source keys, source values, native keys, native values, each in the order (layer, head,
    channel). Targets: keys, then values, likewise. Numbers do not depend on what a table of moments holds.

    Attributes:
        source_shape: `(n_kv_heads, head_dim)` of each source layer; target_shape likewise.
        native_layers: first target layers that count as features too.
    """

    source_shape: CacheShape
    target_shape: CacheShape
    native_layers: int = 0

    def __post_init__(self) -> None:
        """Refuse more native layers than there are.

        Raises:
            SelectionError: naming both numbers.
        """
        if not 0 <= self.native_layers <= len(self.target_shape):
            raise SelectionError(
                f"native_layers={self.native_layers}: the target has {len(self.target_shape)} layers; "
                f"expected 0 to {len(self.target_shape)}"
            )

    @property
    def native_shape(self) -> CacheShape:
        """`(n_kv_heads, head_dim)` of each native layer."""
        return self.target_shape[: self.native_layers]

    @property
    def n_features(self) -> int:
        """All features: twice the channels of source and native layers."""
        return 2 * (n_channels(self.source_shape) + n_channels(self.native_shape))

    @property
    def n_targets(self) -> int:
        """All targets: twice the target's channels."""
        return 2 * n_channels(self.target_shape)

    def span(self, block: Block) -> range:
        """The features of one block.

        Raises:
            SelectionError: a layer or head that the pair does not have.
        """
        shape = self._shape(block.origin)
        if not 0 <= block.layer < len(shape) or not 0 <= (block.head or 0) < shape[block.layer][0]:
            raise SelectionError(
                f"{block.origin} layer {block.layer}, head {block.head}: there are {len(shape)} such layers, "
                f"(heads, head_dim) {shape}"
            )
        return _span(shape, block.layer, block.head, self._feature_start(block.origin, block.kind))

    def features(self, blocks: Iterable[Block]) -> Tensor:
        """Numbers of the features of some blocks, in their order: (p,) int64."""
        return torch.tensor([i for block in blocks for i in self.span(block)], dtype=torch.int64)

    def targets(self, kind: str, layer: int | None = None, head: int | None = None) -> Tensor:
        """Numbers of the targets of one kind; of one layer, or of one head of it: (q,) int64."""
        start = KINDS.index(kind) * n_channels(self.target_shape)
        if layer is None:
            return torch.arange(start, start + n_channels(self.target_shape))
        span = _span(self.target_shape, layer, head, start)
        return torch.arange(span.start, span.stop)

    def kind_features(self, kind: str) -> Tensor:
        """All features of one kind, source and native: (p,) int64."""
        blocks = [Block("source", kind, layer) for layer in range(len(self.source_shape))]
        blocks += [Block("native", kind, layer) for layer in range(self.native_layers)]
        return self.features(blocks)

    def _shape(self, origin: str) -> CacheShape:
        return self.source_shape if origin == "source" else self.native_shape

    def _feature_start(self, origin: str, kind: str) -> int:
        number = KINDS.index(kind)
        if origin == "source":
            return number * n_channels(self.source_shape)
        return 2 * n_channels(self.source_shape) + number * n_channels(self.native_shape)


@dataclass(frozen=True)
class Recipe:
    """What each head of each target layer reads, and in what order.

    A head's features are its source layers' channels of its own kind, in the order of the selection; with
    `both_kinds` the same layers' other kind; the native layers' channels of its own kind; with `both_kinds`
    their other kind. With "head_local" support only head a(h) of each source layer, and head h of each
    native layer; else all heads.

    Attributes:
        source_shape: `(n_kv_heads, head_dim)` of each source layer; target_shape likewise.
        support: "full_head" and "banded" read all heads ([H] §3.3; "banded" penalises the other heads'
            features apart), "head_local" the matched one ([C] §3.2).
        regressors: "own_kind" or "both_kinds" (keys help to predict values, and the reverse).
        native_layers: first target layers that the target computes itself; they are not mapped, and feed
            the others.
        selection: source layers of each target layer, by kind of the target.
    """

    source_shape: CacheShape
    target_shape: CacheShape
    support: str
    selection: Mapping[str, Selection]
    regressors: str = "own_kind"
    native_layers: int = 0

    def __post_init__(self) -> None:
        """Refuse a recipe that the pair cannot serve.

        Raises:
            UnknownName, SelectionError: naming what is wrong.
        """
        if self.support not in SUPPORTS:
            raise UnknownName("support", self.support, SUPPORTS)
        if self.regressors not in REGRESSORS:
            raise UnknownName("regressors", self.regressors, REGRESSORS)
        _ = self.layout
        for kind in KINDS:
            _check_selection(self.selection[kind], self.source_shape, self.target_shape)

    @cached_property
    def layout(self) -> Layout:
        """The numbering the recipe's features are in."""
        return Layout(self.source_shape, self.target_shape, self.native_layers)

    @property
    def shared(self) -> bool:
        """Whether all heads of a layer read the same features."""
        return self.support != "head_local"

    @property
    def mapped_layers(self) -> range:
        """The target layers that are mapped: all but the native ones."""
        return range(self.native_layers, len(self.target_shape))

    def sources(self, kind: str, layer: int) -> list[tuple[str, str, int]]:
        """(origin, kind, layer) of everything that a target layer reads, in the order of its features."""
        kinds = (kind,) if self.regressors == "own_kind" else (kind, KINDS[1 - KINDS.index(kind)])
        found = [("source", k, s) for k in kinds for s in self.selection[kind][layer]]
        return found + [("native", k, n) for k in kinds for n in range(self.native_layers)]

    def blocks(self, kind: str, layer: int, head: int) -> tuple[Block, ...]:
        """The features of one target head."""
        n_heads = self.target_shape[layer][0]
        blocks = []
        for origin, source_kind, number in self.sources(kind, layer):
            count = self._origin_shape(origin)[number][0]
            own = None if self.shared else head_map(count, n_heads)[head]
            blocks.append(Block(origin, source_kind, number, own))
        return tuple(blocks)

    def columns(self, kind: str, layer: int, layout: Layout | None = None) -> Tensor:
        """Feature numbers in a layout (the recipe's own, if None): (1, p) where shared, else (H_t, p)."""
        layout = layout or self.layout
        n_heads = 1 if self.shared else self.target_shape[layer][0]
        return torch.stack([layout.features(self.blocks(kind, layer, head)) for head in range(n_heads)])

    def n_features(self, kind: str, layer: int) -> int:
        """Features of one head of a target layer, p."""
        shapes = [self._origin_shape(origin)[number] for origin, _, number in self.sources(kind, layer)]
        return sum(heads * width if self.shared else width for heads, width in shapes)

    def bands(self, kind: str, layer: int, head: int) -> Tensor:
        """For each feature of a head, `OWN`, `CROSS` or `NATIVE`: (p,) int64."""
        n_heads = self.target_shape[layer][0]
        bands: list[int] = []
        for origin, _, number in self.sources(kind, layer):
            count, width = self._origin_shape(origin)[number]
            own = head_map(count, n_heads)[head]
            for source_head in range(count) if self.shared else (own,):
                band = NATIVE if origin == "native" else OWN if source_head == own else CROSS
                bands += [band] * width
        return torch.tensor(bands, dtype=torch.int64)

    def gather(
        self,
        kind: str,
        layer: int,
        keys: Layers,
        values: Layers,
        native_keys: Layers = (),
        native_values: Layers = (),
    ) -> Tensor:
        """The features of a batch of columns.

        Args:
            kind, layer: of the target.
            keys, values: per source layer (batch, heads, tokens, head_dim), in a sequence or by number;
                native_keys, native_values: per native layer, likewise.

        Returns:
            (1, batch·tokens, p) where all heads share their features, else (H_t, batch·tokens, p).
        """
        found: dict[tuple[str, str], Layers] = {
            ("source", "key"): keys,
            ("source", "value"): values,
            ("native", "key"): native_keys,
            ("native", "value"): native_values,
        }
        parts = [
            found[origin, source_kind][number] for origin, source_kind, number in self.sources(kind, layer)
        ]
        if self.shared:
            return torch.cat([part.transpose(1, 2).flatten(2) for part in parts], dim=-1).flatten(0, 1)[None]
        n_heads = self.target_shape[layer][0]
        matched = torch.cat([_matched_heads(part, n_heads) for part in parts], dim=-1)
        return matched.transpose(0, 1).flatten(1, 2)

    def _origin_shape(self, origin: str) -> CacheShape:
        return self.source_shape if origin == "source" else self.target_shape

    def to_json(self) -> dict[str, Any]:
        """Everything, as JSON can hold it."""
        return {
            "source_shape": [list(layer) for layer in self.source_shape],
            "target_shape": [list(layer) for layer in self.target_shape],
            "support": self.support,
            "regressors": self.regressors,
            "native_layers": self.native_layers,
            "selection": {
                kind: [list(layers) for layers in chosen] for kind, chosen in self.selection.items()
            },
        }

    @classmethod
    def from_json(cls, settings: Mapping[str, Any]) -> Recipe:
        """Inverse of `to_json`."""
        return cls(
            source_shape=shape_from_json(settings["source_shape"]),
            target_shape=shape_from_json(settings["target_shape"]),
            support=settings["support"],
            regressors=settings["regressors"],
            native_layers=int(settings["native_layers"]),
            selection={
                kind: tuple(tuple(int(layer) for layer in layers) for layers in chosen)
                for kind, chosen in settings["selection"].items()
            },
        )


def head_map(n_source: int, n_target: int) -> tuple[int, ...]:
    """Source head that target head h reads, `a(h) = ⌊h · n_source / n_target⌋` ([C] §3.2).

    The identity where the counts match; otherwise the fixed group map, in which neighbouring target heads
    share a source head, as grouped queries share a KV head.
    """
    if n_source < 1 or n_target < 1:
        raise SelectionError(
            f"n_source={n_source}, n_target={n_target} KV heads: expected at least 1 of each"
        )
    return tuple(h * n_source // n_target for h in range(n_target))


def both(selection: Selection) -> dict[str, Selection]:
    """One selection for keys and values alike."""
    return dict.fromkeys(KINDS, selection)


def cache_shape(kv: KVCache) -> CacheShape:
    """`(n_kv_heads, head_dim)` of each layer of a cache."""
    return tuple((keys.shape[1], keys.shape[3]) for keys in kv.keys)


def geometry_shape(geometry: Geometry) -> CacheShape:
    """`(n_kv_heads, head_dim)` of each layer of a model."""
    return tuple((layer.n_kv_heads, layer.head_dim) for layer in geometry.layers)


def n_channels(shape: Iterable[tuple[int, int]]) -> int:
    """Channels of one token over all layers and heads: Σ n_kv_heads · head_dim."""
    return sum(n_heads * head_dim for n_heads, head_dim in shape)


def shape_from_json(layers: Iterable[Sequence[int]]) -> CacheShape:
    """A shape that was written as lists."""
    return tuple((int(n_heads), int(head_dim)) for n_heads, head_dim in layers)


def _span(shape: CacheShape, layer: int, head: int | None, start: int) -> range:
    n_heads, width = shape[layer]
    start += n_channels(shape[:layer])
    if head is None:
        return range(start, start + n_heads * width)
    return range(start + head * width, start + (head + 1) * width)


def _check_selection(selection: Selection, source_shape: CacheShape, target_shape: CacheShape) -> None:
    """Refuse a selection that names layers the source lacks, or serves another number of target layers."""
    if len(selection) != len(target_shape):
        raise SelectionError(
            f"the selection serves {len(selection)} target layers; the target has {len(target_shape)}"
        )
    for target_layer, layers in enumerate(selection):
        if any(not 0 <= layer < len(source_shape) for layer in layers) or len(set(layers)) != len(layers):
            raise SelectionError(
                f"target layer {target_layer} selects source layers {layers}: expected distinct layers "
                f"from 0 to {len(source_shape) - 1}"
            )


def _matched_heads(source: Tensor, n_heads: int) -> Tensor:
    """Source head `a(h)` for each target head: (batch, H_t, tokens, d_s)."""
    heads = head_map(source.shape[1], n_heads)
    if heads == tuple(range(source.shape[1])):
        return source
    return source[:, list(heads)]
