"""What an analysis of costs and times cannot assume."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

from kvmap.config.judging import unknown_name
from kvmap.config.schema import BEYOND_KNOWN, PLAN_DEVICES, SENT_CACHES, Config, EconomicsConfig


def economics_mistakes(cfg: Config) -> Iterator[str]:
    """Every mistake in `economics`, as one line each."""
    economics = cfg.economics
    for key, value, known in (
        ("beyond", economics.beyond, BEYOND_KNOWN),
        ("device", economics.device, PLAN_DEVICES),
        ("sent", economics.sent, SENT_CACHES),
    ):
        if value not in known:
            yield unknown_name(f"economics.{key}", value, known)
    yield from _ranges(economics)
    if economics.judged_after > economics.output_tokens:
        yield (
            f"economics.judged_after={economics.judged_after}: an answer has economics.output_tokens="
            f"{economics.output_tokens}; lower the one or raise the other"
        )
    if economics.latency is not None and not Path(economics.latency).expanduser().exists():
        yield (
            f"economics.latency={economics.latency}: no such file; expected the table latency.csv of stage "
            f"benchmark, or a run's directory"
        )
    yield from _contexts(economics)
    yield from _surface(economics)


def _ranges(economics: EconomicsConfig) -> Iterator[str]:
    prices, accuracy = economics.prices, economics.accuracy
    above_0 = math.ulp(0.0)
    ranges: dict[str, tuple[float | None, float, float]] = {
        "escalation_rate": (economics.escalation_rate, 0, 1),
        "output_tokens": (economics.output_tokens, 1, math.inf),
        "judged_after": (economics.judged_after, 1, math.inf),
        "decode_batch": (economics.decode_batch, 1, math.inf),
        "gbit_per_s": (economics.gbit_per_s, 1e-6, math.inf),
        "link_ms": (economics.link_ms, 0, math.inf),
        "cached_share": (economics.cached_share, 0, 1),
        "source_token_ms": (economics.source_token_ms, above_0, math.inf),
        "target_token_ms": (economics.target_token_ms, above_0, math.inf),
        "prices.source": (prices.source, 0, math.inf),
        "prices.target": (prices.target, 0, math.inf),
        "prices.source_gpus": (prices.source_gpus, 1, math.inf),
        "prices.target_gpus": (prices.target_gpus, 1, math.inf),
        "prices.gbyte": (prices.gbyte, 0, math.inf),
        "prices.cached_discount": (prices.cached_discount, 0, 1),
        "contexts.median": (economics.contexts.median, 1, math.inf),
        "contexts.sigma": (economics.contexts.sigma, 0, 10),
    }
    for name in ("source", "target", "mapped", "source_kept"):
        ranges[f"accuracy.{name}"] = (getattr(accuracy, name), 0, 1)
    for key, (value, low, high) in ranges.items():
        if value is None or (low <= value <= high and math.isfinite(value)):
            continue
        most = "" if math.isinf(high) else f" and at most {high:g}"
        least = "above 0" if low == above_0 else f"of at least {low:g}"
        yield f"economics.{key}={value}: expected a finite number {least}{most}"


def _contexts(economics: EconomicsConfig) -> Iterator[str]:
    """How long contexts are is said once, and each length has its weight."""
    contexts = economics.contexts
    named = {
        "lengths": bool(contexts.lengths),
        "median": contexts.median is not None,
        "path": contexts.path is not None,
    }
    if sum(named.values()) > 1:
        given = ", ".join(f"economics.contexts.{name}" for name, there in named.items() if there)
        yield f"{given}: each says how long contexts are; set one of them"
    if any(not 0 < length < math.inf for length in [*contexts.lengths, *economics.lengths]):
        yield (
            f"economics.contexts.lengths={list(contexts.lengths)}, economics.lengths="
            f"{list(economics.lengths)}: expected numbers of tokens above 0"
        )
    weights = contexts.weights
    if weights and len(weights) != len(contexts.lengths):
        yield (
            f"economics.contexts.weights={list(weights)}: expected one for each economics.contexts.lengths="
            f"{list(contexts.lengths)}, or none"
        )
    if weights and not (all(0 <= weight < math.inf for weight in weights) and sum(weights) > 0):
        yield f"economics.contexts.weights={list(weights)}: expected numbers from 0 on, not all 0"
    if contexts.path is not None and not Path(contexts.path).expanduser().is_file():
        yield f"economics.contexts.path={contexts.path}: no such file; expected a JSONL or CSV of lengths"


def _surface(economics: EconomicsConfig) -> Iterator[str]:
    surface = economics.surface
    for key, values, low, high, may_be_empty in (
        ("lengths", surface.lengths, 1, math.inf, True),
        ("gbit_per_s", surface.gbit_per_s, 1e-6, math.inf, False),
        ("escalation_rates", surface.escalation_rates, 0, 1, False),
        ("price_ratios", surface.price_ratios, 1e-9, math.inf, False),
    ):
        wrong = any(not (low <= value <= high and math.isfinite(value)) for value in values)
        if wrong or not (values or may_be_empty):
            most = "" if math.isinf(high) else f" and at most {high:g}"
            least = "" if may_be_empty else "one or more, "
            yield f"economics.surface.{key}={list(values)}: expected {least}each at least {low:g}{most}"
