"""What every mapper is, and the registry of their kinds."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

import torch
from torch import Tensor

from kvmap.errors import KvmapError, UnknownName
from kvmap.fit.features import CacheShape, cache_shape
from kvmap.kernels.map_cache import CacheMap
from kvmap.models.cache import KVCache
from kvmap.models.identity import ModelIdentity

if TYPE_CHECKING:
    from kvmap.mappers.verdict import Verdict

TENSORS_NAME = "mapper.safetensors"


class MapperMismatch(KvmapError):
    """A mapper applied to models, caches or shapes it was not fitted for."""


class Unavailable(KvmapError):
    """A kind of mapper that this pair of models has no room for, such as a copy between unlike shapes."""


class MapperFileError(KvmapError):
    """A mapper folder that is missing, half-written, altered, or not a mapper at all."""


class RegistryCollision(KvmapError):
    """Two classes that claim one kind."""


@dataclass(frozen=True)
class FittedFor:
    """What a mapper was fitted for.

    Attributes:
        source: the model whose caches it reads.
        target: the model whose caches it writes.
        rope: the strategy of the fit, see `kvmap.fit.view.ROPE_STRATEGIES`; None where that is not known.
    """

    source: ModelIdentity
    target: ModelIdentity
    rope: str | None = None

    def mismatches(
        self, source: ModelIdentity | None, target: ModelIdentity, rope: str | None = None
    ) -> list[str]:
        """One line for each thing in which other models, or another strategy, differ from those of the fit.

        "strip" and "no_rerotate" map content keys by one and the same fit; "coupled" stands alone. None for
        the source or the strategy is not compared.
        """
        lines = [] if source is None else [f"source {line}" for line in self.source.mismatches(source)]
        lines += [f"target {line}" for line in self.target.mismatches(target)]
        both_known = self.rope is not None and rope is not None
        if both_known and (self.rope == "coupled") != (rope == "coupled"):
            lines.append(f"rope: {self.rope!r} of the fit is not {rope!r}")
        return lines


class Mapper(ABC):
    """A function from the source's content keys and values to the target's, column by column.

    A kind implements `map_layer`, `settings`, `tensors` and `from_state`, and registers itself with
    `@register("name")`.

    Attributes:
        source_shape: `(n_kv_heads, head_dim)` of each source layer it reads.
        target_shape: the same of each target layer it writes.
        fitted_for: the models and the strategy it was fitted for; set by `load_mapper`, None where unknown.
        verdict: what a preflight found of it; set by `load_mapper`, None where none is kept beside it. No
            part of its settings, tensors or key.
        native_layers: m, how many of the target's first layers the target computes itself, over every
            column. They are not mapped, and feed the map of the layers above. A kind that can have any keeps
            the number in its `settings`.
    """

    kind: ClassVar[str]
    fitted_for: FittedFor | None = None
    verdict: Verdict | None = None
    native_layers: int = 0

    def __init__(self, source_shape: CacheShape, target_shape: CacheShape) -> None:
        """Args: `(n_kv_heads, head_dim)` of each layer of source and target."""
        self.source_shape = source_shape
        self.target_shape = target_shape

    @abstractmethod
    def map_layer(
        self,
        layer: int,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
        native_keys: Sequence[Tensor] = (),
        native_values: Sequence[Tensor] = (),
    ) -> tuple[Tensor, Tensor]:
        """Keys and values of one target layer.

        Args:
            layer: target layer, `native_layers` or above.
            keys: content keys of every source layer, (batch, n_kv_heads, tokens, head_dim).
            values: likewise.
            native_keys: content keys of the target's first `native_layers` layers, as the target computed
                them from the same tokens, (batch, n_kv_heads, tokens, head_dim); left out where there are
                none.
            native_values: likewise.

        Returns:
            (batch, n_kv_heads, tokens, head_dim) of the target, at least float32; content keys.
        """

    def cache_map(self) -> CacheMap | None:
        """The map as tables of weights over the mapper's own storage, the same object each time.

        `kvmap.kernels.map_cache` applies it to a whole cache at once. None for a map that is not one product
        of each layer and kind: `map_layer` applies it.
        """
        return None

    def needs(self, layer: int) -> int:
        """How many of the source's first layers have to be there for a target layer to be mapped.

        All of them, for a kind that does not say more.
        """
        cache_map = self.cache_map()
        return len(self.source_shape) if cache_map is None else cache_map.needs(layer) + 1

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """Everything but tensors, as JSON can hold it; `from_state` takes it back."""

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """The mapper's tensors by name; `from_state` takes them back."""

    @classmethod
    @abstractmethod
    def from_state(cls, settings: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Self:
        """Inverse of `settings` and `tensors`."""

    def map(self, source: KVCache, native: KVCache | None = None) -> KVCache:
        """Map a stripped cache, all layers and columns: stripped in, stripped out, `exact=False`.

        Args:
            source: the source's cache.
            native: the target's own first `native_layers` layers of the same columns, stripped; they come
                back as they are. None where the mapper has none.

        Raises:
            MapperMismatch: a cache with rotated keys or of another shape than `source_shape`, or native
                layers that are missing or are not those of `check_native`.
        """
        self.check_source(source)
        self.check_native(native, source)
        own = [] if native is None else list(zip(native.keys, native.values, strict=True))
        extra = () if native is None else (native.keys, native.values)
        mapped = [
            self.map_layer(layer, source.keys, source.values, *extra)
            for layer in range(self.native_layers, len(self.target_shape))
        ]
        keys, values = zip(*own, *mapped, strict=True)
        return replace(source, keys=keys, values=values, exact=False, owner=None)

    def check_source(self, source: KVCache) -> None:
        """Refuse a source cache this mapper does not fit.

        Raises:
            MapperMismatch: naming what differs.
        """
        if not source.stripped:
            raise MapperMismatch(
                "the source cache carries rotated keys; mappers read content keys: strip() it first"
            )
        check_shape("source cache", cache_shape(source), self.source_shape)

    def check_native(self, native: KVCache | None, source: KVCache) -> None:
        """Refuse all but the target's first `native_layers` layers, stripped, over the source's columns.

        Raises:
            MapperMismatch: naming what differs.
        """
        if native is None:
            if self.native_layers:
                raise MapperMismatch(
                    f"this mapper reads the target's first {self.native_layers} layers, and none were given: "
                    f"prefill(target, ids, n_layers={self.native_layers}).strip() makes them"
                )
            return
        if native.n_layers != self.native_layers:
            remedy = f"prefill the target with n_layers={self.native_layers}"
            raise MapperMismatch(
                f"{native.n_layers} native layers were given; this mapper reads {self.native_layers} of the "
                f"target's: {remedy if self.native_layers else 'leave native out'}"
            )
        if not native.stripped:
            raise MapperMismatch(
                "the native layers carry rotated keys; mappers read content keys: strip() them first"
            )
        check_shape("native layers", cache_shape(native), self.target_shape[: self.native_layers])
        same_columns = native.mask.shape == source.mask.shape and torch.equal(
            native.mask.cpu(), source.mask.cpu()
        )
        if not same_columns:
            raise MapperMismatch(
                f"the native layers hold {native.batch_size} rows of {native.n_tokens} columns, the source "
                f"cache {source.batch_size} of {source.n_tokens}, or pads lie elsewhere: prefill the target "
                f"with the source's own ids and mask"
            )

    def check_models(self, source: ModelIdentity | None, target: ModelIdentity, rope: str) -> None:
        """Refuse other models or another strategy than the mapper was fitted for, as far as that is known.

        Args:
            source: the model the cache comes from; None: unknown, not compared.
            target: the model the cache is mapped for.
            rope: the strategy of the hand-off.

        Raises:
            MapperMismatch: naming each thing that differs.
        """
        if self.fitted_for is None:
            return
        found = self.fitted_for.mismatches(source, target, rope)
        if found:
            raise MapperMismatch(
                "this mapper was fitted for something else: "
                + "; ".join(found)
                + ". Use the models and the rope strategy of the fit, or fit a mapper for these"
            )

    @property
    def device(self) -> torch.device | None:
        """Where the weights are; None for a mapper without any."""
        return next((tensor.device for tensor in self.tensors().values()), None)

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Self:
        """The same mapper with its tensors elsewhere, or weights in another dtype."""
        moved = {
            name: tensor.to(device=device, dtype=self.stored_dtype(name, tensor, dtype))
            for name, tensor in self.tensors().items()
        }
        mapper = type(self).from_state(self.settings(), moved)
        mapper.fitted_for, mapper.verdict = self.fitted_for, self.verdict
        return mapper

    def stored_dtype(self, name: str, tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
        """The dtype a tensor takes when weights are asked for in `dtype`: biases stay at least float32."""
        if dtype is None:
            return tensor.dtype
        return torch.promote_types(dtype, torch.float32) if name.endswith("bias") else dtype

    @property
    def n_weights(self) -> int:
        """Number of weights, biases not counted: `2·L_t·H_t·p·d_t` for a linear mapper ([H] §3.3)."""
        return sum(tensor.numel() for name, tensor in self.tensors().items() if not name.endswith("bias"))

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, biases included."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors().values())


_REGISTRY: dict[str, type[Mapper]] = {}
_AnyMapper = TypeVar("_AnyMapper", bound=type[Mapper])


def register(kind: str) -> Callable[[_AnyMapper], _AnyMapper]:
    """Class decorator that makes a mapper known by name.

    Raises:
        RegistryCollision: another class has that name.
    """

    def decorate(cls: _AnyMapper) -> _AnyMapper:
        known = _REGISTRY.get(kind)
        if known is not None and (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
            raise RegistryCollision(
                f"mapper kind {kind!r} is taken by {known.__module__}.{known.__qualname__}; {cls.__module__}."
                f"{cls.__qualname__} needs another name"
            )
        cls.kind = kind
        _REGISTRY[kind] = cls
        return cls

    return decorate


def get_mapper(kind: str) -> type[Mapper]:
    """The class of a kind.

    Raises:
        UnknownName: with the nearest name and the full list.
    """
    if kind not in _REGISTRY:
        raise UnknownName("mapper", kind, _REGISTRY)
    return _REGISTRY[kind]


def mapper_kinds() -> tuple[str, ...]:
    """Every registered kind, sorted."""
    return tuple(sorted(_REGISTRY))


def check_shape(what: str, got: CacheShape, expected: CacheShape) -> None:
    """Refuse layers, heads or widths that are not the mapper's, naming the first that differs.

    Raises:
        MapperMismatch: with the layer, what it has and what the mapper was fitted for.
    """
    if len(got) != len(expected):
        raise MapperMismatch(
            f"the {what} has {len(got)} layers; the mapper was fitted for {len(expected)}. "
            f"Use the mapper of this pair"
        )
    for layer, (mine, theirs) in enumerate(zip(got, expected, strict=True)):
        if tuple(mine) != tuple(theirs):
            raise MapperMismatch(
                f"layer {layer} of the {what} has {mine[0]} KV heads of width {mine[1]}; the mapper was "
                f"fitted for {theirs[0]} of width {theirs[1]}. Use the mapper of this pair"
            )


def shape_settings(mapper: Mapper) -> dict[str, Any]:
    """The two shapes, as JSON can hold them."""
    return {
        "source_shape": [list(layer) for layer in mapper.source_shape],
        "target_shape": [list(layer) for layer in mapper.target_shape],
    }


def shapes_from(settings: Mapping[str, Any]) -> tuple[CacheShape, CacheShape]:
    """Inverse of `shape_settings`."""
    source, target = (
        tuple((int(heads), int(width)) for heads, width in settings[name])
        for name in ("source_shape", "target_shape")
    )
    return source, target
