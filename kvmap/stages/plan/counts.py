"""What configs and settings already tell of a run: shapes, features, rows, weights, moments."""

from __future__ import annotations

from itertools import pairwise

from kvmap.fit.features import CacheShape, Layout, geometry_shape
from kvmap.fit.planner import DEFAULT_SHARE, MomentsPlan, default_budget, moments_plans
from kvmap.fit.selection import needs
from kvmap.mappers.linear import linear_feature_count, linear_weight_count
from kvmap.stages.context import Context


def needs_mapper(ctx: Context) -> bool:
    """Whether a stage needs a fitted mapper; the benchmark needs none where it draws one."""
    drawn = ctx.cfg.benchmark.random_weights or ctx.cfg.benchmark.random_mapper
    without = {"plan", "fleet", "preflight", "economics", "report", "calibrate"} | (
        {"benchmark"} if drawn else set()
    )
    return bool(set(ctx.cfg.stages) - without)


def shape(ctx: Context, role: str) -> CacheShape:
    """`(n_kv_heads, head_dim)` of each layer, of the model's config or as the pair file states it."""
    geometry = ctx.geometries[role]
    if geometry is not None:
        return geometry_shape(geometry)
    facts = ctx.models[role].geometry
    return ((facts.n_kv_heads or 0, facts.head_dim or 0),) * (facts.n_layers or 0)


def top_k(ctx: Context) -> int:
    """The most source layers that a target layer can come to read."""
    n_layers, mapper = len(shape(ctx, "source")), ctx.cfg.mapper
    if mapper.top_k == "all" or ctx.cfg.selection.rule == "all":
        return n_layers
    if mapper.top_k == "auto":
        return min(max(mapper.tuning.top_k or [n_layers]), n_layers)
    return int(mapper.top_k)


def n_features(ctx: Context) -> int:
    """p: k H_s d_s, or k d_s where a head reads one head of each layer; native layers' channels besides."""
    mapper = ctx.cfg.mapper
    return linear_feature_count(
        shape(ctx, "source"),
        shape(ctx, "target"),
        top_k(ctx),
        mapper.support,
        mapper.regressors,
        mapper.native_layers,
    )


def n_rows(ctx: Context) -> int:
    """N of the fit split: sequences times the tokens that each contributes."""
    calibration = ctx.cfg.calibration
    tokens = calibration.sequence_length - ctx.calibrated.native_head
    n_held_out = max(1, round(calibration.n_sequences * calibration.held_out_share))
    return (calibration.n_sequences - n_held_out) * -(-tokens // calibration.token_stride)


def n_weights(ctx: Context) -> int:
    """Weights of the mapper, biases not counted; of a network all its layers."""
    mapper, source, target = ctx.cfg.mapper, shape(ctx, "source"), shape(ctx, "target")
    if mapper.kind not in ("linear", "random", "mlp"):
        return 0
    settings = (mapper.support, mapper.regressors, mapper.native_layers)
    linear = linear_weight_count(source, target, top_k(ctx), *settings)
    if mapper.kind != "mlp":
        return linear
    widths = [_n_network_features(ctx), *mapper.mlp.hidden]
    inner = sum(a * b for a, b in pairwise(widths))
    networks = sum(heads * (inner + widths[-1] * dim) for heads, dim in target[mapper.native_layers :])
    by_form = {
        "full": 2 * networks,
        "values_only": linear // 2 + networks,
        "residual": linear + 2 * networks,
        "residual_values": linear + networks,
    }
    return by_form[mapper.mlp.form]


def _n_network_features(ctx: Context) -> int:
    """The networks' p, where `mapper.mlp` has them read other features than the linear part."""
    mapper, mlp = ctx.cfg.mapper, ctx.cfg.mapper.mlp
    return linear_feature_count(
        shape(ctx, "source"),
        shape(ctx, "target"),
        mlp.top_k or top_k(ctx),
        mlp.support or mapper.support,
        mlp.regressors or mapper.regressors,
        mapper.native_layers,
    )


def moments_plans_of(ctx: Context, host_bytes: int | None = None) -> tuple[list[MomentsPlan], int]:
    """The modes that serve the run's mapper, the richest first, and the bytes allowed.

    Args:
        ctx: of the run.
        host_bytes: memory of the host that is planned for; None: this machine's.
    """
    mapper, calibration = ctx.cfg.mapper, ctx.cfg.calibration
    budget = moments_budget(ctx)
    if budget is None:
        budget = default_budget() if host_bytes is None else int(DEFAULT_SHARE * host_bytes)
    plans = moments_plans(
        layout(ctx),
        support=mapper.support,
        regressors=moments_regressors(ctx),
        top_k=top_k(ctx),
        batch_tokens=calibration.batch_size * calibration.sequence_length,
        mode=calibration.mode,
        two_passes=needs(ctx.cfg.selection.rule) != "nothing",
        budget_bytes=budget,
    )
    return plans, budget


def moments_budget(ctx: Context) -> int | None:
    """`calibration.memory_budget_gib` in bytes."""
    budget = ctx.cfg.calibration.memory_budget_gib
    return None if budget is None else int(budget * 2**30)


def moments_regressors(ctx: Context) -> str:
    """What the moments hold: both kinds as soon as calibration or mapper ask for them."""
    both_kinds = "both_kinds" in (ctx.cfg.calibration.regressors, ctx.cfg.mapper.regressors)
    return "both_kinds" if both_kinds else "own_kind"


def layout(ctx: Context) -> Layout:
    """The numbering of features, with the native layers that calibration or mapper ask for."""
    native = max(ctx.cfg.calibration.native_layers, ctx.cfg.mapper.native_layers)
    return Layout(shape(ctx, "source"), shape(ctx, "target"), native)
