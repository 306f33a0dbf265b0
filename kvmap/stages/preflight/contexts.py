"""What a preflight fits: each mapper's settings, all on one small calibration."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any, TypeAlias

from kvmap.config.schema import PREFLIGHT_MAPPERS, CalibrationConfig, MapperConfig
from kvmap.preflight.evidence import CONTROL
from kvmap.stages.context import Context

Row: TypeAlias = dict[str, Any]

LINEAR: Row = {
    "kind": "linear",
    "support": "head_local",
    "regressors": "own_kind",
    "native_layers": 0,
    "ridge_lambda": 0.01,
    "lambda_cross": None,
    "lambda_native": None,
    "penalty": "absolute",
    "row_weights": "none",
}
ONE_RATIO: Row = {"tuning": {"cross_ratio": [10.0]}}
"""Each further ratio of the penalties is a factorisation of the largest system there is, λ costs none; on the
recorded pairs held-out R² of keys and values differs by 0.001 between ratios of 1 and 100."""
SETTINGS: dict[str, Row] = {
    "head_local": LINEAR,
    "native_features": LINEAR | {"native_layers": 1},
    "native_features_2": LINEAR | {"native_layers": 2},
    "linear": LINEAR | {"support": "full_head"},
    "banded": LINEAR | {"support": "banded", "ridge_lambda": "auto", "lambda_cross": "auto"} | ONE_RATIO,
    CONTROL: {"kind": "bias_only", "native_layers": 0},
}
"""What each mapper is in a preflight, whatever the run's own is: that of `conf/mapper/<name>.yaml`, since
cases are known by that name. `top_k`, `dtype` and the rest of `mapper.tuning` are the run's."""
ALONE = ("identity", "raw", "random", "bias_only")
"""Kinds that are judged by themselves where the run's own mapper is one: no other is fitted in its place."""


def contexts_of(ctx: Context) -> dict[str, Context]:
    """By name, a context for each mapper that is fitted, all of one small calibration, and the control."""
    names = [ctx.cfg.mapper.kind] if ctx.cfg.mapper.kind in ALONE else _ordered(ctx.cfg.preflight.mappers)
    mappers = {name: _mapper(ctx, name) for name in (*names, CONTROL)}
    calibration = replace(
        ctx.cfg.calibration,
        n_sequences=min(ctx.cfg.preflight.n_sequences, ctx.cfg.calibration.n_sequences),
        native_layers=max(mapper.native_layers for mapper in mappers.values()),
        token_stride=1,
        keep_captures="auto",
        shards=1,
        worker=None,
    )
    found = {name: _context(ctx, mapper, calibration) for name, mapper in mappers.items()}
    widest = found[max(names, key=lambda name: mappers[name].support != "head_local")]
    # one table that serves every mapper is one pass over the text; what is selected serves one alone
    if widest.calibrated.plan.mode == "full":
        shared = replace(calibration, mode="full")
        found = {name: _context(ctx, mapper, shared) for name, mapper in mappers.items()}
    first = found[CONTROL]
    for other in found.values():
        other.tokens = first.tokens
    return found


def _ordered(names: list[str]) -> list[str]:
    """The cheapest first, whatever order they are named in."""
    return sorted(names, key=PREFLIGHT_MAPPERS.index)


def _mapper(ctx: Context, name: str) -> MapperConfig:
    own = ctx.cfg.mapper
    if own.kind == name and name in ALONE:
        return own
    asked = dict(SETTINGS[name])
    tuning = replace(own.tuning, **asked.pop("tuning", {}))
    return replace(own, **asked, tuning=tuning, compression=replace(own.compression, method="none"))


def _context(ctx: Context, mapper: MapperConfig, calibration: CalibrationConfig) -> Context:
    cfg = copy.copy(ctx.cfg)
    cfg.mapper, cfg.calibration = mapper, calibration
    made = Context(cfg, ctx.run)
    made.pair = ctx.pair
    return made
