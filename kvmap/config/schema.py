"""The schema of every configuration group: settings, their types and defaults, and the names they take."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

STAGES = (
    *("plan", "preflight", "calibrate", "fit", "diagnose", "evaluate", "benchmark"),
    *("fleet", "economics", "report"),
)
DEFAULT_STAGES = ("plan", "calibrate", "fit", "diagnose", "evaluate", "benchmark", "report")
DIRECTIONS = ("up", "down")
DEVICE_MAPS = ("auto", "balanced", "balanced_low_0", "sequential", "disk")
DTYPES = ("auto", "float32", "bfloat16", "float16")
MAPPER_KINDS = ("linear", "mlp", "identity", "bias_only", "raw", "random")
SUPPORTS = ("full_head", "head_local", "banded")
REGRESSORS = ("own_kind", "both_kinds")
PENALTIES = ("absolute", "relative")
ROW_WEIGHTS = ("none", "sensitivity")
MLP_FORMS = ("full", "values_only", "residual", "residual_values")
COMPRESSIONS = ("none", "bfloat16", "fp8", "low_rank", "low_rank_bfloat16", "low_rank_fp8")
TUNING_SCOPES = ("pair", "head")
MOMENTS_MODES = ("auto", "full", "head_local", "selected")
OUTLIER_POLICIES = ("keep", "drop", "separate")
SELECTION_RULES = ("r2", "forward", "cosine", "proportional", "all")
ROPE_STRATEGIES = ("strip", "coupled", "no_rerotate")
PLAN_DEVICES = ("auto", "measured", "cpu", "b200", "h200", "h100", "a100", "l40s", "l4", "a10", "rtx4090")
ALIGNMENTS = ("refuse", "spans")
ALIGNMENT_RULES = ("last", "ended", "mean")
TEXT_KINDS = ("world", "jsonl", "text", "hf")
PACKINGS = ("document", "packed")
ARMS = ("target", "source", "mapped", "bias_only", "raw", "random", "own_keys", "own_values", "no_context")
DEFAULT_ARMS = ("target", "source", "mapped", "bias_only", "raw", "random", "no_context")
REQUIRED_ARMS = ("target", "mapped", "no_context")
DIAGNOSTIC_TEXTS = ("held_out", "evaluation", "questions")
PREFLIGHT_FAMILIES = ("own", "any")
PREFLIGHT_MAPPERS = ("head_local", "native_features", "native_features_2", "linear", "banded")
RECOMPUTE_RULES = ("attention", "map_error", "random")
WORLD_KINDS = ("where", "colour", "holder", "two_hop", "moved", "count")
NEEDLE_KINDS = ("where", "colour", "holder")
CONVERSATION_MODES = ("every_turn", "at_turn")
FEEDS = ("generated", "gold")
CARRIES = ("everything", "artifacts", "fresh")
MAPPING_PATHS = ("auto", "reference", "batched", "triton", "per_head", "per_head_stripped")
MAP_CACHE_PATHS = ("auto", "reference", "batched", "triton")
MOMENTS_PATHS = ("auto", "torch", "triton")
BEYOND_KNOWN = ("refuse", "extend")
SENT_CACHES = ("source", "mapped")
TRACKING_BACKENDS = ("wandb", "wandb_online", "tensorboard", "none")


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
    device_map: Any = None
    max_memory: Any = None
    offload_folder: str | None = None
    attn_implementation: str | None = "sdpa"
    geometry: GeometryFacts = field(default_factory=GeometryFacts)


@dataclass
class PairConfig:
    """Source and target, as read with `direction=up`, and what becomes of two tokenizers that differ."""

    name: str = "???"
    source: ModelConfig = field(default_factory=ModelConfig)
    target: ModelConfig = field(default_factory=ModelConfig)
    alignment: str = "refuse"
    alignment_rule: str = "last"


@dataclass
class TuningConfig:
    """What `auto` tries, judged by held-out R²."""

    per: str = "pair"
    top_k: list[int] | None = None
    ridge_lambda: list[float] = field(default_factory=lambda: [1e-4, 1e-2, 1.0, 1e2, 1e3, 1e4])
    cross_ratio: list[float] = field(default_factory=lambda: [1.0, 10.0, 100.0, 1000.0, math.inf])
    native_ratio: list[float] = field(default_factory=lambda: [0.1, 1.0, 10.0])


@dataclass
class MLPConfig:
    """The networks of `mapper.kind=mlp`."""

    form: str = "full"
    support: str | None = None
    regressors: str | None = None
    top_k: int | None = None
    hidden: list[int] = field(default_factory=lambda: [1024, 1024])
    epochs: int = 20
    batch_size: int = 4096
    learning_rate: float = 1e-3
    weight_decay: float = 0.0
    patience: int | None = None
    standardise: bool = False
    compute_dtype: str | None = None


@dataclass
class CompressionConfig:
    """How the fitted weights are stored, and what that may cost."""

    method: str = "none"
    tolerance: float = 0.01
    max_r2_loss: float = 0.01
    max_kl_nats: float = 0.02
    n_sequences: int = 8


@dataclass
class MapperConfig:
    """The map from source cache to target cache; `top_k` and `ridge_lambda` exist for every kind."""

    kind: str = "linear"
    support: str = "full_head"
    regressors: str = "own_kind"
    native_layers: int = 0
    top_k: Any = "all"
    ridge_lambda: Any = 0.01
    lambda_cross: Any = None
    lambda_native: Any = None
    penalty: str = "absolute"
    row_weights: str = "none"
    tuning: TuningConfig = field(default_factory=TuningConfig)
    mlp: MLPConfig = field(default_factory=MLPConfig)
    compression: CompressionConfig = field(default_factory=CompressionConfig)
    dtype: str = "float32"
    allow_few_rows: bool = False
    seed: int = 0


@dataclass
class SelectionConfig:
    """How the `top_k` source layers of a target layer are chosen, for keys and values alike or apart."""

    rule: str = "r2"
    apart: bool = False


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
class OutliersConfig:
    """Tokens whose keys or values lie far from all others', the native head's aside."""

    policy: str = "keep"
    threshold: float = 6.0
    share: float = 0.5


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
    max_spill_gib: float | None = None
    layerwise: Any = "auto"
    product_dtype: str = "float64"
    mode: str = "auto"
    regressors: str = "own_kind"
    native_layers: int = 0
    native_head: int | None = None
    memory_budget_gib: float | None = None
    device: str = "auto"
    keep_captures: Any = "auto"
    shards: int = 1
    worker: int | None = None
    sensitivity_boundaries: int = 32
    outliers: OutliersConfig = field(default_factory=OutliersConfig)
    seed: int = 0


@dataclass
class TransferConfig:
    """How a mapped cache is taken over."""

    hold_back: int = 1
    native_head: int = 1
    recompute_share: float = 0.0
    recompute_rule: str = "attention"
    recompute_seed: int = 0


@dataclass
class DiagnosticsConfig:
    """Reconstruction quality per layer and head, and what the target's attention makes of it on some texts.

    `texts: []` reads none; a text that the run does not have is left out.
    """

    splits: list[str] = field(default_factory=lambda: ["fit", "held_out"])
    conditioning: bool = True
    texts: list[str] = field(default_factory=lambda: ["evaluation", "questions"])
    n_sequences: int = 8
    rare_share: float = 0.05


@dataclass
class WorldItemsConfig:
    """Questions about the small generated world; `n_per_kind: 0` asks none."""

    n_per_kind: int = 0
    kinds: list[str] | None = None
    seed: int = 1


@dataclass
class JsonlItemsConfig:
    """Multiple-choice items from `{context, choices, answer}` files; `paths: []` asks none."""

    folder: str | None = None
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
class LongContextConfig:
    """Beyond the calibration length: recall by length and depth, perplexity by length, and growth.

    `n_needles: 0` asks for no recall; `n_sequences: 0` for neither perplexity nor growth,
    `continuation_tokens: 0` and `growth_tokens: 0` for not that one.
    """

    multiples: list[float] = field(default_factory=lambda: [1.0, 2.0, 4.0, 8.0])
    depths: list[float] = field(default_factory=lambda: [0.0, 0.25, 0.5, 0.75, 1.0])
    n_needles: int = 0
    kinds: list[str] = field(default_factory=lambda: list(NEEDLE_KINDS))
    data: TextConfig = field(default_factory=TextConfig)
    packing: str = "packed"
    n_sequences: int = 0
    continuation_tokens: int = 64
    growth_multiple: float = 1.0
    growth_tokens: int = 256
    growth_windows: int = 8
    seed: int = 0


@dataclass
class ConversationConfig:
    """Questions about one story in turn; `limit: 0` holds none, `path: null` takes the shipped world's."""

    path: str | None = None
    limit: int | None = 0
    seed: int = 0
    mode: str = "every_turn"
    turn: int = 1
    carry: str = "everything"
    re_prefill: bool = False
    feed: str = "generated"
    max_turns: int | None = None
    max_new_tokens: int = 24


@dataclass
class RelayConfig:
    """The sequences of `perplexity` handed back and forth; `hops: 0` skips it."""

    hops: int = 0
    reverse_mapper: str | None = None


@dataclass
class CostConfig:
    """What handing a context over costs, in FLOPs and in time; `lengths: []` asks nothing."""

    lengths: list[int] = field(default_factory=list)
    batch_size: int = 1
    repeats: int = 10
    warmup: int = 2
    seed: int = 0


@dataclass
class TaskConfig:
    """One entry of `evaluation.tasks`; a plain name stands for an entry of that name and nothing else."""

    name: str = "???"
    label: str | None = None
    num_fewshot: int | None = None
    limit: int | None = None
    metric: str | None = None
    generation: dict[str, Any] = field(default_factory=dict)


@dataclass
class ChatConfig:
    """Whether prompts of `evaluation.tasks` are put as conversations, and how."""

    apply_template: bool = False
    system_instruction: str | None = None
    fewshot_as_multiturn: bool = True


@dataclass
class EvaluationConfig:
    """What a transferred cache is judged on, and against what."""

    arms: list[str] = field(default_factory=lambda: list(DEFAULT_ARMS))
    world: WorldItemsConfig = field(default_factory=WorldItemsConfig)
    jsonl: JsonlItemsConfig = field(default_factory=JsonlItemsConfig)
    perplexity: PerplexityConfig = field(default_factory=PerplexityConfig)
    cost: CostConfig = field(default_factory=CostConfig)
    conversation: ConversationConfig = field(default_factory=ConversationConfig)
    relay: RelayConfig = field(default_factory=RelayConfig)
    long_context: LongContextConfig = field(default_factory=LongContextConfig)
    tasks: list[Any] = field(default_factory=list)  # of names, or of what TaskConfig holds
    include_path: str | None = None
    chat: ChatConfig = field(default_factory=ChatConfig)
    fewshot_seed: int = 1234
    rolling_context: int = 1
    batch_size: int = 8
    max_tokens: int | None = None
    generate: bool = True
    max_new_tokens: int = 8
    stop: list[str] = field(default_factory=list)
    bootstrap_samples: int = 1000
    sequential: bool = False
    reuse_answers: bool = True
    seed: int = 0


@dataclass
class BenchmarkConfig:
    """Latency of mapping against re-prefill; `paths: []` compares none."""

    lengths: list[int] = field(default_factory=lambda: [64, 256, 1024])
    batch_size: int = 1
    repeats: int = 10
    warmup: int = 2
    buffers: int = 3
    paths: list[str] = field(default_factory=lambda: ["auto"])
    link_gbit_per_s: float = 100.0
    memory: bool = True
    random_weights: bool = False
    random_mapper: bool = False
    max_layers: int | None = None
    seed: int = 0


@dataclass
class PlanConfig:
    """What stage `plan` plans for; no result depends on it."""

    device: str = "auto"
    device_memory_gib: float | None = None
    host_memory_gib: float | None = None
    lengths: list[int] = field(default_factory=lambda: [1024, 8192, 32768])


@dataclass
class PromptsConfig:
    """Prompts as the pair will be given them, without answers; none named: none are read."""

    paths: list[str] = field(default_factory=list)
    field: str = "context"
    n: int = 32


@dataclass
class PreflightConfig:
    """What is asked of a pair before it is calibrated in full, and which recorded cases answer it."""

    n_sequences: int = 32
    mappers: list[str] = field(default_factory=lambda: ["head_local", "banded"])
    min_retention: float = 0.9
    confidence: float = 0.8
    min_pairs: int = 9
    reach: float = 0.5
    family: str = "own"
    evidence: list[str] = field(default_factory=list)
    prompts: PromptsConfig = field(default_factory=PromptsConfig)


@dataclass
class ContextsConfig:
    """How long contexts are, by one of `lengths`, `median`, `path`; none: every known length, as often."""

    lengths: list[float] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    median: float | None = None
    sigma: float = 1.0
    path: str | None = None


@dataclass
class PricesConfig:
    """Of a second of one GPU of each model, and of what is sent and cached; all 1: GPU seconds."""

    source: float = 1.0
    target: float = 1.0
    source_gpus: int = 1
    target_gpus: int = 1
    gbyte: float = 0.0
    cached_discount: float = 0.9


@dataclass
class AccuracyConfig:
    """Shares of right answers; null: those that this run has evaluated, else none."""

    source: float | None = None
    target: float | None = None
    mapped: float | None = None
    source_kept: float | None = None


@dataclass
class SurfaceConfig:
    """Where time and cost are computed; `lengths: []` takes the known ones."""

    lengths: list[float] = field(default_factory=list)
    gbit_per_s: list[float] = field(default_factory=lambda: [0.1, 1.0, 10.0, 25.0, 50.0, 100.0, 400.0])
    escalation_rates: list[float] = field(
        default_factory=lambda: [0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0]
    )
    price_ratios: list[float] = field(default_factory=lambda: [0.5, 1.0, 2.0, 4.0, 8.0, 16.0])


@dataclass
class EconomicsConfig:
    """What stage `economics` assumes.

    `latency: null` takes this run's benchmark, and the planner's times where `stages` names none.
    """

    latency: str | None = None
    beyond: str = "refuse"
    device: str = "auto"
    lengths: list[int] = field(default_factory=list)
    source_token_ms: float | None = None
    target_token_ms: float | None = None
    contexts: ContextsConfig = field(default_factory=ContextsConfig)
    escalation_rate: float = 0.2
    output_tokens: int = 256
    judged_after: int = 1
    decode_batch: int | None = None
    gbit_per_s: float | None = 100.0
    link_ms: float = 0.0
    sent: str = "source"
    cached_share: float = 0.5
    prices: PricesConfig = field(default_factory=PricesConfig)
    accuracy: AccuracyConfig = field(default_factory=AccuracyConfig)
    surface: SurfaceConfig = field(default_factory=SurfaceConfig)


@dataclass
class TrackingConfig:
    """Where metrics go besides the run directory."""

    backend: str = "wandb"
    project: str = "kvmap"
    entity: str | None = None
    group: str | None = None
    finish_timeout_s: float = 30.0


@dataclass
class KernelsConfig:
    """How operations are carried out; no result depends on it."""

    map_cache: str = "auto"
    chunk_tokens: int = 2048
    moments: str = "auto"


@dataclass
class SweepConfig:
    """What a job of a sweep does about earlier runs of its point, and about code that changed meanwhile."""

    skip_done: bool = True
    allow_changed_code: bool = False


@dataclass
class Config:
    """The whole of it."""

    study: str = "???"
    direction: str = "up"
    stages: list[str] = field(default_factory=lambda: list(DEFAULT_STAGES))
    outputs: str = "???"
    threads: int | None = None
    seed: int = 0
    pair: PairConfig = field(default_factory=PairConfig)
    fleet: list[Any] = field(default_factory=list)  # of ids, or of what ModelConfig holds
    mapper: MapperConfig = field(default_factory=MapperConfig)
    selection: SelectionConfig = field(default_factory=SelectionConfig)
    rope: RopeConfig = field(default_factory=RopeConfig)
    calibration: CalibrationConfig = field(default_factory=CalibrationConfig)
    transfer: TransferConfig = field(default_factory=TransferConfig)
    diagnostics: DiagnosticsConfig = field(default_factory=DiagnosticsConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    benchmark: BenchmarkConfig = field(default_factory=BenchmarkConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    sweep: SweepConfig = field(default_factory=SweepConfig)
    kernels: KernelsConfig = field(default_factory=KernelsConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)
    preflight: PreflightConfig = field(default_factory=PreflightConfig)
    economics: EconomicsConfig = field(default_factory=EconomicsConfig)
