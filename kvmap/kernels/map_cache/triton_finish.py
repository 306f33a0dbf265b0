"""What is done with a tile's sums: scale, bias, rotation, saturating cast, and the store where it belongs."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from kvmap.kernels.map_cache.triton_places import channels, cos_and_sin, members, pointer


@triton.jit
def finish(
    acc: tl.tensor, entry: tl.tensor, first_head: tl.tensor, batch: tl.tensor, first_token: tl.tensor,
    stop: tl.tensor, keep: tl.tensor, keep_batch: tl.tensor, keep_token: tl.tensor,
    table: tl.tensor, table_row: tl.tensor, table_block: tl.tensor, first: tl.tensor, counts: tl.tensor,
    row_tokens: tl.tensor, n_turns: tl.tensor,
    D: tl.constexpr, DP: tl.constexpr, HEADS: tl.constexpr, N_HEADS: tl.constexpr, BM: tl.constexpr,
    R: tl.constexpr, HALF: tl.constexpr, SCALED: tl.constexpr, KEEP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, FIRST: tl.constexpr, LARGEST: tl.constexpr, CLAMPS: tl.constexpr,
    OUT: tl.constexpr, O_VECTOR: tl.constexpr, O_BYTES: tl.constexpr,
) -> None:  # fmt: skip
    """Store sums (BM, HEADS · DP) float32 of one row of the batch, from a token and a head on.

    O_VECTOR neighbouring channels of the output can be written at once; 0: channels are not neighbours.
    """
    column = tl.arange(0, HEADS * DP)
    head = first_head + column // DP
    channel, exists = channels(column % DP, HALF, D, R, DP)
    exists = exists & (head < N_HEADS)
    term = tl.where(exists, head * D + channel, 0)
    if SCALED:
        acc = acc * tl.load(pointer(tl.load(entry + 4), tl.float32, 4) + term)[None, :]
    acc = acc + tl.load(pointer(tl.load(entry + 3), tl.float32, 4) + term)[None, :]

    t = first_token + tl.arange(0, BM)
    inside = t < stop
    kept = inside
    if KEEP:
        at = batch.to(tl.int64) * keep_batch + t.to(tl.int64) * keep_token
        kept = tl.load(keep + at, mask=inside, other=0) != 0
    row = _rows(entry, batch, t, inside, table, table_row, table_block, first, BLOCK_SIZE, FIRST, O_VECTOR)
    address = pointer(tl.load(entry + 7), OUT, max(1, O_VECTOR) * O_BYTES) + row[:, None]
    head_stride, channel_stride = tl.load(entry + 10), tl.load(entry + 11)
    if O_VECTOR > 0:
        head_stride = tl.multiple_of(head_stride, O_VECTOR)
        channel_stride = 1
    clamped = tl.zeros((), tl.int32)
    bad = tl.zeros((), tl.int32)
    if R > 0:
        turn_row = batch.to(tl.int64) * row_tokens + tl.minimum(t, stop - 1).to(tl.int64)
        a, b = _turned(acc, entry, n_turns, turn_row, DP, HEADS, BM, R, HALF)
        if HALF:
            pairs = tl.arange(0, HEADS * DP // 2)
            pair = pairs % (DP // 2)
            of_pair = first_head + pairs // (DP // 2)
            left, right = members(pair, D, R, max(1, O_VECTOR))
            fits = ((pair < D // 2) & (of_pair < N_HEADS))[None, :] & inside[:, None]
            of_head = of_pair.to(tl.int64) * head_stride
            place = (of_head + left * channel_stride)[None, :]
            clamped, bad = _write(a, place, fits, address, kept, clamped, bad, LARGEST, CLAMPS, OUT)
            place = (of_head + right * channel_stride)[None, :]
            clamped, bad = _write(b, place, fits, address, kept, clamped, bad, LARGEST, CLAMPS, OUT)
        else:
            acc = tl.reshape(tl.join(a, b), (BM, HEADS * DP))
    if R == 0 or not HALF:
        place = (head.to(tl.int64) * head_stride + channel * channel_stride)[None, :]
        fits = exists[None, :] & inside[:, None]
        clamped, bad = _write(acc, place, fits, address, kept, clamped, bad, LARGEST, CLAMPS, OUT)
    count = counts + tl.load(entry + 6) * 2
    tl.atomic_add(count, bad.to(tl.int64), mask=bad > 0)
    tl.atomic_add(count + 1, clamped.to(tl.int64), mask=clamped > 0)


@triton.jit
def _rows(
    entry: tl.tensor,
    batch: tl.tensor,
    t: tl.tensor,
    inside: tl.tensor,
    table: tl.tensor,
    table_row: tl.tensor,
    table_block: tl.tensor,
    first: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    FIRST: tl.constexpr,
    O_VECTOR: tl.constexpr,
) -> Any:
    """Elements from the start of the output to tokens t of a row, through the block table if there is one."""
    out_batch, out_token = tl.load(entry + 8), tl.load(entry + 9)
    if O_VECTOR > 0:
        out_batch = tl.multiple_of(out_batch, O_VECTOR)
        out_token = tl.multiple_of(out_token, O_VECTOR)
    position = t.to(tl.int64)
    if BLOCK_SIZE > 0:
        if FIRST:
            position += tl.load(first + batch).to(tl.int64)
        row_table = table + batch.to(tl.int64) * table_row
        block = tl.load(row_table + position // BLOCK_SIZE * table_block, mask=inside, other=0)
        row = block.to(tl.int64) * out_batch + position % BLOCK_SIZE * out_token
    else:
        row = batch.to(tl.int64) * out_batch + position * out_token
    return row


@triton.jit
def _turned(
    acc: tl.tensor,
    entry: tl.tensor,
    n_turns: tl.tensor,
    turn_row: tl.tensor,
    DP: tl.constexpr,
    HEADS: tl.constexpr,
    BM: tl.constexpr,
    R: tl.constexpr,
    HALF: tl.constexpr,
) -> Any:
    """First and second members of all pairs, turned, each (BM, HEADS · DP / 2)."""
    if HALF:
        split = tl.permute(tl.reshape(acc, (BM, HEADS, 2, DP // 2)), (0, 1, 3, 2))
    else:
        split = tl.reshape(acc, (BM, HEADS, DP // 2, 2))
    a, b = tl.split(split)
    a = tl.reshape(a, (BM, HEADS * DP // 2))
    b = tl.reshape(b, (BM, HEADS * DP // 2))
    pair = tl.arange(0, HEADS * DP // 2) % (DP // 2)
    cos, sin = cos_and_sin(pointer(tl.load(entry + 12), tl.float32, 16), n_turns, turn_row, pair, R)
    return a * cos - b * sin, b * cos + a * sin


@triton.jit
def _write(
    y: tl.tensor,
    place: tl.tensor,
    fits: tl.tensor,
    address: tl.tensor,
    kept: tl.tensor,
    clamped: tl.tensor,
    bad: tl.tensor,
    LARGEST: tl.constexpr,
    CLAMPS: tl.constexpr,
    OUT: tl.constexpr,
) -> Any:
    """Store (rows, columns) at `address + place`; adds to the counts of clamped and not finite numbers."""
    y = tl.where(kept[:, None], y, 0.0)
    size = tl.abs(y)
    finite = size < float("inf")
    bad += tl.sum((fits & (finite == 0)).to(tl.int32))
    if CLAMPS:
        clamped += tl.sum((fits & finite & (size > LARGEST)).to(tl.int32))
        y = tl.where(y > LARGEST, LARGEST, tl.where(y < -LARGEST, -LARGEST, y))
    tl.store(address + place, y.to(OUT), mask=fits)
    return clamped, bad
