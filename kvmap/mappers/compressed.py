"""A fitted linear mapper in fewer bytes: bfloat16 or float8 weights, fewer dimensions for each head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from functools import cached_property
from typing import Any, Self, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvmap.errors import KvmapError, UnknownName
from kvmap.fit.features import KINDS, Recipe
from kvmap.fit.linear import Fallback, HasLinearWeights, LinearWeights, joined, layer_cuts
from kvmap.fit.low_rank import HeadFactors, reduce_layer
from kvmap.fit.moments import MomentsError
from kvmap.fit.pair_moments import PairMoments
from kvmap.fit.quantise import Quantised, dequantise, quantise_columns, round_to_bfloat16
from kvmap.kernels.map_cache import CacheMap, Product, Slot
from kvmap.mappers.base import Mapper, register
from kvmap.mappers.linear import slots_of

METHODS = ("bfloat16", "fp8", "low_rank", "low_rank+bfloat16", "low_rank+fp8")

Ranks: TypeAlias = tuple[int | None, ...]
"""Rank of each head of one target layer; None: all d dimensions."""


class CompressionError(KvmapError):
    """A compression that lacks the moments it is made from."""


@dataclass(frozen=True, eq=False)
class CompressedLayer:
    """The map of one kind of one target layer, as it is stored. Heads lie side by side, none is padded.

    Attributes:
        ranks: of each head.
        weight: (p, C): of a head of rank r its `down` (p, r), of one that stays as it is all d columns.
        scale: (C,) float32, where `weight` is float8; else None.
        up: (R, d), the `up` (r, d) of each head that has a rank, one below the other; None where none has.
            Beside float8 weights it is bfloat16.
        bias: (H, d), at least float32.
    """

    ranks: Ranks
    weight: Tensor
    scale: Tensor | None
    up: Tensor | None
    bias: Tensor

    @classmethod
    def packed(cls, heads: Sequence[HeadFactors], dtype: str | None, bias: Tensor) -> CompressedLayer:
        """Heads side by side, in `dtype` "bfloat16" or "fp8"; None keeps theirs."""
        weight = torch.cat([head.down for head in heads], dim=1)
        ups = [head.up for head in heads if head.up is not None]
        up = torch.cat(ups) if ups else None
        scale = None
        if dtype == "fp8":
            quantised = quantise_columns(weight)
            weight, scale = quantised.values, quantised.scale
        elif dtype == "bfloat16":
            weight = round_to_bfloat16(weight)
        if dtype is not None and up is not None:
            up = round_to_bfloat16(up)
        return cls(tuple(head.rank for head in heads), weight.contiguous(), scale, up, bias)

    @property
    def n_weights(self) -> int:
        """Numbers in `weight` and `up`."""
        return self.weight.numel() + (0 if self.up is None else self.up.numel())

    def as_product(self, slots: tuple[Slot, ...], shared: bool) -> Product:
        """The map of heads without ranks, over the same storage; `shared`: they read the same features."""
        weight = self.weight if shared else self.weight.unflatten(1, self.bias.shape).transpose(0, 1)
        scale = None if self.scale is None else self.scale.view(self.bias.shape)
        return Product(slots, weight, self.bias, scale)

    def effective(self) -> Tensor:
        """The weights it stands for, at least float32: (H, p, d)."""
        if self.scale is not None:
            weight = dequantise(Quantised(self.weight, self.scale), torch.float32)
        else:
            weight = self.weight.to(torch.promote_types(self.weight.dtype, torch.float32))
        heads = []
        row = 0
        for rank, down in zip(self.ranks, weight.split(self._widths, dim=1), strict=True):
            if rank is None or self.up is None:
                heads.append(down)
                continue
            heads.append((down.double() @ self.up[row : row + rank].double()).to(weight.dtype))
            row += rank
        return torch.stack(heads)

    def apply(self, rows: Tensor) -> Tensor:
        """Rows times weights, and the bias.

        The large product, of features, is one for all heads where they share them, without any padding, and
        batched over heads otherwise, padded to the widest. It runs in the dtype of the weights, in bfloat16
        for float8 ones, whose scales are applied to its output in float32. The small one, back to d
        dimensions, is batched over the heads that have a rank.

        Args:
            rows: (1, n, p) where heads share their features, else (H, n, p).

        Returns:
            (H, n, d), in the dtype of the bias.
        """
        dtype = torch.bfloat16 if self.scale is not None else self.weight.dtype
        rows, weight = rows.to(dtype), self.weight.to(dtype)
        shared = len(rows) == 1
        found = self._by_head(rows[0] @ weight) if shared else torch.bmm(rows, self._by_head(weight))
        if self.scale is not None:
            found = found.to(torch.float32) * self._by_head(self.scale.unsqueeze(0))
        if self.up is not None:
            found = self._raised(found)
        return found.to(self.bias.dtype) + self.bias.unsqueeze(1)

    def _raised(self, found: Tensor) -> Tensor:
        """(H, n, c) to (H, n, d): heads of a rank times their `up`, the others as they are."""
        assert self.up is not None
        reduced = [head for head, rank in enumerate(self.ranks) if rank is not None]
        ups = self.up.split([self.ranks[head] for head in reduced])
        rank = max(len(up) for up in ups)
        # rows of zeros below a head's own: what stands in its columns past its rank does not count
        padded = torch.stack([pad(up, (0, 0, 0, rank - len(up))) for up in ups])
        raised = torch.bmm(found[reduced, :, :rank].to(padded.dtype), padded)
        if len(reduced) == len(self.ranks):
            return raised
        found[reduced] = raised.to(found.dtype)
        return found

    def _by_head(self, columns: Tensor) -> Tensor:
        """(n, C) to (H, n, c), c the widest head; in a narrower one any columns stand past its own."""
        if all(rank is None for rank in self.ranks):
            return columns.unflatten(1, self.bias.shape).transpose(0, 1)
        return columns[:, self._columns].transpose(0, 1)

    @cached_property
    def _columns(self) -> Tensor:
        """For each head the columns of `weight` it reads, (H, c)."""
        widths = self._widths
        starts = torch.tensor([sum(widths[:head]) for head in range(len(widths))])
        index = starts.unsqueeze(1) + torch.arange(max(widths))
        return index.clamp(max=max(sum(widths) - 1, 0)).to(self.weight.device)

    @property
    def _widths(self) -> list[int]:
        """Columns of `weight` that belong to each head."""
        return [self.bias.shape[1] if rank is None else rank for rank in self.ranks]


@register("compressed_linear")
class CompressedLinearMapper(Mapper):
    """A linear mapper stored in fewer bytes, of the same recipe; `from_linear` makes it.

    Methods: "bfloat16"; "fp8": float8 weights and one float32 scale for each output column
    (`kvmap.fit.quantise`), with bfloat16 products; "low_rank": each head at the smallest rank that its
    held-out error allows (`kvmap.fit.low_rank`), in the dtype it had; and a rank together with either dtype.

    `nbytes` counts what is stored: weights, factors without padding, scales and biases. `n_weights` counts
    weights and factors.
    """

    def __init__(
        self,
        recipe: Recipe,
        method: str,
        layers: Mapping[str, Mapping[int, CompressedLayer]],
        fallbacks: tuple[Fallback, ...] = (),
    ) -> None:
        """Args: what is read, how it is stored, by kind and mapped target layer what is stored; and the
        systems of the fit that plain Cholesky could not solve.

        Raises:
            UnknownName: another method.
        """
        if method not in METHODS:
            raise UnknownName("compression method", method, METHODS)
        super().__init__(recipe.source_shape, recipe.target_shape)
        self.recipe = recipe
        self.native_layers = recipe.native_layers
        self.method = method
        self.fallbacks = fallbacks
        self._layers = layers

    @classmethod
    def from_linear(
        cls,
        mapper: HasLinearWeights,
        method: str,
        moments: PairMoments | None = None,
        *,
        tolerance: float = 0.01,
    ) -> Self:
        """Compress a mapper.

        With moments the biases are taken again with the weights as they are stored, `b = ȳ − x̄W` over the fit
        split, so that no compression moves the mean of an output. Without, they stay.

        Args:
            mapper: a linear one.
            method: one of `METHODS`.
            moments: of its own calibration; a rank needs them.
            tolerance: a head's held-out squared error may grow by this share when its rank is chosen.

        Raises:
            UnknownName: another method.
            CompressionError: a rank without moments.
            MomentsError: moments of another pair, or that do not hold what the mapper reads.
            LowRankError: a bad tolerance, or no held-out rows. QuantiseError: weights that are not finite.
        """
        if method not in METHODS:
            raise UnknownName("compression method", method, METHODS)
        weights = mapper.linear_weights()
        _check_moments(weights, method, moments)
        layers = {
            kind: {
                layer: _compressed(weights, method, moments, tolerance, kind, layer)
                for layer in weights.recipe.mapped_layers
            }
            for kind in KINDS
        }
        made = cls(weights.recipe, method, layers, weights.fallbacks)
        made.fitted_for = getattr(mapper, "fitted_for", None)
        return made

    @property
    def ranks(self) -> dict[str, tuple[Ranks, ...]]:
        """By kind, rank of each head of each target layer; nothing for native ones."""
        return {
            kind: tuple(
                self._layers[kind][layer].ranks if layer in self.recipe.mapped_layers else ()
                for layer in range(len(self.target_shape))
            )
            for kind in KINDS
        }

    def linear_weights(self) -> LinearWeights:
        """The map it stands for, dequantised and multiplied out, as `kvmap.fit.linear.r2_of` reads it."""
        weight: dict[str, tuple[Tensor, ...]] = {}
        bias: dict[str, tuple[Tensor, ...]] = {}
        for kind in KINDS:
            stored = self._layers[kind]
            weights, biases = [], []
            for layer, (n_heads, width) in enumerate(self.target_shape):
                mapped = layer in stored
                weights.append(stored[layer].effective() if mapped else torch.zeros(n_heads, 0, width))
                biases.append(stored[layer].bias if mapped else torch.zeros(n_heads, width))
            weight[kind], bias[kind] = tuple(weights), tuple(biases)
        return LinearWeights(self.recipe, weight, bias, self.fallbacks)

    def map_layer(
        self,
        layer: int,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
        native_keys: Sequence[Tensor] = (),
        native_values: Sequence[Tensor] = (),
    ) -> tuple[Tensor, Tensor]:
        """See `Mapper.map_layer`."""
        batch, _, tokens, _ = keys[0].shape

        def mapped(kind: str) -> Tensor:
            rows = self.recipe.gather(kind, layer, keys, values, native_keys, native_values)
            outputs = self._layers[kind][layer].apply(rows)
            return outputs.view(-1, batch, tokens, outputs.shape[-1]).transpose(0, 1)

        return mapped("key"), mapped("value")

    def cache_map(self) -> CacheMap | None:
        """See `Mapper.cache_map`. None where a head has a rank: its map is two products."""
        plain = all(stored.up is None for layers in self._layers.values() for stored in layers.values())
        own_way = type(self).map_layer is not CompressedLinearMapper.map_layer
        return self._cache_map if plain and not own_way else None

    @cached_property
    def _cache_map(self) -> CacheMap:
        return CacheMap(
            {
                kind: {
                    layer: stored.as_product(slots_of(self.recipe, kind, layer), self.recipe.shared)
                    for layer, stored in self._layers[kind].items()
                }
                for kind in KINDS
            }
        )

    def settings(self) -> dict[str, Any]:
        """See `Mapper.settings`."""
        return {
            "recipe": self.recipe.to_json(),
            "method": self.method,
            "ranks": {kind: [list(ranks) for ranks in layers] for kind, layers in self.ranks.items()},
            "fallbacks": [list(astuple(fallback)) for fallback in self.fallbacks],
        }

    def tensors(self) -> dict[str, Tensor]:
        """`{kind}.{layer}.weight`, `.bias`, and where there are any `.scale` and `.up`, mapped layers alone;
        shapes as in `CompressedLayer`.
        """
        return {
            f"{kind}.{layer}.{name}": tensor
            for kind in KINDS
            for layer, stored in self._layers[kind].items()
            for name, tensor in (
                ("weight", stored.weight),
                ("scale", stored.scale),
                ("up", stored.up),
                ("bias", stored.bias),
            )
            if tensor is not None
        }

    @classmethod
    def from_state(cls, settings: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Self:
        """See `Mapper.from_state`."""
        recipe = Recipe.from_json(settings["recipe"])
        layers = {
            kind: {
                layer: CompressedLayer(
                    tuple(None if rank is None else int(rank) for rank in settings["ranks"][kind][layer]),
                    tensors[f"{kind}.{layer}.weight"],
                    tensors.get(f"{kind}.{layer}.scale"),
                    tensors.get(f"{kind}.{layer}.up"),
                    tensors[f"{kind}.{layer}.bias"],
                )
                for layer in recipe.mapped_layers
            }
            for kind in KINDS
        }
        return cls(recipe, settings["method"], layers, tuple(Fallback(*f) for f in settings["fallbacks"]))

    def stored_dtype(self, name: str, tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
        """What the method made it: another dtype would be another compression."""
        return tensor.dtype

    @property
    def n_weights(self) -> int:
        """Weights and factors; neither scales nor biases."""
        return sum(stored.n_weights for layers in self._layers.values() for stored in layers.values())


def _check_moments(weights: LinearWeights, method: str, moments: PairMoments | None) -> None:
    if moments is None:
        if method.startswith("low_rank"):
            raise CompressionError(
                f"compression method {method!r} chooses ranks on held-out moments: give those of the "
                f"mapper's own calibration"
            )
        return
    if (weights.source_shape, weights.target_shape) != (moments.source_shape, moments.target_shape):
        raise MomentsError(
            f"the map reads {weights.source_shape} and writes {weights.target_shape} (heads, head_dim); the "
            f"moments are of {moments.source_shape} and {moments.target_shape}"
        )


def _compressed(
    weights: LinearWeights,
    method: str,
    moments: PairMoments | None,
    tolerance: float,
    kind: str,
    layer: int,
) -> CompressedLayer:
    dtype = method.removeprefix("low_rank").removeprefix("+") or None
    if method.startswith("low_rank") and moments is not None:
        heads = reduce_layer(weights, moments, kind, layer, tolerance)
    else:
        heads = [HeadFactors(weight, None) for weight in weights.weight[kind][layer]]
    packed = CompressedLayer.packed(heads, dtype, weights.bias[kind][layer])
    if moments is None:
        return packed
    bias = _bias(packed.effective(), moments, weights.recipe, kind, layer)
    return CompressedLayer(packed.ranks, packed.weight, packed.scale, packed.up, bias.to(packed.bias))


def _bias(weight: Tensor, moments: PairMoments, recipe: Recipe, kind: str, layer: int) -> Tensor:
    """`b = ȳ − x̄W` over the fit split, (H, d) float64."""
    bias = torch.empty(recipe.target_shape[layer], dtype=torch.float64)
    for heads, cut in layer_cuts(moments, "fit", recipe, kind, layer):
        offset = cut.mean_y - cut.mean_x @ joined(weight[heads]).to(cut.mean_x)
        bias[heads] = offset.view(len(heads), -1).cpu()
    return bias
