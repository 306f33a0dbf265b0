"""The one place that judges a configuration: every mistake at once, each with key, value and remedy."""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, get_type_hints

from kvmap.config.schema import (
    ARMS,
    COMPRESSIONS,
    CONVERSATION_MODES,
    DIRECTIONS,
    DTYPES,
    FEEDS,
    MAPPER_KINDS,
    MLP_FORMS,
    MOMENTS_MODES,
    NEEDLE_KINDS,
    OUTLIER_POLICIES,
    PACKINGS,
    PENALTIES,
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
    TaskConfig,
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
        *_mapper(cfg),
        *_calibration(cfg),
        *_texts(cfg),
        *_hand_back(cfg),
        *_conversation(cfg),
        *_relay(cfg),
        *_long_context(cfg),
        *_long_context_lists(cfg),
        *_tasks(cfg),
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
    calibration, evaluation, benchmark, mapper = cfg.calibration, cfg.evaluation, cfg.benchmark, cfg.mapper
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
        "calibration.n_shards": (calibration.n_shards, 1),
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
    native_head = cfg.transfer.native_head if calibration.native_head is None else calibration.native_head
    if native_head >= calibration.sequence_length > 1:
        yield (
            f"transfer.native_head={native_head} (or calibration.native_head): leaves no calibration rows in "
            f"sequences of "
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


def _hand_back(cfg: Config) -> Iterator[str]:
    """What the target recomputes of a mapped cache, and where the cost of handing over is measured."""
    transfer, cost = cfg.transfer, cfg.evaluation.cost
    if not 0 <= transfer.recompute_share <= 1:
        yield f"transfer.recompute_share={transfer.recompute_share}: expected a share of tokens, 0 to 1"
    if transfer.recompute_rule not in RECOMPUTE_RULES:
        yield _unknown("transfer.recompute_rule", transfer.recompute_rule, RECOMPUTE_RULES)
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
        _unknown("evaluation.world.kinds", kind, WORLD_KINDS)
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


def _mapper(cfg: Config) -> Iterator[str]:
    """Settings of the map that `auto`, bands, networks and row weights make depend on each other."""
    mapper, tuning = cfg.mapper, cfg.mapper.tuning
    top_k = mapper.top_k
    if top_k not in ("all", "auto") and not (_is_integer(top_k) and top_k >= 1):
        yield f"mapper.top_k={top_k!r}: expected a number of source layers, 1 or more, 'all' or 'auto'"
    for key in ("ridge_lambda", "lambda_cross", "lambda_native"):
        value = getattr(mapper, key)
        none = key != "ridge_lambda"
        if value != "auto" and not (none and value is None) and not _is_penalty(value, infinite=none):
            more = ", null (as mapper.ridge_lambda)" if none else ""
            yield f"mapper.{key}={value}: expected a finite number of at least 0{more} or 'auto'"
    if mapper.lambda_cross is not None and mapper.support != "banded":
        yield (
            f"mapper.lambda_cross={mapper.lambda_cross}: only mapper.support=banded penalises the other "
            f"heads' features apart; take mapper=banded, or leave it null"
        )
    if mapper.lambda_native is not None and not mapper.native_layers:
        yield (
            f"mapper.lambda_native={mapper.lambda_native}: there are no native features to penalise; set "
            f"mapper.native_layers, or leave it null"
        )
    yield from _grids(cfg)
    if mapper.kind == "mlp" and mapper.row_weights != "none":
        yield (
            f"mapper.row_weights={mapper.row_weights}: the networks of mapper.kind=mlp are trained on rows "
            f"that count alike; take a linear mapper, or none"
        )
    if mapper.kind == "mlp" and mapper.compression.method != "none":
        yield (
            f"mapper.compression.method={mapper.compression.method}: only linear mappers are compressed; "
            f"store an mlp in another dtype (mapper.dtype=bfloat16) instead"
        )
    if any(width < 1 for width in mapper.mlp.hidden) or not mapper.mlp.hidden:
        yield f"mapper.mlp.hidden={list(mapper.mlp.hidden)}: expected one or more widths of at least 1"
    yield from _network_top_k(cfg)
    if not 0 < mapper.mlp.learning_rate < math.inf:
        yield f"mapper.mlp.learning_rate={mapper.mlp.learning_rate}: expected a finite number above 0"
    if tuning.top_k is not None and (not tuning.top_k or any(k < 1 for k in tuning.top_k)):
        yield f"mapper.tuning.top_k={list(tuning.top_k)}: expected numbers of layers, 1 or more, or null"


def _network_top_k(cfg: Config) -> Iterator[str]:
    """The networks read of the layers that were ranked, which are as many as the linear map may read."""
    own, ranked = cfg.mapper.mlp.top_k, cfg.mapper.top_k
    if own is None:
        return
    if own < 1:
        yield f"mapper.mlp.top_k={own}: expected 1 or more source layers, or null (as mapper.top_k)"
    elif _is_integer(ranked) and own > ranked:
        yield (
            f"mapper.mlp.top_k={own}: only mapper.top_k={ranked} source layers are ranked for each; "
            f"expected at most that, or raise mapper.top_k"
        )


def _grids(cfg: Config) -> Iterator[str]:
    """What `auto` tries must be numbers that ridge can take."""
    tuning = cfg.mapper.tuning
    for key, infinite, above in (
        ("ridge_lambda", False, False),
        ("cross_ratio", True, True),
        ("native_ratio", True, True),
    ):
        values = getattr(tuning, key)
        right = [_is_penalty(value, infinite=infinite) and (value > 0 or not above) for value in values]
        if not values or not all(right):
            least = "above 0" if above else "of at least 0"
            yield f"mapper.tuning.{key}={list(values)}: expected one or more numbers {least}"


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
    shard, n_shards = cfg.calibration.shard, cfg.calibration.n_shards
    if shard is not None:
        number, _, total = shard.partition("/")
        if not (number.isdigit() and total.isdigit() and int(number) < int(total)):
            yield f"calibration.shard={shard}: expected i/n with 0 <= i < n, such as 0/4"
        if set(cfg.stages) - {"plan", "calibrate"}:
            yield (
                f"calibration.shard={shard}: a part of the moments can be calibrated and nothing else; set "
                f"stages=[calibrate], then add the parts with stages=[merge,...] calibration.n_shards=n"
            )
    if {"calibrate", "merge"} <= set(cfg.stages):
        yield (
            f"stages={list(cfg.stages)}: calibrate reads the whole text, and merge adds what shards have "
            "read of it; name one of them"
        )
    if ("merge" in cfg.stages) != (n_shards is not None):
        yield (
            f"calibration.n_shards={n_shards}: the stage merge adds the parts of so many shards; name both "
            f"or neither"
        )


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_penalty(value: Any, *, infinite: bool) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and value >= 0 and (infinite or math.isfinite(value))


def _texts(cfg: Config) -> Iterator[str]:
    streams = {"calibration.data": cfg.calibration.data}
    if cfg.evaluation.perplexity.n_sequences:
        streams["evaluation.perplexity.data"] = cfg.evaluation.perplexity.data
    if cfg.evaluation.long_context.n_sequences:
        streams["evaluation.long_context.data"] = cfg.evaluation.long_context.data
    for key, text in streams.items():
        if text.kind not in TEXT_KINDS:
            yield _unknown(f"{key}.kind", text.kind, TEXT_KINDS)
        elif text.kind in ("jsonl", "text") and not text.path:
            yield f"{key}.path is not set: {key}.kind={text.kind} reads a file; set {key}.path=<file>"
        elif text.kind == "hf" and not text.name:
            yield f"{key}.name is not set: {key}.kind=hf reads a dataset; set {key}.name=<dataset id>"
    evaluation = cfg.evaluation
    yield from _perplexity_room(cfg)
    asked = (
        evaluation.world.n_per_kind,
        evaluation.jsonl.paths,
        evaluation.jsonl.folder is not None,
        evaluation.perplexity.n_sequences,
        evaluation.conversation.limit != 0,
        evaluation.tasks,
        evaluation.cost.lengths,
    )
    long_context_asked = evaluation.long_context.n_needles or evaluation.long_context.n_sequences
    if "evaluate" in cfg.stages and not any(asked) and not long_context_asked:
        yield (
            "stages names evaluate, but evaluation asks nothing: set evaluation.world.n_per_kind, "
            "evaluation.jsonl.paths, evaluation.tasks, evaluation.perplexity.n_sequences, "
            "evaluation.conversation.limit or evaluation.cost.lengths, take evaluation=long, or leave the "
            "stage out"
        )


def _perplexity_room(cfg: Config) -> Iterator[str]:
    """Sequences of perplexity and relay are not cut, so they have to fit what a context may be at most."""
    evaluation, perplexity = cfg.evaluation, cfg.evaluation.perplexity
    length = perplexity.prefix_tokens + perplexity.continuation_tokens
    asked = "evaluate" in cfg.stages and perplexity.n_sequences > 0
    if asked and evaluation.max_tokens is not None and length > evaluation.max_tokens:
        yield (
            f"evaluation.max_tokens={evaluation.max_tokens}: evaluation.perplexity.prefix_tokens + "
            f"continuation_tokens = {length} tokens do not fit, and its sequences are not cut; raise the "
            "one, lower the others, or set evaluation.perplexity.n_sequences=0"
        )


def _tasks(cfg: Config) -> Iterator[str]:
    """The entries of `evaluation.tasks`, and the folders that questions come from."""
    evaluation, titles = cfg.evaluation, list[str]()
    for place, entry in enumerate(evaluation.tasks):
        key = f"evaluation.tasks[{place}]"
        settings: Any = {"name": entry} if isinstance(entry, str) else entry
        if not isinstance(settings, Mapping) or not isinstance(settings.get("name"), str):
            yield f"{key}={entry!r}: expected a task's name, or settings with name=<task>"
            continue
        yield from unknown_keys(settings, TaskConfig, f"{key}.")
        for name, low in (("num_fewshot", 0), ("limit", 1)):
            value = settings.get(name)
            if value is not None and not (_is_integer(value) and value >= low):
                yield f"{key}.{name}={value!r}: expected a whole number of at least {low}, or null"
        title = str(settings.get("label") or Path(settings["name"]).stem)
        if not title or "/" in title:
            yield f"{key}.label={title!r}: expected a name without slashes, under which results are counted"
        titles.append(title)
    for title in dict.fromkeys(titles):
        if titles.count(title) > 1:
            yield f"evaluation.tasks: {title!r} stands {titles.count(title)} times; give each its own label"
    if evaluation.include_path is not None and not Path(evaluation.include_path).expanduser().is_dir():
        yield f"evaluation.include_path={evaluation.include_path}: no such folder; expected one of YAML tasks"
    folder = evaluation.jsonl.folder
    if folder == "":
        yield "evaluation.jsonl.folder is not set: set evaluation.jsonl.folder=<folder of *.jsonl files>"
    elif folder is not None and not Path(folder).expanduser().is_dir():
        yield f"evaluation.jsonl.folder={folder}: no such folder; expected one of *.jsonl files"


def _long_context_lists(cfg: Config) -> Iterator[str]:
    """Which lengths, depths and kinds of facts `evaluation.long_context` asks about."""
    long, key = cfg.evaluation.long_context, "evaluation.long_context"
    if not long.multiples or not all(0 < multiple < math.inf for multiple in long.multiples):
        yield f"{key}.multiples={list(long.multiples)}: expected one or more finite numbers above 0"
    if not long.depths or not all(0 <= depth <= 1 for depth in long.depths):
        yield f"{key}.depths={list(long.depths)}: expected one or more shares between 0 and 1"
    for name in ("multiples", "depths", "kinds"):
        if len(set(getattr(long, name))) < len(getattr(long, name)):
            yield f"{key}.{name}={list(getattr(long, name))}: a value stands twice; name each once"
    if not long.kinds:
        yield f"{key}.kinds=[]: expected at least one of {', '.join(NEEDLE_KINDS)}"
    for kind in long.kinds:
        if kind not in NEEDLE_KINDS:
            yield _unknown(f"{key}.kinds", kind, NEEDLE_KINDS)


def _long_context(cfg: Config) -> Iterator[str]:
    """How much `evaluation.long_context` asks."""
    long, key = cfg.evaluation.long_context, "evaluation.long_context"
    for name in ("n_needles", "n_sequences", "growth_tokens"):
        if getattr(long, name) < 0:
            yield f"{key}.{name}={getattr(long, name)}: expected 0, which is off, or more"
    if long.continuation_tokens < 2 and long.continuation_tokens != 0:
        yield (
            f"{key}.continuation_tokens={long.continuation_tokens}: expected 0, which is off, or at least 2, "
            "of which the second is the first that is scored"
        )
    if long.packing not in PACKINGS:
        yield _unknown(f"{key}.packing", long.packing, PACKINGS)
    if not 0 < long.growth_multiple < math.inf:
        yield f"{key}.growth_multiple={long.growth_multiple}: expected a finite number above 0"
    if long.growth_windows < 1 or 0 < long.growth_tokens < long.growth_windows:
        yield (
            f"{key}.growth_windows={long.growth_windows}: expected at least 1, and no more than "
            f"{key}.growth_tokens={long.growth_tokens}"
        )


def _conversation(cfg: Config) -> Iterator[str]:
    """What `evaluation.conversation` asks for."""
    talk, key = cfg.evaluation.conversation, "evaluation.conversation"
    for name, known in (("mode", CONVERSATION_MODES), ("feed", FEEDS)):
        if getattr(talk, name) not in known:
            yield _unknown(f"{key}.{name}", getattr(talk, name), known)
    for name, low in (("limit", 0), ("turn", 1), ("max_turns", 1), ("max_new_tokens", 1)):
        value = getattr(talk, name)
        if value is not None and value < low:
            yield f"{key}.{name}={value}: expected at least {low}"
    if talk.path is not None and not Path(talk.path).expanduser().is_file():
        yield f"{key}.path={talk.path}: no such file; expected one of CoQA's, or of JSON lines"
    if talk.path is not None and talk.limit == 0:
        yield f"{key}.limit=0: no conversation of {key}.path would be held; give a number, or null for all"
    if talk.path is None and talk.limit is None:
        yield f"{key}.limit=null: the shipped world has no last conversation; give a number, or {key}.path"
    if talk.mode == "at_turn" and talk.max_turns is not None and talk.turn > talk.max_turns:
        yield f"{key}.turn={talk.turn}: comes after the last turn, {key}.max_turns={talk.max_turns}; lower it"
    if talk.limit != 0 and cfg.evaluation.sequential and "evaluate" in cfg.stages:
        yield (
            f"evaluation.sequential=true: in a conversation ({key}.limit={talk.limit}) the two models take "
            f"turns, and both are held in memory; set it to false, or {key}.limit=0"
        )


def _relay(cfg: Config) -> Iterator[str]:
    """What `evaluation.relay` asks for."""
    relay, key = cfg.evaluation.relay, "evaluation.relay"
    if relay.hops < 0:
        yield f"{key}.hops={relay.hops}: expected at least 0, which skips the relay"
    if relay.reverse_mapper is not None and not Path(relay.reverse_mapper).expanduser().is_dir():
        yield f"{key}.reverse_mapper={relay.reverse_mapper}: no such folder; expected a mapper's artifact"
    if relay.hops < 1 or "evaluate" not in cfg.stages:
        return
    if not cfg.evaluation.perplexity.n_sequences:
        yield f"{key}.hops={relay.hops}: relays the sequences of perplexity; set its n_sequences"
    if cfg.rope.strategy == "no_rerotate":
        yield f"{key}.hops={relay.hops}: a cache of rope.strategy=no_rerotate cannot be handed on; take strip"
    if cfg.evaluation.sequential or cfg.calibration.sequential:
        yield (
            f"{key}.hops={relay.hops}: the two models take turns, and both are held in memory; set "
            f"evaluation.sequential and calibration.sequential to false, or {key}.hops=0"
        )


def _unknown(key: str, value: object, known: Iterable[str]) -> str:
    names = list(known)
    near = difflib.get_close_matches(str(value), names, n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    return f"{key}={value}: expected one of {', '.join(names)}{hint}"
