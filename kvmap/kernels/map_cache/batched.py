"""`map_cache` in PyTorch: keys un-rotated once a chunk, then one product for each target layer and kind."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from kvmap.kernels.map_cache.reference import saturated
from kvmap.kernels.map_cache.spec import KINDS, CacheMap, Inputs, Output, Product, Slot
from kvmap.models.rope import Rotation


class Turn(NamedTuple):
    """A rotation at the positions of a chunk: ``a' = a cos − b sin, b' = b cos + a sin``, scaling within.

    Attributes:
        cos: (batch, 1, tokens, rotary_dim/2); sin likewise.
        halves: whether channel i pairs with i + rotary_dim/2; otherwise 2i with 2i + 1.
    """

    cos: Tensor
    sin: Tensor
    halves: bool


class LayerCore(Protocol):
    """What `mapped_layer` is, so that a compiled one can stand in for it."""

    def __call__(
        self,
        parts: Sequence[Tensor],
        weight: Tensor,
        bias: Tensor,
        scale: Tensor | None,
        turn: Turn | None,
        dropped: Tensor | None,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        """See `mapped_layer`."""


def map_cache_batched(
    cache_map: CacheMap,
    inputs: Inputs,
    output: Output,
    layers: Iterable[int] | None = None,
    *,
    chunk_tokens: int = 2048,
    core: LayerCore | None = None,
) -> Tensor:
    """Map a cache, writing into `output`. See `kvmap.kernels.map_cache.spec` for the equation.

    Products are accumulated in float32 or better and rounded once before scales, biases and rotations, which
    are in float32: to the dtype of the weights where these are bfloat16 and on a CPU, else to float32.
    On a CUDA device nothing waits for the host.

    Besides inputs, weights and output it holds, for one chunk: un-rotated keys of the source layers that are
    still to be read, and the features and outputs of one product.

    Args:
        cache_map: the weights.
        inputs: what is mapped.
        output: where it goes.
        layers: target layers to write; None: all that are mapped.
        chunk_tokens: tokens, over all rows, that are worked on at a time; at least one column is.
        core: `mapped_layer`, or what `torch.compile` makes of it.

    Returns:
        (layers, 2, 2) int64, by layer in the order of `layers` and by kind: numbers that are not finite,
        and numbers that were clamped.
    """
    wanted = cache_map.layers if layers is None else tuple(layers)
    n_rows, n_tokens = inputs.positions.shape
    if not wanted or not n_rows or not n_tokens:
        return torch.zeros(len(wanted), 2, 2, dtype=torch.int64)
    step = max(chunk_tokens // n_rows, 1)
    total: Tensor | None = None
    for start in range(0, n_tokens, step):
        part = inputs.slice_tokens(start, min(start + step, n_tokens)) if step < n_tokens else inputs
        counts = _map_chunk(cache_map, part, output, wanted, start, core or mapped_layer)
        total = counts if total is None else total + counts
    assert total is not None
    return total


def _map_chunk(
    cache_map: CacheMap, inputs: Inputs, output: Output, wanted: Sequence[int], start: int, core: LayerCore
) -> Tensor:
    """Columns from `start` on, all target layers; counts (layers, 2, 2)."""
    chunk = _Chunk(inputs)
    products = {layer: {kind: cache_map.products[kind][layer] for kind in KINDS} for layer in wanted}
    last_reader = {
        slot: layer for layer in wanted for product in products[layer].values() for slot in product.slots
    }
    counts = []
    for layer in wanted:
        for kind in KINDS:
            product = products[layer][kind]
            mapped, count = core(
                chunk.parts(product),
                product.weight,
                product.bias,
                product.scale,
                chunk.turn(output.rotation(kind, layer), _widened(product), product.weight.device),
                chunk.dropped(product.weight.device),
                output.dtype(kind, layer),
            )
            output.write(kind, layer, start, mapped)
            counts.append(count)
        chunk.forget(slot for slot, reader in last_reader.items() if reader == layer)
    return torch.stack(counts).unflatten(0, (len(wanted), len(KINDS)))


class _Chunk:
    """What the products of a chunk share: content of the layers that are read, and tables of rotations."""

    def __init__(self, inputs: Inputs) -> None:
        self._inputs = inputs
        self._content: dict[tuple[Slot, torch.dtype], Tensor] = {}
        self._turns: dict[tuple[int, bool, torch.dtype, torch.device], Turn] = {}
        self._dropped: dict[torch.device, Tensor] = {}

    def parts(self, product: Product) -> list[Tensor]:
        """What a product reads, slot by slot: (batch, H_s, tokens, d_s); by head (batch, H_t, ...)."""
        parts = [self._layer(slot, product.compute_dtype) for slot in product.slots]
        return parts if product.shared else [_matched(part, product) for part in parts]

    def turn(self, rotation: Rotation | None, dtype: torch.dtype, device: torch.device) -> Turn | None:
        """R(position)."""
        return None if rotation is None else self._turn(rotation, False, dtype, device)

    def dropped(self, device: torch.device) -> Tensor | None:
        """(batch, 1, tokens, 1) bool, columns that get zeros; None where there are none."""
        if self._inputs.keep is None:
            return None
        if device not in self._dropped:
            self._dropped[device] = ~self._inputs.keep[:, None, :, None].to(device)
        return self._dropped[device]

    def forget(self, slots: Iterable[Slot]) -> None:
        """Content that is not read again."""
        gone = set(slots)
        self._content = {key: kept for key, kept in self._content.items() if key[0] not in gone}

    def _layer(self, slot: Slot, dtype: torch.dtype) -> Tensor:
        """R(position)⁻¹ x of a slot, (batch, heads, tokens, head_dim) in `dtype`."""
        if (slot, dtype) not in self._content:
            side = self._inputs.side(slot.origin)
            held, rotation = side.tensor(slot.kind, slot.layer), side.rotation(slot.kind, slot.layer)
            if rotation is not None:
                wide = torch.promote_types(held.dtype, torch.float32)
                held = turned(held.to(wide), self._turn(rotation, True, wide, held.device))
            self._content[slot, dtype] = held.to(dtype)
        return self._content[slot, dtype]

    def _turn(self, rotation: Rotation, undone: bool, dtype: torch.dtype, device: torch.device) -> Turn:
        key = (id(rotation), undone, dtype, device)
        if key not in self._turns:
            # the float32 angle that models compute, see `kvmap.models.rope`
            positions = self._inputs.positions.to(device)[:, None, :, None].float()
            angle = (positions * rotation.inv_freq.to(device).float()).to(dtype)
            scale, direction = (1.0 / rotation.scaling, -1.0) if undone else (rotation.scaling, 1.0)
            cos, sin = angle.cos() * scale, angle.sin() * (scale * direction)
            self._turns[key] = Turn(cos, sin, rotation.layout == "half")
        return self._turns[key]


def _matched(part: Tensor, product: Product) -> Tensor:
    """The source head that each target head reads: (batch, H_t, tokens, d_s)."""
    n_heads = part.shape[1]
    heads = [product.head_of(n_heads, head) for head in range(product.bias.shape[0])]
    if heads == list(range(n_heads)):
        return part
    # no index tensor: on a CUDA device it would have to come from the host
    return torch.cat([part[:, head : head + 1] for head in heads], dim=1)


def _widened(product: Product) -> torch.dtype:
    """The dtype of bias and rotation."""
    return torch.promote_types(product.bias.dtype, torch.promote_types(product.compute_dtype, torch.float32))


def mapped_layer(
    parts: Sequence[Tensor],
    weight: Tensor,
    bias: Tensor,
    scale: Tensor | None,
    turn: Turn | None,
    dropped: Tensor | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """One kind of one target layer over a chunk; a function of tensors, which `torch.compile` takes whole.

    Args:
        parts: slot by slot (batch, H_s, tokens, d_s) where heads share their features, else (batch, H_t,
            tokens, d_s); in the dtype the product is computed in.
        weight: (p, H_t·d_t), or by head (H_t, p, d_t).
        bias: (H_t, d_t), at least float32.
        scale: (H_t, d_t) float32 beside float8 weights, else None.
        turn: what the outputs are turned by; None: not at all.
        dropped: (batch, 1, tokens, 1) bool, columns that become 0; None: none.
        dtype: of the output.

    Returns:
        (batch, H_t, tokens, d_t), clamped to the range of `dtype`, in `dtype` or wider; and int64 (numbers
        not finite, numbers clamped).
    """
    shared = weight.ndim == 2
    n_rows, n_tokens = parts[0].shape[0], parts[0].shape[2]
    features = _shared_features(parts) if shared else _features_by_head(parts)
    found = _multiplied(features, weight.to(features.dtype))
    wide = torch.promote_types(bias.dtype, torch.promote_types(found.dtype, torch.float32))
    if shared:
        found = found.view(n_rows, n_tokens, *bias.shape).transpose(1, 2)
    else:
        found = found.view(bias.shape[0], n_rows, n_tokens, bias.shape[1]).transpose(0, 1)
    found = found.to(wide)
    if scale is not None:
        found = found * scale.unsqueeze(1)
    found = found + bias.unsqueeze(1)
    if turn is not None:
        found = turned(found, turn)
    if dropped is not None:
        found = found.masked_fill(dropped, 0.0)
    return _checked(found, dtype)


def turned(x: Tensor, turn: Turn) -> Tensor:
    """Channel pairs of x (batch, heads, tokens, head_dim) turned; channels past the rotary ones stay."""
    rotary_dim = 2 * turn.cos.shape[-1]
    turning = x[..., :rotary_dim]
    a, b = turning.chunk(2, dim=-1) if turn.halves else (turning[..., 0::2], turning[..., 1::2])
    # rounded as in `kvmap.models.rope`, so that a cache stripped before gives the same bits
    first, second = a * turn.cos - b * turn.sin, b * turn.cos + a * turn.sin
    rest = [x[..., rotary_dim:]] if rotary_dim < x.shape[-1] else []
    if turn.halves:
        return torch.cat((first, second, *rest), dim=-1)
    pairs = torch.stack((first, second), dim=-1).flatten(-2)
    return torch.cat((pairs, *rest), dim=-1) if rest else pairs


def _shared_features(parts: Sequence[Tensor]) -> Tensor:
    """(batch·tokens, p): slots, of each the heads, of each the channels."""
    columns = [part.transpose(1, 2) for part in parts]
    if len({part.shape[3] for part in parts}) == 1:
        return torch.cat(columns, dim=2).flatten(0, 1).flatten(1)
    return torch.cat([part.flatten(2) for part in columns], dim=2).flatten(0, 1)


def _features_by_head(parts: Sequence[Tensor]) -> Tensor:
    """(H_t, batch·tokens, p): slots, of each the channels of one head."""
    return torch.cat([part.transpose(0, 1) for part in parts], dim=-1).flatten(1, 2)


def _multiplied(features: Tensor, weight: Tensor) -> Tensor:
    """(n, p) times (p, q), or (h, n, p) times (h, p, q), accumulated in float32 or better."""
    multiply = torch.mm if weight.ndim == 2 else torch.bmm
    if features.dtype in (torch.bfloat16, torch.float16):
        if features.device.type == "cuda" and _has_out_dtype():
            return multiply(features, weight, out_dtype=torch.float32)
        if features.dtype == torch.float16:
            # a product that leaves float16's range may come back into it with the bias
            features, weight = features.float(), weight.float()
    return multiply(features, weight)


@functools.cache
def _has_out_dtype() -> bool:
    """Whether this torch multiplies half-precision matrices into float32."""
    return "dtype" in torch.ops.aten.mm.overloads()


def _checked(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`saturated`; on a CPU, where looking costs no wait, numbers that all fit come back as they are."""
    if x.device.type == "cpu" and not torch.compiler.is_compiling():
        largest = torch.finfo(dtype).max
        low, high = torch.aminmax(x)
        if float(low) >= -largest and float(high) <= largest:
            return x, torch.zeros(2, dtype=torch.int64)
    return saturated(x, dtype)
