"""The one place that judges a configuration: every mistake at once, each with key, value and remedy."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from pathlib import Path

from kvmap.config.alignment_rules import alignment_mistakes
from kvmap.config.benchmark_rules import benchmark_mistakes
from kvmap.config.diagnostics_rules import diagnostics_mistakes
from kvmap.config.economics_rules import economics_mistakes
from kvmap.config.evaluation_rules import evaluation_mistakes
from kvmap.config.fleet_rules import fleet_mistakes
from kvmap.config.judging import unknown_name
from kvmap.config.mapper_rules import mapper_mistakes
from kvmap.config.placement_rules import placement_mistakes
from kvmap.config.preflight_rules import preflight_mistakes
from kvmap.config.schema import (
    ARMS,
    COMPRESSIONS,
    DIRECTIONS,
    DTYPES,
    MAP_CACHE_PATHS,
    MAPPER_KINDS,
    MLP_FORMS,
    MOMENTS_MODES,
    MOMENTS_PATHS,
    OUTLIER_POLICIES,
    PACKINGS,
    PENALTIES,
    PLAN_DEVICES,
    RECOMPUTE_RULES,
    REGRESSORS,
    REQUIRED_ARMS,
    ROPE_STRATEGIES,
    ROW_WEIGHTS,
    SELECTION_RULES,
    STAGES,
    SUPPORTS,
    TEXT_KINDS,
    TRACKING_BACKENDS,
    TUNING_SCOPES,
    WORLD_KINDS,
    Config,
)
from kvmap.errors import KvmapError


class ConfigError(KvmapError):
    """One or more settings cannot be right."""

    def __init__(self, mistakes: Iterable[str]) -> None:
        """Args: one line per mistake, each naming key, value, expectation and remedy."""
        self.mistakes = list(mistakes)
        many = len(self.mistakes)
        head = "1 mistake in the configuration" if many == 1 else f"{many} mistakes in the configuration"
        super().__init__("\n".join([f"{head}:", *(f"  - {line}" for line in self.mistakes)]))


def validate(cfg: Config) -> list[str]:
    """Every mistake that can be seen without opening a model or a file, as one line each."""
    return [
        *_choices(cfg),
        *_ranges(cfg),
        *_names(cfg),
        *mapper_mistakes(cfg),
        *_calibration(cfg),
        *placement_mistakes(cfg),
        *_texts(cfg),
        *_hand_back(cfg),
        *alignment_mistakes(cfg),
        *benchmark_mistakes(cfg),
        *diagnostics_mistakes(cfg),
        *economics_mistakes(cfg),
        *evaluation_mistakes(cfg),
        *fleet_mistakes(cfg),
        *preflight_mistakes(cfg),
    ]


def _choices(cfg: Config) -> Iterator[str]:
    single = {
        "direction": (cfg.direction, DIRECTIONS),
        "mapper.kind": (cfg.mapper.kind, MAPPER_KINDS),
        "mapper.support": (cfg.mapper.support, SUPPORTS),
        "mapper.regressors": (cfg.mapper.regressors, REGRESSORS),
        "mapper.penalty": (cfg.mapper.penalty, PENALTIES),
        "mapper.row_weights": (cfg.mapper.row_weights, ROW_WEIGHTS),
        "mapper.tuning.per": (cfg.mapper.tuning.per, TUNING_SCOPES),
        "mapper.mlp.form": (cfg.mapper.mlp.form, MLP_FORMS),
        "mapper.mlp.support": (cfg.mapper.mlp.support or "null", ("null", *SUPPORTS[:2])),
        "mapper.mlp.regressors": (cfg.mapper.mlp.regressors or "null", ("null", *REGRESSORS)),
        "mapper.mlp.compute_dtype": (
            cfg.mapper.mlp.compute_dtype or "null",
            ("null", "bfloat16", "float32", "float64"),
        ),
        "mapper.compression.method": (cfg.mapper.compression.method, COMPRESSIONS),
        "calibration.regressors": (cfg.calibration.regressors, REGRESSORS),
        "calibration.mode": (cfg.calibration.mode, MOMENTS_MODES),
        "calibration.outliers.policy": (cfg.calibration.outliers.policy, OUTLIER_POLICIES),
        "mapper.dtype": (cfg.mapper.dtype, DTYPES[1:]),
        "selection.rule": (cfg.selection.rule, SELECTION_RULES),
        "rope.strategy": (cfg.rope.strategy, ROPE_STRATEGIES),
        "calibration.packing": (cfg.calibration.packing, PACKINGS),
        "calibration.product_dtype": (cfg.calibration.product_dtype, ("float64", "float32")),
        "evaluation.perplexity.packing": (cfg.evaluation.perplexity.packing, PACKINGS),
        "tracking.backend": (cfg.tracking.backend, TRACKING_BACKENDS),
        "kernels.map_cache": (cfg.kernels.map_cache, MAP_CACHE_PATHS),
        "kernels.moments": (cfg.kernels.moments, MOMENTS_PATHS),
        "plan.device": (cfg.plan.device, PLAN_DEVICES),
        "pair.source.dtype": (cfg.pair.source.dtype, DTYPES),
        "pair.target.dtype": (cfg.pair.target.dtype, DTYPES),
    }
    for key, (value, known) in single.items():
        if value not in known:
            yield unknown_name(key, value, known)
    several = {
        "stages": (cfg.stages, STAGES),
        "evaluation.arms": (cfg.evaluation.arms, ARMS),
        "diagnostics.splits": (cfg.diagnostics.splits, ("fit", "held_out")),
    }
    for key, (values, known) in several.items():
        if not values:
            yield f"{key}=[]: expected at least one of {', '.join(known)}"
        yield from (unknown_name(key, value, known) for value in values if value not in known)
        if len(set(values)) < len(values):
            yield f"{key}={list(values)}: a name stands twice; name each once"
    for arm in REQUIRED_ARMS:
        if arm not in cfg.evaluation.arms:
            yield f"evaluation.arms={list(cfg.evaluation.arms)}: {arm!r} is always needed; add it"


def _ranges(cfg: Config) -> Iterator[str]:
    calibration, evaluation, mapper = cfg.calibration, cfg.evaluation, cfg.mapper
    at_least: dict[str, tuple[float | None, float]] = {
        "mapper.native_layers": (mapper.native_layers, 0),
        "mapper.mlp.epochs": (mapper.mlp.epochs, 1),
        "mapper.mlp.batch_size": (mapper.mlp.batch_size, 1),
        "mapper.mlp.weight_decay": (mapper.mlp.weight_decay, 0),
        "mapper.mlp.patience": (mapper.mlp.patience, 1),
        "mapper.compression.tolerance": (mapper.compression.tolerance, 0),
        "mapper.compression.max_r2_loss": (mapper.compression.max_r2_loss, 0),
        "mapper.compression.max_kl_nats": (mapper.compression.max_kl_nats, 0),
        "mapper.compression.n_sequences": (mapper.compression.n_sequences, 1),
        "calibration.native_layers": (calibration.native_layers, 0),
        "calibration.native_head": (calibration.native_head, 0),
        "diagnostics.n_sequences": (cfg.diagnostics.n_sequences, 1),
        "calibration.shards": (calibration.shards, 1),
        "calibration.sensitivity_boundaries": (calibration.sensitivity_boundaries, 1),
        "calibration.n_sequences": (calibration.n_sequences, 2),
        "calibration.sequence_length": (calibration.sequence_length, 2),
        "calibration.token_stride": (calibration.token_stride, 1),
        "calibration.batch_size": (calibration.batch_size, 1),
        "calibration.memory_budget_gib": (calibration.memory_budget_gib, 0),
        "calibration.data.skip": (calibration.data.skip, 0),
        "transfer.hold_back": (cfg.transfer.hold_back, 1),
        "transfer.native_head": (cfg.transfer.native_head, 0),
        "evaluation.world.n_per_kind": (evaluation.world.n_per_kind, 0),
        "evaluation.jsonl.limit": (evaluation.jsonl.limit, 1),
        "evaluation.perplexity.n_sequences": (evaluation.perplexity.n_sequences, 0),
        "evaluation.perplexity.prefix_tokens": (evaluation.perplexity.prefix_tokens, 1),
        "evaluation.perplexity.continuation_tokens": (evaluation.perplexity.continuation_tokens, 2),
        "evaluation.perplexity.data.skip": (evaluation.perplexity.data.skip, 0),
        "evaluation.long_context.data.skip": (evaluation.long_context.data.skip, 0),
        "evaluation.rolling_context": (evaluation.rolling_context, 1),
        "evaluation.batch_size": (evaluation.batch_size, 1),
        "evaluation.max_tokens": (evaluation.max_tokens, 2),
        "evaluation.max_new_tokens": (evaluation.max_new_tokens, 1),
        "evaluation.bootstrap_samples": (evaluation.bootstrap_samples, 1),
        "tracking.finish_timeout_s": (cfg.tracking.finish_timeout_s, 0),
        "threads": (cfg.threads, 1),
        "kernels.chunk_tokens": (cfg.kernels.chunk_tokens, 1),
    }
    for key, (value, low) in at_least.items():
        if value is not None and not (value >= low and math.isfinite(value)):
            yield f"{key}={value}: expected a finite number of at least {low}"
    if not 0 < calibration.held_out_share < 1:
        yield (
            f"calibration.held_out_share={calibration.held_out_share}: expected a share between 0 and 1, "
            "both excluded; 0.2 holds out a fifth of the sequences"
        )
    yield from _plan(cfg)
    yield from _nothing_mapped(cfg)
    native_head = cfg.transfer.native_head if calibration.native_head is None else calibration.native_head
    if native_head >= calibration.sequence_length > 1:
        yield (
            f"transfer.native_head={native_head} (or calibration.native_head): leaves no calibration rows in "
            f"sequences of "
            f"calibration.sequence_length={calibration.sequence_length}; lower the one or raise the other"
        )


def _plan(cfg: Config) -> Iterator[str]:
    """What a plan is made for."""
    for key, size in (
        ("plan.device_memory_gib", cfg.plan.device_memory_gib),
        ("plan.host_memory_gib", cfg.plan.host_memory_gib),
    ):
        if size is not None and not 0 < size < math.inf:
            yield f"{key}={size}: expected a number above 0, or null for the device's own or this machine's"
    if any(length < 1 for length in cfg.plan.lengths):
        yield f"plan.lengths={list(cfg.plan.lengths)}: expected numbers of tokens, each at least 1"


def _nothing_mapped(cfg: Config) -> Iterator[str]:
    """Contexts so short that the target reads them whole: the mapped arm would be the target's own."""
    own = cfg.transfer.native_head + cfg.transfer.hold_back
    lengths = {"benchmark.lengths": (min(cfg.benchmark.lengths, default=own + 1), "benchmark" in cfg.stages)}
    perplexity = cfg.evaluation.perplexity
    asked = "evaluate" in cfg.stages and perplexity.n_sequences > 0
    lengths["evaluation.perplexity.prefix_tokens"] = (perplexity.prefix_tokens, asked)
    for key, (length, used) in lengths.items():
        if used and length <= own:
            yield (
                f"{key}={length}: nothing would be mapped, since transfer.native_head + transfer.hold_back = "
                f"{own} covers it; expected more than {own}"
            )


def _hand_back(cfg: Config) -> Iterator[str]:
    """What the target recomputes of a mapped cache, and where the cost of handing over is measured."""
    transfer, cost = cfg.transfer, cfg.evaluation.cost
    if not 0 <= transfer.recompute_share <= 1:
        yield f"transfer.recompute_share={transfer.recompute_share}: expected a share of tokens, 0 to 1"
    if transfer.recompute_rule not in RECOMPUTE_RULES:
        yield unknown_name("transfer.recompute_rule", transfer.recompute_rule, RECOMPUTE_RULES)
    for key, low in (("batch_size", 1), ("repeats", 1), ("warmup", 0)):
        if getattr(cost, key) < low:
            yield f"evaluation.cost.{key}={getattr(cost, key)}: expected at least {low}"
    own = transfer.native_head + transfer.hold_back
    if cost.lengths and min(cost.lengths) <= own:
        yield (
            f"evaluation.cost.lengths={list(cost.lengths)}: nothing would be mapped, since transfer."
            f"native_head + transfer.hold_back = {own} covers the shortest; expected more than {own}"
        )
    if cost.lengths and cfg.evaluation.sequential:
        yield (
            f"evaluation.cost.lengths={list(cost.lengths)}: both models are held in memory to be timed, but "
            f"evaluation.sequential=true; leave the one empty or the other false"
        )


def _names(cfg: Config) -> Iterator[str]:
    world, jsonl = cfg.evaluation.world, cfg.evaluation.jsonl
    yield from (
        unknown_name("evaluation.world.kinds", kind, WORLD_KINDS)
        for kind in world.kinds or ()
        if kind not in WORLD_KINDS
    )
    for path in jsonl.paths:
        if not Path(path).expanduser().exists():
            yield f"evaluation.jsonl.paths: no file {path}; expected one of JSON lines, or a folder of them"
    if "benchmark" in cfg.stages and (cfg.calibration.sequential or cfg.evaluation.sequential):
        yield (
            "stages names benchmark, which holds both models in memory, beside calibration.sequential or "
            "evaluation.sequential; leave the stage out or both settings false"
        )
    if not cfg.study or any(part in cfg.study for part in ("/", "\\", "..")):
        yield f"study={cfg.study!r}: expected a plain folder name without slashes"
    for role, model in (("source", cfg.pair.source), ("target", cfg.pair.target)):
        if model.device_map is not None and model.device != "auto":
            yield (
                f"pair.{role}.device_map={model.device_map!r} with pair.{role}.device={model.device!r}: "
                "name one of them; device_map places the layers itself"
            )


def _calibration(cfg: Config) -> Iterator[str]:
    """Sharding, captures and outliers."""
    calibration = cfg.calibration
    if calibration.keep_captures != "auto" and not isinstance(calibration.keep_captures, bool):
        yield f"calibration.keep_captures={calibration.keep_captures}: expected auto, true or false"
    rows = cfg.mapper.kind == "mlp" or cfg.mapper.row_weights != "none"
    if calibration.keep_captures is False and rows and set(cfg.stages) - {"plan", "calibrate", "report"}:
        yield (
            "calibration.keep_captures=false: mapper.kind=mlp and mapper.row_weights=sensitivity read rows, "
            "which only captured caches hold; set it to auto"
        )
    outliers = calibration.outliers
    if not 0 < outliers.threshold < math.inf:
        yield f"calibration.outliers.threshold={outliers.threshold}: expected a number above 0"
    if not 0 < outliers.share <= 1:
        yield f"calibration.outliers.share={outliers.share}: expected a share of layers above 0, at most 1"
    yield from _shards(cfg)


def _shards(cfg: Config) -> Iterator[str]:
    """Parts of one calibration, and which of them a job begins with."""
    calibration = cfg.calibration
    shards, worker = calibration.shards, calibration.worker
    n_held_out = max(1, round(calibration.n_sequences * calibration.held_out_share))
    fewest = min(n_held_out, calibration.n_sequences - n_held_out)
    if shards > max(fewest, 1):
        yield (
            f"calibration.shards={shards}: one of the splits has {fewest} sequences; expected at most so "
            f"many parts. Lower it, or raise calibration.n_sequences"
        )
    if worker is None:
        return
    if not 0 <= worker < shards:
        yield (
            f"calibration.worker={worker}: expected a number from 0 to calibration.shards - 1 = "
            f"{shards - 1}, the part that this job begins with"
        )
    if more := [stage for stage in cfg.stages if stage not in ("plan", "calibrate", "report")]:
        yield (
            f"calibration.worker={worker}: jobs that differ in it alone calibrate together, and each would "
            f"run {', '.join(more)} again; set stages=[calibrate], and go on in a run without worker"
        )


def _texts(cfg: Config) -> Iterator[str]:
    streams = {"calibration.data": cfg.calibration.data}
    if cfg.evaluation.perplexity.n_sequences:
        streams["evaluation.perplexity.data"] = cfg.evaluation.perplexity.data
    if cfg.evaluation.long_context.n_sequences:
        streams["evaluation.long_context.data"] = cfg.evaluation.long_context.data
    for key, text in streams.items():
        if text.kind not in TEXT_KINDS:
            yield unknown_name(f"{key}.kind", text.kind, TEXT_KINDS)
        elif text.kind in ("jsonl", "text") and not text.path:
            yield f"{key}.path is not set: {key}.kind={text.kind} reads a file; set {key}.path=<file>"
        elif text.kind == "hf" and not text.name:
            yield f"{key}.name is not set: {key}.kind=hf reads a dataset; set {key}.name=<dataset id>"
