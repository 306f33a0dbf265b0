"""Stage `plan`: what the run will hold and cost, from the two configurations alone, and what it cannot do.

It loads no weights. Everything that configs can already tell to be wrong is said here, all at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from kvmap.config import ConfigError
from kvmap.errors import KvmapError
from kvmap.fit.moments import CacheShape, geometry_shape, moments_bytes
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
    if mistakes:
        raise ConfigError(mistakes)
    if set(ctx.cfg.stages) - {"plan", "report"}:
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
    if top_k != "all" and top_k > n_layers:
        yield f"mapper.top_k={top_k}: the source has {n_layers} layers; expected 1 to {n_layers}, or 'all'"


def _length_mistakes(ctx: Context) -> Iterator[str]:
    """Lengths that a window or the model's number of positions does not allow."""
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
            try:
                geometry.check_length(length)
            except KvmapError as error:
                yield f"{key}={length}: {role} {error}"
            if length > geometry.max_positions:
                yield (
                    f"{key}={length}: the {role}, {ctx.models[role].id}, has "
                    f"{geometry.max_positions} positions; shorten it"
                )


def _row_mistakes(ctx: Context) -> Iterator[str]:
    """Calibrations that the fit would refuse only after they are paid for."""
    if not set(ctx.cfg.stages) - {"plan", "report", "calibrate"} or ctx.cfg.mapper.kind != "linear":
        return
    n_rows, n_features = _n_rows(ctx), _n_features(ctx)
    if n_rows <= n_features and not ctx.cfg.mapper.allow_few_rows:
        yield (
            f"calibration.n_sequences={ctx.cfg.calibration.n_sequences}: gives about {n_rows:,} rows "
            f"for {n_features:,} features; expected more than {n_features:,}, better {2 * n_features:,}. "
            "Raise it, lower mapper.top_k, take mapper=head_local, or set mapper.allow_few_rows=true"
        )


def _top_k(ctx: Context) -> int:
    n_layers, top_k = len(_shape(ctx, "source")), ctx.cfg.mapper.top_k
    return n_layers if top_k == "all" or ctx.cfg.selection.rule == "all" else int(top_k)


def _n_features(ctx: Context) -> int:
    """p: k H_s d_s, or k d_s where a head reads one head of each layer."""
    return linear_feature_count(_shape(ctx, "source"), _top_k(ctx), ctx.cfg.mapper.support)


def _n_rows(ctx: Context) -> int:
    """N of the fit split: sequences times the tokens that each contributes."""
    calibration = ctx.cfg.calibration
    tokens = calibration.sequence_length - ctx.cfg.transfer.native_head
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
    source, target, settings = _shape(ctx, "source"), _shape(ctx, "target"), ctx.cfg.mapper
    fitted = settings.kind in ("linear", "random")
    n_weights = linear_weight_count(source, target, _top_k(ctx), settings.support) if fitted else 0
    facts = {
        ("mapper", "top_k"): _top_k(ctx),
        ("mapper", "n_features"): _n_features(ctx),
        ("mapper", "n_weights"): n_weights,
        ("mapper", "weights_bytes"): n_weights * BYTES[settings.dtype],
        ("calibration", "n_rows"): _n_rows(ctx),
        ("calibration", "rows_per_feature"): _n_rows(ctx) / _n_features(ctx),
        ("moments", "size_bytes"): moments_bytes(source, target),
    }
    for (part, quantity), value in facts.items():
        yield {"part": part, "quantity": quantity, "value": value}
