"""From latencies to when a hand-off pays: text, CSV and figure.

python -m kvmap.economics --latency FILE|RUN [assumptions]
python -m kvmap.economics --source A --target B --device h100 [assumptions]

The last line printed is one JSON object; `docs/economics.md` says what the numbers mean.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvmap.economics.analysis import Economics, analyse, as_text
from kvmap.economics.contexts import Contexts, counted, log_normal_within, read_lengths
from kvmap.economics.curves import BEYOND, Latencies
from kvmap.economics.errors import EconomicsError
from kvmap.economics.outcomes import Quality
from kvmap.economics.policies import SENT, Prices, Workload
from kvmap.economics.surfaces import Axes
from kvmap.economics.tables import read_latencies
from kvmap.errors import KvmapError
from kvmap.files import json_text, replacing, write_csv

FIGURE_DPI = 300


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of `python -m kvmap.economics`.

    Returns:
        0; 1 for input that no answer can be had from, with one message.
    """
    given = _parser().parse_args(arguments)
    try:
        found = analyse(*_asked(given))
        files = _write(found, given)
    except KvmapError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(as_text(found))
    for what, path in files.items():
        print(f"{what}: {path}")
    print(json_text({"facts": found.facts, "notes": found.notes, **found.tables}))
    return 0


def _asked(given: argparse.Namespace) -> tuple[Latencies, Contexts | None, Workload, Prices, Quality, Axes]:
    workload = Workload(
        escalation_rate=given.escalation_rate,
        output_tokens=given.output_tokens,
        judged_after=given.judged_after,
        decode_batch=given.decode_batch,
        gbit_per_s=None if given.shared_memory else given.gbit_per_s,
        link_ms=given.link_ms,
        sent=given.sent,
        cached_share=given.cached_share,
    )
    prices = Prices(
        given.source_price,
        given.target_price,
        given.source_gpus,
        given.target_gpus,
        given.gbyte_price,
        given.cached_discount,
    )
    quality = Quality(
        given.source_accuracy, given.target_accuracy, given.mapped_accuracy, given.source_kept_accuracy
    )
    axes = Axes(
        tuple(given.surface_lengths),
        tuple(given.surface_gbit_per_s),
        tuple(given.surface_escalation_rates),
        tuple(given.surface_price_ratios),
    )
    latencies = _latencies(given)
    return latencies, _contexts(given, latencies), workload, prices, quality, axes


def _latencies(given: argparse.Namespace) -> Latencies:
    models = given.source is not None or given.target is not None
    if (given.latency is None) == (not models) or (given.source is None) != (given.target is None):
        raise EconomicsError(
            "give times: --latency FILE (the benchmark's latency.csv, or a run's directory), or --source and "
            "--target for planned ones; one of the two"
        )
    tokens = {"source_token_ms": given.source_token_ms, "target_token_ms": given.target_token_ms}
    wrong = [f"{name}={value:g}" for name, value in tokens.items() if value is not None and not value > 0]
    if wrong:
        raise EconomicsError(f"{', '.join(wrong)}: expected a number above 0")
    if given.latency is not None:
        return read_latencies(given.latency, beyond=given.beyond, **tokens)
    from kvmap.economics.pairs import latencies_of_models

    return latencies_of_models(
        given.source,
        given.target,
        given.device,
        support=given.support,
        top_k=given.top_k,
        lengths=given.lengths,
        gpus=(given.source_gpus, given.target_gpus),
        beyond=given.beyond,
        **tokens,
    )


def _contexts(given: argparse.Namespace, latencies: Latencies) -> Contexts | None:
    named = [given.context_lengths is not None, given.context_median is not None, given.contexts is not None]
    if sum(named) > 1:
        raise EconomicsError(
            "--context-lengths, --context-median and --contexts each say how long contexts are; give one"
        )
    if given.context_weights is not None and given.context_lengths is None:
        raise EconomicsError("--context-weights are those of --context-lengths; give both, or neither")
    if given.contexts is not None:
        return read_lengths(given.contexts)
    if given.context_lengths is not None:
        return counted(given.context_lengths, given.context_weights)
    if given.context_median is not None:
        return log_normal_within(given.context_median, given.context_sigma, latencies)
    return None


def _write(found: Economics, given: argparse.Namespace) -> dict[str, Path]:
    """The files asked for."""
    files: dict[str, Path] = {}
    if given.csv is not None:
        for name, rows in found.tables.items():
            path = given.csv / f"{name}.csv"
            write_csv(path, rows)
            files[name] = path
    if given.figure is not None:
        from kvmap.figures.economics import economics_panels

        figure = economics_panels(
            found.by_length, found.time_surface, found.cost_surface, found.break_even, found.facts
        )
        with replacing(given.figure) as temporary:
            figure.savefig(temporary, dpi=FIGURE_DPI)
        files["figure"] = given.figure
    return files


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m kvmap.economics",
        description="Time to first token and cost of serving with a small model, a large one, and with "
        "escalation from the one to the other; where a hand-off pays.",
    )
    _add_times(parser)
    _add_workload(parser)
    _add_prices(parser)
    axes = Axes()
    surface = parser.add_argument_group("surfaces")
    _numbers(surface, "--surface-lengths", axes.lengths, "tokens (default: those that are known)")
    _numbers(surface, "--surface-gbit-per-s", axes.gbit_per_s, "of links")
    _numbers(surface, "--surface-escalation-rates", axes.escalation_rates, "shares of requests")
    _numbers(surface, "--surface-price-ratios", axes.price_ratios, "a second of the target over the source's")
    results = parser.add_argument_group("results")
    results.add_argument("--csv", type=Path, help="folder where every table goes")
    results.add_argument("--figure", type=Path, help="where the figure goes")
    return parser


def _add_times(parser: argparse.ArgumentParser) -> None:
    times = parser.add_argument_group("times")
    times.add_argument("--latency", type=Path, help="the benchmark's latency.csv, or a run's directory")
    times.add_argument("--source", help="plan for this source model: a folder or a hub id")
    times.add_argument("--target", help="and this target")
    times.add_argument("--device", default="h100", help="of the planner's table (default h100)")
    times.add_argument("--support", default="full_head", help="of the planned map (default full_head)")
    times.add_argument("--top-k", type=int, default=8, help="its source layers (default 8)")
    times.add_argument("--lengths", type=int, nargs="+", help="planned, tokens (default 256 to 32768)")
    times.add_argument("--source-token-ms", type=float, help="of one more token of the source")
    times.add_argument("--target-token-ms", type=float, help="and of the target")
    times.add_argument(
        "--beyond",
        choices=BEYOND,
        default="refuse",
        help="lengths outside of the known ones (default refuse)",
    )


def _add_workload(parser: argparse.ArgumentParser) -> None:
    usual = Workload()
    asked = parser.add_argument_group("what is asked")
    asked.add_argument("--context-lengths", type=float, nargs="+", help="tokens (default: the known lengths)")
    asked.add_argument("--context-weights", type=float, nargs="+", help="how often each comes")
    asked.add_argument("--context-median", type=float, help="of a log-normal, tokens")
    asked.add_argument("--context-sigma", type=float, default=1.0, help="of its logarithm (default 1)")
    asked.add_argument("--contexts", type=Path, help="JSONL or CSV of lengths")
    _number(asked, "--escalation-rate", usual.escalation_rate, "share of requests that the target answers")
    asked.add_argument(
        "--output-tokens", type=int, default=usual.output_tokens, help="of an answer (default 256)"
    )
    asked.add_argument(
        "--judged-after", type=int, default=usual.judged_after, help="tokens before escalation (default 1)"
    )
    asked.add_argument(
        "--decode-batch", type=int, help="requests that share a step (default: the times' batch)"
    )
    _number(asked, "--gbit-per-s", 100.0, "of the link between the models")
    asked.add_argument("--shared-memory", action="store_true", help="there is no link")
    _number(asked, "--link-ms", usual.link_ms, "of the link besides, each time")
    asked.add_argument("--sent", choices=SENT, default=usual.sent, help="which cache (default source)")
    _number(asked, "--cached-share", usual.cached_share, "of a context, that the target holds cached")


def _add_prices(parser: argparse.ArgumentParser) -> None:
    usual = Prices()
    prices = parser.add_argument_group("prices and quality")
    _number(prices, "--source-price", usual.source, "of a second of one of its GPUs")
    _number(prices, "--target-price", usual.target, "of a second of one of its GPUs")
    prices.add_argument("--source-gpus", type=int, default=usual.source_gpus, help="default 1")
    prices.add_argument("--target-gpus", type=int, default=usual.target_gpus, help="default 1")
    _number(prices, "--gbyte-price", usual.gbyte, "of 10⁹ bytes over the link")
    _number(prices, "--cached-discount", usual.cached_discount, "remitted of a cached token's price")
    for name in ("source", "target", "mapped", "source-kept"):
        prices.add_argument(f"--{name}-accuracy", type=float, help="share of answers that are right")


def _number(group: Any, flag: str, default: float, what: str) -> None:
    group.add_argument(flag, type=float, default=default, help=f"{what} (default {default:g})")


def _numbers(group: Any, flag: str, default: Sequence[float], what: str) -> None:
    group.add_argument(flag, type=float, nargs="+", default=default, help=what)
