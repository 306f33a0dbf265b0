"""Second moments of a chunk in PyTorch, and which path serves which rows."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch

from kvmap.errors import UnknownName
from kvmap.fit.moments import Moments
from kvmap.kernels import second_moments
from kvmap.kernels.second_moments import (
    PATHS,
    Means,
    Rows,
    SecondMomentsError,
    Sums,
    add_second_moments,
    choose_path,
    unsupported_reason,
)
from kvmap.kernels.settings import KernelSettings, use
from tests.fit.oracles import from_rows

FLOAT64, FLOAT32 = torch.float64, torch.float32


def rows_of(n: int, p: int, q: int, *, weighted: bool = False, dtype: torch.dtype = FLOAT64) -> Rows:
    rng = np.random.default_rng(n + p + q)
    x, y = (torch.from_numpy(rng.normal(3, 2, size=(n, width))).to(dtype) for width in (p, q))
    return Rows(x, y, torch.from_numpy(rng.gamma(1.0, size=n)) if weighted else None)


def sums_of(p: int, q: int, block: int = 512, fill: float = 0.0) -> Sums:
    return Sums(*(torch.full(shape, fill, dtype=FLOAT64) for shape in ((p, p), (p, q), (q,))), block)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("product_dtype", "rtol"), [(FLOAT64, 1e-13), (FLOAT32, 1e-6)])
def test_torch_gives_what_two_passes_give(product_dtype: torch.dtype, rtol: float, weighted: bool) -> None:
    rows, sums = rows_of(40, 7, 5, weighted=weighted), sums_of(7, 5)
    means = add_second_moments(rows, sums, product_dtype=product_dtype, path="torch")
    weights = None if rows.weights is None else rows.weights.numpy()
    expected = from_rows(rows.x.numpy(), rows.y.numpy(), weights)
    assert means.n_rows == 40
    assert means.weight == pytest.approx(40 if weights is None else weights.sum(), rel=1e-14)
    found = {"mean_x": means.mean_x, "mean_y": means.mean_y, "s_yy": sums.s_yy}
    for name, tensor in (found | {"s_xx": sums.s_xx, "s_xy": sums.s_xy}).items():
        want = expected[name].astype(np.float64)
        np.testing.assert_allclose(tensor.numpy(), want, rtol=0, atol=rtol * np.abs(want).max(), err_msg=name)


def test_nothing_below_the_blocks_of_the_diagonal_is_written() -> None:
    sums = sums_of(10, 2, block=4, fill=7.0)
    add_second_moments(rows_of(9, 10, 2), sums)
    for start in (4, 8):
        assert bool((sums.s_xx[start : start + 4, :start] == 7.0).all())


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_rows_that_are_not_finite_add_nothing(bad: float) -> None:
    rows, sums = rows_of(9, 4, 2), sums_of(4, 2, fill=7.0)
    rows.y[3, 1] = bad
    assert not add_second_moments(rows, sums).finite
    assert all(bool((table == 7.0).all()) for table in (sums.s_xx, sums.s_xy, sums.s_yy))


def test_no_rows_have_no_weight() -> None:
    rows = Rows(torch.ones(3, 4), torch.ones(3, 2), torch.zeros(3, dtype=FLOAT64))
    means = add_second_moments(rows, sums_of(4, 2))
    assert means[:2] == (0, 0.0)
    assert not means.mean_x.any()
    assert not means.mean_y.any()
    assert means.finite


def test_rows_on_the_cpu_are_left_to_torch() -> None:
    for product_dtype in (FLOAT64, FLOAT32):
        assert choose_path(rows_of(3, 2, 2), product_dtype) == "torch"


def test_every_path_of_the_settings_is_one_of_the_operation() -> None:
    rows = rows_of(3, 2, 2)
    for path in PATHS[:2]:
        assert add_second_moments(rows, sums_of(2, 2), path=path).n_rows == 3
    with pytest.raises(UnknownName, match=r"path of second moments 'tritn'.*'triton'"):
        add_second_moments(rows, sums_of(2, 2), path="tritn")


@pytest.mark.parametrize(
    ("product_dtype", "row_dtype", "why"),
    [
        (FLOAT64, FLOAT32, r"products are float64, expected float32 \(calibration.product_dtype=float32\)"),
        (FLOAT32, torch.float8_e4m3fn, "rows are float8_e4m3fn, expected one of float64, float32"),
        (FLOAT32, FLOAT32, "rows are on cpu, expected a CUDA device"),
    ],
)
def test_triton_asked_for_by_name_says_why_it_cannot(
    monkeypatch: pytest.MonkeyPatch, product_dtype: torch.dtype, row_dtype: torch.dtype, why: str
) -> None:
    monkeypatch.setattr(second_moments, "_interpreted", lambda: False)
    rows = rows_of(3, 2, 2, dtype=row_dtype)
    with pytest.raises(SecondMomentsError, match=rf"kernels.moments=triton: {why}.*set kernels.moments to"):
        add_second_moments(rows, sums_of(2, 2), product_dtype=product_dtype, path="triton")


def test_a_machine_without_triton_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(second_moments.importlib.util, "find_spec", lambda name: None)
    assert unsupported_reason(rows_of(3, 2, 2), FLOAT32) == "triton is not installed"


def test_moments_take_the_path_of_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def add(rows: Rows, sums: Sums, *, product_dtype: torch.dtype, path: str) -> Means:
        asked.append((product_dtype, path))
        return add_second_moments(rows, sums, product_dtype=product_dtype)

    monkeypatch.setattr("kvmap.fit.moments.add_second_moments", add)
    rows = rows_of(5, 3, 2)
    with use(KernelSettings(moments="torch")):
        Moments.zeros(3, 2).update(rows.x, rows.y, product_dtype=FLOAT32)
    Moments.zeros(3, 2).update(rows.x, rows.y)
    assert asked == [(FLOAT32, "torch"), (FLOAT64, "auto")]


def test_the_path_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    second_moments._say_once.cache_clear()
    with caplog.at_level(logging.INFO, logger="kvmap"):
        for _ in range(3):
            add_second_moments(rows_of(3, 2, 2, dtype=FLOAT32), sums_of(2, 2))
    assert caplog.messages == ["second moments: path torch (float32 rows on cpu, float64 products)"]
