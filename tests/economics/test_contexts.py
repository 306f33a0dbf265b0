"""Distributions of context lengths."""

from __future__ import annotations

import math
from pathlib import Path
from statistics import NormalDist

import numpy as np
import pytest

from kvmap.economics import EconomicsError, counted, log_normal, read_lengths


def test_equal_lengths_are_taken_together_and_absent_ones_left_out() -> None:
    found = counted([300, 100, 300, 7], [1, 2, 1, 0])
    assert found.lengths.tolist() == [100, 300]
    assert found.weights.tolist() == [0.5, 0.5]
    assert found.mean == 200


@pytest.mark.parametrize("sigma", [0.3, 1.0])
def test_a_log_normal_has_its_median_and_mean(sigma: float) -> None:
    found = log_normal(2000, sigma)
    middle = found.lengths[np.searchsorted(np.cumsum(found.weights), 0.5)]
    assert middle == pytest.approx(2000, rel=0.01)
    # 1,000 midpoints lose a little of the tail beyond the last
    assert found.mean == pytest.approx(2000 * math.exp(sigma**2 / 2), rel=0.01)


def test_a_cut_log_normal_has_the_mean_of_what_is_left_and_says_how_much_that_is() -> None:
    median, sigma, low, high = 3000.0, 1.2, 500.0, 16000.0
    found = log_normal(median, sigma, low, high)
    assert low <= found.lengths[0]
    assert found.lengths[-1] <= high
    normal = NormalDist()
    ends = [(math.log(end) - math.log(median)) / sigma for end in (low, high)]
    left = normal.cdf(ends[1]) - normal.cdf(ends[0])
    shifted = normal.cdf(ends[1] - sigma) - normal.cdf(ends[0] - sigma)
    assert found.mean == pytest.approx(median * math.exp(sigma**2 / 2) * shifted / left, rel=1e-3)
    assert f"{left:.1%} of it" in found.origin


def test_no_spread_is_one_length() -> None:
    assert log_normal(512, 0).lengths.tolist() == [512]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.jsonl", '{"length": 100}\n\n{"length": 300, "weight": 3}\n'),
        ("a.jsonl", '{"n_tokens": 100}\n{"n_tokens": 300}\n300\n300\n'),
        ("a.csv", "length,weight\n100,1\n300,3\n"),
        ("a.csv", "id,n_tokens\nx,100\ny,300\nz,300\nw,300\n"),
    ],
)
def test_files_are_read(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    found = read_lengths(tmp_path / name)
    assert found.lengths.tolist() == [100, 300]
    assert found.weights.tolist() == [0.25, 0.75]


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.jsonl", "{length: 1}\n", "line 1: no JSON"),
        ("a.jsonl", '{"length": 5}\n{"text": "x"}\n', "line 2: .* gives no length"),
        ("a.jsonl", '{"length": true}\n', "line 1: .* gives no length"),
        ("a.jsonl", '{"length": "long"}\n', "line 1: .* gives no length"),
        ("a.jsonl", '{"length": -4}\n', "each a number of tokens above 0"),
        ("a.jsonl", "", "holds no lengths"),
        ("a.csv", "size\n5\n", "line 2: .* gives no length"),
        ("a.csv", "length,weight\n5,-1\n", "weights="),
    ],
)
def test_a_file_that_says_nothing_is_refused(tmp_path: Path, name: str, text: str, said: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(EconomicsError, match=said):
        read_lengths(tmp_path / name)


def test_other_mistakes_are_named(tmp_path: Path) -> None:
    with pytest.raises(EconomicsError, match="cannot be read"):
        read_lengths(tmp_path / "nowhere.jsonl")
    with pytest.raises(EconomicsError, match="1 weights of 2 lengths"):
        counted([1, 2], [1])
    with pytest.raises(EconomicsError, match="lengths=\\[\\]"):
        counted([])
    with pytest.raises(EconomicsError, match="sigma=-1"):
        log_normal(100, -1)
    with pytest.raises(EconomicsError, match="nothing of it lies between 1000 and 2000"):
        log_normal(10, 0.1, 1000, 2000)
