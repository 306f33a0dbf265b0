from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvmap.fit.quantise import (
    FLOAT8,
    LARGEST,
    Quantised,
    QuantiseError,
    dequantise,
    quantise_columns,
    round_to_bfloat16,
)

SHAPES = [(1, 1), (7, 3), (64, 5), (2, 16, 4)]


def every_float8() -> torch.Tensor:
    """All finite numbers of the format, in float64; 127 and 255 are its NaNs."""
    codes = torch.tensor([code for code in range(256) if code not in (127, 255)], dtype=torch.uint8)
    return codes.view(FLOAT8).double().unique()


def wild(shape: tuple[int, ...], dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Weights over fifteen decades, columns of unlike scale."""
    exponents = torch.randint(-9, 6, shape) + torch.randint(-5, 5, (shape[-1],))
    return (torch.randn(shape, dtype=torch.float64) * 10.0**exponents).to(dtype)


def test_the_format_is_the_one_the_bound_is_of() -> None:
    numbers = every_float8()
    assert (LARGEST, float(numbers.max())) == (448, 448)
    positive = numbers[numbers > 0]
    assert float(positive[0]) == 2**-9
    assert torch.equal(positive.float().to(torch.bfloat16).double(), positive)  # exact in bfloat16


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_weight_is_within_half_a_step_of_its_own_size(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    weight = wild(shape, dtype)
    q = quantise_columns(weight)
    assert (q.values.dtype, q.scale.dtype) == (FLOAT8, torch.float32)
    assert (q.values.shape, q.scale.shape) == (shape, (*shape[:-2], shape[-1]))
    error = (q.values.double() * q.scale.double().unsqueeze(-2) - weight.double()).abs()
    bound = torch.maximum(2.0**-4 * weight.double().abs(), 2.0**-10 * q.scale.double().unsqueeze(-2))
    # the quotient is rounded to float32 on its way to float8: 2⁻²⁴ of it may fall on the wrong side of a tie
    assert bool((error <= bound * (1 + 2.0**-20)).all())


@pytest.mark.parametrize("shape", SHAPES)
def test_each_weight_takes_the_nearest_number_of_the_format(shape: tuple[int, ...]) -> None:
    weight = wild(shape)
    q = quantise_columns(weight)
    quotient = weight / q.scale.double().unsqueeze(-2)
    nearest = (quotient.unsqueeze(-1) - every_float8()).abs().amin(-1)
    found = (quotient - q.values.double()).abs()
    torch.testing.assert_close(found, nearest, rtol=1e-6, atol=1e-9)  # float32 ties


@pytest.mark.parametrize("shape", SHAPES)
def test_the_largest_magnitude_of_a_column_is_the_largest_number(shape: tuple[int, ...]) -> None:
    q = quantise_columns(wild(shape))
    assert torch.equal(q.values.float().abs().amax(-2), torch.full_like(q.scale, LARGEST))


def test_columns_do_not_share_a_scale() -> None:
    weight = torch.randn(30, 4)
    alone = quantise_columns(weight)
    beside = quantise_columns(torch.cat([weight, 1e9 * torch.randn(30, 2)], dim=1))
    assert torch.equal(alone.values.float(), beside.values.float()[:, :4])
    assert torch.equal(alone.scale, beside.scale[:4])


@pytest.mark.parametrize("magnitude", [0.0, 5e-324, 1e-300, 1e-45, 1e-40, 1e-37, 1e30, 3e38])
def test_nothing_finite_ever_becomes_nan_or_infinite(magnitude: float) -> None:
    weight = magnitude * torch.tensor([[1.0, -1.0], [-0.3, 0.0], [1.0, 1e-3]], dtype=torch.float64)
    q = quantise_columns(weight)
    for dtype in (torch.float32, torch.float64):
        assert bool(torch.isfinite(dequantise(q, dtype)).all())
    # half a step of the smallest scale that float32 holds, where the weights are smaller than that
    tolerance = torch.finfo(torch.float32).tiny / 2**10
    torch.testing.assert_close(dequantise(q, torch.float64), weight, rtol=2**-4 + 1e-6, atol=tolerance)


def test_a_column_of_zeros_gives_zeros() -> None:
    weight = torch.randn(6, 3)
    weight[:, 1] = 0
    q = quantise_columns(weight)
    assert bool((q.scale > 0).all())
    assert float(dequantise(q, torch.float32)[:, 1].abs().max()) == 0


def test_dequantising_in_bfloat16_rounds_once_more() -> None:
    q = quantise_columns(torch.randn(200, 8))
    exact = dequantise(q, torch.float32)
    rounded = dequantise(q)
    assert rounded.dtype == torch.bfloat16
    assert bool(((rounded.float() - exact).abs() <= 2**-8 * exact.abs()).all())


def test_a_product_with_scales_on_its_output_is_that_of_the_dequantised_weights() -> None:
    q = quantise_columns(torch.randn(20, 8, dtype=torch.float64))
    x = torch.randn(5, 20, dtype=torch.float64)
    direct = (x @ q.values.double()) * q.scale.double()
    torch.testing.assert_close(direct, x @ dequantise(q, torch.float64), rtol=1e-6, atol=1e-6)  # float32 w


def test_safetensors_keep_every_bit(tmp_path) -> None:
    q = quantise_columns(wild((33, 7)))
    save_file({"values": q.values, "scale": q.scale}, tmp_path / "q.safetensors")
    back = load_file(tmp_path / "q.safetensors")
    assert back["values"].dtype == FLOAT8
    assert torch.equal(back["values"].view(torch.uint8), q.values.view(torch.uint8))
    assert torch.equal(dequantise(Quantised(**back)), dequantise(q))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 1e300])
def test_what_no_scale_can_hold_is_refused(bad: float) -> None:
    weight = torch.ones(3, 2, dtype=torch.float64)
    weight[1, 0] = bad
    with pytest.raises(QuantiseError, match="fit the mapper again"):
        quantise_columns(weight)
    with pytest.raises(QuantiseError, match="not finite in bfloat16"):
        round_to_bfloat16(weight)


def test_bfloat16_is_a_plain_cast() -> None:
    weight = torch.randn(9, 4)
    assert torch.equal(round_to_bfloat16(weight), weight.bfloat16())
