"""Mappers fitted on two tiny models, of every form that `map_cache` serves."""

from __future__ import annotations

from functools import cache

import torch

from kvmap.fit.features import Layout, Recipe, geometry_shape
from kvmap.fit.linear import Penalty, fit_linear
from kvmap.fit.pair_moments import PairMoments, calibration_rows, full_tables
from kvmap.fit.selection import rank_layers
from kvmap.fit.view import calibration_view
from kvmap.mappers import LinearMapper, Mapper
from kvmap.mappers.compressed import CompressedLinearMapper
from kvmap.models.capture import prefill
from kvmap.models.loaded import LoadedModel
from tests.tiny_random_models import build, random_ids

FORMS = {
    "full-head": ("full_head", "own_kind", 0),
    "head-local": ("head_local", "own_kind", 0),
    "banded": ("banded", "own_kind", 0),
    "both kinds": ("full_head", "both_kinds", 0),
    "head-local, native layers": ("head_local", "both_kinds", 1),
    "full-head, native layers": ("full_head", "own_kind", 2),
    "float8": ("full_head", "own_kind", 0),
    "float8, head-local": ("head_local", "own_kind", 0),
}


@cache
def source_model(family: str = "llama_llama3") -> LoadedModel:
    return LoadedModel.from_model(build(family, seed=1, n_layers=4), name="source")


@cache
def target_model(family: str = "qwen3", dtype: torch.dtype = torch.float32) -> LoadedModel:
    """Other depth, head count, width and rotation than the source."""
    model = build(family, seed=2, n_layers=3, num_key_value_heads=4, head_dim=6)
    return LoadedModel.from_model(model.to(dtype), name="target")


@cache
def moments(rope: str, family: str, native_layers: int) -> PairMoments:
    source, target = source_model(family), target_model()
    layout = Layout(geometry_shape(source.geometry), geometry_shape(target.geometry), native_layers)
    sums = PairMoments.zeros(layout, full_tables(layout, "both_kinds"))
    for seed, split in ((10, "fit"), (11, "held_out")):
        ids = random_ids(16, 24, seed=seed)
        views = calibration_view(prefill(source, ids), prefill(target, ids), rope)
        sums.update(split, *views, calibration_rows(torch.ones_like(ids).bool(), native_head=1))
    return sums


@cache
def fitted_mapper(form: str, rope: str = "strip", family: str = "llama_llama3") -> Mapper:
    support, regressors, native_layers = FORMS[form]
    fit = "strip" if rope == "no_rerotate" else rope
    sums = moments(fit, family, native_layers)
    recipe = Recipe(
        sums.source_shape, sums.target_shape, support, rank_layers(sums, "r2", 2), regressors, native_layers
    )
    mapper = LinearMapper(fit_linear(sums, recipe, Penalty(0.01)))
    return CompressedLinearMapper.from_linear(mapper, "fp8") if form.startswith("float8") else mapper
