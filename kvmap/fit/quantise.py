"""Eight-bit weights: float8 numbers with one scale for each output column."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvmap.errors import KvmapError

FLOAT8 = torch.float8_e4m3fn
"""Four exponent bits, three of mantissa, no infinity: ±448 at most, 2⁻⁶ the smallest normal, 2⁻⁹ its step."""

LARGEST = torch.finfo(FLOAT8).max
_SMALLEST_SCALE = torch.finfo(torch.float32).tiny


class QuantiseError(KvmapError):
    """Weights that a smaller dtype cannot hold."""


@dataclass(frozen=True, eq=False)
class Quantised:
    """A matrix `W ≈ values · diag(scale)`.

    Attributes:
        values: (..., p, m) float8_e4m3fn, always finite.
        scale: (..., m) float32, positive.
    """

    values: Tensor
    scale: Tensor


def quantise_columns(weight: Tensor) -> Quantised:
    """Float8 weights with one scale a column: `s_j = max_i |w_ij| / 448`, `v_ij = round(w_ij / s_j)`.

    The largest magnitude of a column becomes the largest number of the format, so for every element::

        |s_j v_ij − w_ij| ≤ max(2⁻⁴ |w_ij|, 2⁻¹⁰ s_j)

    but for the rounding of float32: half a step of a three-bit mantissa, and below the smallest normal half
    a step of 2⁻⁹. Quotients are taken in float64 and clamped to ±448, since a cast beyond it gives NaN in
    some versions of torch. A column of zeros gives zeros.

    Args:
        weight: (..., p, m), any floating dtype.

    Raises:
        QuantiseError: weights that are not finite, or too large for a float32 scale.
    """
    wide = weight.double()
    # a column too small for its scale to be a float32 is met in steps of the smallest scale that is one
    scale = (wide.abs().amax(-2) / LARGEST).clamp(min=_SMALLEST_SCALE).to(torch.float32)
    if not bool(torch.isfinite(scale).all()):
        raise QuantiseError(
            "the weights hold NaN, infinite values or magnitudes beyond float32: fit the mapper again with "
            "finite caches or a higher ridge_lambda"
        )
    quotient = wide / scale.double().unsqueeze(-2)
    # float32 first: torch casts float64 to float8 by way of it anyway, and only some devices do so directly
    values = quotient.clamp(-LARGEST, LARGEST).to(torch.float32).to(FLOAT8)
    return Quantised(values, scale)


def dequantise(quantised: Quantised, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """`values · diag(scale)`, multiplied in float32 and rounded once to `dtype`.

    In bfloat16, whose eight-bit significand holds every float8 number, that costs another 2⁻⁸ of each
    element; a product `(x values) · diag(scale)`, with the scales applied to its output, does not pay it.
    """
    return (quantised.values.to(torch.float32) * quantised.scale.unsqueeze(-2)).to(dtype)


def round_to_bfloat16(weight: Tensor) -> Tensor:
    """The weights in bfloat16: each within 2⁻⁸ of itself.

    Raises:
        QuantiseError: weights that are not finite there.
    """
    rounded = weight.to(torch.bfloat16)
    if not bool(torch.isfinite(rounded).all()):
        raise QuantiseError(
            "the weights are not finite in bfloat16: fit the mapper again with finite caches or a higher "
            "ridge_lambda"
        )
    return rounded
