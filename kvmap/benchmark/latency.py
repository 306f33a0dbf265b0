"""Map or read again: time, bytes and break-even, measured side by side on this machine's device."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from kvmap.errors import KvmapError
from kvmap.mappers import Mapper
from kvmap.metrics import Metric
from kvmap.models.cache import KVCache
from kvmap.models.capture import forward, prefill
from kvmap.models.pair import LoadedModel, ModelPair
from kvmap.progress import track
from kvmap.transfer import TransferOptions, transfer

Row: TypeAlias = dict[str, Any]
Progress: TypeAlias = Callable[[Iterable[Any], int | None, str], Iterable[Any]]

ARMS = ("source_prefill", "map", "re_prefill", "first_token")
LINK_GBIT_PER_S = (10, 25, 50, 100, 400)


def latency_rows(
    pair: ModelPair,
    mapper: Mapper,
    lengths: Sequence[int],
    *,
    batch_size: int = 1,
    repeats: int = 10,
    warmup: int = 2,
    options: TransferOptions | None = None,
    seed: int = 0,
    progress: Progress = track,
) -> list[Row]:
    """Times every arm at every length.

    | arm | from | to |
    |---|---|---|
    | `source_prefill` | token ids | the source's cache |
    | `map` | the source's cache | the target's, its own head and held-back tokens run, first logits had |
    | `re_prefill` | token ids | the target's own cache (without logits: this favours re-prefill) |
    | `first_token` | the mapped cache and one token | the next logits |

    Warm, a hand-off costs `map`; cold, `source_prefill` + `map`. Arms take turns within each repeat, each
    repeat starting with another, so that whatever else the machine does falls on all alike.

    Args:
        pair: both models, in memory together.
        mapper: of this pair, moved to the target's device.
        lengths: context tokens.
        batch_size: contexts at a time.
        repeats: timed runs of each arm and length.
        warmup: runs before them that are not timed.
        options: how a cache is transferred.
        seed: of the token ids, which are random.
        progress: wraps the loop over lengths.

    Returns:
        Rows {length, arm, p20_ms, p50_ms, p80_ms, bytes_moved, source_bytes, mapped_bytes, batch_size,
        n_repeats, device, dtype, threads}. `bytes_moved` is the least memory traffic the arm can do with:
        weights and caches read once, caches written once. Where the mapper has native layers, `map` reads
        their weights twice: they are done before the mapper, the held-back tokens come after it.

    Raises:
        KvmapError: repeats, warm-up or batch size out of range, or a length with nothing to map or too long.
    """
    options = options or TransferOptions()
    _check(pair, lengths, batch_size, repeats, warmup, options)
    source, target = pair.source, pair.target
    mapper = mapper.to(target.device)
    rows: list[Row] = []
    for length in progress(lengths, len(lengths), "benchmark latency"):
        ids = _random_ids(pair, batch_size, length, seed)
        source_kv = prefill(source, ids)
        mapped_kv = _transfer(source_kv, mapper, target, ids, options)
        calls: dict[str, Callable[[], object]] = {
            "source_prefill": partial(prefill, source, ids),
            "map": partial(_transfer, source_kv, mapper, target, ids, options),
            "re_prefill": partial(prefill, target, ids),
            "first_token": partial(forward, target, ids[:, -1:], mapped_kv),
        }
        seconds = time_interleaved(calls, repeats, warmup, (source.device, target.device))
        moved = _bytes_moved(source, target, mapper, source_kv, mapped_kv)
        for arm in ARMS:
            rows.append(
                {
                    "length": length,
                    "arm": arm,
                    **_percentiles(seconds[arm]),
                    "bytes_moved": moved[arm],
                    "source_bytes": source_kv.nbytes,
                    "mapped_bytes": mapped_kv.nbytes,
                    "batch_size": batch_size,
                    **_setting(target, repeats),
                }
            )
    return rows


def time_interleaved(
    calls: dict[str, Callable[[], object]],
    repeats: int,
    warmup: int,
    devices: Iterable[torch.device] = (),
) -> dict[str, list[float]]:
    """Seconds of every call, the calls taking turns; CUDA devices are synchronised before and after each."""
    cuda = {device for device in devices if device.type == "cuda"}

    def wait() -> None:
        for device in cuda:
            torch.cuda.synchronize(device)

    names = list(calls)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(warmup + repeats):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            wait()
            start = time.perf_counter()
            result = calls[name]()
            wait()
            elapsed = time.perf_counter() - start
            del result
            if turn >= warmup:
                seconds[name].append(elapsed)
    return seconds


def transport_rows(rows: Iterable[Row], gbit_per_s: Sequence[float] = LINK_GBIT_PER_S) -> list[Row]:
    """How long each cache takes over a link of so many 10⁹ bits a second, at full rate and without latency.

    Returns:
        Rows {length, cache, bytes, gbit_per_s, transport_ms}; `cache` is `source` (mapped where it arrives)
        or `mapped` (mapped where it was read).
    """
    sizes = {row["length"]: (row["source_bytes"], row["mapped_bytes"]) for row in rows}
    return [
        {
            "length": length,
            "cache": cache,
            "bytes": n_bytes,
            "gbit_per_s": rate,
            "transport_ms": n_bytes * 8 / (rate * 1e9) * 1e3,
        }
        for length, pair_of_sizes in sizes.items()
        for cache, n_bytes in zip(("source", "mapped"), pair_of_sizes, strict=True)
        for rate in gbit_per_s
    ]


def ratio_rows(rows: Iterable[Row]) -> list[Row]:
    """How many times faster a hand-off is than reading again, medians of one run.

    Returns:
        Rows {length, warm_ratio, cold_ratio}: re_prefill / map, and re_prefill / (source_prefill + map).
    """
    medians: dict[int, dict[str, float]] = {}
    for row in rows:
        medians.setdefault(row["length"], {})[row["arm"]] = row["p50_ms"]
    return [
        {
            "length": length,
            "warm_ratio": arms["re_prefill"] / arms["map"],
            "cold_ratio": arms["re_prefill"] / (arms["source_prefill"] + arms["map"]),
        }
        for length, arms in sorted(medians.items())
    ]


def break_even(rows: Iterable[Row]) -> dict[str, Any]:
    """The context length from which a hand-off pays, warm and cold.

    Returns:
        {warm_length, cold_length, note}: the shortest measured length from which on every measured one is
        faster handed over; None where none is. The note says it in a sentence.
    """
    ratios = ratio_rows(rows)
    lengths = {case: _pays_from(ratios, f"{case}_ratio") for case in ("warm", "cold")}
    measured = f"{ratios[0]['length']} to {ratios[-1]['length']} tokens" if ratios else "nothing"
    said = ", ".join(
        f"{case} {'never' if length is None else f'from {length} tokens on'}"
        for case, length in lengths.items()
    )
    return {
        "warm_length": lengths["warm"],
        "cold_length": lengths["cold"],
        "note": f"a hand-off is faster than re-prefill: {said} (measured: {measured})",
    }


def latency_metrics(rows: Sequence[Row]) -> dict[str, Metric]:
    """Medians by `benchmark/<length>/<arm>/p50_ms`, ratios, and bytes of both caches by length."""
    metrics = {
        f"benchmark/{row['length']}/{row['arm']}/p50_ms": Metric(row["p50_ms"], n=row["n_repeats"])
        for row in rows
    }
    for row in rows:
        if row["arm"] == "map":
            metrics[f"benchmark/{row['length']}/source_prefill/cache_bytes"] = Metric(row["source_bytes"])
            metrics[f"benchmark/{row['length']}/map/cache_bytes"] = Metric(row["mapped_bytes"])
    for row in ratio_rows(rows):
        for case in ("warm", "cold"):
            metrics[f"benchmark/{row['length']}/map/{case}_ratio"] = Metric(row[f"{case}_ratio"])
    return metrics


def _check(
    pair: ModelPair,
    lengths: Sequence[int],
    batch_size: int,
    repeats: int,
    warmup: int,
    options: TransferOptions,
) -> None:
    if batch_size < 1 or repeats < 1 or warmup < 0:
        raise KvmapError(
            f"batch_size={batch_size}, repeats={repeats}, warmup={warmup}: expected at least 1, 1 and 0"
        )
    shortest = options.hold_back + options.native_head + 1
    for length in lengths:
        if length < shortest:
            raise KvmapError(
                f"length {length}: expected at least {shortest} tokens, or nothing is left to map with "
                f"hold_back={options.hold_back} and native_head={options.native_head}"
            )
        for side, geometry in (("source", pair.source_geometry), ("target", pair.target_geometry)):
            geometry.check_length(length + 1)
            if length + 1 > geometry.max_positions:
                raise KvmapError(
                    f"length {length} and one token more: the {side} takes {geometry.max_positions}; "
                    "shorten it"
                )


def _random_ids(pair: ModelPair, batch_size: int, length: int, seed: int) -> Tensor:
    vocabulary = min(pair.source_geometry.vocab_size, pair.target_geometry.vocab_size)
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocabulary, (batch_size, length), generator=generator)


def _transfer(
    source_kv: KVCache, mapper: Mapper, target: LoadedModel, ids: Tensor, options: TransferOptions
) -> KVCache:
    return transfer(
        source_kv,
        mapper,
        target,
        ids,
        **asdict(options),
    ).kv


def _bytes_moved(
    source: LoadedModel, target: LoadedModel, mapper: Mapper, source_kv: KVCache, mapped_kv: KVCache
) -> dict[str, int]:
    source_weights, target_weights = _weight_bytes(source.model), _weight_bytes(target.model)
    native_weights = _native_layer_bytes(target, mapper.native_layers)
    return {
        "source_prefill": source_weights + source_kv.nbytes,
        "map": source_kv.nbytes + mapper.nbytes + mapped_kv.nbytes + target_weights + native_weights,
        "re_prefill": target_weights + mapped_kv.nbytes,
        "first_token": target_weights + mapped_kv.nbytes,
    }


def _weight_bytes(module: nn.Module) -> int:
    return sum(weight.numel() * weight.element_size() for weight in module.parameters())


def _native_layer_bytes(target: LoadedModel, native_layers: int) -> int:
    """Weights of native_layers − 1 whole layers, and of the next those that make its keys and values."""
    if native_layers == 0:
        return 0
    layers: Any = target.body.layers
    whole = sum(_weight_bytes(layer) for layer in layers[: native_layers - 1])
    last = target.geometry.layers[native_layers - 1]
    projected = 2 * last.n_kv_heads * last.head_dim * target.geometry.hidden_size
    return whole + projected * target.dtype.itemsize


def _percentiles(seconds: Sequence[float]) -> dict[str, float]:
    low, middle, high = np.percentile(np.asarray(seconds) * 1e3, [20, 50, 80])
    return {"p20_ms": float(low), "p50_ms": float(middle), "p80_ms": float(high)}


def _setting(target: LoadedModel, repeats: int) -> Row:
    device = target.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return {
        "n_repeats": repeats,
        "device": name,
        "dtype": str(target.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
    }


def _pays_from(ratios: Sequence[Row], case: str) -> int | None:
    found = None
    for row in reversed(ratios):
        if not row[case] > 1 or math.isnan(row[case]):
            break
        found = row["length"]
    return found
