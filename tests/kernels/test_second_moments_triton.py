"""The Triton kernels of second moments: in the interpreter on the CPU, and the same on a GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvmap.fit.moments import Moments, MomentsError
from kvmap.kernels.second_moments import Means, Rows, Sums, add_second_moments, choose_path
from kvmap.kernels.settings import KernelSettings, use
from tests.fit.oracles import assert_same, from_rows

FLOAT64, FLOAT32 = torch.float64, torch.float32
ROW_DTYPES = [FLOAT64, FLOAT32, torch.float16, torch.bfloat16]
GUARD = 7.0

# Each number is Σ w a b of rounded factors. Against Σ |w a b| a product is off by 3 · 2⁻²² at most (tf32x3;
# less otherwise), its factors by 2⁻²³ each, and the float32 sum of up to 1,024 terms, in blocks, some 2⁻²⁴.
RTOL = 2e-6


@pytest.fixture(
    params=[pytest.param("cpu", marks=pytest.mark.interpreter), pytest.param("cuda", marks=pytest.mark.gpu)]
)
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


def numbers(n: int, width: int, dtype: torch.dtype = FLOAT32, offset: float = 3.0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(n * width).normal(offset, 2, size=(n, width))).to(dtype)


def weights_of(n: int) -> torch.Tensor:
    """Some of them zero."""
    weights = torch.from_numpy(np.random.default_rng(n).gamma(1.0, size=n))
    weights[2::5] = 0
    return weights


def surrounded(tensor: torch.Tensor, fill: float, device: torch.device) -> torch.Tensor:
    """A view with rows and columns of `fill` on all sides of it."""
    shape = [length + 6 for length in tensor.shape]
    storage = torch.full(shape, fill, dtype=tensor.dtype, device=device)
    view = storage[tuple(slice(3, -3) for _ in shape)]
    view.copy_(tensor)
    return view


def tables(p: int, q: int, device: torch.device, block: int = 512) -> Sums:
    """Zeros, guarded on all sides."""
    shapes = ((p, p), (p, q), (q,))
    return Sums(*(surrounded(torch.zeros(s, dtype=FLOAT64), GUARD, device) for s in shapes), block)


def guards_hold(sums: Sums) -> bool:
    for table in (sums.s_xx, sums.s_xy, sums.s_yy):
        whole = table._base
        assert whole is not None
        outside = torch.ones_like(whole, dtype=torch.bool)
        outside[tuple(slice(3, -3) for _ in whole.shape)] = False
        if not bool((whole[outside] == GUARD).all()):
            return False
    return True


def add(rows: Rows, sums: Sums) -> Means:
    return add_second_moments(rows, sums, product_dtype=FLOAT32, path="triton")


def assert_sums(sums: Sums, rows: Rows, rtol: float = RTOL) -> None:
    """Element by element against extended precision, by the size of what was summed."""
    x, y = rows.x.double().cpu().numpy(), rows.y.double().cpu().numpy()
    w = np.ones(len(x)) if rows.weights is None else rows.weights.cpu().numpy()
    x, y, w = x[w > 0], y[w > 0], w[w > 0]
    expected = from_rows(x, y, w)
    a, b = (np.abs(side - w @ side / w.sum()) for side in (x, y))
    sizes = {"s_xx": (a * w[:, None]).T @ a, "s_xy": (a * w[:, None]).T @ b}
    first = np.arange(x.shape[1])
    needed = first[None, :] >= (first // sums.block * sums.block)[:, None]
    for name, size in sizes.items():
        error = np.abs(getattr(sums, name).cpu().numpy() - expected[name]).astype(float)
        where = needed if name == "s_xx" else np.ones_like(size, dtype=bool)
        assert (error <= rtol * size + 1e-300)[where].all(), (name, (error / size)[where].max())
    np.testing.assert_allclose(sums.s_yy.cpu().numpy(), expected["s_yy"].astype(float), rtol=1e-12)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", ROW_DTYPES)
@pytest.mark.parametrize(("n", "p", "q"), [(70, 67, 3), (2, 1, 1), (33, 5, 130)])
def test_sums_are_those_of_two_passes_and_nothing_past_the_bounds_is_read_or_written(
    device: torch.device, n: int, p: int, q: int, dtype: torch.dtype, weighted: bool
) -> None:
    nan = float("nan")
    x, y = (surrounded(numbers(n, width, dtype), nan, device) for width in (p, q))
    weights = surrounded(weights_of(n), nan, device) if weighted else None
    rows, sums = Rows(x, y, weights), tables(p, q, device)
    means = add(rows, sums)
    assert guards_hold(sums)
    assert_sums(sums, rows)
    assert means.n_rows == (n if weights is None else int((weights > 0).sum()))
    counted = rows.counted()
    w = torch.ones(n, dtype=FLOAT64, device=device) if weights is None else counted.weights
    assert w is not None
    assert means.weight == pytest.approx(float(w.sum()), rel=1e-14)
    for mean, side in ((means.mean_x, counted.x), (means.mean_y, counted.y)):
        torch.testing.assert_close(mean, w @ side.double() / w.sum(), rtol=1e-13, atol=1e-13)


def test_rows_of_two_dtypes(device: torch.device) -> None:
    rows = Rows(numbers(40, 6, torch.bfloat16).to(device), numbers(40, 5, FLOAT64).to(device))
    sums = tables(6, 5, device)
    add(rows, sums)
    assert_sums(sums, rows)


@pytest.mark.parametrize("n", [63, 64, 65, 200])
def test_a_chunk_is_summed_in_runs(device: torch.device, n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvmap.kernels.second_moments.triton_products.RUN_ROWS", 64)
    rows = Rows(numbers(n, 7).to(device), numbers(n, 4).to(device), weights_of(n).to(device))
    sums = tables(7, 4, device)
    add(rows, sums)
    assert_sums(sums, rows)
    assert guards_hold(sums)


@pytest.mark.parametrize("block", [48, 64, 100, 512])
def test_only_tiles_of_needed_blocks_are_summed(device: torch.device, block: int) -> None:
    rows, sums = Rows(numbers(20, 300).to(device), numbers(20, 2).to(device)), tables(300, 2, device, block)
    add(rows, sums)
    assert_sums(sums, rows)
    assert bool(sums.s_xx[256:, : min(block, 64)].any()) == (block == 512)


def test_wide_tables_have_wide_tiles(device: torch.device) -> None:
    rows = Rows(numbers(9, 259, torch.bfloat16).to(device), numbers(9, 258, torch.bfloat16).to(device))
    sums = tables(259, 258, device, 128)
    add(rows, sums)
    assert_sums(sums, rows)
    assert guards_hold(sums)


def test_sums_are_added_to_what_is_there(device: torch.device) -> None:
    rows, once, twice = (
        Rows(numbers(9, 4).to(device), numbers(9, 3).to(device)),
        *(tables(4, 3, device) for _ in "ab"),
    )
    add(rows, once)
    add(rows, twice)
    add(rows, twice)
    for name in ("s_xx", "s_xy", "s_yy"):
        assert torch.equal(getattr(twice, name), 2 * getattr(once, name))


@pytest.mark.parametrize("dtype", [FLOAT64, FLOAT32])
def test_an_offset_a_million_times_the_spread_costs_no_digits(
    device: torch.device, dtype: torch.dtype
) -> None:
    rows = Rows(*(numbers(50, width, dtype, offset=2000300.3).to(device) for width in (5, 3)))
    sums = tables(5, 3, device)
    add(rows, sums)
    assert_sums(sums, rows)


def test_rows_of_no_weight_are_not_looked_at(device: torch.device) -> None:
    x, y, weights = numbers(12, 4), numbers(12, 3), weights_of(12)
    x[2], y[7] = float("nan"), float("inf")
    rows, sums = Rows(x.to(device), y.to(device), weights.to(device)), tables(4, 3, device)
    assert add(rows, sums).finite
    assert_sums(sums, rows)


@pytest.mark.parametrize(("p", "q"), [(0, 3), (3, 0), (0, 0)])
def test_no_features_or_no_targets(device: torch.device, p: int, q: int) -> None:
    rows, sums = Rows(numbers(5, p).to(device), numbers(5, q).to(device)), tables(p, q, device)
    assert add(rows, sums).n_rows == 5
    assert_sums(sums, rows)
    assert guards_hold(sums)


@pytest.mark.parametrize("n", [0, 4])
def test_no_rows_and_rows_that_all_weigh_nothing(device: torch.device, n: int) -> None:
    weights = torch.zeros(n, dtype=FLOAT64, device=device)
    sums = tables(3, 2, device)
    means = add(Rows(numbers(n, 3).to(device), numbers(n, 2).to(device), weights), sums)
    assert means[:2] == (0, 0.0)
    assert not means.mean_x.any()
    assert means.mean_y.shape == (2,)
    assert not any(bool(table.any()) for table in (sums.s_xx, sums.s_xy, sums.s_yy))


def test_one_row_has_no_spread(device: torch.device) -> None:
    sums = tables(3, 2, device)
    assert add(Rows(numbers(1, 3).to(device), numbers(1, 2).to(device)), sums).n_rows == 1
    assert not any(bool(table.any()) for table in (sums.s_xx, sums.s_xy, sums.s_yy))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_rows_that_are_not_finite_add_nothing(device: torch.device, bad: float) -> None:
    x = numbers(9, 4)
    x[3, 1] = bad
    sums = tables(4, 2, device)
    assert not add(Rows(x.to(device), numbers(9, 2).to(device)), sums).finite
    assert not any(bool(table.any()) for table in (sums.s_xx, sums.s_xy, sums.s_yy))


def test_strides_of_any_kind(device: torch.device) -> None:
    x = numbers(31, 40).T.contiguous().to(device).T[:, ::3]
    y = numbers(62, 6).to(device)[::2]
    rows, sums = Rows(x, y, weights_of(62).to(device)[::2]), tables(14, 6, device)
    add(rows, sums)
    assert_sums(sums, rows)


@pytest.mark.parametrize(("n", "apart"), [(2, 2**31 + 64), (3, 2**30 + 64)])
def test_an_offset_past_two_gibi_elements(device: torch.device, n: int, apart: int) -> None:
    """By a stride that 32 bits cannot hold, and by one that they can; nothing between the rows is touched."""
    try:
        storage = torch.empty((n - 1) * apart + 8, dtype=torch.float16, device=device)
    except RuntimeError:
        pytest.skip("4 GiB of address space cannot be had")
    x, y = (storage.as_strided((n, 4), (apart, 1), start) for start in (0, 4))
    x.copy_(numbers(n, 4))
    y.copy_(numbers(n, 4)[:, [1, 0, 3, 2]] + 1)
    rows, sums = Rows(x, y), tables(4, 4, device)
    add(rows, sums)
    assert_sums(sums, rows)


def test_moments_are_those_of_float64_products(device: torch.device) -> None:
    """Chunks, weights, the mirrored half, a merge: everything around the operation stays as it is."""
    x, y, weights = numbers(60, 530), numbers(60, 3), weights_of(60)
    parts = (slice(0, 22), slice(22, 60))
    with use(KernelSettings(moments="triton")):
        found = Moments.zeros(530, 3, device)
        for part in parts:
            found.update(x[part], y[part], weights[part], FLOAT32)
    expected = Moments.zeros(530, 3)
    for part in parts:
        expected.update(x[part], y[part], weights[part])
    assert_same(found.to("cpu"), expected, rtol=1e-6)
    assert torch.equal(found.s_xx[512:, :512], found.s_xx[:512, 512:].T)


def test_a_value_that_is_not_finite_is_named_as_ever(device: torch.device) -> None:
    x, y = numbers(5, 3), numbers(5, 2)
    x[2, 1] = float("nan")
    moments = Moments.zeros(3, 2, device)
    with (
        use(KernelSettings(moments="triton")),
        pytest.raises(MomentsError, match=r"features hold .* column 1"),
    ):
        moments.update(x, y, product_dtype=FLOAT32)
    assert moments.n_rows == 0


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ROW_DTYPES)
def test_large_chunks_and_the_same_bits_twice(dtype: torch.dtype) -> None:
    device = torch.device("cuda")
    rows = Rows(
        *(numbers(5000, width, dtype).to(device) for width in (1500, 700)), weights_of(5000).to(device)
    )
    first, second = (tables(1500, 700, device) for _ in "ab")
    add(rows, first)
    add(rows, second)
    assert_sums(first, rows)
    assert guards_hold(first)
    for name in ("s_xx", "s_xy", "s_yy"):
        assert torch.equal(getattr(first, name), getattr(second, name))


@pytest.mark.gpu
def test_float32_products_on_a_gpu_are_left_to_triton() -> None:
    rows = Rows(numbers(50, 4).cuda(), numbers(50, 3).cuda())
    assert (choose_path(rows, FLOAT32), choose_path(rows, FLOAT64)) == ("triton", "torch")
