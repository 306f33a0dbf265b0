"""The grouped product: which tile a program works on, and the sum over its features."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from kvmap.kernels.map_cache.triton_finish import finish
from kvmap.kernels.map_cache.triton_places import (
    N_PRODUCT_FIELDS,
    N_STEP_FIELDS,
    SIZES,
    channels,
    cos_and_sin,
    members,
    pointer,
)


@triton.jit(do_not_specialize=SIZES)
def product_kernel(
    products: tl.tensor, steps: tl.tensor, keep: tl.tensor, table: tl.tensor, first: tl.tensor,
    counts: tl.tensor,
    n_products: tl.tensor, start: tl.tensor, stop: tl.tensor, row_tokens: tl.tensor, n_turns: tl.tensor,
    keep_batch: tl.tensor, keep_token: tl.tensor, table_row: tl.tensor, table_block: tl.tensor,
    SHARED: tl.constexpr, N_HEADS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, HEADS: tl.constexpr,
    R: tl.constexpr, HALF: tl.constexpr,
    N_STEPS: tl.constexpr, EVEN: tl.constexpr, FUSED_R: tl.constexpr, FUSED_D: tl.constexpr,
    INPUT: tl.constexpr, COMPUTE: tl.constexpr, WEIGHT: tl.constexpr, OUT: tl.constexpr,
    SCALED: tl.constexpr, KEEP: tl.constexpr, BLOCK_SIZE: tl.constexpr, FIRST: tl.constexpr,
    LARGEST: tl.constexpr, CLAMPS: tl.constexpr, UPCAST: tl.constexpr,
    A_VECTOR: tl.constexpr, A_BYTES: tl.constexpr, W_VECTOR: tl.constexpr, W_BYTES: tl.constexpr,
    O_VECTOR: tl.constexpr, O_BYTES: tl.constexpr,
    BM: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
) -> None:  # fmt: skip
    """Columns start:stop of one tile, BM tokens of one row of the batch × HEADS heads, of one product.

    All products of a launch have N_STEPS steps. A step is up to BK channels in COMPUTE; or, with FUSED_R > 0,
    all FUSED_D channels of a head of a key as the cache holds it. VECTORs are numbers of neighbours that can
    be read or written at once.
    """
    batch, product, tile, block = _tile(n_products, stop - start, tl.cdiv(N_HEADS, HEADS), GROUP, BM)
    entry = products + product.to(tl.int64) * N_PRODUCT_FIELDS
    first_token = start + block * BM
    # What lies past the end reads the last token again, and is not stored.
    tokens = tl.minimum(first_token + tl.arange(0, BM), stop - 1)
    first_head = tile * HEADS

    column = tl.arange(0, HEADS * DP)
    head = first_head + column // DP
    channel, exists = channels(column % DP, HALF, D, R, DP)
    if DP > D:
        # Places without a channel read another one's weights, and are not stored: a mask would cost more.
        channel = tl.where(exists, channel, column % W_VECTOR)
    row_stride = tl.multiple_of(tl.load(entry + 1), W_VECTOR)
    weight = pointer(tl.load(entry), WEIGHT, W_VECTOR * W_BYTES)
    step = steps + tl.load(entry + 5) * N_STEP_FIELDS
    if SHARED:
        columns = tl.minimum(head, N_HEADS - 1) * D + channel
    else:
        weight += first_head.to(tl.int64) * tl.multiple_of(tl.load(entry + 2), W_VECTOR)
        step += first_head.to(tl.int64) * N_STEPS * N_STEP_FIELDS
        columns = channel
    columns = tl.max_contiguous(tl.multiple_of(columns, W_VECTOR), W_VECTOR)

    acc = tl.zeros((BM, HEADS * DP), tl.float32)
    if FUSED_R > 0:
        turn_row = batch.to(tl.int64) * row_tokens + tokens.to(tl.int64)
        acc = _add_undone(
            acc, step, weight, row_stride, columns, batch, tokens, turn_row, n_turns,
            N_STEPS, FUSED_R, FUSED_D, INPUT, COMPUTE, UPCAST, A_VECTOR, A_BYTES, BK,
        )  # fmt: skip
    else:
        acc = _add_content(
            acc, step, weight, row_stride, columns, batch, tokens, start,
            N_STEPS, EVEN, COMPUTE, UPCAST, A_VECTOR, A_BYTES, BK,
        )  # fmt: skip

    # A large tile is finished in two parts, whose addresses and tables then need half the registers.
    PARTS: tl.constexpr = 2 if BM * HEADS * DP >= 32768 else 1
    PART_HEADS: tl.constexpr = HEADS // 2 if PARTS == 2 and HEADS > 1 else HEADS
    PART_ROWS: tl.constexpr = BM // 2 if PARTS == 2 and HEADS == 1 else BM
    left, right = acc, acc
    if PARTS == 2:
        if HEADS > 1:
            left, right = tl.split(tl.permute(tl.reshape(acc, (BM, 2, PART_HEADS * DP)), (0, 2, 1)))
        else:
            left, right = tl.split(tl.permute(tl.reshape(acc, (2, PART_ROWS, DP)), (1, 2, 0)))
    for part in tl.static_range(PARTS):
        finish(
            left if part == 0 else right, entry,
            first_head + part * (HEADS - PART_HEADS), batch, first_token + part * (BM - PART_ROWS), stop,
            keep, keep_batch, keep_token, table, table_row, table_block, first, counts, row_tokens, n_turns,
            D, DP, PART_HEADS, N_HEADS, PART_ROWS, R, HALF, SCALED, KEEP, BLOCK_SIZE, FIRST,
            LARGEST, CLAMPS, OUT, O_VECTOR, O_BYTES,
        )  # fmt: skip


@triton.jit
def _tile(
    n_products: tl.tensor, n_tokens: tl.tensor, N_TILES: tl.constexpr, GROUP: tl.constexpr, BM: tl.constexpr
) -> Any:
    """Row of the batch, product, tile of heads and block of tokens of this program.

    Programs that follow each other share the weights of one tile over `GROUP` blocks of tokens; then come
    the other heads, then the next product, which reads mostly the same source layers; so that the tokens of
    a group stay in L2 over all products.
    """
    pid = tl.program_id(0)
    n_blocks = tl.cdiv(n_tokens, BM)
    per_block = n_products * N_TILES
    batch = pid // (n_blocks * per_block)
    rest = pid % (n_blocks * per_block)
    group = rest // (GROUP * per_block)
    size = tl.minimum(GROUP, n_blocks - group * GROUP)
    rest = rest - group * GROUP * per_block
    product = rest // (size * N_TILES)
    rest = rest % (size * N_TILES)
    return batch, product, rest // size, group * GROUP + rest % size


@triton.jit
def _add_content(
    acc: tl.tensor, step: tl.tensor, weight: tl.tensor, row_stride: tl.tensor, columns: tl.tensor,
    batch: tl.tensor, tokens: tl.tensor, start: tl.tensor,
    N_STEPS: tl.constexpr, EVEN: tl.constexpr, COMPUTE: tl.constexpr, UPCAST: tl.constexpr,
    A_VECTOR: tl.constexpr, A_BYTES: tl.constexpr, BK: tl.constexpr,
) -> Any:  # fmt: skip
    """Plus the products of all steps; with EVEN every step has BK channels."""
    k = tl.arange(0, BK)
    weights = k.to(tl.int64)[:, None] * row_stride + columns[None, :]
    for i in range(N_STEPS):
        at = step + i * N_STEP_FIELDS
        source = pointer(tl.load(at), COMPUTE, A_VECTOR * A_BYTES)
        source += batch.to(tl.int64) * tl.multiple_of(tl.load(at + 1), A_VECTOR)
        row = (tokens - start * tl.load(at + 3).to(tl.int32)).to(tl.int64)
        features = source + row[:, None] * tl.multiple_of(tl.load(at + 2), A_VECTOR) + k[None, :]
        if EVEN:
            a = tl.load(features)
            w = tl.load(weight + i * BK * row_stride + weights)
        else:
            real = k < tl.multiple_of(tl.load(at + 4).to(tl.int32), A_VECTOR)
            a = tl.load(features, mask=real[None, :], other=0.0)
            w = tl.load(weight + tl.load(at + 5) * row_stride + weights, mask=real[:, None], other=0.0)
        w = w.to(COMPUTE)
        if UPCAST:
            a, w = a.to(tl.float32), w.to(tl.float32)
        acc = tl.dot(a, w, acc, input_precision="ieee")
    return acc


@triton.jit
def _add_undone(
    acc: tl.tensor, step: tl.tensor, weight: tl.tensor, row_stride: tl.tensor, columns: tl.tensor,
    batch: tl.tensor, tokens: tl.tensor, turn_row: tl.tensor, n_turns: tl.tensor,
    N_STEPS: tl.constexpr, R: tl.constexpr, D: tl.constexpr, INPUT: tl.constexpr, COMPUTE: tl.constexpr,
    UPCAST: tl.constexpr, A_VECTOR: tl.constexpr, A_BYTES: tl.constexpr, BK: tl.constexpr,
) -> Any:  # fmt: skip
    """Plus the products of all steps, whose keys are turned back in float32 before they are rounded: BK / 2
    pairs at a time, for which cosines and sines are loaded once for all steps.
    """
    turns = pointer(tl.load(step + 3), tl.float32, 16)
    for j in tl.static_range((D // 2 + BK // 2 - 1) // (BK // 2)):
        pair = j * (BK // 2) + tl.arange(0, BK // 2)
        real = pair < D // 2
        cos, sin = cos_and_sin(turns, n_turns, turn_row, pair, R)
        left, right = members(pair, D, R, A_VECTOR)
        for i in range(N_STEPS):
            at = step + i * N_STEP_FIELDS
            source = pointer(tl.load(at), INPUT, A_VECTOR * A_BYTES)
            source += batch.to(tl.int64) * tl.multiple_of(tl.load(at + 1), A_VECTOR)
            rows = source + tokens.to(tl.int64)[:, None] * tl.multiple_of(tl.load(at + 2), A_VECTOR)
            a = tl.load(rows + left[None, :], mask=real[None, :], other=0.0).to(tl.float32)
            b = tl.load(rows + right[None, :], mask=real[None, :], other=0.0).to(tl.float32)
            x = (a * cos + b * sin).to(COMPUTE)
            y = (b * cos - a * sin).to(COMPUTE)
            weights = weight + tl.load(at + 5) * row_stride + columns[None, :]
            w = tl.load(weights + left[:, None] * row_stride, mask=real[:, None], other=0.0).to(COMPUTE)
            v = tl.load(weights + right[:, None] * row_stride, mask=real[:, None], other=0.0).to(COMPUTE)
            if UPCAST:
                x, y = x.to(tl.float32), y.to(tl.float32)
                w, v = w.to(tl.float32), v.to(tl.float32)
            acc = tl.dot(x, w, acc, input_precision="ieee")
            acc = tl.dot(y, v, acc, input_precision="ieee")
    return acc
