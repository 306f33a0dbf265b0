"""The kernel that sets content down before: keys turned back, numbers rounded, heads side by side."""

from __future__ import annotations

import triton
import triton.language as tl

from kvmap.kernels.map_cache.triton_places import N_STRIP_FIELDS, SIZES, cos_and_sin, members, pointer


@triton.jit(do_not_specialize=SIZES)
def strip_kernel(
    tensors: tl.tensor,
    start: tl.tensor,
    stop: tl.tensor,
    row_tokens: tl.tensor,
    n_turns: tl.tensor,
    chunk_tokens: tl.tensor,
    INPUT: tl.constexpr,
    COMPUTE: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    R: tl.constexpr,
    HALF: tl.constexpr,
    VECTOR: tl.constexpr,
    BYTES: tl.constexpr,
    BM: tl.constexpr,
) -> None:
    """Content of one tensor's columns start:stop in COMPUTE, into (batch, chunk_tokens, heads, d).

    VECTOR neighbouring channels can be read at once; 0: channels are not neighbours. Grid: (blocks of tokens,
    tensors, batch).
    """
    entry = tensors + tl.program_id(1).to(tl.int64) * N_STRIP_FIELDS
    batch = tl.program_id(2).to(tl.int64)
    t = start + tl.program_id(0) * BM + tl.arange(0, BM)
    inside = (t < stop)[:, None]
    tokens = tl.minimum(t, stop - 1).to(tl.int64)
    batch_stride, head_stride = tl.load(entry + 1), tl.load(entry + 2)
    token_stride, channel_stride = tl.load(entry + 3), tl.load(entry + 4)
    if VECTOR > 0:
        batch_stride = tl.multiple_of(batch_stride, VECTOR)
        head_stride = tl.multiple_of(head_stride, VECTOR)
        token_stride = tl.multiple_of(token_stride, VECTOR)
        channel_stride = 1
    rows = pointer(tl.load(entry), INPUT, max(1, VECTOR) * BYTES) + batch * batch_stride
    rows = rows + tokens[:, None] * token_stride
    to = pointer(tl.load(entry + 5), COMPUTE, 16)
    to = to + ((batch * chunk_tokens + t.to(tl.int64) - start) * (HEADS * D))[:, None]
    if R > 0:
        pair = tl.arange(0, DP // 2)
        turns = pointer(tl.load(entry + 6), tl.float32, 16)
        cos, sin = cos_and_sin(turns, n_turns, batch * row_tokens + tokens, pair, R)
        if HALF:
            left, right = members(pair, D, R, max(1, VECTOR))
        else:
            left, right = 2 * pair, 2 * pair + 1
        real = (pair < D // 2)[None, :]
        for head in range(HEADS):
            of_head = rows + head * head_stride
            a = tl.load(of_head + left[None, :] * channel_stride, mask=real, other=0.0).to(tl.float32)
            b = tl.load(of_head + right[None, :] * channel_stride, mask=real, other=0.0).to(tl.float32)
            fits = real & inside
            tl.store(to + head * D + left[None, :], (a * cos + b * sin).to(COMPUTE), mask=fits)
            tl.store(to + head * D + right[None, :], (b * cos - a * sin).to(COMPUTE), mask=fits)
    else:
        channel = tl.arange(0, DP)
        real = (channel < D)[None, :]
        for head in range(HEADS):
            from_head = rows + head * head_stride + channel[None, :] * channel_stride
            x = tl.load(from_head, mask=real, other=0.0).to(tl.float32)
            tl.store(to + head * D + channel[None, :], x.to(COMPUTE), mask=real & inside)
