"""A path is believed where it gives what PyTorch gives, and no other."""

from __future__ import annotations

import pytest
import torch

from kvmap.kernels import second_moments
from kvmap.kernels.second_moments.proof import disagreement
from kvmap.kernels.second_moments.reference import second_moments_reference
from kvmap.kernels.second_moments.spec import Rows


def rows_of(weighted: bool, n: int = 230) -> Rows:
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(n, width, generator=generator) + 3 for width in (170, 50))
    return Rows(x, y, torch.zeros(n, dtype=torch.float64) if weighted else None)


def in_float32(rows, sums):
    return second_moments_reference(rows, sums, torch.float32)


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("n", [1, 230])
def test_float32_products_are_believed(weighted, n):
    assert disagreement(rows_of(weighted, n), in_float32) is None


@pytest.mark.interpreter
@pytest.mark.parametrize("weighted", [True, False])
def test_the_kernels_are_believed(weighted):
    pytest.importorskip("triton")
    assert disagreement(rows_of(weighted, 40), second_moments._triton) is None


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("name", ["s_xx", "s_xy", "s_yy"])
@pytest.mark.parametrize("fault", ["one number", "a thousandth too large", "not a number"])
def test_a_wrong_table_is_not(weighted, name, fault):
    def wrong(rows, sums):
        means = in_float32(rows, sums)
        table = getattr(sums, name)
        if fault == "one number":
            table.view(-1)[0] += table.abs().max()
        elif fault == "not a number":
            table.view(-1)[0] = torch.nan
        else:
            table.mul_(1.001)
        return means

    assert disagreement(rows_of(weighted), wrong).startswith(name)


def test_a_path_that_fails_is_not():
    def fails(*args):
        raise RuntimeError("an illegal memory access\nwas encountered")

    assert disagreement(rows_of(False), fails) == "RuntimeError: an illegal memory access"


def test_rows_that_are_not_finite_are_no_doubt():
    rows = rows_of(False)
    rows.x[3, 3] = torch.inf
    assert disagreement(rows, in_float32) is None
