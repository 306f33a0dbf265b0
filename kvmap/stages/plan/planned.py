"""The run's configuration as a plan sees it: plain numbers, and the machine it is planned for."""

from __future__ import annotations

from dataclasses import replace

from kvmap.benchmark.roofline import measure_roofline
from kvmap.fit.selection import needs
from kvmap.planning.devices import Device, find_device, host_bytes
from kvmap.planning.memory import Machine
from kvmap.planning.models import ModelFacts, facts_of, read_facts
from kvmap.planning.run import ROLES, PlannedRun, ScoredText, Settings
from kvmap.stages.context import Context
from kvmap.stages.plan.counts import (
    layout,
    moments_budget,
    moments_regressors,
    n_rows,
    n_weights,
    top_k,
)

GIB = 2**30
_WORLD_TOKENS, _TEXT_TOKENS = (128, 4), (512, 16)
"""Context and answer of a question, about, where the configuration does not say."""


def planned_machine(ctx: Context) -> Machine:
    """The device and host that `plan.*` names, or this machine's."""
    plan = ctx.cfg.plan
    device = find_device(plan.device, threads=ctx.cfg.threads) or measured_device()
    on_host = plan.device in ("auto", "cpu", "measured") and {m.device for m in ctx.models.values()} == {
        "cpu"
    }
    if on_host and device.memory_bytes is not None:
        device = find_device("cpu", threads=ctx.cfg.threads) or device
    if plan.device_memory_gib is not None and device.memory_bytes is not None:
        device = replace(device, memory_bytes=int(plan.device_memory_gib * GIB))
    host = host_bytes() if plan.host_memory_gib is None else int(plan.host_memory_gib * GIB)
    return Machine(device, host)


def measured_device() -> Device:
    """This machine's GPU, else its processor, by a product and a copy of each dtype; efficiency is 0.8 of it.

    A measured peak is one that large products reach, so a forward gets nearer to it than to a maker's.
    """
    import torch

    name = "cuda" if torch.cuda.is_available() else "cpu"
    where = torch.device(name)
    size = None if name == "cuda" else 768
    found = {
        dtype: measure_roofline(where, getattr(torch, dtype), repeats=2, matmul_size=size, copy_bytes=2**26)
        for dtype in ("bfloat16", "float32", "float64")
    }
    rates = {dtype: roofline.flops_per_s for dtype, roofline in found.items()}
    memory = torch.cuda.get_device_properties(0).total_memory if name == "cuda" else None
    fp8 = name == "cuda" and torch.cuda.get_device_capability() >= (8, 9)
    bandwidth = max(roofline.bytes_per_s for roofline in found.values())
    rates["float16"] = rates["bfloat16"]
    return Device("measured", rates, bandwidth, memory, fp8, efficiency=0.8)


def model_facts(ctx: Context) -> dict[str, ModelFacts] | None:
    """Both models; None where a pair file's geometry is all that is known of one."""
    if None in ctx.geometries.values():
        return None
    if ctx.random_weights:
        from kvmap.models.shapes import shape_config

        return {role: facts_of(shape_config(ctx.specs[role]), ctx.specs[role], "shape") for role in ROLES}
    return {role: read_facts(ctx.specs[role]) for role in ROLES}


def planned_run(ctx: Context, models: dict[str, ModelFacts]) -> PlannedRun:
    """The run as configured."""
    cfg, calibration, mapper = ctx.cfg, ctx.cfg.calibration, ctx.cfg.mapper
    rows_of_split = n_rows(ctx)
    of_fit = calibration.n_sequences - max(1, round(calibration.n_sequences * calibration.held_out_share))
    reads_rows = mapper.kind == "mlp" or mapper.row_weights != "none"
    keeps = calibration.keep_captures is True or (calibration.keep_captures == "auto" and reads_rows)
    spill = calibration.max_spill_gib
    own = (
        cfg.diagnostics.texts
        if "diagnose" in cfg.stages or not set(cfg.stages) - {"plan", "economics", "report"}
        else []
    )
    benchmark = cfg.benchmark
    return PlannedRun(
        stages=frozenset(cfg.stages),
        models=models,
        layout=layout(ctx),
        kind=mapper.kind,
        regressors=mapper.regressors,
        native_layers=mapper.native_layers,
        moments_regressors=moments_regressors(ctx),
        two_passes=needs(cfg.selection.rule) != "nothing",
        n_sequences=calibration.n_sequences,
        sequence_length=calibration.sequence_length,
        n_rows=rows_of_split * calibration.n_sequences // max(of_fit, 1),
        product_dtype=calibration.product_dtype,
        keeps_captures=keeps,
        spill_bytes=None if spill is None else int(spill * GIB),
        mapper_weights=None if mapper.kind in ("linear", "random") else n_weights(ctx),
        mapper_dtype=mapper.dtype,
        texts=scored_texts(ctx),
        n_arms=len(cfg.evaluation.arms),
        diagnosed=(cfg.diagnostics.n_sequences * len(own), calibration.sequence_length),
        lengths=tuple(benchmark.lengths),
        benchmark_batch=benchmark.batch_size,
        benchmark_turns=benchmark.repeats + benchmark.warmup,
        settings=_settings(ctx),
    )


def scored_texts(ctx: Context) -> tuple[ScoredText, ...]:
    """What an evaluation scores, as far as the configuration says: how many, and about how long."""
    evaluation = ctx.cfg.evaluation
    perplexity, found = evaluation.perplexity, []
    if perplexity.n_sequences:
        found.append(
            ScoredText(perplexity.n_sequences, perplexity.prefix_tokens, perplexity.continuation_tokens)
        )
    if evaluation.world.n_per_kind:
        kinds = 6 if evaluation.world.kinds is None else len(evaluation.world.kinds)
        found.append(ScoredText(kinds * evaluation.world.n_per_kind, *_WORLD_TOKENS))
    for task in evaluation.tasks:
        limit = task.get("limit") if hasattr(task, "get") else None
        if limit:
            found.append(ScoredText(int(limit), *_TEXT_TOKENS))
    return tuple(found)


def not_counted(ctx: Context) -> list[str]:
    """Parts of an evaluation whose size only their files tell."""
    evaluation = ctx.cfg.evaluation
    found = []
    if evaluation.jsonl.paths or evaluation.jsonl.folder:
        found.append("evaluation.jsonl")
    if any(not (hasattr(task, "get") and task.get("limit")) for task in evaluation.tasks):
        found.append("evaluation.tasks without a limit")
    if evaluation.conversation.limit != 0:
        found.append("evaluation.conversation")
    if evaluation.long_context.n_needles or evaluation.long_context.n_sequences:
        found.append("evaluation.long_context")
    if evaluation.relay.hops:
        found.append("evaluation.relay")
    if evaluation.cost.lengths:
        found.append("evaluation.cost")
    if ctx.cfg.mapper.kind == "mlp":
        found.append("training of networks")
    return found


def _settings(ctx: Context) -> Settings:
    calibration, mapper = ctx.cfg.calibration, ctx.cfg.mapper
    return Settings(
        sequential=calibration.sequential,
        evaluation_sequential=ctx.cfg.evaluation.sequential,
        placed=frozenset(role for role, model in ctx.models.items() if model.device_map is not None),
        batch_size=calibration.batch_size,
        evaluation_batch_size=ctx.cfg.evaluation.batch_size,
        tables_on_host=calibration.device == "cpu",
        budget_bytes=moments_budget(ctx),
        mode=calibration.mode,
        support=mapper.support,
        top_k=top_k(ctx),
    )
