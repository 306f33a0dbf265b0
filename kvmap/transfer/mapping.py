"""The map of a hand-off: a source's cache into the columns of the target's, in place."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvmap.fit.view import cache_view
from kvmap.kernels import map_cache as kernel
from kvmap.kernels.map_cache.reference import saturated
from kvmap.kernels.settings import current
from kvmap.mappers.base import Mapper
from kvmap.models.cache import KVCache
from kvmap.models.pair import LoadedModel
from kvmap.models.rope import apply_rotation
from kvmap.transfer.columns import Columns, Rotations, first_layers
from kvmap.transfer.context import TransferError

_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Filling:
    """A target's cache whose columns from `columns.start` on are being filled by a mapper.

    Attributes:
        mapper: fills the layers above its native ones.
        target: the model whose cache it is.
        columns: of the context.
        rope: the strategy. Native layers are seen by the mapper as it sees the source, but keep in the cache
            the keys that the target itself would have cached.
        kv: the cache, with the rotations of the target's layers for a context of this length.
        first: the target's own first layers over these columns; None where the mapper has none.
        every_column: fill also the columns of windowed layers that nothing after these columns can see. Else
            they hold zeros.
    """

    mapper: Mapper
    target: LoadedModel
    columns: Columns
    rope: str
    kv: KVCache
    first: KVCache | None
    every_column: bool = False
    _counts: dict[int, Tensor] = field(default_factory=dict)

    @property
    def layers(self) -> range:
        """The target layers that the mapper fills."""
        return range(self.mapper.native_layers, len(self.mapper.target_shape))

    @property
    def turned(self) -> Rotations | None:
        """What mapped keys are turned by; None leaves them as they are mapped."""
        return self.kv.rotations if self.rope == "strip" else None

    def skipped(self, layer: int) -> int:
        """How many columns from `columns.start` on a target layer has no use for: its window is past them.

        All but the last at most, so that there is always something to map.
        """
        if self.every_column:
            return 0
        n_columns = self.columns.context.n_columns
        seen = max(self.target.geometry.layers[layer].seen_of(n_columns), 1)
        return max(n_columns - seen - self.columns.start, 0)

    def mapped_of_layer(self, n_mapped: int) -> tuple[int, ...]:
        """Tokens mapped in each target layer, of `n_mapped` that are not its own, summed over the rows."""
        counts = [0] * self.kv.n_layers
        for layer in self.layers if n_mapped else ():
            counts[layer] = n_mapped
            if n_skipped := self.skipped(layer):
                wanted = self.columns.mask & ~self.columns.is_own
                counts[layer] = int(wanted[:, self.columns.start + n_skipped :].sum())
        return tuple(counts)

    def map_all(self, source_kv: KVCache) -> None:
        """Fill every layer from the source's cache over all columns of the context."""
        source = source_kv.slice_tokens(self.columns.start, self.columns.context.n_columns)
        cache_map = self.mapper.cache_map()
        if cache_map is None:
            _log_layer_by_layer(type(self.mapper).__name__)
            self._map_layer_by_layer(source)
        else:
            self.map_layers(cache_map, self._side(source), self.layers)

    def map_layers(self, cache_map: kernel.CacheMap, source: kernel.Side, layers: Iterable[int]) -> None:
        """Fill some layers at once.

        Args:
            cache_map: the mapper's.
            source: the source's layers over the columns from `columns.start` on; for those that these target
                layers do not read, anything of their shape, dtype and device may stand.
            layers: of the target.
        """
        together: dict[int, list[int]] = {}
        for layer in layers:
            together.setdefault(self.skipped(layer), []).append(layer)
        for n_skipped, alike in together.items():
            self._map_columns(cache_map, source, tuple(alike), n_skipped)

    def _map_columns(
        self, cache_map: kernel.CacheMap, source: kernel.Side, layers: tuple[int, ...], n_skipped: int
    ) -> None:
        """Fill layers that leave out the same columns."""
        device = self.mapper.device or self.target.device
        slots = {slot for k in kernel.KINDS for i in layers for slot in cache_map.products[k][i].slots}
        keep, output, native = self.columns.keep, self._output, self._native
        positions = self.columns.positions[:, self.columns.start + n_skipped :]
        if n_skipped:
            n = source.keys[0].shape[2]
            source = source.slice_tokens(n_skipped, n)
            native = None if native is None else native.slice_tokens(n_skipped, n)
            keep = None if keep is None else keep[:, n_skipped:]
            output = self._without_first(layers, n_skipped)
        inputs = kernel.Inputs(
            _moved(source, "source", slots, device),
            positions.to(device),
            None if native is None else _moved(native, "native", slots, device),
            None if keep is None else keep.to(device),
        )
        settings = current()
        counts = kernel.map_cache(
            cache_map,
            inputs,
            output,
            layers,
            path=settings.map_cache,
            chunk_tokens=settings.chunk_tokens,
        )
        self._counts.update(zip(layers, counts, strict=True))

    def _without_first(self, layers: Iterable[int], n_skipped: int) -> kernel.Columns:
        """The columns to fill, from the first that some layers need; what they leave out becomes zeros."""
        for layer in layers:
            for kind in kernel.KINDS:
                self._output.tensor(kind, layer)[:, :, :n_skipped].zero_()
        keys, values = (
            {layer: whole[:, :, n_skipped:] for layer, whole in parts.items()}
            for parts in (self._output.keys, self._output.values)
        )
        return kernel.Columns(keys, values, self.turned)

    def finish(self) -> int:
        """Put the native layers in, and say how many mapped numbers were clamped to the target's dtype.

        Raises:
            TransferError: mapped keys or values that are not finite, by layer.
        """
        if self.first is not None:
            drop = None if self.columns.keep is None else ~self.columns.keep[:, None, :, None]
            held = zip((*self.first.keys, *self.first.values), self._native_views, strict=True)
            for own, view in held:
                view.copy_(own)
                if drop is not None:
                    view.masked_fill_(drop.to(view.device), 0.0)
        if not self._counts:
            return 0
        # one read of all counts: on a GPU each would otherwise wait for its layer
        counts = torch.stack(list(self._counts.values())).tolist()
        for layer, by_kind in zip(self._counts, counts, strict=True):
            for kind, (n_bad, _) in zip(("keys", "values"), by_kind, strict=True):
                if n_bad:
                    raise TransferError(
                        f"{n_bad} mapped {kind} of target layer {layer} are NaN or infinite: the source "
                        f"cache or the mapper is damaged; capture the source in bfloat16 or float32, or fit "
                        f"again"
                    )
        return int(sum(n_clamped for by_kind in counts for _, n_clamped in by_kind))

    def _side(self, kv: KVCache) -> kernel.Side:
        """A cache over the columns from `columns.start` on, as the map reads it under the strategy."""
        positions = self.columns.positions[:, self.columns.start :]
        if self.rope != "coupled" and not kv.stripped:
            if kv.mixed or not torch.equal(kv.positions.to(positions.device), positions):
                kv = kv.strip()
            return kernel.Side(kv.keys, kv.values, kv.rotations)
        return kernel.Side(kv.keys, kv.values)

    @functools.cached_property
    def _native(self) -> kernel.Side | None:
        return None if self.first is None else self._side(self.first)

    @functools.cached_property
    def _output(self) -> kernel.Columns:
        keys, values = (
            {layer: layers[layer][:, :, self.columns.start :] for layer in self.layers}
            for layers in (self.kv.keys, self.kv.values)
        )
        return kernel.Columns(keys, values, self.turned)

    @property
    def _native_views(self) -> list[Tensor]:
        m = self.mapper.native_layers
        return [layer[:, :, self.columns.start :] for layer in (*self.kv.keys[:m], *self.kv.values[:m])]

    def _map_layer_by_layer(self, source: KVCache) -> None:
        """With a mapper that has no tables."""
        view = cache_view(source, self.rope).to(device=self.mapper.device)
        features: tuple[Sequence[Tensor], ...] = (view.keys, view.values)
        if self.first is not None:
            native = cache_view(self.first, self.rope).to(device=self.mapper.device)
            features += (native.keys, native.values)
        positions = self.columns.positions[:, self.columns.start :]
        keep = self.columns.keep
        for layer in self.layers:
            n_skipped = self.skipped(layer)
            output = self._without_first([layer], n_skipped)
            read = features  # the very tensors, by which a mapper knows what it has looked at already
            if n_skipped:
                read = tuple([part[:, :, n_skipped:] for part in parts] for parts in features)
            key, value = (part.to(self.target.device) for part in self.mapper.map_layer(layer, *read))
            turn = None if self.turned is None else self.turned[layer]
            key = apply_rotation(key, positions[:, n_skipped:], turn)
            checks = []
            for kind, part in (("key", key), ("value", value)):
                if keep is not None:
                    part = part.masked_fill(~keep[:, None, n_skipped:, None].to(part.device), 0.0)
                cast, check = saturated(part, self.target.dtype)
                output.write(kind, layer, 0, cast)
                checks.append(check)
            self._counts[layer] = torch.stack(checks)


def start_filling(
    mapper: Mapper, target: LoadedModel, columns: Columns, rope: str, kv: KVCache, every_column: bool = False
) -> Filling:
    """Before the first layer is mapped: the target runs the mapper's native layers, if it has any."""
    first = first_layers(target, columns, mapper.native_layers)
    return Filling(mapper, target, columns, rope, kv, first, every_column)


def _moved(side: kernel.Side, origin: str, slots: set[kernel.Slot], device: torch.device) -> kernel.Side:
    """The layers that are read on the map's device; the others where they are."""

    def moved(kind: str, layers: Sequence[Tensor]) -> list[Tensor]:
        return [
            layer.to(device) if kernel.Slot(origin, kind, number) in slots else layer
            for number, layer in enumerate(layers)
        ]

    return kernel.Side(moved("key", side.keys), moved("value", side.values), side.rotations)


@functools.cache
def _log_layer_by_layer(name: str) -> None:
    """Once in a process for each kind."""
    _log.info("%s is no table of weights: mapped layer by layer in PyTorch, without a kernel", name)
