"""`python -m kvmap.benchmark.latency`: two models measured without a configuration, against what is asked."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from kvmap.benchmark.fitting import as_text
from kvmap.benchmark.latency import (
    LatencySettings,
    break_even,
    latency_rows,
    network_rows,
    path_rows,
    ratio_rows,
)
from kvmap.benchmark.mapping import MAPPING_PATHS
from kvmap.benchmark.random_models import random_mapper_of, random_pair
from kvmap.benchmark.roofline import measure_roofline
from kvmap.benchmark.timing import Row, torch_threads
from kvmap.errors import KvmapError
from kvmap.files import json_text, write_json
from kvmap.fit.features import SUPPORTS
from kvmap.mappers import Mapper, load_mapper
from kvmap.models.pair import ModelPair, ModelSpec
from kvmap.transfer import TransferOptions

SHOWN = ("length", "arm", "how", "p20_ms", "p50_ms", "p80_ms", "whole_p50_ms", "roofline_share", "peak_bytes")
COMPARED = ("auto", "batched", "per_head", "per_head_stripped")
SHOWN_PATHS = ("length", "path", "note", "p20_ms", "p50_ms", "p80_ms", "times_per_head", "roofline_share")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the tables and, on the last line, everything as one JSON object.

    Returns:
        0; 1 for something that cannot be measured; 2 where --at-least names a ratio that was not reached.
    """
    asked = _parser().parse_args(arguments)
    try:
        with torch_threads(asked.threads):
            found = measured(asked)
    except KvmapError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for name, shown in (("latency", SHOWN), ("paths", SHOWN_PATHS), ("ratios", None)):
        rows = found[name] if shown is None else [{key: row.get(key) for key in shown} for row in found[name]]
        print(f"\n{name}\n{as_text(rows)}")
    print(f"\n{found['break_even']['note']}")
    for line in found["reach"]:
        said = "reached" if line["reached"] else "NOT reached"
        got = "not measured" if line["got"] is None else f"{line['got']:.2f}"
        print(f"{line['what']} at {line['length']} tokens: {got}, asked {line['asked']:g}: {said}")
    if asked.output is not None:
        write_json(asked.output, found)
    print(json_text(found))
    return 0 if all(line["reached"] for line in found["reach"]) else 2


def measured(asked: argparse.Namespace) -> dict[str, Any]:
    """Every table of one measurement, as JSON can hold it.

    Raises:
        KvmapError: models, a map or lengths that cannot be had.
    """
    specs = [ModelSpec(name, dtype=asked.dtype, device=asked.device) for name in (asked.source, asked.target)]
    depths = None
    if asked.random_weights:
        positions = max(asked.lengths) + 1
        pair, depths = random_pair(*specs, n_positions=positions, max_layers=asked.max_layers)
    elif asked.max_layers is not None:
        raise KvmapError("--max-layers shortens random models; add --random-weights, or leave it out")
    else:
        pair = ModelPair(*specs)
    target = pair.target
    roofline = measure_roofline(target.device, target.dtype)
    settings = LatencySettings(
        batch_size=asked.batch_size,
        repeats=asked.repeats,
        warmup=asked.warmup,
        buffers=asked.buffers,
        path=asked.path,
        link_gbit_per_s=asked.link_gbit_per_s,
        memory=asked.memory,
        seed=asked.seed,
    )
    mapper = _mapper(asked, pair)
    options = TransferOptions(hold_back=asked.hold_back, native_head=asked.native_head)
    rows = latency_rows(
        pair, mapper, asked.lengths, settings, options=options, roofline=roofline, depths=depths
    )
    paths = path_rows(pair, mapper, asked.lengths, asked.paths, settings, roofline=roofline)
    return {
        "source": pair.source_identity.name,
        "target": pair.target_identity.name,
        "mapper": str(asked.mapper) if asked.mapper else f"random, {asked.support}, k = {asked.top_k}",
        "n_weights": mapper.n_weights,
        "mapper_bytes": mapper.nbytes,
        "roofline": roofline.rates,
        "latency": rows,
        "paths": paths,
        "ratios": ratio_rows(rows),
        "network": network_rows(rows),
        "break_even": break_even(rows),
        "reach": [*_reach(rows, paths, asked)],
    }


def _mapper(asked: argparse.Namespace, pair: ModelPair) -> Mapper:
    if asked.mapper is not None:
        return load_mapper(asked.mapper)[0]
    return random_mapper_of(pair, asked.top_k, asked.support, seed=asked.seed)


def _reach(rows: Sequence[Row], paths: Sequence[Row], asked: argparse.Namespace) -> Iterator[Row]:
    """What was asked by `--at-least`, against what came out."""
    ratios = {row["length"]: row for row in ratio_rows(rows)}
    batched = {row["length"]: row.get("times_per_head") for row in paths if row["path"] == "batched"}
    for length in asked.lengths:
        for what, wanted, got in (
            ("re-prefill over map, warm", asked.at_least_map, ratios[length]["map_ratio"]),
            ("loop over heads over batched", asked.at_least_batched, batched.get(length)),
        ):
            if wanted is not None:
                reached = got is not None and got >= wanted
                yield {"what": what, "length": length, "asked": wanted, "got": got, "reached": reached}


def _top_k(text: str) -> int | str:
    if text != "all" and not (text.isdecimal() and int(text)):
        raise argparse.ArgumentTypeError(f"{text!r}: expected 1 or more, or 'all'")
    return text if text == "all" else int(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m kvmap.benchmark.latency",
        description="Time mapping, hand-off, re-prefill, source prefill and first token of two models side "
        "by side, and mapping by every path. Without --mapper the map is a linear one of random weights in "
        "the models' dtype, which costs what a fitted one does.",
    )
    parser.add_argument("--source", required=True, help="source model: a folder or a hub id")
    parser.add_argument("--target", required=True, help="target model")
    parser.add_argument("--dtype", default="auto", help="of both models (default: of the checkpoint)")
    parser.add_argument("--device", default="auto", help="of both models (default: a GPU if there is one)")
    parser.add_argument("--random-weights", action="store_true", help="of the true shapes, nothing is loaded")
    parser.add_argument("--max-layers", type=int, help="shorten random models, and scale (labelled)")
    parser.add_argument("--lengths", type=int, nargs="+", default=[64, 256, 512], help="default 64 256 512")
    parser.add_argument("--batch-size", type=int, default=1, help="contexts at a time (default 1)")
    parser.add_argument("--repeats", type=int, default=10, help="timed runs of each (default 10)")
    parser.add_argument("--warmup", type=int, default=2, help="runs before them (default 2)")
    parser.add_argument("--buffers", type=int, default=3, help="copies that take turns (default 3)")
    parser.add_argument("--no-memory", dest="memory", action="store_false", help="do not run for peak memory")
    parser.add_argument("--threads", type=int, default=1, help="of torch (default 1)")
    parser.add_argument("--seed", type=int, default=0, help="of ids and random weights")
    parser.add_argument("--hold-back", type=int, default=1, help="last tokens the target runs (default 1)")
    parser.add_argument("--native-head", type=int, default=1, help="first tokens it runs (default 1)")
    parser.add_argument("--link-gbit-per-s", type=float, default=100.0, help="of a computed transport")
    mapper = parser.add_argument_group("the map")
    mapper.add_argument("--mapper", type=Path, help="folder of a fitted one")
    mapper.add_argument("--support", choices=SUPPORTS, default="full_head", help="default full_head")
    mapper.add_argument("--top-k", type=_top_k, default=8, help="source layers (default 8), or 'all'")
    mapper.add_argument("--path", choices=MAPPING_PATHS, default="auto", help="of the arm `map`")
    mapper.add_argument(
        "--paths",
        nargs="*",
        choices=MAPPING_PATHS,
        default=list(COMPARED),
        help="compared",
    )
    parser.add_argument("--at-least-map", type=float, help="exit with 2 unless re-prefill takes so many maps")
    parser.add_argument(
        "--at-least-batched", type=float, help="likewise of the loop over heads and the batched path"
    )
    parser.add_argument("--output", type=Path, help="also write everything there, as JSON")
    return parser
