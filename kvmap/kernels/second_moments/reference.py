"""`add_second_moments` in PyTorch: rows centred in float64, products by blocks of features."""

from __future__ import annotations

import torch
from torch import Tensor

from kvmap.kernels.second_moments.spec import Means, Rows, Sums


def second_moments_reference(rows: Rows, sums: Sums, product_dtype: torch.dtype) -> Means:
    """Add the second moments of a chunk; arguments and result as of `add_second_moments`.

    Holds a float64 copy of the rows, and beside it one of `product_dtype`, one of x and y at a time.
    """
    rows = rows.counted()
    weights = rows.weights
    # copies of our own, centred and weighted in place: rows are the largest thing beside the tables
    x, y = (side.to(torch.float64, copy=True) for side in (rows.x, rows.y))
    n_rows = x.shape[0]
    if n_rows == 0:
        return Means(0, 0.0, x.new_zeros(x.shape[1]), y.new_zeros(y.shape[1]))
    if weights is None:
        means = Means(n_rows, float(n_rows), x.mean(0), y.mean(0))
    else:
        weight = float(weights.sum())
        means = Means(n_rows, weight, weights @ x / weight, weights @ y / weight)
    if not means.finite:
        return means
    x.sub_(means.mean_x)
    y.sub_(means.mean_y)
    if weights is not None:
        root = weights.sqrt().unsqueeze(1)
        x.mul_(root)
        y.mul_(root)
    sums.s_yy.add_(torch.linalg.vector_norm(y, dim=0).square())
    x = x.to(product_dtype)  # one after the other: the wider copy goes as soon as it is read
    y = y.to(product_dtype)
    _add_products(x, y, sums)
    return means


def _add_products(x: Tensor, y: Tensor, sums: Sums) -> None:
    """Add XᵀX, of which only blocks on and above the diagonal, and XᵀY.

    By blocks of features: half of the work on XᵀX is saved, and a float32 product needs no second table.
    """
    for start in range(0, x.shape[1], sums.block):
        block = slice(start, start + sums.block)
        left = x[:, block].T
        for table, right in ((sums.s_xx[block, start:], x[:, start:]), (sums.s_xy[block], y)):
            if x.dtype == torch.float64:
                table.addmm_(left, right)
            else:
                table.add_(left @ right)
