"""Rotation as plain mathematics: complex numbers as the oracle."""

from __future__ import annotations

import pytest
import torch

from kvmap.models.rope import Rotation, apply_rotation, same_rotations, strip_rotation

layouts = pytest.mark.parametrize("layout", ["half", "interleaved"])


def make(layout, scaling=1.0, rotary_dim=8):
    return Rotation(0.37 ** torch.arange(rotary_dim // 2).float(), scaling, layout)


def turned_as_complex_numbers(keys, positions, rotation):
    half = rotation.rotary_dim // 2
    if rotation.layout == "half":
        a, b = keys[..., :half], keys[..., half : 2 * half]
    else:
        a, b = keys[..., 0 : 2 * half : 2], keys[..., 1 : 2 * half : 2]
    angle = (positions[:, None, :, None].float() * rotation.inv_freq).double()
    product = torch.complex(a.double(), b.double()) * torch.polar(
        torch.full_like(angle, rotation.scaling), angle
    )
    out = keys.double().clone()
    if rotation.layout == "half":
        out[..., :half], out[..., half : 2 * half] = product.real, product.imag
    else:
        out[..., 0 : 2 * half : 2], out[..., 1 : 2 * half : 2] = product.real, product.imag
    return out


@layouts
@pytest.mark.parametrize(("scaling", "rotary_dim"), [(1.0, 12), (1.3, 12), (1.3, 8)])
def test_rotation_multiplies_by_unit_complex_numbers(layout, scaling, rotary_dim):
    keys, positions = torch.randn(2, 3, 5, 12), torch.randint(0, 5000, (2, 5))
    rotation = make(layout, scaling, rotary_dim)
    expected = turned_as_complex_numbers(keys, positions, rotation)
    torch.testing.assert_close(
        apply_rotation(keys, positions, rotation).double(), expected, atol=1e-5, rtol=1e-5
    )


@layouts
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_strip_undoes_apply_at_any_position(layout, dtype):
    keys, positions = torch.randn(2, 3, 64, 8, dtype=dtype), torch.randint(0, 200_000, (2, 64))
    rotation = make(layout, 1.7)
    there = apply_rotation(keys, positions, rotation)
    back = strip_rotation(there, positions, rotation)
    assert there.dtype == back.dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 1e-13
    torch.testing.assert_close(back, keys, atol=tolerance, rtol=tolerance)


@layouts
def test_channels_past_the_rotary_ones_pass_untouched(layout):
    keys = torch.randn(1, 2, 4, 12)
    out = apply_rotation(keys, torch.arange(4)[None], make(layout, 1.5, rotary_dim=8))
    assert torch.equal(out[..., 8:], keys[..., 8:])
    assert not torch.allclose(out[..., :8], keys[..., :8])


def test_position_zero_only_scales():
    keys = torch.randn(1, 2, 3, 8)
    torch.testing.assert_close(apply_rotation(keys, torch.zeros(1, 3).long(), make("half", 1.5)), 1.5 * keys)


def test_no_rotation_leaves_keys_as_they_are_in_float32():
    keys = torch.randn(1, 2, 3, 8).bfloat16()
    for turn in (apply_rotation, strip_rotation):
        assert torch.equal(turn(keys, torch.arange(3)[None], None), keys.float())


def test_bfloat16_keys_are_turned_in_float32():
    keys = torch.randn(1, 2, 3, 8).bfloat16()
    positions = torch.arange(3)[None]
    out = apply_rotation(keys, positions, make("half"))
    assert out.dtype == torch.float32
    assert torch.equal(out, apply_rotation(keys.float(), positions, make("half")))


def test_a_rotation_matches_by_content():
    one, same = make("half"), make("half")
    others = [make("interleaved"), make("half", 1.1), make("half", rotary_dim=6)]
    assert one.matches(same)
    for other in others:
        assert not one.matches(other)
    assert same_rotations((one, None), (same, None))
    assert not same_rotations((one, None), (same, same))
    assert not same_rotations((one,), (one, one))
