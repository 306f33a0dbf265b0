"""Shares of a spectrum and its effective rank, in cases known in closed form."""

from __future__ import annotations

import math

import pytest
import torch

from kvmap.diagnostics.spectrum import effective_rank, shares


@pytest.mark.parametrize("d", [1, 3, 16])
def test_an_error_alike_in_all_directions_has_full_rank(d):
    share = shares(4 * torch.eye(d))
    assert share.tolist() == pytest.approx([1 / d] * d)
    assert float(effective_rank(share)) == pytest.approx(d)


def test_an_error_in_one_direction_has_rank_one():
    x = torch.randn(6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    share = shares(torch.outer(x, x))
    assert float(share[0]) == pytest.approx(1.0)
    assert float(effective_rank(share)) == pytest.approx(1.0)
    assert bool((share >= 0).all()), "rounding makes no share negative"


def test_shares_are_sorted_and_of_each_matrix():
    share = shares(torch.stack([torch.diag(torch.tensor([1.0, 6.0, 3.0])), torch.eye(3)]))
    assert share[0].tolist() == pytest.approx([0.6, 0.3, 0.1])
    assert effective_rank(share).tolist() == pytest.approx([1 / (0.36 + 0.09 + 0.01), 3.0])


def test_no_error_has_no_shares():
    share = shares(torch.zeros(2, 2))
    assert all(math.isnan(value) for value in share.tolist())
    assert math.isnan(float(effective_rank(share)))
