"""Which products share a launch, and what each of their steps reads: of a map and the shape of a call alone.

What follows from addresses is left to `triton_plan`, so that calls of one shape share one layout.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kvmap.kernels.map_cache.spec import KINDS, CacheMap, KernelError, Product, Slot
from kvmap.kernels.map_cache.triton_launch import Group
from kvmap.kernels.map_cache.triton_tiles import Tile, features_of_step, power_of_two
from kvmap.kernels.map_cache.triton_weights import Prepared

DIRECT, STAGED, FUSED = "direct", "staged", "fused"
"""How a slot is read: content in the right dtype as it stands; through a workspace; undone in the step."""


class SlotFacts(NamedTuple):
    """What matters of a cache that is read.

    Attributes:
        heads: of its layer.
        width: channels of a head.
        dtype: its own.
        rotary: channels whose rotation is to be undone.
        half: whether they turn in halves.
        rotation: a number of the rotation among those of the call.
        neighbours: whether channels stand side by side.
        aligned: whether all heads of all tokens also start at a multiple of 16 bytes.
    """

    heads: int
    width: int
    dtype: torch.dtype
    rotary: int
    half: bool
    rotation: int
    neighbours: bool
    aligned: bool


class OutFacts(NamedTuple):
    """What matters of a cache that is written: its dtype, which channels turn and how, slots of a block (0:
    columns).
    """

    dtype: torch.dtype
    rotary: int
    half: bool
    block_size: int


class Choice(NamedTuple):
    """How work is cut: the tile by whether all heads read the same and whether rotations are undone in the
    step; where they are; and the shared memory of a program.
    """

    tiles: tuple[tuple[bool, bool, Tile], ...]
    fuses: tuple[tuple[bool, bool], ...]
    shared_bytes: int

    def tile(self, shared: bool, fused: bool) -> Tile:
        """Of a product."""
        return next(tile for s, f, tile in self.tiles if (s, f) == (shared, fused))


class Access(NamedTuple):
    """One way of reading a slot."""

    slot: Slot
    how: str
    compute: torch.dtype


class Run(NamedTuple):
    """Channels that stand side by side: of one head, or of all heads in a workspace."""

    access: int
    head: int
    width: int


class Member(NamedTuple):
    """One product of a launch."""

    kind: str
    layer: int
    place: int  # of its counts
    runs: list[list[Run]]


class LaidOut(NamedTuple):
    """One launch.

    Attributes:
        group: what its products have in common.
        members: the products.
        weights: (products, 7) int64, the first of `PRODUCT_FIELDS`.
        cut: (steps, 5) int64: access, head, first channel, channels and row of the weights.
        accesses: those it reads.
        feature_vector: neighbouring features that can be read at once, as far as widths allow.
        weight_vector: neighbouring weights.
        out_vector: neighbouring channels of the output, as far as head dim and rotation allow.
    """

    group: Group
    members: list[Member]
    weights: Tensor
    cut: Tensor
    accesses: tuple[int, ...]
    feature_vector: int
    weight_vector: int
    out_vector: int


class Layout(NamedTuple):
    """All launches of a call, and all that they read."""

    launches: list[LaidOut]
    accesses: list[Access]


def lay_out(
    cache_map: CacheMap,
    kept: Prepared,
    layers: Sequence[int],
    slots: Mapping[Slot, SlotFacts],
    outs: Mapping[tuple[str, int], OutFacts],
    choice: Choice,
) -> Layout:
    """The layout of a call.

    Args:
        cache_map: the map.
        kept: what is kept of it.
        layers: target layers, in the order of the counts.
        slots: what is read.
        outs: what is written, by kind and layer.
        choice: how work is cut.

    Raises:
        KernelError: a product whose features are not those that its slots give.
    """
    numbers: dict[Access, int] = {}
    groups: dict[Group, list[Member]] = {}
    for index, layer in enumerate(layers):
        for nth, kind in enumerate(KINDS):
            product = cache_map.products[kind][layer]
            facts = [slots[slot] for slot in product.slots]
            fused = (product.shared, True) in choice.fuses and _fusable(facts)
            n_heads, dim = product.bias.shape
            tile = choice.tile(product.shared, fused)
            padded = max(16, power_of_two(dim))
            columns = tile.heads(n_heads, padded, product.shared) * padded
            tile = tile.fitted(columns, product.compute_dtype.itemsize, choice.shared_bytes)
            runs = _runs(product, slots, numbers, tile, fused)
            group = _group(product, facts[0], runs, outs[kind, layer], tile, fused)
            groups.setdefault(group, []).append(Member(kind, layer, 2 * index + nth, runs))
    return Layout(
        [_laid_out(cache_map, kept, group, members) for group, members in groups.items()], [*numbers]
    )


def _fusable(facts: Sequence[SlotFacts]) -> bool:
    """Whether a step can undo the rotation: one, in halves, on all slots alike; channels are neighbours."""
    first = facts[0]
    return (
        first.rotary > 0
        and first.half
        and all(
            (one.rotation, one.width, one.dtype, one.neighbours)
            == (first.rotation, first.width, first.dtype, True)
            for one in facts
        )
    )


def _runs(
    product: Product,
    slots: Mapping[Slot, SlotFacts],
    numbers: dict[Access, int],
    tile: Tile,
    fused: bool,
) -> list[list[Run]]:
    """What is read in the order of the weights' rows, for each head of its own or once for all."""
    found: list[list[Run]] = [[] for _ in range(1 if product.shared else product.bias.shape[0])]
    for slot in product.slots:
        facts = slots[slot]
        how = FUSED if fused else _how(facts, product, tile)
        access = numbers.setdefault(Access(slot, how, product.compute_dtype), len(numbers))
        for head, runs in enumerate(found):
            if not product.shared:
                runs.append(Run(access, product.head_of(facts.heads, head), facts.width))
            elif how == STAGED:
                runs.append(Run(access, 0, facts.heads * facts.width))
            else:
                runs.extend(Run(access, each, facts.width) for each in range(facts.heads))
    p = sum(run.width for run in found[0])
    if p != product.n_features:
        raise KernelError(
            f"a product has {product.n_features} features, its slots give {p}: {product.slots}; pass the "
            f"caches it was fitted on"
        )
    return found


def _how(facts: SlotFacts, product: Product, tile: Tile) -> str:
    """Direct or staged."""
    ready = facts.rotary == 0 and facts.dtype == product.compute_dtype and facts.aligned
    # All heads of a workspace stand side by side, so that steps need not end with a head.
    whole = not product.shared or facts.width % tile.block_features == 0
    return DIRECT if ready and whole else STAGED


def _group(
    product: Product,
    first: SlotFacts,
    runs: Sequence[Sequence[Run]],
    out: OutFacts,
    tile: Tile,
    fused: bool,
) -> Group:
    """The launch a product belongs to."""
    widths = sorted({run.width for each in runs for run in each})
    features = tile.block_features if fused else features_of_step(widths, tile.block_features)
    return Group(
        shared=product.shared,
        n_heads=product.bias.shape[0],
        dim=product.bias.shape[1],
        compute=product.compute_dtype,
        weight=product.weight.dtype,
        scaled=product.scale is not None,
        out=out.dtype,
        rotary=out.rotary,
        half=out.half,
        block_size=out.block_size,
        n_steps=len(runs[0]) if fused else sum(-(-run.width // features) for run in runs[0]),
        features=features,
        even=all(width % features == 0 for width in widths),
        fused_rotary=first.rotary if fused else 0,
        fused_dim=first.width if fused else 0,
        read=first.dtype if fused else product.compute_dtype,
        tile=tile,
    )


def _laid_out(cache_map: CacheMap, kept: Prepared, group: Group, members: list[Member]) -> LaidOut:
    """All of a launch that is the same in every call."""
    per_product = group.n_steps * (1 if group.shared else group.n_heads)
    halves = (group.dim // 2, group.rotary // 2) if group.half else (group.dim,)
    rows, vector = [], math.gcd(16 // group.weight.itemsize, group.dim, *halves)
    for nth, member in enumerate(members):
        weights = kept.weights(member.kind, member.layer, cache_map.products[member.kind][member.layer])
        address = weights.weight.data_ptr()
        vector = math.gcd(vector, address // group.weight.itemsize, weights.row_stride, weights.head_stride)
        scale = 0 if weights.scale is None else weights.scale.data_ptr()
        strides = (weights.row_stride, weights.head_stride)
        rows.append([address, *strides, weights.bias.data_ptr(), scale, nth * per_product, member.place])
    runs = [run for member in members for each in member.runs for run in each]
    widths = {run.width for run in runs}
    fused = group.fused_rotary > 0
    return LaidOut(
        group,
        members,
        torch.tensor(rows, dtype=torch.int64),
        _cut([each for member in members for each in member.runs], None if fused else group.features),
        tuple(sorted({run.access for run in runs})),
        math.gcd(16, *((group.fused_rotary // 2, *(w // 2 for w in widths)) if fused else widths)),
        vector,
        math.gcd(16 // group.out.itemsize, group.dim, *halves),
    )


def _cut(runs: Sequence[Sequence[Run]], features: int | None) -> Tensor:
    """(steps, 5) int64, see `LaidOut`; all heads of a product follow each other. None: whole runs."""
    steps = []
    for head_runs in runs:
        row = 0
        for access, head, width in head_runs:
            by = width if features is None else features
            for channel in range(0, width, by):
                steps.append([access, head, channel, min(by, width - channel), row + channel])
            row += width
    return torch.tensor(steps, dtype=torch.int64).view(-1, 5)
