"""Stage `economics`: time to first token and cost of every way of serving, from measured or planned times."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path

from kvmap.economics import (
    Axes,
    Contexts,
    EconomicsError,
    Latencies,
    Prices,
    Quality,
    Workload,
    analyse,
    counted,
    log_normal_within,
    read_latencies,
    read_lengths,
)
from kvmap.economics.planned import LENGTHS, PlannedMap, planned_latencies
from kvmap.figures.economics import economics_panels
from kvmap.metrics import Metric
from kvmap.planning.devices import find_device
from kvmap.stages.context import Context
from kvmap.stages.plan.planned import measured_device, model_facts, planned_run

_METRICS = ("ttft_mean_ms", "ttft_p50_ms", "ttft_p95_ms", "cost", "cost_per_correct")


def run(ctx: Context) -> None:
    """Tables: `economics` (policies), `economics_lengths`, `economics_break_even`, `economics_time_surface`,
    `economics_cost_surface`. Figure: `economics`.
    """
    chosen = ctx.cfg.economics
    latencies = _latencies(ctx)
    found = analyse(
        latencies,
        _contexts(ctx, latencies),
        Workload(
            escalation_rate=chosen.escalation_rate,
            output_tokens=chosen.output_tokens,
            judged_after=chosen.judged_after,
            decode_batch=chosen.decode_batch,
            gbit_per_s=chosen.gbit_per_s,
            link_ms=chosen.link_ms,
            sent=chosen.sent,
            cached_share=chosen.cached_share,
        ),
        Prices(**asdict(chosen.prices)),
        _quality(ctx),
        Axes(**{name: tuple(values) for name, values in asdict(chosen.surface).items()}),
    )
    for name, rows in found.tables.items():
        ctx.run.table(name, rows)
    ctx.run.log(
        {
            f"economics/policies/{row['policy']}/{name}": Metric(row[name])
            for row in found.policies
            for name in _METRICS
            if row[name] is not None
        }
    )
    ctx.run.note(economics={**found.facts, "notes": found.notes})
    panels = economics_panels(
        found.by_length, found.time_surface, found.cost_surface, found.break_even, found.facts
    )
    ctx.run.figure("economics", panels)


def _latencies(ctx: Context) -> Latencies:
    """Of the file that is named, of this run's benchmark, or planned."""
    chosen = ctx.cfg.economics
    tokens = {"source_token_ms": chosen.source_token_ms, "target_token_ms": chosen.target_token_ms}
    if chosen.latency is not None:
        return read_latencies(Path(chosen.latency), beyond=chosen.beyond, **tokens)
    if "benchmark" in ctx.cfg.stages:
        return read_latencies(
            ctx.run.directory, beyond=chosen.beyond, origin="measured by this run's benchmark", **tokens
        )
    return _planned(ctx)


def _planned(ctx: Context) -> Latencies:
    chosen, models = ctx.cfg.economics, model_facts(ctx)
    if models is None:
        raise EconomicsError(
            f"pair={ctx.cfg.pair.name}: no more than its geometry is known, and times need the models' "
            f"configs; name the table of a benchmark with economics.latency=<file>"
        )
    planned = planned_run(ctx, models)
    most = min(model.geometry.max_positions for model in models.values())
    return planned_latencies(
        models["source"],
        models["target"],
        PlannedMap(
            planned.n_weights(planned.settings),
            planned.mapper_bytes(planned.settings, models["target"].dtype),
            models["target"].dtype,
            planned.native_layers,
            ctx.options.native_head,
            ctx.options.hold_back,
        ),
        find_device(chosen.device, threads=ctx.cfg.threads) or measured_device(),
        chosen.lengths or [length for length in LENGTHS if length <= most],
        source_gpus=chosen.prices.source_gpus,
        target_gpus=chosen.prices.target_gpus,
        source_token_ms=chosen.source_token_ms,
        target_token_ms=chosen.target_token_ms,
        beyond=chosen.beyond,
    )


def _contexts(ctx: Context, latencies: Latencies) -> Contexts | None:
    contexts = ctx.cfg.economics.contexts
    if contexts.path is not None:
        return read_lengths(Path(contexts.path))
    if contexts.median is not None:
        return log_normal_within(contexts.median, contexts.sigma, latencies)
    return counted(contexts.lengths, contexts.weights or None) if contexts.lengths else None


def _quality(ctx: Context) -> Quality:
    """As configured; what is not, as this run has evaluated it."""
    accuracy = asdict(ctx.cfg.economics.accuracy)
    for arm in ("source", "target", "mapped"):
        measured = ctx.run.metrics.get(f"evaluate/average/{arm}/accuracy")
        if accuracy[arm] is None and measured is not None and math.isfinite(measured.value):
            accuracy[arm] = measured.value
    return Quality(**accuracy)
