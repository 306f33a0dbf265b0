"""Mapping alone on a GPU: by support, length and path; and by tile."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvmap.benchmark.gpu_cases import PATHS, WITH_FP8, GpuCase, in_fp8, weight_count
from kvmap.benchmark.gpu_study import Record, Study, free
from kvmap.benchmark.roofline import Roofline
from kvmap.benchmark.timing import Call, Row, in_turn, n_copies, peak_bytes, percentiles, time_interleaved
from kvmap.errors import KvmapError
from kvmap.kernels.map_cache import CacheMap

SUPPORTS = ("full_head", "head_local")
_BUFFERS = 4
_UNWATCHED = ("compiled", "_graph")
"""Endings of paths whose memory is not theirs to say: a graph has a pool of its own, and a compiled function
takes no watcher.
"""


def mapping_rows(study: Study, roofline: Roofline, record: Record) -> Iterator[Row]:
    """Mapping alone by support, length and path; the paths of one length take turns.

    Yields:
        Rows {support, top_k, length, path, note, p20_ms, p50_ms, p80_ms, n_repeats, buffers, flops,
        bytes_moved, roofline_share, peak_bytes, source_bytes, output_bytes, mapper_bytes}. `peak_bytes` is
        what a call holds besides caches and weights; of a graph, whose memory is its own, it is not known.
    """
    for support in SUPPORTS:
        plain = study.shape.cache_map(support, study.top_k, study.dtype, study.device)
        maps = {"": plain} if study.dry else {"": plain, "fp8": in_fp8(plain)}
        for length in study.lengths:
            if record.left < 30:
                record.skip(f"mapping {support} at {length} tokens")
                continue
            yield from _mapping_at(study, support, maps, length, roofline, record)
            free(study.device)


def _mapping_at(
    study: Study, support: str, maps: Mapping[str, CacheMap], length: int, roofline: Roofline, record: Record
) -> Iterator[Row]:
    first = GpuCase.prepare(study.shape, maps, length, study.dtype, study.device)
    copies = n_copies(1 if study.dry else _BUFFERS, first.source_bytes + first.output_bytes)
    cases = [first]
    for seed in range(1, copies):
        cases.append(GpuCase.prepare(study.shape, maps, length, study.dtype, study.device, seed=seed))
    asked = [*PATHS, *(WITH_FP8 if "fp8" in maps else ())]
    calls, notes = _ready(cases, asked)
    repeats = study.repeats_at(length)
    seconds = time_interleaved(calls, repeats, min(repeats, 3), (study.device,)) if calls else {}
    for path in asked:
        cache_map = first.map_of(path)
        row: Row = {"support": support, "top_k": study.top_k, "length": length, "path": path}
        row |= {"note": notes.get(path), "n_repeats": repeats, "buffers": copies}
        if path in seconds:
            flops = 2.0 * weight_count(cache_map) * length
            n_bytes = first.source_bytes + cache_map.nbytes + first.output_bytes
            row |= percentiles(seconds[path]) | {"flops": flops, "bytes_moved": n_bytes}
            row["roofline_share"] = roofline.share(flops, n_bytes, row["p50_ms"] / 1e3)
            row["peak_bytes"] = _peak(calls[path], path, study)
            record.say(
                f"{support} {length} tokens {path}: {row['p50_ms']:.3f} ms, "
                f"{100 * row['roofline_share']:.0f} % of the roofline"
            )
        row |= {"source_bytes": first.source_bytes, "output_bytes": first.output_bytes}
        yield row | {"mapper_bytes": cache_map.nbytes}


def _ready(cases: Sequence[GpuCase], paths: Sequence[str]) -> tuple[dict[str, Call], dict[str, str]]:
    """Every path's call, compiled and captured, and why others have none."""
    calls: dict[str, Call] = {}
    notes: dict[str, str] = {}
    for path in paths:
        try:
            made = [case.call(path) for case in cases]
            for call in made:
                call()
        except Exception as error:  # one that breaks is a finding, and the others are still to be timed
            notes[path] = str(error) if isinstance(error, KvmapError) else f"{type(error).__name__}: {error}"
            continue
        calls[path] = in_turn(made)
    return calls, notes


def _peak(call: Call, path: str, study: Study) -> int | None:
    unwatched = _UNWATCHED if study.device.type == "cpu" else _UNWATCHED[1:]
    return None if path.endswith(unwatched) else peak_bytes(call, study.device)


def tuning_rows(study: Study, record: Record) -> Iterator[Row]:
    """Other tiles of the Triton kernels, as far as time allows: what a table of tiles is made from.

    Yields:
        Rows {support, length, tile, note, p20_ms, p50_ms, p80_ms}; `tile` None is what the table has now.
    """
    try:
        from kvmap.kernels.map_cache.triton_path import map_cache_triton
        from kvmap.kernels.map_cache.triton_tiles import CANDIDATES
    except ImportError as error:
        record.say(f"no tuning: {error}")
        return
    tiles = [None, *sorted(CANDIDATES, key=lambda tile: tile.group_tokens)][: 2 if study.dry else None]
    for support in SUPPORTS:
        maps = {"": study.shape.cache_map(support, study.top_k, study.dtype, study.device)}
        case = GpuCase.prepare(study.shape, maps, study.tune_at, study.dtype, study.device)
        until = record.left / 2 if support == SUPPORTS[0] else 0.0
        for tile in tiles:
            if record.left < max(until, 20.0):
                record.skip(f"tiles of {support}")
                break

            def call(tile: Any = tile, case: GpuCase = case) -> object:
                return map_cache_triton(case.maps[""], case.inputs, case.output, tile=tile)

            row: Row = {"support": support, "length": study.tune_at}
            row["tile"] = None if tile is None else str(tile)
            try:
                call()
                seconds = time_interleaved({"map": call}, min(study.repeats, 3), 0, (study.device,))["map"]
            except (
                Exception
            ) as error:  # a tile that does not compile is no choice, and the next is to be tried
                yield row | {"note": f"{type(error).__name__}: {str(error)[:200]}"}
                continue
            yield row | {"note": None, **percentiles(seconds)}
        free(study.device)
