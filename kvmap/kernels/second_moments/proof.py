"""Whether a path new to this device gives what PyTorch gives: asked once, on a few rows and columns."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kvmap.kernels.second_moments.reference import second_moments_reference
from kvmap.kernels.second_moments.spec import Means, Rows, Sums

N_ROWS, N_FEATURES, N_TARGETS, BLOCK = 200, 160, 48, 64
TOLERANCE = 1e-4
"""Of the largest number of a table: float32 products stay below 1e-6, a wrong kernel misses by its size."""

Path = Callable[[Rows, Sums], Means]


def disagreement(rows: Rows, path: Path) -> str | None:
    """How a path differs from PyTorch with float64 products on the first rows and columns.

    Args:
        rows: of the call that is to be served; of their weights it matters alone that there are some.
        path: called with rows and sums.

    Returns:
        None where it agrees; else what is wrong, an error of the path included.
    """
    few = Rows(rows.x[:N_ROWS, :N_FEATURES], rows.y[:N_ROWS, :N_TARGETS])
    if rows.weights is not None:
        weights = torch.linspace(0, 2, len(few.x), dtype=torch.float64, device=rows.x.device)
        few = Rows(few.x, few.y, weights)
    expected, found = _sums(few), _sums(few)
    right = second_moments_reference(few, expected, torch.float64)
    if not right.finite:
        return None  # the call itself says so, by any path
    try:
        got = path(few, found)
        return _difference(_numbers(right, expected), _numbers(got, found))
    except Exception as error:  # whatever a compiler or a driver raises: PyTorch serves
        return f"{type(error).__name__}: {error}".splitlines()[0]


def _sums(rows: Rows) -> Sums:
    p, q = rows.x.shape[1], rows.y.shape[1]
    s_xx, s_xy, s_yy = (rows.x.new_zeros(shape, dtype=torch.float64) for shape in ((p, p), (p, q), (q,)))
    return Sums(s_xx, s_xy, s_yy, BLOCK)


def _numbers(means: Means, sums: Sums) -> dict[str, Tensor]:
    """All that is computed; of s_xx what has to be right."""
    named = {"s_xx": sums.s_xx.triu(), "s_xy": sums.s_xy, "s_yy": sums.s_yy}
    return named | {"mean_x": means.mean_x, "mean_y": means.mean_y}


def _difference(expected: dict[str, Tensor], found: dict[str, Tensor]) -> str | None:
    for name, right in expected.items():
        if right.numel() == 0:
            continue
        allowed = TOLERANCE * float(right.abs().max())
        apart = float((right - found[name]).abs().nan_to_num(torch.inf).max())
        if apart > allowed:
            return f"{name} is {apart:.3g} off; rounding explains {allowed:.3g}"
    return None
