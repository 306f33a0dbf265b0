"""Map or read again: every arm of a hand-off timed side by side on this machine's device.

    python -m kvmap.benchmark.latency --source A --target B

measures two models and prints one JSON object on its last line (`kvmap.benchmark.command`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from kvmap.benchmark.case import Case, LatencySettings, check_lengths
from kvmap.benchmark.links import break_even, network_rows, ratio_rows, transport_ms, transport_rows
from kvmap.benchmark.mapping import BY_LAYER, MAPPING_PATHS
from kvmap.benchmark.mapping import Mapping as PreparedMapping
from kvmap.benchmark.random_models import Depth
from kvmap.benchmark.roofline import Roofline
from kvmap.benchmark.timing import (
    Call,
    Row,
    in_turn,
    peak_bytes,
    percentiles,
    setting,
    time_interleaved,
)
from kvmap.benchmark.work import Work
from kvmap.errors import UnknownName
from kvmap.kernels.map_cache import KernelError
from kvmap.mappers import Mapper
from kvmap.metrics import Metric
from kvmap.models.pair import ModelPair
from kvmap.progress import track
from kvmap.transfer import TransferOptions

__all__ = [
    "ARMS",
    "LatencySettings",
    "break_even",
    "latency_metrics",
    "latency_rows",
    "network_rows",
    "path_rows",
    "ratio_rows",
    "time_interleaved",
    "transport_rows",
]

Progress: TypeAlias = Callable[[Iterable[Any], int | None, str], Iterable[Any]]

ARMS = ("source_prefill", "map", "hand_off", "re_prefill", "first_token", "transport")
_SIDE = {"source_prefill": "source", "transport": "source"}
"""Whose layers an arm's time grows with; the target's where nothing is said."""


def latency_rows(
    pair: ModelPair,
    mapper: Mapper,
    lengths: Sequence[int],
    settings: LatencySettings | None = None,
    *,
    options: TransferOptions | None = None,
    roofline: Roofline | None = None,
    depths: Mapping[str, Depth] | None = None,
    progress: Progress = track,
) -> list[Row]:
    """Times every arm at every length.

    | arm | from | to |
    |---|---|---|
    | `source_prefill` | token ids | the source's cache |
    | `map` | the source's cache | the target's, all columns, by the map alone |
    | `hand_off` | the source's cache | the target's, its head and held-back tokens run, first logits had |
    | `re_prefill` | token ids | the target's own cache (without logits: this favours re-prefill) |
    | `first_token` | the mapped cache and one token | the next logits |
    | `transport` | the source's cache elsewhere | the source's cache here |

    Warm, the first logits cost `hand_off`; cold, `source_prefill` besides. Transport is the copy from the
    host's pinned memory where the target is on a CUDA device, and otherwise computed for a link. Arms take
    turns within each repeat, each repeat starting with another.

    Args:
        pair: both models, in memory together.
        mapper: of this pair, moved to the target's device.
        lengths: context tokens.
        settings: how it is timed.
        options: how a cache is transferred.
        roofline: of this device and dtype; adds what share of it each arm reached.
        depths: of models that were shortened, by side: `whole_p50_ms` is then scaled to all layers.
        progress: wraps the loop over lengths.

    Returns:
        Rows {length, arm, how, p20_ms, p50_ms, p80_ms, whole_p50_ms, flops, bytes_moved, roofline_ms,
        roofline_share, peak_bytes, source_bytes, mapped_bytes, path, buffers, batch_size, n_repeats, device,
        dtype, threads}. `how` is measured, computed or "scaled from n of m layers" (`whole_p50_ms` and the
        bytes of both caches are, all else is of the layers that were run). `flops` and `bytes_moved`: see
        `kvmap.benchmark.work`; `peak_bytes`: see `kvmap.benchmark.timing.peak_bytes`.

    Raises:
        KvmapError: a length with nothing to map or too long.
    """
    settings, options = settings or LatencySettings(), options or TransferOptions()
    check_lengths(pair, lengths, options)
    mapper = mapper.to(pair.target.device)
    rows: list[Row] = []
    for length in progress(lengths, len(lengths), "benchmark latency"):
        case = Case.prepare(pair, mapper, length, settings, options)
        calls = case.calls()
        devices = (pair.source.device, pair.target.device)
        seconds = time_interleaved(calls, settings.repeats, settings.warmup, devices)
        work = case.work()
        for arm in ARMS:
            taken = seconds.get(arm, [transport_ms(case.source_bytes, settings.link_gbit_per_s) / 1e3])
            row: Row = {"length": length, "arm": arm, "how": "measured", **percentiles(taken)}
            if arm not in calls:
                row["how"] = f"computed for {settings.link_gbit_per_s:g} Gb/s"
            row["whole_p50_ms"] = row["p50_ms"]
            row |= _against(work[arm], taken, roofline if arm in calls else None)
            peak = settings.memory and arm in calls
            row["peak_bytes"] = peak_bytes(calls[arm], pair.target.device) if peak else None
            row |= {"source_bytes": case.source_bytes, "mapped_bytes": case.mapped_bytes}
            row |= {"path": case.path, "buffers": len(case.ids), "batch_size": settings.batch_size}
            row |= setting(pair.target.device, pair.target.dtype, settings.repeats)
            rows.append(row if depths is None else _scaled(row, depths))
    return rows


def path_rows(
    pair: ModelPair,
    mapper: Mapper,
    lengths: Sequence[int],
    paths: Sequence[str],
    settings: LatencySettings | None = None,
    *,
    roofline: Roofline | None = None,
    progress: Progress = track,
) -> list[Row]:
    """Times mapping alone by every path, the paths taking turns.

    Args:
        pair, mapper, lengths, settings, roofline, progress: as of `latency_rows`.
        paths: of `MAPPING_PATHS`.

    Returns:
        Rows {length, path, note, p20_ms, p50_ms, p80_ms, times_per_head, flops, bytes_moved, roofline_ms,
        roofline_share, peak_bytes, buffers, batch_size, n_repeats, device, dtype, threads}.
        `times_per_head`: the median over turns of the loop over heads over this path, where both are timed.
        A path that cannot serve has its reason in `note`, and no times. A mapper that is no table of weights
        has one row, `by_layer`.

    Raises:
        KvmapError: a length out of range, or another path.
    """
    settings = settings or LatencySettings()
    for path in paths:
        if path not in MAPPING_PATHS:
            raise UnknownName("mapping path", path, MAPPING_PATHS)
    options = TransferOptions()
    check_lengths(pair, lengths, options)
    mapper = mapper.to(pair.target.device)
    rows: list[Row] = []
    for length in progress(lengths, len(lengths), "benchmark paths"):
        case = Case.prepare(pair, mapper, length, settings, options, hand_off=False)
        asked = list(paths) if mapper.cache_map() is not None else [BY_LAYER]
        calls, notes = _serving(case.mappings, asked)
        devices = (pair.target.device,)
        seconds = time_interleaved(calls, settings.repeats, settings.warmup, devices) if calls else {}
        for path in asked:
            row: Row = {"length": length, "path": path, "note": notes.get(path)}
            if path in seconds:
                row |= percentiles(seconds[path]) | _against(case.work()["map"], seconds[path], roofline)
                row["peak_bytes"] = peak_bytes(calls[path], pair.target.device) if settings.memory else None
                row["times_per_head"] = _times(seconds, "per_head", path)
            row |= {"buffers": len(case.ids), "batch_size": settings.batch_size}
            rows.append(row | setting(pair.target.device, pair.target.dtype, settings.repeats))
    return rows


def latency_metrics(rows: Sequence[Row]) -> dict[str, Metric]:
    """Medians by `benchmark/<length>/<arm>/p50_ms`, ratios, and bytes of both caches by length."""
    metrics = {
        f"benchmark/{row['length']}/{row['arm']}/p50_ms": Metric(row["whole_p50_ms"], n=row["n_repeats"])
        for row in rows
    }
    for row in rows:
        if row["arm"] == "map":
            metrics[f"benchmark/{row['length']}/source_prefill/cache_bytes"] = Metric(row["source_bytes"])
            metrics[f"benchmark/{row['length']}/map/cache_bytes"] = Metric(row["mapped_bytes"])
    for row in ratio_rows(rows):
        for arm, case in (("map", "map"), ("hand_off", "warm"), ("hand_off", "cold")):
            metrics[f"benchmark/{row['length']}/{arm}/{case}_ratio"] = Metric(row[f"{case}_ratio"])
    return metrics


def _serving(
    mappings: Sequence[PreparedMapping], paths: Sequence[str]
) -> tuple[dict[str, Call], dict[str, str]]:
    """The paths that can serve, and why the others cannot."""
    calls: dict[str, Call] = {}
    notes: dict[str, str] = {}
    for path in paths:
        call = in_turn([mapping.call(path) for mapping in mappings])
        try:
            call()
        except KernelError as error:
            notes[path] = str(error)
        else:
            calls[path] = call
    return calls, notes


def _against(work: Work, seconds: Sequence[float], roofline: Roofline | None) -> Row:
    row: Row = {"flops": work.flops, "bytes_moved": work.n_bytes, "roofline_ms": None, "roofline_share": None}
    if roofline is not None:
        row["roofline_ms"] = roofline.seconds(work.flops, work.n_bytes) * 1e3
        row["roofline_share"] = roofline.share(work.flops, work.n_bytes, float(np.median(seconds)))
    return row


def _times(seconds: Mapping[str, Sequence[float]], slow: str, fast: str) -> float | None:
    """By turns, so that what slows a whole turn down cancels."""
    if slow not in seconds:
        return None
    return float(np.median(np.asarray(seconds[slow]) / np.asarray(seconds[fast])))


def _scaled(row: Row, depths: Mapping[str, Depth]) -> Row:
    """A row of shortened models, with its median and the bytes of both caches for all layers."""
    depth = depths[_SIDE.get(row["arm"], "target")]
    if all(found.run == found.whole for found in depths.values()):
        return row
    bytes_of = {
        f"{name}_bytes": round(row[f"{name}_bytes"] * depths[side].scale)
        for name, side in (("source", "source"), ("mapped", "target"))
    }
    how = f"{row['how']}, scaled from {depth.run} of {depth.whole} layers"
    return row | bytes_of | {"how": how, "whole_p50_ms": row["p50_ms"] * depth.scale}


if __name__ == "__main__":
    from kvmap.benchmark.command import main

    sys.exit(main())
