"""Where things stand: the tables that launches hand to the kernels, and the channels of a tile's columns.

Pointers and strides stand in int64 tables in device memory, so that one launch serves all layers:

* a row of `PRODUCT_FIELDS` for each target layer and kind;
* a row of `STEP_FIELDS` for each block of features that a product (by head: a head of one) sums over;
* a row of `STRIP_FIELDS` for each tensor whose rotation is undone before.

In a tile, a head takes `DP` places, the power of two from d upwards. Where keys turn in halves, places of a
head are the first members of all pairs, then the second ones, channels past the rotary ones in pairs that
turn by nothing; so the pairs of every layout are found by a reshape.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

PRODUCT_FIELDS = (
    "weight", "row_stride", "head_stride", "bias", "scale", "first_step", "count",
    "out", "out_batch", "out_token", "out_head", "out_channel", "turns",
)  # fmt: skip
"""Addresses, strides in elements, and indices. Of pages `out_batch` is the stride of a block, `out_token`
that of a slot; `turns` is a table of cosines, then one of sines, each (batch · tokens, r/2) float32."""

STEP_FIELDS = ("address", "batch_stride", "token_stride", "in_chunk", "width", "weight_row")
"""Of a block of features: its first channel at token 0, strides in elements, 1 where tokens are counted from
the start of the chunk (a workspace), how many channels it has, and their first row of the weights. Where the
rotation is undone in the step, `in_chunk` is the address of the turns."""

STRIP_FIELDS = ("address", "batch_stride", "head_stride", "token_stride", "channel_stride", "to", "turns")

N_PRODUCT_FIELDS: tl.constexpr = tl.constexpr(len(PRODUCT_FIELDS))
N_STEP_FIELDS: tl.constexpr = tl.constexpr(len(STEP_FIELDS))
N_STRIP_FIELDS: tl.constexpr = tl.constexpr(len(STRIP_FIELDS))

SIZES = [
    "n_products", "start", "stop", "row_tokens", "n_turns", "chunk_tokens",
    "keep_batch", "keep_token", "table_row", "table_block",
]  # fmt: skip
"""Arguments that change from call to call and must not compile a kernel again."""


@triton.jit
def pointer(address: tl.tensor, TYPE: tl.constexpr, BYTES: tl.constexpr) -> Any:
    """An address from a table as a pointer, of which is known that so many bytes divide it."""
    return tl.multiple_of(address.to(tl.pointer_type(TYPE)), BYTES)


@triton.jit
def channels(place: tl.tensor, HALF: tl.constexpr, D: tl.constexpr, R: tl.constexpr, DP: tl.constexpr) -> Any:
    """Channel at a place of a head, and whether there is one."""
    if HALF and (R < D or DP > D):
        second = place // (DP // 2)
        pair = place % (DP // 2)
        turning = second * (R // 2) + pair
        passing = R + second * (D // 2 - R // 2) + pair - R // 2
        channel = tl.where(pair < R // 2, turning, passing)
        exists = pair < D // 2
    else:
        channel = place
        exists = place < D
    return channel, exists


@triton.jit
def members(pair: tl.tensor, D: tl.constexpr, R: tl.constexpr, VECTOR: tl.constexpr) -> Any:
    """Channels of both members of pairs that turn in halves, in runs of VECTOR neighbours."""
    if R < D:
        turning = pair < R // 2
        left = tl.where(turning, pair, R // 2 + pair)
        right = tl.where(turning, R // 2 + pair, D // 2 + pair)
        left = tl.max_contiguous(tl.multiple_of(left, VECTOR), VECTOR)
        right = tl.max_contiguous(tl.multiple_of(right, VECTOR), VECTOR)
    else:
        left, right = pair, D // 2 + pair
    return left, right


@triton.jit
def cos_and_sin(
    turns: tl.tensor, n_turns: tl.tensor, row: tl.tensor, pair: tl.tensor, R: tl.constexpr
) -> Any:
    """Of rows and pairs, each (rows, pairs) float32; pairs past R / 2 turn by nothing."""
    turning = (pair < R // 2)[None, :]
    place = turns + row[:, None] * (R // 2) + pair[None, :]
    cos = tl.load(place, mask=turning, other=1.0)
    sin = tl.load(place + n_turns * (R // 2), mask=turning, other=0.0)
    return cos, sin
