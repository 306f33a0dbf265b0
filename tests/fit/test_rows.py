"""Rows of one target layer are those that loops over the captured caches gather."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from kvmap.fit.calibrate import CalibrationOptions, accumulate_moments
from kvmap.fit.captures import Captures, capture
from kvmap.fit.features import KINDS, REGRESSORS, SUPPORTS, Recipe, geometry_shape
from kvmap.fit.outliers import OutlierRows, OutlierRule
from kvmap.fit.pair_moments import SPLITS, full_tables
from kvmap.fit.rows import counted_rows, layer_rows
from kvmap.fit.view import cache_view
from kvmap.models.pair import LoadedModel, ModelPair
from kvmap.models.storage import load_kv
from tests.fit.oracles import head_rows, regressors
from tests.tiny_random_models import build, random_ids

TOKENS, BATCH_SIZE = 30, 3
# Neither in order nor cut where batches are; sequence 5 is in no split.
SPLIT = {"fit": [7, 1, 0, 4], "held_out": [6, 2, 3]}
SELECTION = {"key": ((), (2, 0), (1,)), "value": ((), (1,), (0, 2, 1))}


@pytest.fixture(scope="module")
def pair() -> ModelPair:
    source = build("llama_yarn", seed=1, n_layers=3).to(torch.bfloat16)
    target = build("smollm3", seed=2, n_layers=3)
    return ModelPair(
        LoadedModel.from_model(source, name="source"), LoadedModel.from_model(target, name="target")
    )


@pytest.fixture(scope="module")
def captured(pair, tmp_path_factory) -> Captures:
    return capture(pair, random_ids(8, TOKENS), tmp_path_factory.mktemp("captures"), batch_size=BATCH_SIZE)


@pytest.fixture(scope="module")
def rules(captured) -> dict[str, OutlierRule]:
    """Rules so strict that they flag many tokens, of content and of rotated keys."""
    found = {}
    for rope in ("strip", "coupled"):
        caches = [cache_view(load_kv(captured.path(start, "source")), rope) for start, _ in captured.batches]
        found[rope] = OutlierRule.fit(caches, threshold=1.0, share=0.5)
    return found


def recipe_of(pair: ModelPair, support: str, kinds: str) -> Recipe:
    shapes = (geometry_shape(pair.source_geometry), geometry_shape(pair.target_geometry))
    return Recipe(*shapes, support, SELECTION, kinds, native_layers=1)


def wanted(flagged: torch.Tensor, options: CalibrationOptions) -> torch.Tensor:
    """(1, tokens): every `token_stride`-th token after the native head, unless it is flagged."""
    rows = [
        t >= options.native_head
        and (t - options.native_head) % options.token_stride == 0
        and not bool(flagged[t])
        for t in range(TOKENS)
    ]
    return torch.tensor([rows])


def by_hand(
    captured: Captures,
    recipe: Recipe,
    kind: str,
    layer: int,
    head: int,
    split: str,
    options: CalibrationOptions,
    rule: OutlierRule | None,
) -> tuple[np.ndarray, np.ndarray]:
    """X and Y of one head, sequence by sequence, as the batches hold them."""
    xs, ys = [], []
    for sequence in sorted(SPLIT[split]):
        start = sequence // BATCH_SIZE * BATCH_SIZE
        source, target = (
            cache_view(load_kv(captured.path(start, role)), options.rope).select_rows([sequence - start])
            for role in ("source", "target")
        )
        flagged = torch.zeros(TOKENS, dtype=torch.bool) if rule is None else rule.flag(source)[0]
        rows = wanted(flagged, options)
        xs.append(regressors(recipe, source, target, kind, layer, head, rows))
        ys.append(head_rows(target, kind, layer, head, rows))
    return np.concatenate(xs), np.concatenate(ys)


@pytest.mark.parametrize("without_outliers", [False, True])
@pytest.mark.parametrize("rope", ["strip", "coupled"])
@pytest.mark.parametrize("kinds", REGRESSORS)
@pytest.mark.parametrize("support", SUPPORTS)
def test_rows_are_those_gathered_by_hand(
    pair, captured, rules, support, kinds, rope, without_outliers
) -> None:
    recipe = recipe_of(pair, support, kinds)
    options = CalibrationOptions(native_head=2, token_stride=3, rope=rope)
    rule = rules[rope] if without_outliers else None
    for kind, layer in (("key", 1), ("value", 2)):
        rows = layer_rows(captured, recipe, SPLIT, kind, layer, options, rule)
        for split in SPLITS:
            every = torch.arange(rows.n_rows(split))
            x, y = rows.features(split, every), rows.targets(split, every)
            assert x.dtype == y.dtype == torch.float32
            assert x.shape[0] == (1 if recipe.shared else 2)
            assert x.shape[2] == recipe.n_features(kind, layer)
            for head in range(len(y)):
                wanted_x, wanted_y = by_hand(captured, recipe, kind, layer, head, split, options, rule)
                # the same float32 numbers, in the same order
                assert np.array_equal(x[0 if recipe.shared else head].numpy(), wanted_x)
                assert np.array_equal(y[head].numpy(), wanted_y)


@pytest.mark.parametrize("rope", ["strip", "coupled"])
@pytest.mark.parametrize(("native_head", "stride"), [(0, 1), (1, 1), (2, 3), (29, 5)])
def test_every_stride_counts_from_the_native_head(captured, rules, rope, native_head, stride) -> None:
    options = CalibrationOptions(native_head=native_head, token_stride=stride, rope=rope)
    for start, stop in captured.batches:
        source = cache_view(load_kv(captured.path(start, "source")), rope)
        nothing = torch.zeros(stop - start, TOKENS, dtype=torch.bool)
        for rule, flagged in ((None, nothing), (rules[rope], rules[rope].flag(source))):
            expected = torch.cat([wanted(row, options) for row in flagged])
            assert torch.equal(counted_rows(captured, start, options, rule), expected)
    assert bool(rules[rope].flag(source).any())


def test_as_many_rows_as_the_moments_have(pair, captured, rules) -> None:
    recipe = recipe_of(pair, "head_local", "own_kind")
    options = CalibrationOptions()
    outliers = OutlierRows(rules["strip"], "drop", recipe.layout)
    tables = full_tables(recipe.layout)
    moments = accumulate_moments(captured.stream(SPLIT), recipe.layout, tables, options, outliers=outliers)
    for kind in KINDS:
        rows = layer_rows(captured, recipe, SPLIT, kind, 1, options, rules["strip"])
        for split in SPLITS:
            assert rows.n_rows(split) == moments.n_rows(split)
            assert 0 < rows.n_rows(split) < len(SPLIT[split]) * (TOKENS - 1)


def test_a_split_without_sequences_has_no_rows(pair, captured) -> None:
    recipe = recipe_of(pair, "head_local", "own_kind")
    splits = {"fit": [4], "held_out": []}
    rows = layer_rows(captured, recipe, splits, "value", 1, CalibrationOptions())
    assert (rows.n_rows("fit"), rows.n_rows("held_out")) == (TOKENS - 1, 0)


def test_a_batch_in_no_split_is_not_read(pair, captured, tmp_path: Path) -> None:
    for file in captured.folder.iterdir():
        if not file.name.startswith("3."):
            (tmp_path / file.name).symlink_to(file)
    some = Captures(tmp_path, captured.batches, sensitivity=False)
    recipe = recipe_of(pair, "head_local", "own_kind")
    rows = layer_rows(some, recipe, {"fit": [0], "held_out": [7]}, "key", 1, CalibrationOptions())
    assert (rows.n_rows("fit"), rows.n_rows("held_out")) == (TOKENS - 1, TOKENS - 1)
