"""The plan as rows: quantities, work of stages, memory by place, and settings that make it fit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from kvmap.fit.features import n_channels
from kvmap.fit.planner import best_plan
from kvmap.planning.memory import DISK, Machine, Need, cache_bytes, captures_bytes
from kvmap.planning.models import ITEM_BYTES, ModelFacts
from kvmap.planning.remedies import Advice
from kvmap.planning.run import ROLES, PlannedRun
from kvmap.planning.work import Work
from kvmap.stages.context import Context
from kvmap.stages.plan.counts import moments_plans_of, n_features, n_rows, n_weights, shape, top_k

Row = dict[str, Any]

UNKNOWN_DTYPE_BYTES = 2


def quantity_rows(
    ctx: Context, models: dict[str, ModelFacts] | None, run: PlannedRun | None, machine: Machine
) -> list[Row]:
    """Table `plan`: part, quantity, value."""
    found = [*_model_rows(ctx, models)]
    if run is not None:
        found += _cache_rows(ctx, run)
    found += _mapper_rows(ctx)
    found += _moments_rows(ctx, machine)
    if run is not None:
        found.append(_row("captures", "size_bytes", captures_bytes(run)))
    return found


def work_rows(work: Sequence[Work]) -> list[Row]:
    """Table `plan_work`."""
    return [
        {
            "stage": each.stage,
            "what": each.what,
            "tflop": each.flops / 1e12,
            "gb": each.n_bytes / 1e9,
            "seconds": each.seconds,
        }
        for each in work
    ]


def memory_rows(needs: Sequence[Need], machine: Machine) -> list[Row]:
    """Table `plan_memory`: one row for each part, and one for all of a stage in a place."""
    found: list[Row] = []
    for need in needs:
        for what, n_bytes in need.parts.items():
            found.append({"stage": need.stage, "place": need.place, "what": what, "n_bytes": n_bytes})
        if need.place != DISK:
            capacity = machine.capacity(need.place)
            fits = {"capacity": int(capacity), "fits": need.over(machine) == 0}
            found.append(
                {"stage": need.stage, "place": need.place, "what": "all"} | {"n_bytes": need.n_bytes} | fits
            )
    return found


def advice_rows(advice: Advice) -> list[Row]:
    """Table `plan_settings`: what to paste, and what it does."""
    return [
        {"override": override, "why": why}
        for override, why in zip(advice.overrides, advice.reasons, strict=True)
    ]


def _row(part: str, quantity: str, value: float) -> Row:
    return {"part": part, "quantity": quantity, "value": value}


def _model_rows(ctx: Context, models: dict[str, ModelFacts] | None) -> Iterator[Row]:
    for role in ROLES:
        layers = shape(ctx, role)
        width = ITEM_BYTES.get(ctx.models[role].dtype, UNKNOWN_DTYPE_BYTES)
        width = width if models is None else models[role].item_bytes
        yield _row(role, "n_layers", len(layers))
        yield _row(role, "n_kv_heads", layers[0][0])
        yield _row(role, "head_dim", layers[0][1])
        yield _row(role, "kv_bytes_per_token", 2 * n_channels(layers) * width)
        if models is not None:
            yield _row(role, "parameters", models[role].parameters)
            yield _row(role, "weights_bytes", models[role].weights_bytes())
            for dtype in ("float32", "bfloat16"):
                yield _row(role, f"weights_{dtype}_bytes", models[role].weights_bytes(dtype=dtype))


def _cache_rows(ctx: Context, run: PlannedRun) -> Iterator[Row]:
    longest = min(model.geometry.max_positions for model in run.models.values())
    lengths = [length for length in ctx.cfg.plan.lengths if length <= longest]
    for length in sorted({*lengths, run.sequence_length}):
        for role in ROLES:
            yield _row(f"cache of {length} tokens", f"{role}_bytes", cache_bytes(run, role, length))


def _mapper_rows(ctx: Context) -> Iterator[Row]:
    weights, rows, features = n_weights(ctx), n_rows(ctx), n_features(ctx)
    biases = 4 * 2 * n_channels(shape(ctx, "target"))
    yield _row("mapper", "top_k", top_k(ctx))
    yield _row("mapper", "n_features", features)
    yield _row("mapper", "n_weights", weights)
    yield _row("mapper", "weights_bytes", weights * ITEM_BYTES[ctx.cfg.mapper.dtype])
    yield _row("mapper", "float32_bytes", weights * 4 + biases)
    yield _row("mapper", "bfloat16_bytes", weights * 2 + biases)
    yield _row("mapper", "fp8_bytes", weights + biases)
    yield _row("calibration", "n_rows", rows)
    yield _row("calibration", "rows_per_feature", rows / features)


def _moments_rows(ctx: Context, machine: Machine) -> Iterator[Row]:
    """Bytes that the calibration would hold in each mode, and the mode that fits the host's budget."""
    plans, budget = moments_plans_of(ctx, machine.host_bytes)
    chosen = best_plan(plans)
    ctx.run.note(moments_mode="none fits the budget" if chosen is None else chosen.mode)
    yield _row("moments", "budget_bytes", budget)
    for plan in plans:
        yield _row(f"moments_{plan.mode}", "size_bytes", plan.table_bytes)
        yield _row(f"moments_{plan.mode}", "peak_bytes", plan.peak_bytes)
        yield _row(f"moments_{plan.mode}", "n_passes", plan.n_passes)
