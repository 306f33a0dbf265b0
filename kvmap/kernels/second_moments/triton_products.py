"""`add_second_moments` in Triton: rows are centred and weighted where they are loaded, and never copied.

Rows are taken in runs of at most `RUN_ROWS`. Of each run, a program sums one tile of a table in float32 and
adds it to the float64 table, so that the float32 error does not grow with the rows of a chunk. Every
program owns its tile: there are no atomics, and two calls on the same rows give the same bits.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvmap.kernels.second_moments.spec import Means, Rows, Sums

RUN_ROWS = 1024
"""Rows whose products are summed in float32 before they are added in float64."""

PRECISIONS = ("tf32x3", "ieee")
"""How float32 factors are multiplied: three TensorFloat-32 products each, or one rounded float32 product."""

_BLOCK_ROWS = 32  # a step of the sum over rows
_GROUP = 8  # neighbouring tiles along one side that run together, and share their rows in L2
_COLUMNS, _COLUMN_ROWS = 32, 64  # tile of the column sums


def second_moments_triton(rows: Rows, sums: Sums, precision: str = "tf32x3") -> Means:
    """Add the second moments of a chunk with float32 products; as `add_second_moments` otherwise.

    Args:
        rows: float64, float32, float16 or bfloat16, on the device of the sums.
        sums: what is added to.
        precision: of `PRECISIONS`. Factors carry a few roundings of 2⁻²⁴; relative to its size, the product
            of two of them is off by at most 3 · 2⁻²² ("tf32x3") or 2⁻²⁴ ("ieee").
    """
    x, y = rows.x, rows.y
    weights = None if rows.weights is None else rows.weights.contiguous()
    n_rows = len(x) if weights is None else int((weights > 0).sum())
    weight = float(n_rows) if weights is None else float(weights.sum())
    if n_rows == 0:
        zeros = torch.zeros(x.shape[1] + y.shape[1], dtype=torch.float64, device=x.device)
        return Means(0, 0.0, *zeros.split([x.shape[1], y.shape[1]]))
    with _on(x):
        mean_x, mean_y = (_column_sums(side, weights) / weight for side in (x, y))
        means = Means(n_rows, weight, mean_x, mean_y)
        if not means.finite:
            return means
        sums.s_yy.add_(_column_sums(y, weights, mean_y))
        root = None if weights is None else weights.sqrt().float()
        _add_products(x, x, mean_x, mean_x, root, sums.s_xx, sums.block, precision)
        _add_products(x, y, mean_x, mean_y, root, sums.s_xy, None, precision)
    return means


def _column_sums(rows: Tensor, weights: Tensor | None, mean: Tensor | None = None) -> Tensor:
    """Σ w x, or with means Σ w (x − x̄)², of each column in float64."""
    n_rows, n_columns = rows.shape
    sums = torch.zeros(n_columns, dtype=torch.float64, device=rows.device)
    if n_columns == 0:
        return sums
    for start, run in _runs(n_rows):
        _column_sums_kernel[(triton.cdiv(n_columns, _COLUMNS),)](
            rows[start:],
            weights if weights is None else weights[start:],
            mean,
            sums,
            min(run, n_rows - start),
            n_columns,
            *rows.stride(),
            WEIGHTED=weights is not None,
            SQUARED=mean is not None,
            RUN=run,
            BLOCK_ROWS=min(_COLUMN_ROWS, run),
            BLOCK_COLUMNS=_COLUMNS,
        )
    return sums


def _add_products(
    left: Tensor,
    right: Tensor,
    mean_left: Tensor,
    mean_right: Tensor,
    root: Tensor | None,
    table: Tensor,
    triangle: int | None,
    precision: str,
) -> None:
    """Add Σ √w (l − l̄) · √w (r − r̄) to a table; `triangle`: side of its blocks, none below the diagonal."""
    n_rows, n_left, n_right = len(left), left.shape[1], right.shape[1]
    tile, stages = _tile(min(n_left, n_right), max(left.element_size(), right.element_size()))
    tiles = _tiles(n_left, n_right, tile, triangle, left.device)
    if len(tiles) == 0:
        return
    for start, run in _runs(n_rows):
        _products_kernel[(len(tiles),)](
            left[start:],
            right[start:],
            mean_left,
            mean_right,
            root if root is None else root[start:],
            table,
            tiles,
            min(run, n_rows - start),
            n_left,
            n_right,
            *left.stride(),
            *right.stride(),
            *table.stride(),
            WEIGHTED=root is not None,
            PRECISION=precision,
            RUN=run,
            BLOCK_ROWS=_BLOCK_ROWS,
            TILE=tile,
            num_warps=8 if tile == 128 else 4,
            num_stages=stages,
        )


def _tile(n_columns: int, element_size: int) -> tuple[int, int]:
    """Side of a tile, and how many steps of rows are under way: what 99 KiB of shared memory hold."""
    wide = n_columns > 256 and element_size <= 4
    return 128 if wide else 64, 3 if element_size == 2 else 2


def _runs(n_rows: int) -> list[tuple[int, int]]:
    """Start of each run and its length, rounded up to a power of two: few of them, each compiled once."""
    starts = range(0, n_rows, RUN_ROWS)
    return [(s, max(_BLOCK_ROWS, triton.next_power_of_2(min(RUN_ROWS, n_rows - s)))) for s in starts]


@lru_cache(maxsize=64)
def _tiles(n_left: int, n_right: int, tile: int, triangle: int | None, device: torch.device) -> Tensor:
    """(row, column) of every tile of a table that is needed, (n_tiles, 2) int32, in the order they run.

    Groups of rows of tiles, and in a group column by column: tiles that run together read the same rows of
    the chunk.
    """
    rows, columns = (torch.arange(-(-n // tile)) for n in (n_left, n_right))
    row, column = (index.flatten() for index in torch.meshgrid(rows, columns, indexing="ij"))
    if triangle is not None:
        needed = (column + 1) * tile > row * tile // triangle * triangle
        row, column = row[needed], column[needed]
    order = ((row // _GROUP * len(columns) + column) * _GROUP + row % _GROUP).argsort()
    return torch.stack([row[order], column[order]], dim=1).to(device, torch.int32)


def _on(rows: Tensor) -> AbstractContextManager[Any]:
    """Launch where the rows are."""
    return torch.cuda.device(rows.device) if rows.is_cuda else nullcontext()


# Arguments are tl.tensor, numbers too: `int` would have the compiler take them, and strides, as 32 bits.


@triton.jit
def _column_sums_kernel(
    rows: tl.tensor,
    weights: tl.tensor,
    mean: tl.tensor,
    sums: tl.tensor,
    n_rows: tl.tensor,
    n_columns: tl.tensor,
    stride_row: tl.tensor,
    stride_column: tl.tensor,
    WEIGHTED: tl.constexpr,
    SQUARED: tl.constexpr,
    RUN: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
) -> None:
    column = tl.program_id(0).to(tl.int64) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    real = column < n_columns
    total = tl.zeros((BLOCK_COLUMNS,), dtype=tl.float64)
    for start in range(0, RUN, BLOCK_ROWS):
        row = start + tl.arange(0, BLOCK_ROWS).to(tl.int64)
        inside = (row < n_rows)[:, None] & real[None, :]
        if WEIGHTED:
            weight = tl.load(weights + row, mask=row < n_rows, other=0.0)
            inside = inside & (weight > 0)[:, None]
        places = row[:, None] * stride_row + column[None, :] * stride_column
        term = tl.load(rows + places, mask=inside, other=0.0).to(tl.float64)
        if SQUARED:
            term = tl.where(inside, term - tl.load(mean + column, mask=real, other=0.0)[None, :], 0.0)
            term = term * term
        if WEIGHTED:
            term = term * weight[:, None]
        total += tl.sum(term, axis=0)
    tl.store(sums + column, tl.load(sums + column, mask=real, other=0.0) + total, mask=real)


@triton.jit
def _products_kernel(
    left: tl.tensor,
    right: tl.tensor,
    mean_left: tl.tensor,
    mean_right: tl.tensor,
    root: tl.tensor,
    table: tl.tensor,
    tiles: tl.tensor,
    n_rows: tl.tensor,
    n_left: tl.tensor,
    n_right: tl.tensor,
    stride_left_row: tl.tensor,
    stride_left_column: tl.tensor,
    stride_right_row: tl.tensor,
    stride_right_column: tl.tensor,
    stride_table_row: tl.tensor,
    stride_table_column: tl.tensor,
    WEIGHTED: tl.constexpr,
    PRECISION: tl.constexpr,
    RUN: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    number = tl.program_id(0).to(tl.int64) * 2
    i = tl.load(tiles + number).to(tl.int64) * TILE + tl.arange(0, TILE)
    j = tl.load(tiles + number + 1).to(tl.int64) * TILE + tl.arange(0, TILE)
    high_i, low_i = _mean(mean_left, i, n_left)
    high_j, low_j = _mean(mean_right, j, n_right)
    total = tl.zeros((TILE, TILE), dtype=tl.float32)
    for start in range(0, RUN, BLOCK_ROWS):
        row = start + tl.arange(0, BLOCK_ROWS).to(tl.int64)
        real = row < n_rows
        weight = tl.full((BLOCK_ROWS,), 1.0, dtype=tl.float32)
        if WEIGHTED:
            weight = tl.load(root + row, mask=real, other=0.0)
            real = real & (weight > 0)
        places_i = row[:, None] * stride_left_row + i[None, :] * stride_left_column
        places_j = row[:, None] * stride_right_row + j[None, :] * stride_right_column
        a = _centred(left + places_i, real[:, None] & (i < n_left)[None, :], high_i, low_i)
        b = _centred(right + places_j, real[:, None] & (j < n_right)[None, :], high_j, low_j)
        if WEIGHTED:
            a = a * weight[:, None]
            b = b * weight[:, None]
        total = tl.dot(tl.trans(a), b, total, input_precision=PRECISION)
    inside = (i < n_left)[:, None] & (j < n_right)[None, :]
    place = table + i[:, None] * stride_table_row + j[None, :] * stride_table_column
    tl.store(place, tl.load(place, mask=inside, other=0.0) + total.to(tl.float64), mask=inside)


@triton.jit
def _mean(mean: tl.tensor, column: tl.tensor, n_columns: int) -> Any:
    """A float64 mean as two float32 numbers: rounded to one it would be off by more than a centred row is."""
    exact = tl.load(mean + column, mask=column < n_columns, other=0.0)
    high = exact.to(tl.float32)
    return high, (exact - high.to(tl.float64)).to(tl.float32)


@triton.jit
def _centred(place: tl.tensor, inside: tl.tensor, high: tl.tensor, low: tl.tensor) -> Any:
    """Rows less their mean in float32; zeros outside, where nothing is read."""
    x = tl.load(place, mask=inside, other=0.0)
    if x.dtype == tl.float64:
        centred = (x - high.to(tl.float64)[None, :] - low.to(tl.float64)[None, :]).to(tl.float32)
    else:
        centred = x.to(tl.float32) - high[None, :] - low[None, :]
    return tl.where(inside, centred, 0.0)
