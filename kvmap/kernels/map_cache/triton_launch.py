"""Launches of the Triton kernels: which constants a launch compiles for, and what it is given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvmap.kernels.map_cache.triton_kernels import product_kernel
from kvmap.kernels.map_cache.triton_strip import strip_kernel
from kvmap.kernels.map_cache.triton_tiles import Tile, power_of_two

INTERPRETED = not isinstance(product_kernel, triton.JITFunction)
"""Whether kernels run in Triton's interpreter, on the CPU."""

TRITON_DTYPES = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float8_e4m3fn: tl.float8e4nv,
}

Launch: TypeAlias = Callable[[int, int], None]
"""Works on the columns from a first to before a last one."""


class Group(NamedTuple):
    """What products of one launch have in common."""

    shared: bool
    n_heads: int
    dim: int
    compute: torch.dtype
    weight: torch.dtype
    scaled: bool
    out: torch.dtype
    rotary: int
    half: bool
    block_size: int
    n_steps: int
    features: int
    even: bool
    fused_rotary: int
    fused_dim: int
    read: torch.dtype
    tile: Tile

    @property
    def heads(self) -> int:
        """Target heads of a tile."""
        return self.tile.heads(self.n_heads, self.padded, self.shared)

    @property
    def padded(self) -> int:
        """Places of a head."""
        return max(16, power_of_two(self.dim))


class StripGroup(NamedTuple):
    """What staged tensors of one launch of the strip kernel have in common; `vector` neighbouring channels
    can be read at once, 0 where channels are not neighbours.
    """

    dtype: torch.dtype
    compute: torch.dtype
    heads: int
    dim: int
    rotary: int
    half: bool
    vector: int


class Frame(NamedTuple):
    """What all product launches of a call are given."""

    batch: int
    tokens: int
    counts: Tensor
    keep: Tensor | None
    block_table: Tensor | None
    first: Tensor | None


class Vectors(NamedTuple):
    """Neighbouring elements, powers of two, that can be read or written at once; 0: none are neighbours."""

    features: int
    weights: int
    out: int


def product_constants(
    group: Group, vectors: Vectors, *, keep: bool, first: bool, upcast: bool
) -> dict[str, Any]:
    """What the product kernel is compiled for.

    Args:
        group: the products.
        vectors: what can be read and written at once.
        keep: whether some columns are zeroed.
        first: whether rows of pages start past 0.
        upcast: whether factors are multiplied in float32, as the interpreter needs it.
    """
    tile = group.tile
    return {
        "SHARED": group.shared, "N_HEADS": group.n_heads, "D": group.dim, "DP": group.padded,
        "HEADS": group.heads, "R": group.rotary, "HALF": group.half,
        "N_STEPS": group.n_steps, "EVEN": group.even,
        "FUSED_R": group.fused_rotary, "FUSED_D": group.fused_dim,
        "INPUT": TRITON_DTYPES[group.read], "COMPUTE": TRITON_DTYPES[group.compute],
        "WEIGHT": TRITON_DTYPES[group.weight], "OUT": TRITON_DTYPES[group.out],
        "SCALED": group.scaled, "KEEP": keep, "BLOCK_SIZE": group.block_size, "FIRST": first,
        "LARGEST": torch.finfo(group.out).max, "CLAMPS": group.out != torch.float32,
        "UPCAST": upcast,
        "A_VECTOR": vectors.features, "A_BYTES": group.read.itemsize,
        "W_VECTOR": vectors.weights, "W_BYTES": group.weight.itemsize,
        "O_VECTOR": vectors.out, "O_BYTES": group.out.itemsize,
        "BM": tile.block_tokens, "BK": group.features,
        "GROUP": max(1, tile.group_tokens // tile.block_tokens),
    }  # fmt: skip


def num_stages(tile: Tile) -> int:
    """Triton's number of stages: the address of a step is loaded before its features are, and Triton shares
    its stages out between the two.
    """
    return 2 * tile.stages - 1


def product_launch(
    group: Group, products: Tensor, steps: Tensor, n_products: int, frame: Frame, vectors: Vectors
) -> Launch:
    """All products of a group, over the columns it is called with.

    Args:
        group: what they have in common.
        products: their table. steps: and that of their steps.
        n_products: how many.
        frame: what is read beside them.
        vectors: what can be read and written at once.
    """
    tile, counts = group.tile, frame.counts
    keep = counts if frame.keep is None else frame.keep
    table = counts if frame.block_table is None else frame.block_table
    first = counts if frame.first is None else frame.first
    strides = (*(keep.stride()[:2]), *(table.stride()[:2]))
    constants = product_constants(
        group, vectors, keep=frame.keep is not None, first=frame.first is not None, upcast=INTERPRETED
    )
    per_block = frame.batch * n_products * -(-group.n_heads // group.heads)
    n_turns = frame.batch * frame.tokens

    def launch(start: int, stop: int) -> None:
        blocks = -(-(stop - start) // tile.block_tokens)
        product_kernel[(blocks * per_block,)](
            products, steps, keep, table, first, counts,
            n_products, start, stop, frame.tokens, n_turns, *strides,
            **constants, num_warps=tile.warps, num_stages=num_stages(tile),
        )  # fmt: skip

    return launch


def strip_constants(group: StripGroup, block_tokens: int) -> dict[str, Any]:
    """What the strip kernel is compiled for.

    Args:
        group: the staged tensors. block_tokens: of a program.
    """
    return {
        "INPUT": TRITON_DTYPES[group.dtype], "COMPUTE": TRITON_DTYPES[group.compute],
        "HEADS": group.heads, "D": group.dim, "DP": max(2, power_of_two(group.dim)),
        "R": group.rotary, "HALF": group.half, "BM": block_tokens,
        "VECTOR": group.vector, "BYTES": group.dtype.itemsize,
    }  # fmt: skip


def strip_launch(
    group: StripGroup, tensors: Tensor, n_tensors: int, frame: Frame, chunk_tokens: int, block_tokens: int
) -> Launch:
    """Staged tensors of a group, the columns it is called with.

    Args:
        group: what they have in common.
        tensors: their table. n_tensors: how many.
        frame: sizes.
        chunk_tokens: columns a workspace has room for.
        block_tokens: of a program.
    """
    constants = strip_constants(group, block_tokens)
    n_turns = frame.batch * frame.tokens

    def launch(start: int, stop: int) -> None:
        strip_kernel[(-(-(stop - start) // block_tokens), n_tensors, frame.batch)](
            tensors, start, stop, frame.tokens, n_turns, chunk_tokens, **constants, num_warps=4
        )

    return launch
