from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from kvmap.fit.features import KINDS, CacheShape, SelectionError
from kvmap.fit.forward import RELATIVE_RIDGE, TIE, _factor, best_layer, forward
from kvmap.fit.moments import MomentsError
from kvmap.fit.pair_moments import PairMoments, head_local_tables, probe_tables
from tests.fit.caches import random_cache
from tests.fit.pair_rows import PairRows, random_rows
from tests.fit.test_probes import PAIRS, per_head_tables

# Five source layers, so that the order of choice has 120 outcomes; heads grouped, matched and unmatched.
UNIFORM: tuple[CacheShape, CacheShape] = (((2, 3),) * 5, ((2, 4),) * 3)
GROUPED: tuple[CacheShape, CacheShape] = (((2, 3),) * 5, ((4, 2), (2, 5)))
RAGGED: tuple[CacheShape, CacheShape] = (((2, 3), (1, 5), (3, 2), (2, 1), (4, 2)), ((1, 5), (3, 2), (2, 4)))
SHAPES = pytest.mark.parametrize("shapes", [UNIFORM, GROUPED, RAGGED], ids=["uniform", "grouped", "ragged"])


def joint_r2(rows: PairRows, kind: str, layer: int, chosen: tuple[int, ...]) -> float:
    """R² of least squares on all chosen layers, from the rows, mean over heads."""
    n_heads = rows.layout.target_shape[layer][0]
    scores = []
    for head in range(n_heads):
        matched = [(s, head * rows.layout.source_shape[s][0] // n_heads) for s in chosen]
        x = np.hstack([rows.source_head(kind, s, own) for s, own in matched])
        y = rows.target_head(kind, layer, head)
        x, y = x - x.mean(0), y - y.mean(0)
        error = y - x @ np.linalg.lstsq(x, y, rcond=None)[0]
        scores.append(1 - (error**2).sum() / (y**2).sum())
    return float(np.mean(scores))


def brute_force(rows: PairRows, kinds: tuple[str, ...], layer: int, k: int) -> tuple[int, ...]:
    chosen: tuple[int, ...] = ()
    for _ in range(k):
        free = [s for s in range(len(rows.layout.source_shape)) if s not in chosen]
        scores = [np.mean([joint_r2(rows, kind, layer, (*chosen, s)) for kind in kinds]) for s in free]
        chosen = (*chosen, free[int(np.argmax(scores))])
    return chosen


@SHAPES
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("seed", range(2))
def test_the_greedy_choice_equals_refitting_every_candidate(
    shapes: tuple[CacheShape, CacheShape], apart: bool, seed: int
) -> None:
    rows = random_rows(*shapes, seed=seed)
    result = forward(rows, 5, apart)
    for kind in KINDS:
        for layer in range(len(shapes[1])):
            chosen = result.selection[kind][layer]
            assert chosen == brute_force(rows, (kind,) if apart else KINDS, layer, 5)
            expected = [joint_r2(rows, kind, layer, chosen[:k]) for k in range(1, 6)]
            # the relative ridge of 1e-8, times condition numbers of up to a few hundred
            np.testing.assert_allclose(result.r2[kind][layer], expected, rtol=0, atol=1e-5)
    if not apart:
        assert result.selection["key"] == result.selection["value"]


def test_apart_keys_and_values_do_choose_differently() -> None:
    result = forward(random_rows(*UNIFORM), 2, apart=True)
    assert result.selection["key"] != result.selection["value"]


@SHAPES
def test_the_score_is_that_of_the_joint_ridge_objective(shapes: tuple[CacheShape, CacheShape]) -> None:
    """Exact: the Schur complements are those of the one system with the stated penalty."""
    rows = random_rows(*shapes)
    result = forward(rows, 5, apart=True)
    layout = rows.layout
    for kind in KINDS:
        for layer, (n_heads, _) in enumerate(layout.target_shape):
            shares = []
            for head in range(n_heads):
                matched = [(s, head * layout.source_shape[s][0] // n_heads) for s in range(5)]
                x = np.hstack([rows.source_head(kind, s, own) for s, own in matched])
                y = rows.target_head(kind, layer, head)
                x, y = x - x.mean(0), y - y.mean(0)
                gram = x.T @ x
                weight = np.linalg.solve(gram + RELATIVE_RIDGE * np.diag(np.diag(gram)), x.T @ y)
                shares.append((weight * (x.T @ y)).sum() / (y**2).sum())
            assert result.r2[kind][layer][-1] == pytest.approx(np.mean(shares), abs=1e-12)


@PAIRS
@pytest.mark.parametrize("tables", [head_local_tables, per_head_tables])
@pytest.mark.parametrize("native_layers", [0, 1])
def test_every_mode_of_calibration_gives_the_same_choice(
    shapes: tuple[CacheShape, CacheShape], tables, native_layers: int
) -> None:
    generator = torch.Generator().manual_seed(1)
    source, target = (random_cache(shape, 2, 30, generator) for shape in shapes)
    layout = random_rows(*shapes, native_layers=native_layers).layout
    full = PairMoments.zeros(layout).update("fit", source, target)
    held = PairMoments.zeros(layout, tables(layout)).update("fit", source, target)
    expected, found = forward(full, len(shapes[0])), forward(held, len(shapes[0]))
    assert found.selection == expected.selection
    for kind in KINDS:
        for mine, theirs in zip(found.r2[kind], expected.r2[kind], strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-12)


def test_moments_of_single_layers_are_refused() -> None:
    layout = random_rows(*UNIFORM).layout
    with pytest.raises(MomentsError, match="do not hold"):
        forward(PairMoments.zeros(layout, probe_tables(layout)), 1)


def test_native_layers_choose_nothing_and_the_others_as_without_them() -> None:
    rows = random_rows(*UNIFORM)
    native = random_rows(*UNIFORM, native_layers=2)
    native.rows = {
        split: (torch.cat([x, native.rows[split][0][:, x.shape[1] :]], 1), y)
        for split, (x, y) in rows.rows.items()
    }
    expected, found = forward(rows, 3), forward(native, 3)
    for kind in KINDS:
        assert found.selection[kind] == ((), (), expected.selection[kind][2])
        assert found.r2[kind][:2] == ((), ())
        np.testing.assert_allclose(found.r2[kind][2], expected.r2[kind][2], rtol=0, atol=1e-12)


def test_a_copy_of_a_chosen_layer_adds_nothing_and_comes_last() -> None:
    rows = random_rows(((1, 3),) * 4, ((1, 4),) * 2)
    for split in ("fit", "held_out"):
        x, y = rows.rows[split]
        x[:, 6:9] = x[:, 0:3] @ torch.randn(
            3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(3)
        )
        x[:, 18:21] = x[:, 12:15]
        y[:, [0, 1, 8, 9]] += 100 * x[:, [0, 1, 12, 13]]
    result = forward(rows, 4)
    for kind in KINDS:
        assert result.selection[kind][0][0] == 0
        assert result.selection[kind][0][3] == 2
        assert result.r2[kind][0][3] - result.r2[kind][0][2] == pytest.approx(0, abs=1e-6)


def test_dead_channels_and_heads_that_never_vary_gain_nothing() -> None:
    rows = random_rows(*UNIFORM)
    x, y = rows.rows["fit"]
    x[:, 6:12] = 4.0  # all keys of layer 1
    x[:, 30 + 6 : 30 + 12] = 4.0  # and all values
    y[:, :8] = 1.0  # the keys of target layer 0
    result = forward(rows, 5)
    assert result.r2["key"][0] == (0.0,) * 5
    assert all(chosen[-1] == 1 for chosen in result.selection["key"])
    assert result.selection["key"][0] == forward(rows, 5, apart=True).selection["value"][0]
    assert forward(rows, 5, apart=True).selection["key"][0] == (0, 1, 2, 3, 4)


def test_fewer_rows_than_features_end_at_a_perfect_fit() -> None:
    """10 rows against 15 features a head: after three layers or four nothing is left."""
    rows = random_rows(*UNIFORM, n=10)
    result = forward(rows, 5)
    for kind in KINDS:
        for curve in result.r2[kind]:
            assert all(later >= earlier - 1e-12 for earlier, later in pairwise(curve))
            assert curve[-1] == pytest.approx(1, abs=1e-5)


def test_moments_of_float32_products_choose_the_same_layers() -> None:
    generator = torch.Generator().manual_seed(2)
    source, target = (random_cache(shape, 4, 50, generator) for shape in UNIFORM)
    keys = [*source.keys[:4], source.keys[0] + 1e-6 * source.keys[4]]  # singular to float32
    source = type(source)(tuple(keys), source.values, source.positions, source.mask, None)
    layout = random_rows(*UNIFORM).layout
    exact, rounded = (
        PairMoments.zeros(layout, product_dtype=dtype).update("fit", source, target)
        for dtype in (torch.float64, torch.float32)
    )
    expected, found = forward(exact, 4), forward(rounded, 4)
    for kind in KINDS:
        for mine, theirs in zip(found.r2[kind], expected.r2[kind], strict=True):
            # products of 200 float32 rows, amplified by at most 1e-4/√ε in directions that hold nothing
            np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-3)


@pytest.mark.parametrize("lowest", [-3.0, -0.999])
def test_a_block_that_rounding_made_indefinite_gains_no_noise(lowest: float) -> None:
    """An eigenvalue below -ε has no pivot, and one just above it a pivot near 0, which blows noise up."""
    q = torch.linalg.qr(torch.arange(16, dtype=torch.float64).reshape(4, 4).square().cos()).Q
    block = (q * torch.tensor([1.0, 0.5, 0.25, lowest * RELATIVE_RIDGE], dtype=torch.float64)) @ q.T
    floored = (q * (torch.tensor([1.0, 0.5, 0.25, 0.0], dtype=torch.float64) + RELATIVE_RIDGE)) @ q.T
    identity = torch.eye(4, dtype=torch.float64)
    factors = _factor(torch.stack([block, identity]))
    torch.testing.assert_close(factors, factors.tril())
    products = factors @ factors.mT
    # rounding of unit entries: 1e-15, far below ε
    torch.testing.assert_close(products[0], floored, rtol=0, atol=1e-14)
    torch.testing.assert_close(products[1], (1 + RELATIVE_RIDGE) * identity)


def test_equal_scores_go_to_the_lower_layer() -> None:
    assert best_layer([0.1, 0.5, 0.5 + TIE / 2, 0.4]) == 1
    assert best_layer([0.1, 0.5, 0.5 + 2 * TIE, 0.4]) == 2
    assert best_layer([0.1, 0.5, 0.5, 0.4], taken=(1, 2)) == 3
    rows = random_rows(((1, 2),) * 3, ((1, 2),))
    x, y = rows.rows["fit"]
    x[:, 2:4], x[:, 8:10] = x[:, 4:6], x[:, 10:12]
    y[:, :2], y[:, 2:] = x[:, 4:6], x[:, 10:12]
    assert forward(rows, 1).selection["key"] == ((1,),)


def test_moments_that_are_not_finite_are_refused() -> None:
    rows = random_rows(*UNIFORM)
    rows.rows["fit"][0][3, 31] = float("inf")
    with pytest.raises(SelectionError, match="values from source heads"):
        forward(rows, 1)


def test_progress_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "kvmap.progress"):
        forward(random_rows(*UNIFORM), 1)
    (line,) = caplog.messages
    assert line.startswith("forward selection: target layers: 3 done in")
