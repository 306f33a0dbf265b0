"""Stage `plan`: what the run will hold and cost, from the two configurations alone, and what it cannot do.

It loads no weights. Everything that configs can already tell to be wrong is said here, all at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvmap.config import ConfigError
from kvmap.errors import KvmapError
from kvmap.fit.moments import CacheShape, geometry_shape, moments_bytes
from kvmap.metrics import Metric
from kvmap.models.geometry import Geometry
from kvmap.models.pair import ModelNotFound, read_geometry
from kvmap.stages.context import Context

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
LOADING_STAGES = {"calibrate", "fit", "diagnose", "evaluate", "benchmark"}


def check(ctx: Context) -> None:
    """Refuse what cannot work before any weights load.

    Raises:
        ConfigError: every setting that the two models' geometry contradicts.
        KvmapError: a model that is missing or unsupported, or tokenizers that differ.
    """
    geometries = {role: _geometry(ctx, role) for role in ("source", "target")}
    mistakes = [*_geometry_mistakes(ctx, geometries), *_length_mistakes(ctx, geometries)]
    if mistakes:
        raise ConfigError(mistakes)
    if LOADING_STAGES & set(ctx.cfg.stages):
        ctx.pair.check()


def run(ctx: Context) -> None:
    """Log geometry, bytes and sizes, as metrics and as `tables/plan.csv`."""
    shapes = {role: _shape(ctx, role) for role in ("source", "target")}
    rows: list[dict[str, Any]] = [*_cache_rows(ctx, shapes), *_mapper_rows(ctx, shapes)]
    ctx.run.table("plan", rows)
    ctx.run.log({f"plan/{row['part']}/{row['quantity']}": Metric(row["value"]) for row in rows})


def _geometry(ctx: Context, role: str) -> Geometry | None:
    """The model's geometry; None where a plan must do with the facts in the pair file."""
    facts = ctx.models[role].geometry
    try:
        return read_geometry(ctx.specs[role])
    except ModelNotFound:
        if LOADING_STAGES & set(ctx.cfg.stages) or None in (facts.n_layers, facts.n_kv_heads, facts.head_dim):
            raise
        ctx.run.note(geometry={role: "from the pair file; the hub was not reached"})
        return None


def _shape(ctx: Context, role: str) -> CacheShape:
    geometry = _geometry(ctx, role)
    if geometry is not None:
        return geometry_shape(geometry)
    facts = ctx.models[role].geometry
    return ((facts.n_kv_heads or 0, facts.head_dim or 0),) * (facts.n_layers or 0)


def _geometry_mistakes(ctx: Context, geometries: dict[str, Geometry | None]) -> Iterator[str]:
    for role, geometry in geometries.items():
        facts = ctx.models[role].geometry
        for name in ("n_layers", "n_kv_heads", "head_dim"):
            said = getattr(facts, name)
            found = said if geometry is None else getattr(geometry, name)
            if said is not None and said != found:
                yield (
                    f"pair.{role}.geometry.{name}={said}: {ctx.models[role].id} has {found}; "
                    f"another model or revision than the pair file means? Correct the one or the other"
                )
    n_layers = len(_shape(ctx, "source"))
    top_k = ctx.cfg.mapper.top_k
    if top_k != "all" and top_k > n_layers:
        yield f"mapper.top_k={top_k}: the source has {n_layers} layers; expected 1 to {n_layers}, or 'all'"


def _length_mistakes(ctx: Context, geometries: dict[str, Geometry | None]) -> Iterator[str]:
    perplexity, benchmark = ctx.cfg.evaluation.perplexity, ctx.cfg.benchmark
    lengths = {"calibration.sequence_length": ctx.cfg.calibration.sequence_length}
    if "evaluate" in ctx.cfg.stages and perplexity.n_sequences:
        total = perplexity.prefix_tokens + perplexity.continuation_tokens
        lengths["evaluation.perplexity.prefix_tokens + continuation_tokens"] = total
    if "benchmark" in ctx.cfg.stages:
        lengths["benchmark.lengths"] = max(benchmark.lengths)
    for role, geometry in geometries.items():
        if geometry is None:
            continue
        for key, length in lengths.items():
            try:
                geometry.check_length(length)
            except KvmapError as error:
                yield f"{key}={length}: {role} {error}"


def _cache_rows(ctx: Context, shapes: dict[str, CacheShape]) -> Iterator[dict[str, Any]]:
    for role, shape in shapes.items():
        channels = sum(n_heads * head_dim for n_heads, head_dim in shape)
        dtype = ctx.models[role].dtype
        facts = {
            "n_layers": len(shape),
            "n_kv_heads": shape[0][0],
            "head_dim": shape[0][1],
            "kv_bytes_per_token": 2 * channels * BYTES.get(dtype, 2),
        }
        for quantity, value in facts.items():
            yield {"part": role, "quantity": quantity, "value": value}


def _mapper_rows(ctx: Context, shapes: dict[str, CacheShape]) -> Iterator[dict[str, Any]]:
    source, target, settings = shapes["source"], shapes["target"], ctx.cfg.mapper
    calibration, native_head = ctx.cfg.calibration, ctx.cfg.transfer.native_head
    everything = settings.top_k == "all" or ctx.cfg.selection.rule == "all"
    k = len(source) if everything else settings.top_k
    heads = source[0][0] if settings.support == "full_head" else 1
    p = k * heads * source[0][1]
    outputs = 2 * sum(n_heads * head_dim for n_heads, head_dim in target)
    n_weights = p * outputs if settings.kind == "linear" else 0
    per_sequence = -(-(calibration.sequence_length - native_head) // calibration.token_stride)
    n_rows = int(calibration.n_sequences * (1 - calibration.held_out_share)) * per_sequence
    facts = {
        ("mapper", "top_k"): k,
        ("mapper", "n_features"): p,
        ("mapper", "n_weights"): n_weights,
        ("mapper", "weights_bytes"): n_weights * BYTES[settings.dtype],
        ("calibration", "n_rows"): n_rows,
        ("calibration", "rows_per_feature"): n_rows / p,
        ("moments", "size_bytes"): moments_bytes(source, target),
    }
    for (part, quantity), value in facts.items():
        yield {"part": part, "quantity": quantity, "value": value}
