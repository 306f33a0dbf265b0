"""Two linear maps that follow each other, as one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvmap.errors import KvmapError
from kvmap.fit.features import KINDS, Recipe, Selection
from kvmap.fit.linear import LinearWeights
from kvmap.mappers import LinearMapper
from kvmap.mappers.base import FittedFor, MapperMismatch


@dataclass(frozen=True, eq=False)
class _MiddleHead:
    """A head of B as A feeds it.

    Attributes:
        channels: (d,) consecutive numbers: targets of A -> B, and features of B -> C, which are numbered
            alike (keys, then values, by layer, head and channel).
        features: (p,) numbers of what it reads of A.
        weight: (p, d); bias: (d,).
    """

    channels: Tensor
    features: Tensor
    weight: Tensor
    bias: Tensor


def fold(first: LinearMapper, second: LinearMapper) -> LinearMapper:
    """One map of A → C from those of A → B and B → C: `W_AC = W_AB W_BC`, `b_AC = b_AB W_BC + b_BC`.

    It gives what `second` gives of what `first` gives, for every column. Its heads read what any head of B
    that they read reads, so it can be larger than both: see `folded_recipe`. Products run in float64 and are
    kept in the dtype of `second`.

    Args:
        first: A → B.
        second: B → C.

    Raises:
        MapperMismatch: maps that do not follow each other: shapes, models or RoPE strategies that differ.
        KvmapError: a map that is not plainly linear, or reads native layers of its target.
    """
    _check(first, second)
    inner, outer = first.linear_weights(), second.linear_weights()
    recipe, middle = folded_recipe(inner.recipe, outer.recipe), _middle_heads(inner)
    weight: dict[str, tuple[Tensor, ...]] = {}
    bias: dict[str, tuple[Tensor, ...]] = {}
    for kind in KINDS:
        layers = [_folded_layer(middle, outer, recipe, kind, i) for i in range(len(recipe.target_shape))]
        weight[kind] = tuple(weights for weights, _ in layers)
        bias[kind] = tuple(biases for _, biases in layers)
    folded = LinearMapper(LinearWeights(recipe, weight, bias, inner.fallbacks + outer.fallbacks))
    if first.fitted_for is not None and second.fitted_for is not None:
        rope = first.fitted_for.rope or second.fitted_for.rope
        folded.fitted_for = FittedFor(first.fitted_for.source, second.fitted_for.target, rope)
    return folded


def folded_recipe(first: Recipe, second: Recipe) -> Recipe:
    """What a folded map reads of A: for each layer of C, the layers that feed the layers of B it reads.

    Head-local only where both maps are and every model has as many heads in every layer; "full_head" else. Of
    both kinds where either map is.
    """
    counts = {
        heads for shape in (first.source_shape, first.target_shape, second.target_shape) for heads, _ in shape
    }
    local = first.support == second.support == "head_local" and len(counts) == 1
    both_kinds = "both_kinds" in (first.regressors, second.regressors)
    return Recipe(
        first.source_shape,
        second.target_shape,
        "head_local" if local else "full_head",
        {kind: _folded_selection(first, second, kind, both_kinds) for kind in KINDS},
        "both_kinds" if both_kinds else "own_kind",
    )


def check_follows(first: FittedFor | None, second: FittedFor | None) -> None:
    """Refuse two maps of which the second was not fitted for what the first writes.

    Raises:
        MapperMismatch: naming each thing that differs; what is not known is not compared.
    """
    if first is None or second is None:
        return
    found = [f"middle {line}" for line in second.source.mismatches(first.target)]
    if first.rope is not None and second.rope is not None and _coupled(first) != _coupled(second):
        found.append(f"rope: {first.rope!r} of the first is not {second.rope!r} of the second")
    if found:
        raise MapperMismatch(
            "the second mapper does not read what the first writes: " + "; ".join(found) + ". Relay A -> B "
            "and B -> C with the same model B and the same rope strategy"
        )


def _coupled(fitted: FittedFor) -> bool:
    return fitted.rope == "coupled"


def _check(first: LinearMapper, second: LinearMapper) -> None:
    for name, mapper in (("first", first), ("second", second)):
        if type(mapper) is not LinearMapper:
            raise KvmapError(
                f"the {name} mapper is of kind {mapper.kind!r}; only plain linear maps fold into one: relay "
                "through the two instead"
            )
        if mapper.native_layers:
            raise KvmapError(
                f"the {name} mapper has native_layers={mapper.native_layers}: it reads what its own target "
                "computes, so it cannot be folded; fit with mapper.native_layers=0"
            )
    if first.target_shape != second.source_shape:
        raise MapperMismatch(
            f"the first mapper writes layers {first.target_shape} (heads, head_dim), the second reads "
            f"{second.source_shape}: they are not of one model B"
        )
    check_follows(first.fitted_for, second.fitted_for)


def _folded_selection(first: Recipe, second: Recipe, kind: str, both_kinds: bool) -> Selection:
    """Layers of A, ascending, for each layer of C."""
    selection = []
    for layer in range(len(second.target_shape)):
        read: set[int] = set()
        for _, middle_kind, middle in second.sources(kind, layer):
            for _, _, number in first.sources(middle_kind, middle):
                read.add(number)
        # one selection serves both kinds of A, whichever kind of B asked for a layer
        selection.append(tuple(sorted(read)))
    return tuple(selection)


def _folded_layer(
    middle: Sequence[_MiddleHead], outer: LinearWeights, recipe: Recipe, kind: str, layer: int
) -> tuple[Tensor, Tensor]:
    """Weights (H_t, p, d_t) and biases (H_t, d_t) of one layer of C."""
    own = outer.weight[kind][layer]
    n_heads, width = recipe.target_shape[layer]
    columns, kept = outer.recipe.columns(kind, layer), recipe.columns(kind, layer)
    weights, biases = [], []
    for head in range(n_heads):
        dense = torch.zeros(recipe.layout.n_features, width, dtype=torch.float64)
        bias = outer.bias[kind][layer][head].double().clone()
        rows = columns[0 if outer.recipe.shared else head]
        for each in middle:
            places = ((rows >= each.channels[0]) & (rows <= each.channels[-1])).nonzero().squeeze(1)
            if len(places):
                wanted, step = rows[places] - each.channels[0], own[head, places].double()
                dense.index_add_(0, each.features, each.weight[:, wanted].double() @ step)
                bias += each.bias[wanted].double() @ step
        weights.append(dense[kept[0 if recipe.shared else head]].to(own.dtype))
        biases.append(bias.to(outer.bias[kind][layer].dtype))
    return torch.stack(weights), torch.stack(biases)


def _middle_heads(inner: LinearWeights) -> list[_MiddleHead]:
    return [
        _MiddleHead(
            inner.recipe.layout.targets(kind, layer, head),
            inner.recipe.columns(kind, layer)[0 if inner.recipe.shared else head],
            inner.weight[kind][layer][head],
            inner.bias[kind][layer][head],
        )
        for kind in KINDS
        for layer, (n_heads, _) in enumerate(inner.target_shape)
        for head in range(n_heads)
    ]
