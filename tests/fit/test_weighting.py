"""Row weights of a calibration against the raw weights of its rows, gathered by hand."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.linear_model import Ridge

from kvmap.errors import KvmapError
from kvmap.fit.calibrate import CalibrationOptions, accumulate_moments
from kvmap.fit.captures import Captures, SensitivityOptions, capture
from kvmap.fit.features import KINDS, Recipe, both, geometry_shape
from kvmap.fit.linear import Head, Penalty, fit_linear, r2_of
from kvmap.fit.outliers import OutlierRows, OutlierRule
from kvmap.fit.pair_moments import SPLITS, PairMoments, selected_tables
from kvmap.fit.view import cache_view
from kvmap.fit.weighting import AttentionWeights
from kvmap.models.pair import LoadedModel, ModelPair
from kvmap.models.storage import load_kv
from tests.fit.oracles import head_rows, regressors
from tests.tiny_random_models import build, random_ids

TOKENS, BATCH_SIZE, NATIVE_HEAD, STRIDE = 40, 4, 1, 2
IDS = random_ids(13, TOKENS)
# No batch of four lies in one split, and sequences 4 and 11 in neither.
SPLIT = {"fit": [10, 0, 1, 2, 5, 6, 7, 12], "held_out": [3, 8, 9]}
OPTIONS = CalibrationOptions(native_head=NATIVE_HEAD, token_stride=STRIDE)


@pytest.fixture(scope="module")
def pair() -> ModelPair:
    source, target = build("llama_yarn", seed=1, n_layers=3), build("smollm3", seed=2, n_layers=3)
    return ModelPair(
        LoadedModel.from_model(source, name="source"), LoadedModel.from_model(target, name="target")
    )


@pytest.fixture(scope="module")
def captured(pair, tmp_path_factory) -> Captures:
    sensitivity = SensitivityOptions(n_boundaries=8, native_head=NATIVE_HEAD, token_stride=STRIDE)
    folder = tmp_path_factory.mktemp("captures")
    return capture(pair, IDS, folder, batch_size=BATCH_SIZE, sensitivity=sensitivity)


@pytest.fixture(scope="module")
def rule(captured) -> OutlierRule:
    """So strict that it flags about a third of the tokens."""
    caches = [cache_view(load_kv(captured.path(start, "source"))) for start, _ in captured.batches]
    return OutlierRule.fit(caches, threshold=1.0, share=0.5)


@pytest.fixture(params=[False, True], ids=["all rows", "without outliers"])
def outliers(request, rule) -> OutlierRule | None:
    return rule if request.param else None


def recipe_of(pair: ModelPair, support: str, n_layers: int, native_layers: int = 0) -> Recipe:
    layers = tuple(range(n_layers))
    selection = both(tuple(() if layer < native_layers else layers for layer in range(3)))
    shapes = (geometry_shape(pair.source_geometry), geometry_shape(pair.target_geometry))
    return Recipe(*shapes, support, selection, native_layers=native_layers)


def counted(captured: Captures, start: int, outliers: OutlierRule | None) -> torch.Tensor:
    """(batch, tokens): every second token after the first, but outliers."""
    source = cache_view(load_kv(captured.path(start, "source")))
    rows = torch.zeros(source.batch_size, TOKENS, dtype=torch.bool)
    rows[:, NATIVE_HEAD::STRIDE] = True
    return rows if outliers is None else rows & ~outliers.flag(source)


def raw_weights(
    captured: Captures, head: Head, outliers: OutlierRule | None, split: str = "fit"
) -> np.ndarray:
    """R of one head's rows, sequence by sequence."""
    kind, layer, number = head
    found = []
    for sequence in sorted(SPLIT[split]):
        start = sequence // BATCH_SIZE * BATCH_SIZE
        r = captured.weights(start)[kind, layer][sequence - start, number]
        found.append(r[counted(captured, start, outliers)[sequence - start]])
    return torch.cat(found).double().numpy()


def heads_of(recipe: Recipe) -> list[Head]:
    return [
        (kind, layer, head)
        for kind, layer in product(KINDS, recipe.mapped_layers)
        for head in range(recipe.target_shape[layer][0])
    ]


@pytest.mark.parametrize(("support", "must_shrink"), [("head_local", False), ("full_head", True)])
def test_the_weights_keep_an_effective_sample_of_two_rows_a_feature(
    pair, captured, outliers, support, must_shrink
) -> None:
    recipe = recipe_of(pair, support, 3 if must_shrink else 1)
    weights = AttentionWeights(captured, recipe, SPLIT, OPTIONS, outliers)
    rows = {(row["kind"], row["layer"], row["head"]): row for row in weights.rows()}
    assert list(rows) == heads_of(recipe)
    for head, row in rows.items():
        kind, layer, number = head
        r = raw_weights(captured, head, outliers)
        floor = min(len(r), 2 * recipe.n_features(kind, layer))
        alpha = float(weights.alpha(kind, layer)[number])
        assert row["alpha"] == alpha
        assert row["n_rows"] == weights.spread.n_rows == len(r)
        # r is float32, of mean one to its rounding
        assert row["cv_squared"] == pytest.approx(np.var(r) / np.mean(r) ** 2, rel=1e-6)
        w = 1 + alpha * (r / r.mean() - 1)
        effective = w.sum() ** 2 / (w**2).sum()
        assert row["effective_rows"] == pytest.approx(effective, rel=1e-6)
        assert bool(r.sum() ** 2 / (r**2).sum() < floor) is must_shrink
        if must_shrink:  # by the least that reaches the floor
            assert effective == pytest.approx(floor, rel=1e-6)
            assert 0 <= alpha < 1
        else:
            assert alpha == 1


def weighted(
    captured: Captures, recipe: Recipe, outliers: OutlierRule | None, policy: str = "drop"
) -> tuple[PairMoments, AttentionWeights]:
    weights = AttentionWeights(captured, recipe, SPLIT, OPTIONS, outliers)
    left_out = None if outliers is None else OutlierRows(outliers, policy, recipe.layout)
    tables = selected_tables(recipe, weighted=True)
    stream = captured.stream(SPLIT)
    return accumulate_moments(stream, recipe.layout, tables, OPTIONS, weights.weigh, left_out), weights


def rows_and_weights(
    captured: Captures, recipe: Recipe, weights: AttentionWeights, head: Head, split: str, outliers
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    kind, layer, number = head
    xs, ys, ws = [], [], []
    mean = raw_weights(captured, head, outliers).mean()
    for sequence in sorted(SPLIT[split]):
        start = sequence // BATCH_SIZE * BATCH_SIZE
        place = sequence - start
        source, target = (
            cache_view(load_kv(captured.path(start, role))).select_rows([place])
            for role in ("source", "target")
        )
        rows = counted(captured, start, outliers)[[place]]
        xs.append(regressors(recipe, source, target, kind, layer, number, rows))
        ys.append(head_rows(target, kind, layer, number, rows))
        r = captured.weights(start)[kind, layer][place, number][rows[0]].double().numpy()
        ws.append(1 + float(weights.alpha(kind, layer)[number]) * (r / mean - 1))
    return np.concatenate(xs), np.concatenate(ys), np.concatenate(ws)


@pytest.mark.parametrize(("support", "native_layers"), [("head_local", 1), ("full_head", 0)])
def test_weighted_moments_give_scikit_learns_fits_with_sample_weights(
    pair, captured, outliers, support, native_layers
) -> None:
    recipe = recipe_of(pair, support, 2, native_layers)
    moments, weights = weighted(captured, recipe, outliers)
    fitted = fit_linear(moments, recipe, Penalty(0.3), dtype=torch.float64)
    r2 = r2_of(fitted, moments, "held_out")
    for head in heads_of(recipe):
        kind, layer, number = head
        x, y, w = rows_and_weights(captured, recipe, weights, head, "fit", outliers)
        model = Ridge(alpha=0.3, solver="svd").fit(x, y, sample_weight=w)
        # rows are float32, sums float64
        np.testing.assert_allclose(
            fitted.weight[kind][layer][number], model.coef_.T, rtol=1e-7, atol=1e-8, err_msg=str(head)
        )
        np.testing.assert_allclose(fitted.bias[kind][layer][number], model.intercept_, rtol=1e-7, atol=1e-7)
        x, y, w = rows_and_weights(captured, recipe, weights, head, "held_out", outliers)
        error = (w @ (y - model.predict(x)) ** 2).sum()
        expected = 1 - error / (w @ (y - np.average(y, 0, w)) ** 2).sum()
        assert float(r2[kind][layer, number]) == pytest.approx(expected, abs=1e-8)


def test_weights_have_mean_one_over_the_fit_rows(pair, captured, outliers) -> None:
    """So that a penalty means what it means without weights."""
    recipe = recipe_of(pair, "full_head", 3)
    moments, _ = weighted(captured, recipe, outliers)
    for table in moments.tables:
        fit = table.splits["fit"]
        assert fit.weight == pytest.approx(fit.n_rows, rel=1e-6)


def test_only_the_fit_rows_decide_how_far_weights_are_shrunk(pair, captured) -> None:
    recipe = recipe_of(pair, "full_head", 3)
    some = AttentionWeights(captured, recipe, SPLIT, OPTIONS)
    none = AttentionWeights(captured, recipe, {"fit": SPLIT["fit"], "held_out": []}, OPTIONS)
    assert some.rows() == none.rows()


def test_outliers_that_are_kept_apart_take_no_part_either(pair, captured, rule) -> None:
    recipe = recipe_of(pair, "head_local", 2)
    (dropped, _), (separate, _) = (weighted(captured, recipe, rule, p) for p in ("drop", "separate"))
    for mine, theirs in zip(dropped.tables, separate.tables, strict=True):
        for split in SPLITS:
            assert torch.equal(mine.splits[split].s_xy, theirs.splits[split].s_xy)


def test_captures_without_weights_are_refused(pair, tmp_path: Path) -> None:
    plain = capture(pair, IDS[:4], tmp_path, batch_size=BATCH_SIZE)
    with pytest.raises(
        KvmapError, match=r"no attention-sensitivity weights.*mapper\.row_weights=sensitivity"
    ):
        AttentionWeights(plain, recipe_of(pair, "head_local", 1), SPLIT, OPTIONS)


def test_a_batch_without_weights_is_refused(pair, captured, tmp_path: Path) -> None:
    plain = capture(pair, IDS[:4], tmp_path, batch_size=BATCH_SIZE)
    weights = AttentionWeights(captured, recipe_of(pair, "head_local", 1), SPLIT, OPTIONS)
    batch = next(plain.stream({"fit": [0], "held_out": []}))
    with pytest.raises(KvmapError, match="capture again"):
        weights.weigh(batch, torch.ones(1, TOKENS, dtype=torch.bool))
