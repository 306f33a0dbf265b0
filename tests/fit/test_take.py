"""Entries taken run by run are those taken one by one, as views where nothing needs a copy."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from kvmap.fit.moments import Moments, runs, take
from tests.fit.oracles import assert_matches, from_rows

ONE = list(range(3, 21))
HEADS = [*range(8), *range(16, 24), *range(32, 40)]
BACKWARDS = [*range(24, 40), *range(10)]
UNEVEN = [*range(20), 30, *range(5, 9)]
SCATTERED = [0, 5, 6, 30, 2]
POSITIONS = {"one": ONE, "heads": HEADS, "backwards": BACKWARDS, "uneven": UNEVEN, "scattered": SCATTERED}
POSITIONS |= {"single": [7], "none": []}


def numbers(positions: list[int]) -> torch.Tensor:
    return torch.tensor(positions, dtype=torch.int64)


def test_runs_are_found_where_they_are_long_enough() -> None:
    assert runs(numbers(ONE)) == [slice(3, 21)]
    assert runs(numbers(HEADS)) == [slice(0, 8), slice(16, 24), slice(32, 40)]
    assert runs(numbers(BACKWARDS)) == [slice(24, 40), slice(0, 10)]
    assert runs(numbers(UNEVEN)) == [slice(0, 20), slice(30, 31), slice(5, 9)]
    assert runs(numbers([7])) == [slice(7, 8)]
    assert runs(numbers(SCATTERED)) == runs(numbers([])) == []


@pytest.mark.parametrize("positions", POSITIONS.values(), ids=POSITIONS)
def test_what_is_taken_is_what_indexing_gives(positions: list[int]) -> None:
    table = torch.randn(40, 41, generator=torch.Generator().manual_seed(0))
    index = numbers(positions)
    assert torch.equal(take(table, index, 0), table[index])
    assert torch.equal(take(table, index, 1), table[:, index])
    assert take(table, index, 1)._is_view() == (positions in (ONE, [7]))


@pytest.mark.parametrize(("rows", "columns"), list(product(POSITIONS, repeat=2)))
def test_moments_are_cut_to_those_of_the_rows(rows: str, columns: str) -> None:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(2, 30, 40, generator=generator, dtype=torch.float64)
    features, targets = POSITIONS[rows], POSITIONS[columns]
    part = Moments.zeros(40, 40).update(x, y).cut(numbers(features), numbers(targets))
    assert_matches(part, from_rows(x.numpy()[:, features], y.numpy()[:, targets]))
