"""k, λ and the ratios of bands chosen on held-out rows: every number against scikit-learn on the rows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import product

import numpy as np
import pytest
import torch
from sklearn.linear_model import Ridge

from kvmap.fit.features import KINDS, SUPPORTS, Layout, Recipe, Selection, cache_shape
from kvmap.fit.linear import Head, LinearWeights, Penalty, fit_linear, r2_of
from kvmap.fit.pair_moments import (
    PairMoments,
    RowWeights,
    TableSpec,
    full_tables,
    head_local_tables,
    selected_tables,
)
from kvmap.fit.ridge import FewRowsWarning, TooFewRows
from kvmap.fit.tuning import SCOPES, Choice, Grid, Tuned, fit_tuned, recipe_for, tune
from kvmap.models.cache import KVCache
from tests.fit.caches import (
    GROUPED_TARGET_SHAPE,
    SOURCE_SHAPE,
    TARGET_SHAPE,
    UNEVEN_SOURCE_SHAPE,
    UNEVEN_TARGET_SHAPE,
    pair_of_caches,
)
from tests.fit.oracles import bands, head_rows, regressors

INF = math.inf

# Keys and values rank the source layers each their own way.
RANKED: dict[str, Selection] = {
    "key": ((2, 0, 1), (1, 2, 0), (0, 2, 1)),
    "value": ((0, 1, 2), (2, 1, 0), (1, 0, 2)),
}


def empty_recipe(moments: PairMoments, support: str, regressors: str, native_layers: int) -> Recipe:
    nothing: Selection = ((),) * len(moments.target_shape)
    return Recipe(
        moments.source_shape,
        moments.target_shape,
        support,
        dict.fromkeys(KINDS, nothing),
        regressors,
        native_layers,
    )


def ranked_for(n_target: int, native_layers: int = 0) -> dict[str, Selection]:
    return {
        kind: tuple(() if layer < native_layers else RANKED[kind][layer] for layer in range(n_target))
        for kind in KINDS
    }


@dataclass
class Oracle:
    """Ridge of scikit-learn on the rows of one head at a time."""

    pairs: Mapping[str, tuple[KVCache, KVCache]]
    base: Recipe
    ranked: Mapping[str, Selection]
    convention: str = "absolute"
    weights: Mapping[str, RowWeights] | None = None

    @cached_property
    def heads(self) -> list[Head]:
        return [
            (kind, layer, head)
            for kind in KINDS
            for layer in self.base.mapped_layers
            for head in range(self.base.target_shape[layer][0])
        ]

    def __post_init__(self) -> None:
        self._rows: dict[tuple[Head, int, str], tuple[np.ndarray, np.ndarray, np.ndarray]] = {}

    def recipe(self, top_k: int) -> Recipe:
        selection = {
            kind: tuple(tuple(sorted(layers[:top_k])) for layers in self.ranked[kind]) for kind in KINDS
        }
        return Recipe(
            self.base.source_shape,
            self.base.target_shape,
            self.base.support,
            selection,
            self.base.regressors,
            self.base.native_layers,
        )

    def rows(self, head: Head, top_k: int, split: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """X, Y and the weights of the rows."""
        if (head, top_k, split) not in self._rows:
            kind, layer, number = head
            source, target = self.pairs[split]
            y = head_rows(target, kind, layer, number)
            w = np.ones(len(y))
            if self.weights is not None:
                w = self.weights[split][kind, layer][:, number].flatten().double().numpy()
            x = regressors(self.recipe(top_k), source, target, *head)
            self._rows[head, top_k, split] = x, y, w
        return self._rows[head, top_k, split]

    def penalty(self, head: Head, choice: Choice) -> np.ndarray:
        """λ of each feature, ∞ where it is not read."""
        band = bands(self.recipe(choice.top_k), *self.pairs["fit"], *head)
        own = choice.ridge_lambda
        of_band = [own, *(INF if r == INF else own * r for r in (choice.cross, choice.native))]
        penalty = np.array(of_band)[band]
        if self.convention == "relative":
            x, _, w = self.rows(head, choice.top_k, "fit")
            read = np.isfinite(penalty)
            deviation = x[:, read] - np.average(x[:, read], 0, w)
            penalty = penalty * (w @ deviation**2).mean()
        return penalty

    def fit(self, head: Head, choice: Choice) -> tuple[np.ndarray, np.ndarray]:
        """Weight (p, d_t), zero for features left out, and bias."""
        x, y, w = self.rows(head, choice.top_k, "fit")
        penalty = self.penalty(head, choice)
        read, weight = np.isfinite(penalty), np.zeros((x.shape[1], y.shape[1]))
        scale = np.sqrt(penalty[read])
        # λ_j = alpha / (1/scale)²: a feature divided by √λ_j is penalised by 1
        model = Ridge(alpha=1.0, solver="svd").fit(x[:, read] / scale, y, sample_weight=w)
        weight[read] = np.atleast_2d(model.coef_).T / scale[:, None]
        return weight, np.average(y, 0, w) - np.average(x, 0, w) @ weight

    def r2(self, head: Head, choice: Choice) -> float:
        """Held-out, over all channels of the head, about the held-out rows' own mean."""
        weight, bias = self.fit(head, choice)
        x, y, w = self.rows(head, choice.top_k, "held_out")
        error = (w @ (y - x @ weight - bias) ** 2).sum()
        return float(1 - error / (w @ (y - np.average(y, 0, w)) ** 2).sum())


def problem(
    support: str,
    regressors: str = "own_kind",
    native_layers: int = 0,
    convention: str = "absolute",
    uneven: bool = False,
    tables: list[TableSpec] | None = None,
) -> tuple[PairMoments, Oracle]:
    shapes = (
        (UNEVEN_TARGET_SHAPE, UNEVEN_SOURCE_SHAPE)
        if uneven
        else (GROUPED_TARGET_SHAPE if native_layers else TARGET_SHAPE, SOURCE_SHAPE)
    )
    pairs = pair_of_caches(shapes[0], source_shape=shapes[1])
    source, target = pairs["fit"]
    layout = Layout(cache_shape(source), cache_shape(target), native_layers)
    moments = PairMoments.zeros(layout, tables or full_tables(layout, regressors))
    for split, caches in pairs.items():
        moments.update(split, *caches)
    base = empty_recipe(moments, support, regressors, native_layers)
    ranked = ranked_for(len(moments.target_shape), native_layers)
    return moments, Oracle(pairs, base, ranked, convention)


def points(grid: Grid) -> list[Choice]:
    return [Choice(*point) for point in product(grid.top_k, grid.ridge_lambda, grid.cross, grid.native)]


GRIDS = {
    "full_head": Grid((1, 3), (1e-2, 3.0, 1e3)),
    "head_local": Grid((1, 2, 3), (1e-2, 3.0, 1e3)),
    "banded": Grid((1, 2), (1e-2, 3.0), cross=(1.0, 40.0, INF)),
    "native": Grid((1, 2), (0.1, 30.0), native=(0.1, 1.0, INF)),
}


def assert_tuned_equals_rows(tuned: Tuned, oracle: Oracle, grid: Grid, per: str) -> None:
    found = {c: {head: oracle.r2(head, c) for head in oracle.heads} for c in points(grid)}
    means = {choice: np.mean(list(of_heads.values())) for choice, of_heads in found.items()}
    assert set(tuned.r2) == set(means)
    for choice, mean in means.items():
        # float64, of sums a hundred times larger than the smallest difference
        assert tuned.r2[choice] == pytest.approx(mean, abs=1e-9), choice
    assert list(tuned.choices) == oracle.heads
    best = max(means, key=lambda c: means[c])
    for head in oracle.heads:
        own = max(found, key=lambda c: found[c][head])
        assert tuned.choices[head] == (best if per == "pair" else own)
        assert tuned.head_r2[head] == pytest.approx(found[tuned.choices[head]][head], abs=1e-9)


@pytest.mark.parametrize("per", SCOPES)
@pytest.mark.parametrize("convention", ["absolute", "relative"])
@pytest.mark.parametrize("support", SUPPORTS)
def test_every_point_has_the_held_out_r2_of_its_rows(support: str, convention: str, per: str) -> None:
    moments, oracle = problem(support, convention=convention)
    grid = Grid(
        GRIDS[support].top_k, GRIDS[support].ridge_lambda, GRIDS[support].cross, convention=convention
    )
    tuned = tune(moments, oracle.base, oracle.ranked, grid, per)
    assert_tuned_equals_rows(tuned, oracle, grid, per)


@pytest.mark.parametrize("support", ["head_local", "banded"])
@pytest.mark.parametrize("convention", ["absolute", "relative"])
def test_native_layers_are_a_band_of_their_own(support: str, convention: str) -> None:
    moments, oracle = problem(support, "both_kinds", native_layers=1, convention=convention)
    cross = (1.0, INF) if support == "banded" else (1.0,)
    grid = Grid((1, 2), (0.1, 30.0), cross, GRIDS["native"].native, convention)
    tuned = tune(moments, oracle.base, oracle.ranked, grid, "head")
    assert_tuned_equals_rows(tuned, oracle, grid, "head")
    assert {layer for _, layer, _ in tuned.choices} == {1}


@pytest.mark.parametrize("support", SUPPORTS)
def test_layers_of_other_head_counts_and_widths(support: str) -> None:
    moments, oracle = problem(support, uneven=True)
    tuned = tune(moments, oracle.base, oracle.ranked, GRIDS[support], "head")
    assert_tuned_equals_rows(tuned, oracle, GRIDS[support], "head")


def test_an_infinite_ratio_is_head_local_support() -> None:
    moments, banded = problem("banded")
    _, local = problem("head_local")
    lambdas = (0.0, 1e-2, 3.0)
    with_bands = tune(moments, banded.base, banded.ranked, Grid((2,), lambdas, cross=(INF,)))
    without = tune(moments, local.base, local.ranked, Grid((2,), lambdas))
    for ridge_lambda in lambdas:
        expected = without.r2[Choice(2, ridge_lambda)]
        assert with_bands.r2[Choice(2, ridge_lambda, INF)] == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("per", SCOPES)
def test_moments_that_hold_no_more_than_the_support_do(per: str) -> None:
    moments, oracle = problem("head_local")
    tables = head_local_tables(moments.layout)
    fewer, _ = problem("head_local", tables=tables)
    grid = GRIDS["head_local"]
    tuned, expected = (tune(m, oracle.base, oracle.ranked, grid, per) for m in (fewer, moments))
    assert tuned.choices == expected.choices
    assert tuned.r2 == pytest.approx(expected.r2, abs=1e-12)


def test_of_equal_points_the_fewest_layers_and_the_largest_penalty_win() -> None:
    moments, oracle = problem("banded")
    source, target = oracle.pairs["fit"]
    still = KVCache(
        tuple(torch.ones_like(keys) for keys in target.keys),
        tuple(torch.zeros_like(values) for values in target.values),
        target.positions,
        target.mask,
        None,
    )
    constant = PairMoments.zeros(moments.layout)
    for split in ("fit", "held_out"):
        constant.update(split, source, still)
    grid = Grid((1, 2), (1e-2, 5.0, 3.0), cross=(1.0, INF))
    for per in SCOPES:
        tuned = tune(constant, oracle.base, oracle.ranked, grid, per)
        # what never varies is met by the bias, at any point
        assert set(tuned.r2.values()) == {1.0}
        assert set(tuned.choices.values()) == {Choice(1, 5.0, 1.0)}


def test_the_table_says_how_many_heads_chose_each_point() -> None:
    moments, oracle = problem("banded")
    grid = GRIDS["banded"]
    tuned = tune(moments, oracle.base, oracle.ranked, grid, "head")
    rows = tuned.rows()
    assert [(row["top_k"], row["cross_ratio"], row["ridge_lambda"]) for row in rows] == [
        (k, cross, ridge_lambda)
        for k in (1, 2)
        for cross in (1.0, 40.0, "inf")
        for ridge_lambda in (3.0, 1e-2)
    ]
    assert sum(row["n_heads"] for row in rows) == len(oracle.heads)
    for row in rows:
        choice = Choice(
            row["top_k"], row["ridge_lambda"], float(row["cross_ratio"]), float(row["native_ratio"])
        )
        assert row["held_out_r2"] == tuned.r2[choice]
        assert row["n_heads"] == sum(chosen == choice for chosen in tuned.choices.values())


# What heads chose, made up: all k, λ and ratios, several to a layer.
def made_up(oracle: Oracle, cross: tuple[float, ...], native: tuple[float, ...]) -> Tuned:
    offered = [
        Choice(*point) for point in product((1, 3, 2), (0.5, 20.0), cross, native)
    ]  # neighbouring heads differ in k
    choices = {head: offered[5 * i % len(offered)] for i, head in enumerate(oracle.heads)}
    assert len({choice.top_k for choice in choices.values()}) > 1
    return Tuned(choices, {}, {})


def assert_fit_equals_rows(weights: LinearWeights, tuned: Tuned, oracle: Oracle) -> None:
    """Each head's map is scikit-learn's on what it chose, and zero for what else its layer reads."""
    for (kind, layer, number), choice in tuned.choices.items():
        head = (kind, layer, number)
        expected, bias = oracle.fit(head, choice)
        row = 0 if weights.recipe.shared else number
        features = weights.recipe.columns(kind, layer)[row].tolist()
        read = oracle.recipe(choice.top_k).columns(kind, layer)[row].tolist()
        assert set(read) <= set(features)
        got = weights.weight[kind][layer][number].numpy()
        places = [features.index(feature) for feature in read]
        # condition numbers up to 1e4, float64
        np.testing.assert_allclose(got[places], expected, rtol=1e-8, atol=1e-9, err_msg=str(head))
        others = np.ones(len(features), bool)
        others[places] = False
        assert (got[others] == 0).all()
        np.testing.assert_allclose(weights.bias[kind][layer][number], bias, rtol=1e-8, atol=1e-9)


@pytest.mark.filterwarnings("ignore::kvmap.fit.ridge.FewRowsWarning")
@pytest.mark.parametrize("convention", ["absolute", "relative"])
@pytest.mark.parametrize("native_layers", [0, 1])
@pytest.mark.parametrize("support", SUPPORTS)
def test_heads_of_fewer_layers_have_zeros_for_the_rest(
    support: str, native_layers: int, convention: str
) -> None:
    moments, oracle = problem(support, "both_kinds", native_layers, convention)
    cross = (1.0, 30.0, INF) if support == "banded" else (1.0,)
    tuned = made_up(oracle, cross, (0.2, 1.0, INF) if native_layers else (1.0,))
    weights = fit_tuned(
        moments, oracle.base, oracle.ranked, tuned, convention, dtype=torch.float64, allow_few_rows=True
    )
    assert_fit_equals_rows(weights, tuned, oracle)
    for kind in KINDS:
        assert weights.weight[kind][0].shape[1] == (
            0 if native_layers else weights.recipe.n_features(kind, 0)
        )


@pytest.mark.parametrize("uneven", [False, True])
def test_a_layer_reads_what_its_hungriest_head_reads(uneven: bool) -> None:
    moments, oracle = problem("head_local", uneven=uneven)
    tuned = made_up(oracle, (1.0,), (1.0,))
    weights = fit_tuned(moments, oracle.base, oracle.ranked, tuned, "absolute")
    for kind in KINDS:
        for layer in range(len(moments.target_shape)):
            largest = max(c.top_k for (k, at, _), c in tuned.choices.items() if (k, at) == (kind, layer))
            expected = tuple(sorted(oracle.ranked[kind][layer][:largest]))
            assert weights.recipe.selection[kind][layer] == expected


@pytest.mark.parametrize("per", SCOPES)
@pytest.mark.parametrize("support", SUPPORTS)
def test_what_is_fitted_has_the_r2_that_was_promised(support: str, per: str) -> None:
    for convention in ("absolute", "relative"):
        moments, oracle = problem(support, native_layers=1, convention=convention)
        cross = (1.0, 40.0, INF) if support == "banded" else (1.0,)
        grid = Grid((1, 2, 3), (1e-2, 3.0, 1e3), cross, (0.1, 1.0, INF), convention)
        tuned = tune(moments, oracle.base, oracle.ranked, grid, per)
        weights = fit_tuned(moments, oracle.base, oracle.ranked, tuned, convention, dtype=torch.float64)
        r2 = r2_of(weights, moments, "held_out")
        for (kind, layer, head), promised in tuned.head_r2.items():
            assert float(r2[kind][layer, head]) == pytest.approx(promised, abs=1e-9)


def test_one_k_for_all_is_the_plain_fit() -> None:
    moments, oracle = problem("full_head")
    chosen = Tuned(dict.fromkeys(oracle.heads, Choice(2, 0.5)), {}, {})
    got = fit_tuned(moments, oracle.base, oracle.ranked, chosen, "absolute")
    recipe = recipe_for(oracle.base, oracle.ranked, 2)
    assert recipe == oracle.recipe(2) == got.recipe
    expected = fit_linear(moments, recipe, Penalty(0.5))
    for kind in KINDS:
        for mine, theirs in zip(got.weight[kind], expected.weight[kind], strict=True):
            assert torch.equal(mine, theirs)


def random_weights(oracle: Oracle) -> dict[str, RowWeights]:
    generator = torch.Generator().manual_seed(3)
    weights = {}
    for split, (_, target) in oracle.pairs.items():
        shape = {layer: keys.shape[:3] for layer, keys in enumerate(target.keys)}
        weights[split] = {
            (kind, layer): torch.rand(shape[layer], generator=generator, dtype=torch.float64) ** 2
            for kind in KINDS
            for layer in oracle.base.mapped_layers
        }
    return weights


@pytest.mark.parametrize("convention", ["absolute", "relative"])
@pytest.mark.parametrize("support", SUPPORTS)
def test_weighted_moments_give_the_fits_of_weighted_rows(support: str, convention: str) -> None:
    plain, oracle = problem(support, native_layers=1, convention=convention)
    oracle.weights = random_weights(oracle)
    widest = recipe_for(oracle.base, oracle.ranked, 3)
    moments = PairMoments.zeros(plain.layout, selected_tables(widest, weighted=True))
    for split, caches in oracle.pairs.items():
        moments.update(split, *caches, weights=oracle.weights[split])
    cross = (1.0, 30.0, INF) if support == "banded" else (1.0,)
    chosen = made_up(oracle, cross, (0.2, 1.0))
    fitted = fit_tuned(moments, oracle.base, oracle.ranked, chosen, convention, dtype=torch.float64)
    assert_fit_equals_rows(fitted, chosen, oracle)
    grid = Grid((1, 3), (1e-2, 3.0), cross, (1.0,), convention)
    tuned = tune(moments, oracle.base, oracle.ranked, grid, "head")
    assert_tuned_equals_rows(tuned, oracle, grid, "head")


def test_too_few_rows_for_the_largest_choice_are_refused() -> None:
    moments, oracle = problem("full_head")
    few = PairMoments.zeros(moments.layout)
    source, target = (kv.select_rows([0]) for kv in oracle.pairs["fit"])  # 17 rows: 6 features, not 18
    few.update("fit", source, target)
    tuned = made_up(oracle, (1.0,), (1.0,))
    with pytest.raises(TooFewRows, match="17 calibration rows for 18 features"):
        fit_tuned(few, oracle.base, oracle.ranked, tuned, "absolute")
    with pytest.warns(FewRowsWarning):
        fit_tuned(few, oracle.base, oracle.ranked, tuned, "absolute", allow_few_rows=True)
