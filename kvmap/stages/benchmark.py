"""Stage `benchmark`: mapping against re-prefill on this machine's device."""

from __future__ import annotations

from collections.abc import Mapping

from kvmap.benchmark.latency import (
    LatencySettings,
    break_even,
    latency_metrics,
    latency_rows,
    network_rows,
    path_rows,
    ratio_rows,
    transport_rows,
)
from kvmap.benchmark.random_models import Depth, random_mapper_of, random_pair
from kvmap.benchmark.roofline import measure_roofline
from kvmap.figures.latency import cost_panels
from kvmap.mappers import Mapper
from kvmap.models.pair import ModelPair
from kvmap.stages.context import Context


def run(ctx: Context) -> None:
    """Tables: `latency` by length, its `ratios`, `paths` of mapping alone, and `transport` and `network`, the
    caches' way over links. Figure: `latency_cost`.
    """
    chosen = ctx.cfg.benchmark
    settings = LatencySettings(
        batch_size=chosen.batch_size,
        repeats=chosen.repeats,
        warmup=chosen.warmup,
        buffers=chosen.buffers,
        link_gbit_per_s=chosen.link_gbit_per_s,
        memory=chosen.memory,
        seed=chosen.seed,
    )
    pair, depths = _pair(ctx)
    mapper = _mapper(ctx, pair)
    roofline = measure_roofline(pair.target.device, pair.target.dtype)
    rows = latency_rows(
        pair,
        mapper,
        chosen.lengths,
        settings,
        options=ctx.options,
        roofline=roofline,
        depths=depths,
    )
    ctx.run.table("latency", rows)
    ctx.run.table("ratios", ratio_rows(rows))
    ctx.run.table("transport", transport_rows(rows))
    ctx.run.table("network", network_rows(rows))
    ctx.run.log(latency_metrics(rows))
    ctx.run.note(break_even=break_even(rows), roofline=roofline.rates, benchmarked=_described(ctx, depths))
    ctx.run.figure("latency_cost", cost_panels(rows))
    if chosen.paths:
        paths = path_rows(pair, mapper, chosen.lengths, chosen.paths, settings, roofline=roofline)
        ctx.run.table("paths", paths)


def _pair(ctx: Context) -> tuple[ModelPair, Mapping[str, Depth] | None]:
    """The run's models, or random ones in their shapes and how deep those are."""
    benchmark = ctx.cfg.benchmark
    if not benchmark.random_weights:
        return ctx.pair, None
    return random_pair(
        ctx.specs["source"],
        ctx.specs["target"],
        n_positions=max(benchmark.lengths) + 1,
        max_layers=benchmark.max_layers,
        seed=benchmark.seed,
    )


def _mapper(ctx: Context, pair: ModelPair) -> Mapper:
    """The run's mapper, or a random one of its k and support, in the dtype of the target."""
    benchmark, settings = ctx.cfg.benchmark, ctx.cfg.mapper
    if not (benchmark.random_weights or benchmark.random_mapper):
        return ctx.mapper
    return random_mapper_of(
        pair,
        settings.top_k,
        settings.support,
        regressors=settings.regressors,
        native_layers=settings.native_layers,
        seed=benchmark.seed,
    )


def _described(ctx: Context, depths: Mapping[str, Depth] | None) -> dict[str, str]:
    """What was timed, in words: fitted or drawn, whole or shortened."""
    benchmark = ctx.cfg.benchmark
    if depths is None:
        return {"models": "loaded", "mapper": "random weights" if benchmark.random_mapper else "fitted"}
    whole = "; ".join(f"{side} {depth.run} of {depth.whole} layers" for side, depth in depths.items())
    return {"models": f"random weights: {whole}", "mapper": "random weights"}
