"""Centred second moments of a chunk of rows, added to float64 tables: what every linear fit reads."""

from __future__ import annotations

import importlib.util
import logging
from functools import cache

import torch

from kvmap.errors import UnknownName
from kvmap.kernels.second_moments.proof import disagreement
from kvmap.kernels.second_moments.reference import second_moments_reference
from kvmap.kernels.second_moments.spec import Means, Rows, SecondMomentsError, Sums
from kvmap.kernels.settings import MOMENTS_PATHS as PATHS

__all__ = [
    "PATHS",
    "Means",
    "Rows",
    "SecondMomentsError",
    "Sums",
    "add_second_moments",
    "choose_path",
    "unsupported_reason",
]

_ROW_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_LOG = logging.getLogger(__name__)


def add_second_moments(
    rows: Rows, sums: Sums, *, product_dtype: torch.dtype = torch.float64, path: str = "auto"
) -> Means:
    """Add the second moments of a chunk of rows, centred on the chunk's own means, in place.

    See `kvmap.kernels.second_moments.spec` for the equations. Means, s_yy and all sums over chunks are
    float64 on every path; `product_dtype` is that of the centred products of s_xx and s_xy.

    Args:
        rows: the chunk.
        sums: what is added to.
        product_dtype: float64 or float32.
        path: of `PATHS`; "auto" is `choose_path`.

    Returns:
        The chunk's means; where one is not finite, nothing was added.

    Raises:
        UnknownName: a path that is none.
        SecondMomentsError: the path was asked for by name and cannot serve these rows.
    """
    if path not in PATHS:
        raise UnknownName("path of second moments", path, PATHS)
    if path == "auto":
        path = choose_path(rows, product_dtype)
        _say_once(path, str(rows.x.device), _name(rows.x.dtype), _name(product_dtype))
    if path == "torch":
        return second_moments_reference(rows, sums, product_dtype)
    reason = unsupported_reason(rows, product_dtype)
    if reason is not None:
        raise SecondMomentsError(f"kernels.moments=triton: {reason}; set kernels.moments to auto or torch")
    return _triton(rows, sums)


def choose_path(rows: Rows, product_dtype: torch.dtype) -> str:
    """The path that "auto" takes: "triton" for float32 products on CUDA where it can serve, else "torch".

    The first call with rows of a dtype on a device adds a few rows up both ways; where these differ, "torch"
    stays.
    """
    usable = rows.x.is_cuda and unsupported_reason(rows, product_dtype) is None
    return "triton" if usable and _doubt(rows) is None else "torch"


_doubts: dict[tuple[str, ...], str | None] = {}


def _doubt(rows: Rows) -> str | None:
    """Why the first call of its kind on this device speaks against "triton"; None where it does not."""
    case = (str(rows.x.device), _name(rows.x.dtype), _name(rows.y.dtype), str(rows.weights is None))
    if case not in _doubts:
        if len(rows.x) == 0:
            return None
        _doubts[case] = disagreement(rows, _triton)
        if _doubts[case] is not None:
            _LOG.warning("second moments do without path triton for %s: %s", case[:3], _doubts[case])
    return _doubts[case]


def _triton(rows: Rows, sums: Sums) -> Means:
    from kvmap.kernels.second_moments.triton_products import second_moments_triton

    return second_moments_triton(rows, sums)


def unsupported_reason(rows: Rows, product_dtype: torch.dtype) -> str | None:
    """Why the Triton kernels cannot serve these rows; None where they can."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if product_dtype != torch.float32:
        return f"products are {_name(product_dtype)}, expected float32 (calibration.product_dtype=float32)"
    for side in (rows.x, rows.y):
        if side.dtype not in _ROW_DTYPES:
            return f"rows are {_name(side.dtype)}, expected one of {', '.join(map(_name, _ROW_DTYPES))}"
    if not rows.x.is_cuda:
        return None if _interpreted() else f"rows are on {rows.x.device}, expected a CUDA device"
    major, minor = torch.cuda.get_device_capability(rows.x.device)
    return None if major >= 8 else f"compute capability {major}.{minor}, expected 8.0 or newer"


def _interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on CPU tensors."""
    from triton import knobs

    return bool(knobs.runtime.interpret)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@cache
def _say_once(path: str, device: str, rows: str, products: str) -> None:
    _LOG.info("second moments: path %s (%s rows on %s, %s products)", path, rows, device, products)
