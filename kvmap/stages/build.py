"""Mappers of each kind from a run's moments: the one that is judged, and the controls beside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kvmap.config import Config
from kvmap.errors import KvmapError
from kvmap.fit.linear import LinearWeights, fit_linear
from kvmap.fit.selection import select_layers
from kvmap.mappers import BiasOnlyMapper, IdentityMapper, LinearMapper, Mapper, RandomMapper, RawMapper
from kvmap.stages.context import Context

CONTROLS = ("bias_only", "raw", "random")


def content_settings(cfg: Config, n_source_layers: int) -> dict[str, Any]:
    """The settings that determine a mapper's content; two runs that agree in these share one mapper."""
    mapper, rule = cfg.mapper, cfg.selection.rule
    settings: dict[str, Any] = {"kind": mapper.kind}
    if mapper.kind in ("linear", "random"):
        top_k = n_source_layers if mapper.top_k == "all" or rule == "all" else mapper.top_k
        settings |= {
            "support": mapper.support,
            "top_k": top_k,
            "rule": "all" if top_k == n_source_layers else rule,
            "ridge_lambda": mapper.ridge_lambda,
            "dtype": mapper.dtype,
        }
    if mapper.kind == "random":
        settings["seed"] = mapper.seed
    return settings


def build_mapper(ctx: Context, kind: str) -> Mapper:
    """The mapper of one kind, with the run's own settings.

    Raises:
        KvmapError: the kind does not fit this pair (shapes that differ), or too few rows.
    """
    return BUILDERS[kind](ctx)


def build_arms(ctx: Context) -> dict[str, Mapper | KvmapError | None]:
    """What stands for each arm: a mapper, None where it needs none, or the error why there is none."""
    arms: dict[str, Mapper | KvmapError | None] = {}
    for arm in ctx.cfg.evaluation.arms:
        if arm == "mapped":
            arms[arm] = ctx.mapper
        elif arm in CONTROLS:
            try:
                arms[arm] = build_mapper(ctx, arm)
            except KvmapError as error:
                arms[arm] = error
        else:
            arms[arm] = None
    return arms


def _fitted(ctx: Context) -> LinearWeights:
    settings = ctx.cfg.mapper
    return fit_linear(
        ctx.moments,
        select_layers(ctx.probes.r2, ctx.cfg.selection.rule, settings.top_k),
        settings.support,
        settings.ridge_lambda,
        dtype=getattr(torch, settings.dtype),
        allow_few_rows=settings.allow_few_rows,
    )


def _random(ctx: Context) -> Mapper:
    """Noise of the scale of the fitted mapper, which is the run's own where that is linear."""
    own = ctx.mapper if ctx.cfg.mapper.kind == "linear" else None
    fitted = own.linear_weights() if isinstance(own, LinearMapper) else _fitted(ctx)
    return RandomMapper.from_fitted(fitted, ctx.moments, ctx.cfg.mapper.seed)


BUILDERS: dict[str, Callable[[Context], Mapper]] = {
    "linear": lambda ctx: LinearMapper(_fitted(ctx)),
    "identity": lambda ctx: IdentityMapper(ctx.moments.source_shape, ctx.moments.target_shape),
    "bias_only": lambda ctx: BiasOnlyMapper.from_moments(ctx.moments),
    "raw": lambda ctx: RawMapper(ctx.moments.source_shape, ctx.moments.target_shape),
    "random": _random,
}
