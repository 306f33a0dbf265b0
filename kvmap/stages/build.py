"""Mappers of each kind from what calibration left: the one that is judged, and the controls beside it."""

from __future__ import annotations

import logging
import math
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from kvmap.artifacts import content_key
from kvmap.diagnostics.compression import CompressionGate, compression_rows
from kvmap.errors import KvmapError
from kvmap.evaluation.arms import ORACLES
from kvmap.fit.features import Recipe
from kvmap.fit.linear import LinearWeights, Penalties, Penalty, fit_linear
from kvmap.fit.mlp import MLPSettings, train_mlp
from kvmap.fit.network_rows import TensorRows, residual_rows
from kvmap.fit.networks import trained_kinds
from kvmap.fit.pair_moments import PairMoments
from kvmap.fit.rows import layer_rows
from kvmap.fit.tuning import Grid, Tuned, fit_tuned, recipe_for, tune
from kvmap.mappers import (
    BiasOnlyMapper,
    CompressedLinearMapper,
    IdentityMapper,
    LinearMapper,
    Mapper,
    MLPMapper,
    RandomMapper,
    RawMapper,
    SeparateMapper,
)
from kvmap.stages.context import Context, plain

CONTROLS = ("bias_only", "raw", "random")
METHODS = {
    "bfloat16": "bfloat16",
    "fp8": "fp8",
    "low_rank": "low_rank",
    "low_rank_bfloat16": "low_rank+bfloat16",
    "low_rank_fp8": "low_rank+fp8",
}
_logger = logging.getLogger(__name__)

FITTED = ("linear", "mlp", "random")

Row = dict[str, Any]


@dataclass
class Built:
    """A mapper, and what was noted while it was fitted.

    Attributes:
        mapper: of one kind.
        tables: rows by table: `tuning`, `row_weights`, `mlp_history`.
    """

    mapper: Mapper
    tables: dict[str, list[Row]] = field(default_factory=dict)


def content_settings(ctx: Context) -> Row:
    """The settings that determine a mapper's content; two runs that agree in these share one mapper."""
    mapper, selection = ctx.cfg.mapper, ctx.cfg.selection
    settings: Row = {"kind": mapper.kind, "native_layers": mapper.native_layers}
    if mapper.kind in FITTED:
        n_layers, k = len(ctx.pair.source_geometry.layers), ctx.calibrated.largest_k
        rule = "all" if k == n_layers and mapper.top_k != "auto" else selection.rule
        settings |= {
            "support": mapper.support,
            "regressors": mapper.regressors,
            "top_k": list(ctx.calibrated.top_k_grid) if mapper.top_k == "auto" else k,
            "rule": rule,
            "apart": selection.apart and rule != "all",
            "ridge_lambda": [mapper.ridge_lambda, mapper.lambda_cross, mapper.lambda_native],
            "penalty": mapper.penalty,
            "row_weights": mapper.row_weights,
            "dtype": mapper.dtype,
        }
        if _is_tuned(ctx):
            settings["tuning"] = asdict(mapper.tuning)
        if mapper.compression.method != "none":
            settings["compression"] = asdict(mapper.compression) | {"transfer": asdict(ctx.cfg.transfer)}
        if mapper.row_weights != "none":
            settings["sensitivity_boundaries"] = ctx.cfg.calibration.sensitivity_boundaries
    if mapper.kind == "mlp":
        settings |= {"mlp": asdict(mapper.mlp), "seed": mapper.seed}
    if mapper.kind == "random":
        settings["seed"] = mapper.seed
    return dict(plain(settings))


def build_mapper(ctx: Context, kind: str) -> Built:
    """The mapper of one kind, with the run's own settings.

    Raises:
        KvmapError: the kind does not fit this pair (shapes that differ), or too few rows.
    """
    built = BUILDERS[kind](ctx)
    outliers = ctx.calibrated.outlier_rows() if kind in ("linear", "mlp") else None
    if outliers is None:
        return built
    tables = built.tables | {"outliers": outliers.counts()}
    if outliers.applied != "separate":
        return Built(built.mapper, tables)
    return Built(SeparateMapper.from_rows(built.mapper, outliers), tables)


def build_arms(ctx: Context) -> dict[str, Mapper | KvmapError | None]:
    """What stands for each arm: a mapper, None where it needs none, or the error why there is none."""
    arms: dict[str, Mapper | KvmapError | None] = {}
    for arm in ctx.cfg.evaluation.arms:
        if arm == "mapped" or arm in ORACLES:
            arms[arm] = ctx.mapper
        elif arm in CONTROLS:
            try:
                arms[arm] = build_mapper(ctx, arm).mapper
            except KvmapError as error:
                arms[arm] = error
        else:
            arms[arm] = None
    return arms


def fitted_linear(ctx: Context) -> tuple[LinearWeights, dict[str, list[Row]]]:
    """The linear map of the run's settings, and the tables of its tuning and row weights."""
    mapper, calibrated = ctx.cfg.mapper, ctx.calibrated
    dtype, allow = getattr(torch, mapper.dtype), mapper.allow_few_rows
    base, ranked = calibrated.base_recipe(), calibrated.ranked
    tables: dict[str, list[Row]] = {}
    tuned = _tuned(ctx, base) if _is_tuned(ctx) else None
    if tuned is not None:
        tables["tuning"] = tuned.rows()
        tables["tuning_heads"] = _choice_rows(tuned)
    k = calibrated.largest_k if tuned is None else max(c.top_k for c in tuned.choices.values())
    moments: PairMoments = ctx.moments
    if calibrated.weighted:
        widest = recipe_for(base, ranked, k)
        moments = calibrated.weighted_moments(widest)
        tables["row_weights"] = calibrated.attention_weights(widest).rows()
    if tuned is not None:
        weights_ = fit_tuned(moments, base, ranked, tuned, mapper.penalty, dtype=dtype, allow_few_rows=allow)
        return weights_, tables
    recipe = recipe_for(base, ranked, k)
    return fit_linear(moments, recipe, _penalty(ctx), dtype=dtype, allow_few_rows=allow), tables


def fitted_systems(ctx: Context, recipe: Recipe) -> Iterator[tuple[Recipe, Penalties]]:
    """What the run's linear map was solved as: a recipe and its heads' penalties, for each k that was chosen.

    Args:
        ctx: of the run.
        recipe: of the whole map, which reads the largest k of each layer.
    """
    rows = ctx.mapper_tables.get("tuning_heads")
    if rows is None:
        yield recipe, _penalty(ctx)
        return
    for top_k in sorted({row["top_k"] for row in rows}):
        penalties = {
            (row["kind"], row["layer"], row["head"]): Penalty(
                row["ridge_lambda"],
                _number(row["lambda_cross"]),
                _number(row["lambda_native"]),
                ctx.cfg.mapper.penalty,
            )
            for row in rows
            if row["top_k"] == top_k
        }
        yield recipe_for(ctx.calibrated.base_recipe(), ctx.calibrated.ranked, top_k), penalties


def _is_tuned(ctx: Context) -> bool:
    mapper = ctx.cfg.mapper
    return "auto" in (mapper.top_k, mapper.ridge_lambda, mapper.lambda_cross, mapper.lambda_native)


def _penalty(ctx: Context) -> Penalty:
    mapper = ctx.cfg.mapper
    return Penalty(mapper.ridge_lambda, mapper.lambda_cross, mapper.lambda_native, mapper.penalty)


def _tuned(ctx: Context, base: Recipe) -> Tuned:
    """The grid that the settings span, fitted and judged."""
    mapper, calibrated = ctx.cfg.mapper, ctx.calibrated
    tuning = mapper.tuning
    fixed = mapper.ridge_lambda != "auto"
    own = float(mapper.ridge_lambda) if fixed else 1.0

    def ratios(value: Any, tried: list[float]) -> tuple[float, ...]:
        """λ of a band over λ_own: tried, as `ridge_lambda`, or as given (over the λ that is given too)."""
        if value == "auto":
            return tuple(tried)
        return (1.0,) if value is None else (value / own,)

    grid = Grid(
        top_k=calibrated.top_k_grid if mapper.top_k == "auto" else (calibrated.largest_k,),
        ridge_lambda=(own,) if fixed else tuple(tuning.ridge_lambda),
        cross=ratios(mapper.lambda_cross, tuning.cross_ratio) if mapper.support == "banded" else (1.0,),
        native=ratios(mapper.lambda_native, tuning.native_ratio) if mapper.native_layers else (1.0,),
        convention=mapper.penalty,
    )
    return tune(ctx.moments, base, calibrated.ranked, grid, tuning.per)


def _choice_rows(tuned: Tuned) -> list[Row]:
    return [
        {
            "kind": kind,
            "layer": layer,
            "head": head,
            "top_k": choice.top_k,
            "ridge_lambda": choice.ridge_lambda,
            "lambda_cross": plain(choice.ridge_lambda * choice.cross),
            "lambda_native": plain(choice.ridge_lambda * choice.native),
            "held_out_r2": tuned.head_r2[kind, layer, head],
        }
        for (kind, layer, head), choice in tuned.choices.items()
    ]


def _number(value: Any) -> float:
    return math.inf if value == "inf" else float(value)


def _linear(ctx: Context) -> Built:
    weights, tables = fitted_linear(ctx)
    mapper = LinearMapper(weights)
    if ctx.cfg.mapper.compression.method == "none":
        return Built(mapper, tables)
    return _compressed(ctx, mapper, tables)


def _compressed(ctx: Context, mapper: LinearMapper, tables: dict[str, list[Row]]) -> Built:
    """The map in fewer bytes if it passes the gate, and as it was fitted if not; the table says which."""
    settings, calibrated = ctx.cfg.mapper.compression, ctx.calibrated
    smaller = CompressedLinearMapper.from_linear(
        mapper, METHODS[settings.method], ctx.moments, tolerance=settings.tolerance
    )
    held_out = calibrated.splits["held_out"][: settings.n_sequences]
    rows = compression_rows(
        ctx.pair,
        mapper,
        {settings.method: smaller},
        ctx.moments,
        ctx.tokens.input_ids[held_out],
        ctx.options,
        prefix_tokens=ctx.cfg.calibration.sequence_length // 2,
        gate=CompressionGate(settings.max_r2_loss, settings.max_kl_nats),
        sequential=ctx.cfg.calibration.sequential,
    )
    passed = bool(rows[-1]["passes"])
    if not passed:
        _logger.warning(
            "mapper.compression.method=%s is not used: %s. The mapper stays as it was fitted",
            settings.method,
            rows[-1]["reason"],
        )
    return Built(smaller if passed else mapper, tables | {"compression": rows})


def _mlp(ctx: Context) -> Built:
    """Networks trained on captured rows; with a linear part where the form has one."""
    mapper, calibrated = ctx.cfg.mapper, ctx.calibrated
    captures, form = calibrated.kept_captures(), mapper.mlp.form
    linear, tables = (None, {}) if form == "full" and not _is_tuned(ctx) else fitted_linear(ctx)
    recipe = _network_recipe(ctx, linear)
    residual = form in ("residual", "residual_values")
    settings = _mlp_settings(ctx, start_at_zero=residual)
    identity = content_key("mlp_rows", ctx.calibrated.rows_spec | {"mapper": content_settings(ctx)})
    folder = ctx.store.root / "mlp_layers" / identity

    def read(read_recipe: Recipe, kind: str, layer: int) -> TensorRows:
        options, rule = calibrated.options, calibrated.counting_rule
        return layer_rows(captures, read_recipe, calibrated.splits, kind, layer, options, rule)

    def rows_of(kind: str, layer: int) -> TensorRows:
        rows = read(recipe, kind, layer)
        if linear is None or not residual:
            return rows
        inputs = rows if linear.recipe == recipe else read(linear.recipe, kind, layer)
        weight, bias = linear.weight[kind][layer].float(), linear.bias[kind][layer].float()
        return residual_rows(rows, weight, bias, inputs)

    trained = train_mlp(
        rows_of,
        recipe,
        settings,
        trained_kinds(form),
        folder,
        rows_identity=identity,
        device=calibrated.options.device,
    )
    built = MLPMapper.from_weights(form, trained, linear).to(dtype=getattr(torch, mapper.dtype))
    shutil.rmtree(folder, ignore_errors=True)
    return Built(built, tables | {"mlp_history": list(trained.history)})


def _network_recipe(ctx: Context, linear: LinearWeights | None) -> Recipe:
    """What the networks read: what the linear part reads, but for what `mapper.mlp` says otherwise."""
    calibrated, mlp = ctx.calibrated, ctx.cfg.mapper.mlp
    base = calibrated.base_recipe()
    own = replace(base, support=mlp.support or base.support, regressors=mlp.regressors or base.regressors)
    if mlp.top_k is not None:
        return recipe_for(own, calibrated.ranked, mlp.top_k)
    if linear is None:
        return recipe_for(own, calibrated.ranked, calibrated.largest_k)
    return replace(own, selection=linear.recipe.selection)


def _mlp_settings(ctx: Context, *, start_at_zero: bool) -> MLPSettings:
    mlp = ctx.cfg.mapper.mlp
    return MLPSettings(
        hidden=tuple(mlp.hidden),
        epochs=mlp.epochs,
        batch_size=mlp.batch_size,
        learning_rate=mlp.learning_rate,
        weight_decay=mlp.weight_decay,
        patience=mlp.patience,
        standardise=mlp.standardise,
        start_at_zero=start_at_zero,
        compute_dtype=mlp.compute_dtype,
        seed=ctx.cfg.mapper.seed,
    )


def _random(ctx: Context) -> Built:
    """Noise of the scale of the fitted mapper, which is the run's own where that is linear."""
    # of a run whose own mapper is the random one there is no other to imitate
    own = None if ctx.cfg.mapper.kind == "random" else ctx.mapper
    fitted = own.linear_weights() if isinstance(own, LinearMapper) else fitted_linear(ctx)[0]
    return Built(RandomMapper.from_fitted(fitted, ctx.moments, ctx.cfg.mapper.seed))


def _raw(ctx: Context) -> Built:
    layout = ctx.calibrated.layout
    return Built(RawMapper(layout.source_shape, layout.target_shape, ctx.cfg.mapper.native_layers))


def _identity(ctx: Context) -> Built:
    layout = ctx.calibrated.layout
    return Built(IdentityMapper(layout.source_shape, layout.target_shape))


BUILDERS: dict[str, Callable[[Context], Built]] = {
    "linear": _linear,
    "mlp": _mlp,
    "identity": _identity,
    "bias_only": lambda ctx: Built(BiasOnlyMapper.from_moments(ctx.moments, ctx.cfg.mapper.native_layers)),
    "raw": _raw,
    "random": _random,
}
