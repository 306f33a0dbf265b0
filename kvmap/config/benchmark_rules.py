"""What a latency benchmark cannot do."""

from __future__ import annotations

from collections.abc import Iterator

from kvmap.config.judging import unknown_name
from kvmap.config.schema import MAPPING_PATHS, Config

WITHOUT_MODELS = ("plan", "benchmark", "economics", "report")
"""Stages that random weights serve: any other would give numbers that mean nothing."""


def benchmark_mistakes(cfg: Config) -> Iterator[str]:
    """Every mistake in `benchmark`, as one line each."""
    benchmark = cfg.benchmark
    for key, low in (("batch_size", 1), ("repeats", 1), ("warmup", 0), ("buffers", 1)):
        if getattr(benchmark, key) < low:
            yield f"benchmark.{key}={getattr(benchmark, key)}: expected at least {low}"
    if not 0 < benchmark.link_gbit_per_s < float("inf"):
        yield f"benchmark.link_gbit_per_s={benchmark.link_gbit_per_s}: expected a finite number above 0"
    if not benchmark.lengths:
        yield f"benchmark.lengths={list(benchmark.lengths)}: expected at least one length"
    yield from (
        unknown_name("benchmark.paths", path, MAPPING_PATHS)
        for path in benchmark.paths
        if path not in MAPPING_PATHS
    )
    if len(set(benchmark.paths)) < len(benchmark.paths):
        yield f"benchmark.paths={list(benchmark.paths)}: a path stands twice; name each once"
    if "benchmark" in cfg.stages and (benchmark.random_weights or benchmark.random_mapper):
        yield from _random_mistakes(cfg)
    if benchmark.max_layers is not None and not benchmark.random_weights:
        yield (
            f"benchmark.max_layers={benchmark.max_layers}: shortens random models alone; set "
            f"benchmark.random_weights=true, or leave it out"
        )


def _random_mistakes(cfg: Config) -> Iterator[str]:
    benchmark, mapper = cfg.benchmark, cfg.mapper
    more = [stage for stage in cfg.stages if stage not in WITHOUT_MODELS]
    if benchmark.random_weights and more:
        yield (
            f"benchmark.random_weights=true: {', '.join(more)} would give numbers that mean nothing; set "
            f"stages=[{','.join(WITHOUT_MODELS)}]"
        )
    if mapper.kind != "linear":
        yield (
            f"mapper.kind={mapper.kind}: benchmark.random_weights and benchmark.random_mapper draw a linear "
            f"one; set mapper.kind=linear, or both to false"
        )
    if mapper.top_k == "auto":
        yield (
            "mapper.top_k=auto: a random mapper has no held-out rows to choose k by; set mapper.top_k to a "
            "number or to 'all'"
        )
    if benchmark.max_layers is None:
        return
    if benchmark.max_layers < 1:
        yield f"benchmark.max_layers={benchmark.max_layers}: expected at least 1"
    elif isinstance(mapper.top_k, int) and mapper.top_k > benchmark.max_layers:
        yield (
            f"benchmark.max_layers={benchmark.max_layers}: mapper.top_k={mapper.top_k} source layers are to "
            f"be read; lower mapper.top_k or raise it"
        )
    elif mapper.native_layers >= benchmark.max_layers:
        yield (
            f"benchmark.max_layers={benchmark.max_layers}: mapper.native_layers={mapper.native_layers} "
            f"leaves nothing to map; lower the one or raise the other"
        )
