"""Stage `plan`: what the run will hold and cost, from the two configurations alone, and what it cannot do.

It loads no weights. Everything that configs can already tell to be wrong is said here, all at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from itertools import pairwise
from typing import Any

from kvmap.config import ConfigError
from kvmap.fit.features import CacheShape, Layout, geometry_shape
from kvmap.fit.planner import MomentsPlan, best_plan, default_budget, moments_plans
from kvmap.fit.selection import needs
from kvmap.mappers.linear import linear_feature_count, linear_weight_count
from kvmap.metrics import Metric
from kvmap.stages.context import Context

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def check(ctx: Context) -> None:
    """Refuse what cannot work before any weights load.

    Raises:
        ConfigError: every setting that the two models' geometry contradicts.
        KvmapError: a model that is missing or unsupported, or tokenizers that differ.
    """
    mistakes = [*_geometry_mistakes(ctx), *_length_mistakes(ctx), *_row_mistakes(ctx)]
    mistakes = mistakes or [*_memory_mistakes(ctx)]  # which counts on a geometry that is right
    if mistakes:
        raise ConfigError(mistakes)
    if _reads_models(ctx):
        ctx.pair.check()
        identities = {"source": ctx.pair.source_identity, "target": ctx.pair.target_identity}
        ctx.run.note(
            models={
                role: {**asdict(identity), "revision": ctx.specs[role].revision}
                for role, identity in identities.items()
            }
        )


def run(ctx: Context) -> None:
    """Log geometry, bytes and sizes, as metrics and as `tables/plan.csv`."""
    rows: list[dict[str, Any]] = [*_cache_rows(ctx), *_mapper_rows(ctx)]
    ctx.run.table("plan", rows)
    ctx.run.log({f"plan/model/{row['part']}/{row['quantity']}": Metric(row["value"]) for row in rows})


def _reads_models(ctx: Context) -> bool:
    """Whether a stage loads the two models."""
    return bool(set(ctx.cfg.stages) - {"plan", "report"}) and not ctx.random_weights


def _needs_mapper(ctx: Context) -> bool:
    """Whether a stage needs a fitted mapper; the benchmark needs none where it draws one."""
    drawn = ctx.cfg.benchmark.random_weights or ctx.cfg.benchmark.random_mapper
    without = {"plan", "report", "calibrate"} | ({"benchmark"} if drawn else set())
    return bool(set(ctx.cfg.stages) - without)


def _shape(ctx: Context, role: str) -> CacheShape:
    geometry = ctx.geometries[role]
    if geometry is not None:
        return geometry_shape(geometry)
    facts = ctx.models[role].geometry
    return ((facts.n_kv_heads or 0, facts.head_dim or 0),) * (facts.n_layers or 0)


def _geometry_mistakes(ctx: Context) -> Iterator[str]:
    for role, geometry in ctx.geometries.items():
        facts = ctx.models[role].geometry
        for name in ("n_layers", "n_kv_heads", "head_dim"):
            said = getattr(facts, name)
            found = said if geometry is None else getattr(geometry, name)
            if said is not None and said != found:
                yield (
                    f"{ctx.keys[role]}.geometry.{name}={said}: {ctx.models[role].id} has {found}; "
                    f"another model or revision than the pair file means? Correct the one or the other"
                )
    n_layers = len(_shape(ctx, "source"))
    top_k = ctx.cfg.mapper.top_k
    if top_k not in ("all", "auto") and top_k > n_layers:
        yield (
            f"mapper.top_k={top_k}: the source has {n_layers} layers; expected 1 to {n_layers}, 'all' or "
            f"'auto'"
        )
    n_target = len(_shape(ctx, "target"))
    for key, native in (
        ("mapper.native_layers", ctx.cfg.mapper.native_layers),
        ("calibration.native_layers", ctx.cfg.calibration.native_layers),
    ):
        if native >= n_target:
            yield (
                f"{key}={native}: the target has {n_target} layers, and nothing would be left to map; "
                f"expected 0 to {n_target - 1}"
            )


def _length_mistakes(ctx: Context) -> Iterator[str]:
    """Lengths that the model's number of positions does not allow."""
    perplexity, benchmark = ctx.cfg.evaluation.perplexity, ctx.cfg.benchmark
    lengths = {"calibration.sequence_length": ctx.cfg.calibration.sequence_length}
    if "evaluate" in ctx.cfg.stages and perplexity.n_sequences:
        total = perplexity.prefix_tokens + perplexity.continuation_tokens
        lengths["evaluation.perplexity.prefix_tokens + continuation_tokens"] = total
    if "benchmark" in ctx.cfg.stages:
        lengths["benchmark.lengths (and the token after)"] = max(benchmark.lengths) + 1
    for role, geometry in ctx.geometries.items():
        for key, length in lengths.items():
            if geometry is None:
                continue
            if length > geometry.max_positions:
                yield (
                    f"{key}={length}: the {role}, {ctx.models[role].id}, has "
                    f"{geometry.max_positions} positions; shorten it"
                )


def _row_mistakes(ctx: Context) -> Iterator[str]:
    """Calibrations that the fit would refuse only after they are paid for."""
    fits = _needs_mapper(ctx) and ctx.cfg.mapper.kind in ("linear", "mlp")
    if not fits:
        return
    n_rows, n_features = _n_rows(ctx), _n_features(ctx)
    if n_rows <= n_features and not ctx.cfg.mapper.allow_few_rows:
        yield (
            f"calibration.n_sequences={ctx.cfg.calibration.n_sequences}: gives about {n_rows:,} rows "
            f"for {n_features:,} features; expected more than {n_features:,}, better {2 * n_features:,}. "
            "Raise it, lower mapper.top_k, take mapper=head_local, or set mapper.allow_few_rows=true"
        )


def _top_k(ctx: Context) -> int:
    """The most source layers that a target layer can come to read."""
    n_layers, mapper = len(_shape(ctx, "source")), ctx.cfg.mapper
    if mapper.top_k == "all" or ctx.cfg.selection.rule == "all":
        return n_layers
    if mapper.top_k == "auto":
        return min(max(mapper.tuning.top_k or [n_layers]), n_layers)
    return int(mapper.top_k)


def _n_features(ctx: Context) -> int:
    """p: k H_s d_s, or k d_s where a head reads one head of each layer; native layers' channels besides."""
    mapper = ctx.cfg.mapper
    return linear_feature_count(
        _shape(ctx, "source"),
        _shape(ctx, "target"),
        _top_k(ctx),
        mapper.support,
        mapper.regressors,
        mapper.native_layers,
    )


def _n_rows(ctx: Context) -> int:
    """N of the fit split: sequences times the tokens that each contributes."""
    calibration = ctx.cfg.calibration
    tokens = calibration.sequence_length - ctx.calibrated.native_head
    n_held_out = max(1, round(calibration.n_sequences * calibration.held_out_share))
    return (calibration.n_sequences - n_held_out) * -(-tokens // calibration.token_stride)


def _cache_rows(ctx: Context) -> Iterator[dict[str, Any]]:
    for role in ("source", "target"):
        shape = _shape(ctx, role)
        channels = sum(n_heads * head_dim for n_heads, head_dim in shape)
        facts = {
            "n_layers": len(shape),
            "n_kv_heads": shape[0][0],
            "head_dim": shape[0][1],
            "kv_bytes_per_token": 2 * channels * BYTES.get(ctx.models[role].dtype, 2),
        }
        for quantity, value in facts.items():
            yield {"part": role, "quantity": quantity, "value": value}


def _mapper_rows(ctx: Context) -> Iterator[dict[str, Any]]:
    settings = ctx.cfg.mapper
    n_weights = _n_weights(ctx)
    facts = {
        ("mapper", "top_k"): _top_k(ctx),
        ("mapper", "n_features"): _n_features(ctx),
        ("mapper", "n_weights"): n_weights,
        ("mapper", "weights_bytes"): n_weights * BYTES[settings.dtype],
        ("calibration", "n_rows"): _n_rows(ctx),
        ("calibration", "rows_per_feature"): _n_rows(ctx) / _n_features(ctx),
    }
    facts |= _moments_facts(ctx)
    for (part, quantity), value in facts.items():
        yield {"part": part, "quantity": quantity, "value": value}


def _n_weights(ctx: Context) -> int:
    """Weights of the mapper, biases not counted; of a network all its layers."""
    mapper, source, target = ctx.cfg.mapper, _shape(ctx, "source"), _shape(ctx, "target")
    if mapper.kind not in ("linear", "random", "mlp"):
        return 0
    settings = (mapper.support, mapper.regressors, mapper.native_layers)
    linear = linear_weight_count(source, target, _top_k(ctx), *settings)
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
        _shape(ctx, "source"),
        _shape(ctx, "target"),
        mlp.top_k or _top_k(ctx),
        mlp.support or mapper.support,
        mlp.regressors or mapper.regressors,
        mapper.native_layers,
    )


def _moments_facts(ctx: Context) -> dict[tuple[str, str], float]:
    """Bytes that the calibration would hold in each mode, and the mode that fits this machine's budget."""
    plans, budget = _moments_plans(ctx)
    chosen = best_plan(plans)
    ctx.run.note(moments_mode="none fits the budget" if chosen is None else chosen.mode)
    facts: dict[tuple[str, str], float] = {("moments", "budget_bytes"): budget}
    for plan in plans:
        facts[f"moments_{plan.mode}", "size_bytes"] = plan.table_bytes
        facts[f"moments_{plan.mode}", "peak_bytes"] = plan.peak_bytes
        facts[f"moments_{plan.mode}", "n_passes"] = plan.n_passes
    return facts


def _moments_plans(ctx: Context) -> tuple[list[MomentsPlan], int]:
    """The modes that serve the run's mapper, the richest first, and the bytes allowed."""
    mapper, calibration = ctx.cfg.mapper, ctx.cfg.calibration
    budget = calibration.memory_budget_gib
    budget_bytes = default_budget() if budget is None else int(budget * 2**30)
    both_kinds = "both_kinds" in (calibration.regressors, mapper.regressors)
    plans = moments_plans(
        Layout(
            _shape(ctx, "source"),
            _shape(ctx, "target"),
            max(calibration.native_layers, mapper.native_layers),
        ),
        support=mapper.support,
        regressors="both_kinds" if both_kinds else "own_kind",
        top_k=_top_k(ctx),
        batch_tokens=calibration.batch_size * calibration.sequence_length,
        mode=calibration.mode,
        two_passes=needs(ctx.cfg.selection.rule) != "nothing",
        budget_bytes=budget_bytes,
    )
    return plans, budget_bytes


def _memory_mistakes(ctx: Context) -> Iterator[str]:
    """Moments that would not fit, said before any model is loaded."""
    if not (_needs_mapper(ctx) or "calibrate" in ctx.cfg.stages):
        return
    plans, budget = _moments_plans(ctx)
    if best_plan(plans) is None:
        needed = ", ".join(f"{plan.mode} {plan.peak_bytes:,}" for plan in plans)
        yield (
            f"calibration.memory_budget_gib={budget / 2**30:.4g}: the moments would take ({needed}) bytes; "
            f"raise it, lower mapper.top_k or calibration.batch_size, or take mapper=head_local"
        )
