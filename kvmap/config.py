"""The schema of every configuration group, and the one place that judges a configuration.

`register()` puts the schema into Hydra's ConfigStore; `validate(cfg)` returns every mistake at once.
This file knows neither torch nor what the settings are used for: `kvmap.stages` is where they end.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, get_type_hints

from kvmap.errors import KvmapError

STAGES = ("plan", "calibrate", "fit", "diagnose", "evaluate", "benchmark", "report")
DIRECTIONS = ("up", "down")
DTYPES = ("auto", "float32", "bfloat16", "float16")
MAPPER_KINDS = ("linear", "identity", "bias_only", "raw", "random")
SUPPORTS = ("full_head", "head_local")
SELECTION_RULES = ("r2", "proportional", "all")
ROPE_STRATEGIES = ("strip", "coupled", "no_rerotate")
TEXT_KINDS = ("world", "jsonl", "text", "hf")
PACKINGS = ("document", "packed")
ARMS = ("target", "source", "mapped", "bias_only", "raw", "random", "no_context")
REQUIRED_ARMS = ("target", "mapped", "no_context")
WORLD_KINDS = ("where", "colour", "holder", "two_hop", "moved", "count")
TRACKING_BACKENDS = ("wandb", "wandb_online", "none")


@dataclass
class GeometryFacts:
    """What a pair file says of a model; checked against the model's own config when it is read."""

    n_layers: int | None = None
    n_kv_heads: int | None = None
    head_dim: int | None = None


@dataclass
class ModelConfig:
    """One model: hub id, local folder or `zoo:<name>`, or a GGUF file inside one of these."""

    id: str = "???"
    revision: str | None = None
    gguf_file: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    device_map: str | None = None
    attn_implementation: str | None = "sdpa"
    geometry: GeometryFacts = field(default_factory=GeometryFacts)


@dataclass
class PairConfig:
    """Source and target, as read with `direction=up`."""

    name: str = "???"
    source: ModelConfig = field(default_factory=ModelConfig)
    target: ModelConfig = field(default_factory=ModelConfig)


@dataclass
class MapperConfig:
    """The map from source cache to target cache; `top_k` and `ridge_lambda` exist for every kind."""

    kind: str = "linear"
    support: str = "full_head"
    top_k: Any = "all"
    ridge_lambda: float = 0.01
    dtype: str = "float32"
    allow_few_rows: bool = False
    seed: int = 0


@dataclass
class SelectionConfig:
    """How the `top_k` source layers of a target layer are chosen."""

    rule: str = "r2"


@dataclass
class RopeConfig:
    """What happens to the rotation of keys between the two models."""

    strategy: str = "strip"


@dataclass
class TextConfig:
    """A stream of documents."""

    kind: str = "world"
    path: str | None = None
    where: dict[str, str] = field(default_factory=dict)
    name: str | None = None
    config: str | None = None
    split: str | None = None
    revision: str | None = None
    skip: int | None = None
    seed: int = 0
    field: str = "text"  # last: it hides dataclasses.field from the lines below it


@dataclass
class CalibrationConfig:
    """The text both models read, and which of its tokens become rows of the regression."""

    data: TextConfig = field(default_factory=TextConfig)
    n_sequences: int = 500
    sequence_length: int = 1024
    packing: str = "document"
    token_stride: int = 4
    held_out_share: float = 0.2
    batch_size: int = 8
    sequential: bool = False
    product_dtype: str = "float64"
    memory_budget_gib: float | None = None
    seed: int = 0


@dataclass
class TransferConfig:
    """How a mapped cache is taken over."""

    hold_back: int = 1
    native_head: int = 1


@dataclass
class DiagnosticsConfig:
    """Reconstruction quality per layer and head."""

    splits: list[str] = field(default_factory=lambda: ["fit", "held_out"])


@dataclass
class WorldItemsConfig:
    """Questions about the small generated world; `n_per_kind: 0` asks none."""

    n_per_kind: int = 0
    kinds: list[str] | None = None
    seed: int = 1


@dataclass
class JsonlItemsConfig:
    """Multiple-choice items from `{context, choices, answer}` files; `paths: []` asks none."""

    paths: list[str] = field(default_factory=list)
    limit: int | None = None
    seed: int = 0


@dataclass
class PerplexityConfig:
    """Prefix perplexity: score a continuation from the prefix's cache; `n_sequences: 0` skips it."""

    data: TextConfig = field(default_factory=TextConfig)
    n_sequences: int = 0
    prefix_tokens: int = 1024
    continuation_tokens: int = 1024
    packing: str = "packed"


@dataclass
class EvaluationConfig:
    """What a transferred cache is judged on, and against what."""

    arms: list[str] = field(default_factory=lambda: list(ARMS))
    world: WorldItemsConfig = field(default_factory=WorldItemsConfig)
    jsonl: JsonlItemsConfig = field(default_factory=JsonlItemsConfig)
    perplexity: PerplexityConfig = field(default_factory=PerplexityConfig)
    batch_size: int = 8
    max_tokens: int | None = None
    generate: bool = True
    max_new_tokens: int = 8
    stop: list[str] = field(default_factory=list)
    bootstrap_samples: int = 1000
    sequential: bool = False
    seed: int = 0


@dataclass
class BenchmarkConfig:
    """Latency of mapping against re-prefill."""

    lengths: list[int] = field(default_factory=lambda: [64, 256, 1024])
    batch_size: int = 1
    repeats: int = 10
    warmup: int = 2
    seed: int = 0


@dataclass
class TrackingConfig:
    """Where metrics go besides the run directory."""

    backend: str = "wandb"
    project: str = "kvmap"
    entity: str | None = None
    group: str | None = None
    finish_timeout_s: float = 30.0


@dataclass
class Config:
    """The whole of it."""

    study: str = "???"
    direction: str = "up"
    stages: list[str] = field(default_factory=lambda: list(STAGES))
    outputs: str = "???"
    threads: int | None = None
    seed: int = 0
    pair: PairConfig = field(default_factory=PairConfig)
    mapper: MapperConfig = field(default_factory=MapperConfig)
    selection: SelectionConfig = field(default_factory=SelectionConfig)
    rope: RopeConfig = field(default_factory=RopeConfig)
    calibration: CalibrationConfig = field(default_factory=CalibrationConfig)
    transfer: TransferConfig = field(default_factory=TransferConfig)
    diagnostics: DiagnosticsConfig = field(default_factory=DiagnosticsConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    benchmark: BenchmarkConfig = field(default_factory=BenchmarkConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)


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
        *_top_k(cfg.mapper.top_k),
        *_texts(cfg),
    ]


def unknown_keys(values: Mapping[str, Any], schema: type, prefix: str = "") -> Iterator[str]:
    """Keys that `+key=value` has added but nothing reads; one line each."""
    known = {item.name for item in dataclasses.fields(schema)}
    nested = get_type_hints(schema)
    for key, value in values.items():
        if key not in known:
            yield f"{prefix}{key}: nothing reads this key; expected one of {', '.join(sorted(known))}"
        elif dataclasses.is_dataclass(nested[key]) and isinstance(value, Mapping):
            yield from unknown_keys(value, nested[key], f"{prefix}{key}.")


def _choices(cfg: Config) -> Iterator[str]:
    single = {
        "direction": (cfg.direction, DIRECTIONS),
        "mapper.kind": (cfg.mapper.kind, MAPPER_KINDS),
        "mapper.support": (cfg.mapper.support, SUPPORTS),
        "mapper.dtype": (cfg.mapper.dtype, DTYPES[1:]),
        "selection.rule": (cfg.selection.rule, SELECTION_RULES),
        "rope.strategy": (cfg.rope.strategy, ROPE_STRATEGIES),
        "calibration.packing": (cfg.calibration.packing, PACKINGS),
        "calibration.product_dtype": (cfg.calibration.product_dtype, ("float64", "float32")),
        "evaluation.perplexity.packing": (cfg.evaluation.perplexity.packing, PACKINGS),
        "tracking.backend": (cfg.tracking.backend, TRACKING_BACKENDS),
        "pair.source.dtype": (cfg.pair.source.dtype, DTYPES),
        "pair.target.dtype": (cfg.pair.target.dtype, DTYPES),
    }
    for key, (value, known) in single.items():
        if value not in known:
            yield _unknown(key, value, known)
    several = {
        "stages": (cfg.stages, STAGES),
        "evaluation.arms": (cfg.evaluation.arms, ARMS),
        "diagnostics.splits": (cfg.diagnostics.splits, ("fit", "held_out")),
    }
    for key, (values, known) in several.items():
        if not values:
            yield f"{key}=[]: expected at least one of {', '.join(known)}"
        yield from (_unknown(key, value, known) for value in values if value not in known)
        if len(set(values)) < len(values):
            yield f"{key}={list(values)}: a name stands twice; name each once"
    for arm in REQUIRED_ARMS:
        if arm not in cfg.evaluation.arms:
            yield f"evaluation.arms={list(cfg.evaluation.arms)}: {arm!r} is always needed; add it"


def _ranges(cfg: Config) -> Iterator[str]:
    calibration, evaluation, benchmark = cfg.calibration, cfg.evaluation, cfg.benchmark
    at_least: dict[str, tuple[float | None, float]] = {
        "mapper.ridge_lambda": (cfg.mapper.ridge_lambda, 0),
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
        "evaluation.batch_size": (evaluation.batch_size, 1),
        "evaluation.max_tokens": (evaluation.max_tokens, 2),
        "evaluation.max_new_tokens": (evaluation.max_new_tokens, 1),
        "evaluation.bootstrap_samples": (evaluation.bootstrap_samples, 1),
        "benchmark.batch_size": (benchmark.batch_size, 1),
        "benchmark.repeats": (benchmark.repeats, 1),
        "benchmark.warmup": (benchmark.warmup, 0),
        "tracking.finish_timeout_s": (cfg.tracking.finish_timeout_s, 0),
        "threads": (cfg.threads, 1),
    }
    for key, (value, low) in at_least.items():
        if value is not None and not (value >= low and math.isfinite(value)):
            yield f"{key}={value}: expected a finite number of at least {low}"
    if not 0 < calibration.held_out_share < 1:
        yield (
            f"calibration.held_out_share={calibration.held_out_share}: expected a share between 0 and 1, "
            "both excluded; 0.2 holds out a fifth of the sequences"
        )
    if not benchmark.lengths:
        yield f"benchmark.lengths={list(benchmark.lengths)}: expected at least one length"
    yield from _nothing_mapped(cfg)
    if cfg.transfer.native_head >= calibration.sequence_length > 1:
        yield (
            f"transfer.native_head={cfg.transfer.native_head}: leaves no calibration rows in sequences of "
            f"calibration.sequence_length={calibration.sequence_length}; lower the one or raise the other"
        )


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


def _names(cfg: Config) -> Iterator[str]:
    world, jsonl = cfg.evaluation.world, cfg.evaluation.jsonl
    yield from (
        _unknown("evaluation.world.kinds", kind, WORLD_KINDS)
        for kind in world.kinds or ()
        if kind not in WORLD_KINDS
    )
    for path in jsonl.paths:
        if not Path(path).expanduser().is_file():
            yield f"evaluation.jsonl.paths: no file {path}; expected a file of JSON lines"
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


def _top_k(value: Any) -> Iterator[str]:
    is_count = isinstance(value, int) and not isinstance(value, bool) and value >= 1
    if value != "all" and not is_count:
        yield f"mapper.top_k={value!r}: expected a number of source layers, 1 or more, or 'all'"


def _texts(cfg: Config) -> Iterator[str]:
    streams = {"calibration.data": cfg.calibration.data}
    if cfg.evaluation.perplexity.n_sequences:
        streams["evaluation.perplexity.data"] = cfg.evaluation.perplexity.data
    for key, text in streams.items():
        if text.kind not in TEXT_KINDS:
            yield _unknown(f"{key}.kind", text.kind, TEXT_KINDS)
        elif text.kind in ("jsonl", "text") and not text.path:
            yield f"{key}.path is not set: {key}.kind={text.kind} reads a file; set {key}.path=<file>"
        elif text.kind == "hf" and not text.name:
            yield f"{key}.name is not set: {key}.kind=hf reads a dataset; set {key}.name=<dataset id>"
    evaluation = cfg.evaluation
    asked = (evaluation.world.n_per_kind, evaluation.jsonl.paths, evaluation.perplexity.n_sequences)
    if "evaluate" in cfg.stages and not any(asked):
        yield (
            "stages names evaluate, but evaluation asks nothing: set evaluation.world.n_per_kind, "
            "evaluation.jsonl.paths or evaluation.perplexity.n_sequences, or leave the stage out"
        )


def _unknown(key: str, value: object, known: Iterable[str]) -> str:
    names = list(known)
    near = difflib.get_close_matches(str(value), names, n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    return f"{key}={value}: expected one of {', '.join(names)}{hint}"


def checkout_root() -> Path | None:
    """The folder that holds `conf/` and `pyproject.toml`, or None in an installed wheel."""
    root = Path(__file__).resolve().parent.parent
    return root if (root / "conf" / "config.yaml").is_file() and (root / "pyproject.toml").is_file() else None


def config_path() -> str:
    """Where Hydra finds the configuration groups: beside the package, else inside the wheel."""
    root = checkout_root()
    return str(root / "conf") if root else "pkg://kvmap.conf"


def outputs_root() -> str:
    """`$KVMAP_OUTPUTS`, else the checkout's `outputs/`, else `~/kvmap-outputs`; never the cwd."""
    root = checkout_root()
    chosen = os.environ.get("KVMAP_OUTPUTS") or (root / "outputs" if root else Path.home() / "kvmap-outputs")
    return str(Path(chosen).expanduser().resolve())


@cache
def start_token() -> str:
    """Six hexadecimal digits, one draw per process: two starts in one second get two directories."""
    return secrets.token_hex(3)


def register() -> None:
    """Put the schema and the resolvers `${kvmap.outputs:}` and `${kvmap.token:}` where Hydra looks."""
    from hydra.core.config_store import ConfigStore
    from omegaconf import OmegaConf

    ConfigStore.instance().store(name="kvmap_schema", node=Config)
    OmegaConf.register_new_resolver("kvmap.outputs", outputs_root, replace=True)
    OmegaConf.register_new_resolver("kvmap.token", start_token, replace=True)
