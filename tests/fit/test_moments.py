"""One table of moments: against two passes over the rows, in any order, in any parts."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmap.fit.moments import Moments, MomentsError, moments_bytes
from tests.fit.oracles import FIELDS, assert_matches, assert_same, from_rows


def data(n: int, p: int, q: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng(seed)
    return torch.from_numpy(rng.normal(size=(n, p))), torch.from_numpy(rng.normal(size=(n, q)))


def test_moments_equal_two_passes_over_the_rows() -> None:
    x, y = data(50, 5, 3)
    moments = Moments.zeros(5, 3).update(x, y)
    assert (moments.n_rows, moments.weight) == (50, 50.0)
    assert_matches(moments, from_rows(x.numpy(), y.numpy()))


def test_weights_act_as_sklearn_takes_them_and_zero_weights_do_not_count() -> None:
    x, y = data(60, 4, 2)
    w = torch.from_numpy(np.random.default_rng(1).gamma(1.0, size=60))
    w[::7] = 0
    moments = Moments.zeros(4, 2).update(x[:25], y[:25], w[:25]).update(x[25:], y[25:], w[25:])
    assert moments.n_rows == int((w > 0).sum())
    assert moments.weight == pytest.approx(float(w.sum()), rel=1e-14)
    assert_matches(moments, from_rows(x.numpy(), y.numpy(), w.numpy()))


def test_rows_of_no_weight_are_not_even_looked_at() -> None:
    x, y = data(6, 3, 2)
    x[4], y[5] = float("nan"), float("inf")
    w = torch.tensor([1.0, 2.0, 0.5, 1.0, 0.0, 0.0], dtype=torch.float64)
    moments = Moments.zeros(3, 2).update(x, y, w)
    assert_same(moments, Moments.zeros(3, 2).update(x[:4], y[:4], w[:4]))


def test_rows_that_all_weigh_nothing_and_no_rows_change_nothing() -> None:
    x, y = data(6, 3, 2)
    moments = Moments.zeros(3, 2).update(x, y, torch.zeros(6)).update(x[:0], y[:0])
    assert (moments.n_rows, moments.weight) == (0, 0.0)
    assert all(not bool(getattr(moments, name).any()) for name in FIELDS)
    assert_same(moments.update(x, y).merge(Moments.zeros(3, 2)), Moments.zeros(3, 2).update(x, y))
    assert_same(Moments.zeros(3, 2).merge(moments), moments)


def test_integer_weights_equal_repeated_rows() -> None:
    x, y = data(20, 4, 2)
    counts = torch.tensor([1, 2, 3, 1] * 5)
    weighted = Moments.zeros(4, 2).update(x, y, counts)
    repeated = Moments.zeros(4, 2).update(x.repeat_interleave(counts, 0), y.repeat_interleave(counts, 0))
    for name in FIELDS:
        torch.testing.assert_close(getattr(weighted, name), getattr(repeated, name), rtol=1e-12, atol=1e-12)


@settings(max_examples=60, deadline=None)
@given(
    cuts=st.lists(st.integers(0, 30), max_size=6),
    order=st.randoms(use_true_random=False),
    offset=st.sampled_from([0.0, 1e3, -1e6]),
    weighted=st.booleans(),
    seed=st.integers(0, 5),
)
def test_chunks_their_order_and_sharding_change_nothing_beyond_rounding(
    cuts: list[int], order: random.Random, offset: float, weighted: bool, seed: int
) -> None:
    x, y = data(30, 4, 3, seed)
    x, y = x + offset, y - offset
    w = torch.linspace(0.1, 3, 30, dtype=torch.float64) if weighted else None
    if w is not None:
        w[order.sample(range(30), 5)] = 0
    edges = [0, *sorted(cuts), 30]
    chunks = [slice(a, b) for a, b in pairwise(edges)]
    order.shuffle(chunks)
    streamed, shards = Moments.zeros(4, 3), [Moments.zeros(4, 3), Moments.zeros(4, 3)]
    for i, chunk in enumerate(chunks):
        part = None if w is None else w[chunk]
        streamed.update(x[chunk], y[chunk], part)
        shards[i % 2].update(x[chunk], y[chunk], part)
    # the mean of a chunk at 1e6 is good to 1e6 · 2⁻⁵³ ≈ 1e-10, and so is what lies between two of them; sums
    # that were not centred would be off by 30 · 1e12 · 2⁻⁵³ ≈ 3e-3
    rtol = 1e-12 if abs(offset) < 1e4 else 2e-9
    expected = from_rows(x.numpy(), y.numpy(), None if w is None else w.numpy())
    assert_matches(streamed, expected, rtol)
    assert_matches(shards[0] + shards[1], expected, rtol)
    assert_matches(shards[1].merge(shards[0]), expected, rtol)
    assert streamed.n_rows == shards[1].n_rows == (30 if w is None else 25)


@settings(max_examples=40, deadline=None)
@given(
    order=st.randoms(use_true_random=False), p=st.integers(0, 9), q=st.integers(0, 5), block=st.integers(1, 9)
)
def test_any_cut_in_any_order_is_what_its_own_rows_give(
    order: random.Random, p: int, q: int, block: int
) -> None:
    x, y = data(25, 9, 5, seed=4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvmap.fit.moments._BLOCK_FEATURES", block)
        whole = Moments.zeros(9, 5).update(x[:11], y[:11]).update(x[11:], y[11:])
        features, targets = order.sample(range(9), p), order.sample(range(5), q)
        part = whole.cut(torch.tensor(features, dtype=torch.int64), torch.tensor(targets, dtype=torch.int64))
    assert (part.n_rows, part.weight, part.n_features, part.n_targets) == (25, 25.0, p, q)
    assert_matches(part, from_rows(x.numpy()[:, features], y.numpy()[:, targets]))


def test_a_cut_of_neighbours_shares_the_table_and_any_other_is_its_own() -> None:
    moments = Moments.zeros(6, 4).update(*data(20, 6, 4))
    neighbours = moments.cut(torch.arange(1, 5), torch.arange(2))
    for name in FIELDS:
        assert getattr(neighbours, name).data_ptr() - getattr(moments, name).data_ptr() < moments.nbytes
    assert neighbours.s_xx._is_view()
    before = moments.s_xx.clone()
    moments.cut(torch.tensor([3, 1]), torch.tensor([0])).s_xx.zero_()
    assert torch.equal(moments.s_xx, before)


def test_one_channel_300_times_larger_costs_the_others_nothing() -> None:
    x, y = data(200, 5, 3)
    x[:, 2] = 300 * x[:, 2] + 4000
    moments = Moments.zeros(5, 3)
    for i in range(0, 200, 16):
        moments.update(x[i : i + 16], y[i : i + 16])
    expected = from_rows(x.numpy(), y.numpy())
    keep = [0, 1, 3, 4]
    np.testing.assert_allclose(
        moments.s_xx[keep][:, keep].numpy(), expected["s_xx"][keep][:, keep].astype(float), rtol=0, atol=1e-10
    )
    assert_matches(moments, expected)


def test_float32_products_keep_float64_sums_and_survive_an_offset() -> None:
    x, y = data(512, 6, 2)
    x = (x + 1000).float()
    moments = Moments.zeros(6, 2)
    for i in range(0, 512, 32):
        moments.update(x[i : i + 32], y[i : i + 32], product_dtype=torch.float32)
    # products of centred float32 numbers: 2⁻²⁴ relative, against sums of 512
    assert_matches(moments, from_rows(x.numpy(), y.numpy()), rtol=1e-6)


@pytest.mark.parametrize("product_dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_rows_that_are_given_stay_as_they_were(dtype: torch.dtype, product_dtype: torch.dtype) -> None:
    x, y = (rows.to(dtype) for rows in data(12, 4, 2))
    w = torch.linspace(0, 2, 12, dtype=torch.float64)
    before = [tensor.clone() for tensor in (x, y, w)]
    Moments.zeros(4, 2).update(x, y, product_dtype=product_dtype).update(x, y, w, product_dtype)
    assert all(torch.equal(a, b) for a, b in zip(before, (x, y, w), strict=True))


def test_features_past_one_block_are_all_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvmap.fit.moments._BLOCK_FEATURES", 3)
    x, y = data(30, 8, 2)
    assert_matches(Moments.zeros(8, 2).update(x, y), from_rows(x.numpy(), y.numpy()))


@pytest.mark.parametrize("p", [511, 512, 513, 1024, 1100])
def test_the_half_that_is_mirrored_equals_the_plain_product(p: int) -> None:
    """At, below and past the edge of a block: two chunks, read in between, a merge, and a clone."""
    x, y = data(9, p, 2)
    moments = Moments.zeros(p, 2).update(x[:4], y[:4])
    # read, so that the next chunk finds it mirrored; symmetric to the rounding of a product
    torch.testing.assert_close(moments.s_xx, moments.s_xx.T, rtol=0, atol=1e-14)
    moments.update(x[4:6], y[4:6])
    other = Moments.zeros(p, 2).update(x[6:], y[6:])
    xc, yc = x - x.mean(0), y - y.mean(0)
    for found in (moments.clone().merge(other), moments + other, other.clone().merge(moments.to("cpu"))):
        # sums of nine products of numbers below 5
        np.testing.assert_allclose(found.s_xx.numpy(), (xc.T @ xc).numpy(), rtol=0, atol=1e-13)
        np.testing.assert_allclose(found.s_xy.numpy(), (xc.T @ yc).numpy(), rtol=0, atol=1e-13)
    far = moments.merge(other).cut(torch.tensor([p - 1, 0, 1]), torch.tensor([1]))
    np.testing.assert_allclose(far.s_xx.numpy(), (xc.T @ xc)[[p - 1, 0, 1]][:, [p - 1, 0, 1]], atol=1e-13)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_value_that_is_not_finite_is_refused_and_its_column_named(bad: float) -> None:
    x, y = data(5, 3, 2)
    x[2, 1] = bad
    with pytest.raises(MomentsError, match=r"features hold .* column 1"):
        Moments.zeros(3, 2).update(x, y)
    x, y = data(5, 3, 2)
    y[4, 0] = -bad
    with pytest.raises(MomentsError, match=r"targets hold .* column 0"):
        Moments.zeros(3, 2).update(x, y, torch.ones(5))


def test_opposite_infinities_do_not_hide_each_other() -> None:
    x, y = data(5, 3, 2)
    x[0, 2], x[1, 2] = float("inf"), -float("inf")
    with pytest.raises(MomentsError, match=r"features hold .* column 2"):
        Moments.zeros(3, 2).update(x, y)


def test_shapes_and_weights_that_do_not_fit_are_refused() -> None:
    x, y = data(5, 3, 2)
    with pytest.raises(MomentsError, match="expected"):
        Moments.zeros(4, 2).update(x, y)
    with pytest.raises(MomentsError, match=r"expected \(5,\)"):
        Moments.zeros(3, 2).update(x, y, torch.ones(4))
    with pytest.raises(MomentsError, match="at least 0"):
        Moments.zeros(3, 2).update(x, y, -torch.ones(5))
    with pytest.raises(MomentsError, match="finite"):
        Moments.zeros(3, 2).update(x, y, torch.full((5,), float("nan")))
    with pytest.raises(MomentsError, match="cannot merge"):
        Moments.zeros(3, 2).merge(Moments.zeros(2, 2))


def test_a_copy_shares_nothing_and_a_sum_leaves_its_parts_as_they_were() -> None:
    x, y = data(30, 4, 2)
    first, second = Moments.zeros(4, 2).update(x[:10], y[:10]), Moments.zeros(4, 2).update(x[10:], y[10:])
    before = [first.clone(), second.clone()]
    both = first + second
    both.update(x, y)
    for part, old in zip((first, second), before, strict=True):
        assert (part.n_rows, part.weight) == (old.n_rows, old.weight)
        assert all(torch.equal(getattr(part, name), getattr(old, name)) for name in FIELDS)


def test_bytes_are_those_of_the_five_tensors() -> None:
    moments = Moments.zeros(7, 3)
    found = sum(tensor.numel() * tensor.element_size() for tensor in moments.tensors().values())
    assert list(moments.tensors()) == list(FIELDS)
    assert moments.nbytes == moments_bytes(7, 3) == found
