"""What configs can already tell to be wrong, before any weights load."""

from __future__ import annotations

from collections.abc import Iterator

from kvmap.fit.planner import best_plan
from kvmap.stages.context import Context
from kvmap.stages.plan.counts import moments_plans_of, n_features, n_rows, needs_mapper, shape


def geometry_mistakes(ctx: Context) -> Iterator[str]:
    """Settings that the two models' shapes contradict."""
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
    n_layers = len(shape(ctx, "source"))
    top_k = ctx.cfg.mapper.top_k
    if top_k not in ("all", "auto") and top_k > n_layers:
        yield (
            f"mapper.top_k={top_k}: the source has {n_layers} layers; expected 1 to {n_layers}, 'all' or "
            f"'auto'"
        )
    n_target = len(shape(ctx, "target"))
    for key, native in (
        ("mapper.native_layers", ctx.cfg.mapper.native_layers),
        ("calibration.native_layers", ctx.cfg.calibration.native_layers),
    ):
        if native >= n_target:
            yield (
                f"{key}={native}: the target has {n_target} layers, and nothing would be left to map; "
                f"expected 0 to {n_target - 1}"
            )


def length_mistakes(ctx: Context) -> Iterator[str]:
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


def row_mistakes(ctx: Context) -> Iterator[str]:
    """Calibrations that the fit would refuse only after they are paid for."""
    fits = needs_mapper(ctx) and ctx.cfg.mapper.kind in ("linear", "mlp")
    if not fits:
        return
    rows, features = n_rows(ctx), n_features(ctx)
    if rows <= features and not ctx.cfg.mapper.allow_few_rows:
        yield (
            f"calibration.n_sequences={ctx.cfg.calibration.n_sequences}: gives about {rows:,} rows "
            f"for {features:,} features; expected more than {features:,}, better {2 * features:,}. "
            "Raise it, lower mapper.top_k, take mapper=head_local, or set mapper.allow_few_rows=true"
        )


def memory_mistakes(ctx: Context) -> Iterator[str]:
    """Moments that would not fit, said before any model is loaded."""
    if not (needs_mapper(ctx) or "calibrate" in ctx.cfg.stages):
        return
    plans, budget = moments_plans_of(ctx)
    if best_plan(plans) is None:
        needed = ", ".join(f"{plan.mode} {plan.peak_bytes:,}" for plan in plans)
        yield (
            f"calibration.memory_budget_gib={budget / 2**30:.4g}: the moments would take ({needed}) bytes; "
            f"raise it, lower mapper.top_k or calibration.batch_size, or take mapper=head_local"
        )
