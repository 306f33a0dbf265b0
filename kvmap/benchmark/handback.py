"""What handing a context over costs the target, the hand-back knobs being set: counted and timed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch

from kvmap.benchmark.latency import time_interleaved
from kvmap.errors import KvmapError
from kvmap.mappers import Mapper
from kvmap.models.capture import prefill
from kvmap.models.pair import ModelPair
from kvmap.progress import track
from kvmap.transfer import TransferOptions, handoff_flops, native_share, transfer

Row: TypeAlias = dict[str, Any]
Progress: TypeAlias = Callable[[Iterable[Any], int | None, str], Iterable[Any]]

PERCENTILES = {"p20": 20, "p50": 50, "p80": 80}


def handback_rows(
    pair: ModelPair,
    mapper: Mapper,
    lengths: Sequence[int],
    options: TransferOptions,
    *,
    batch_size: int = 1,
    repeats: int = 10,
    warmup: int = 2,
    seed: int = 0,
    progress: Progress = track,
) -> list[Row]:
    """The cost of a hand-off beside that of reading the context again, at every length.

    The hand-off begins at the source's cache and ends with the logits after the context; re-prefill ends with
    the target's own cache, without logits, which favours it a little. Both take turns, so that whatever else
    the machine does falls on both.

    Args:
        pair: both models, in memory together.
        mapper: of this pair, moved to the target's device.
        lengths: context tokens.
        options: the knobs.
        batch_size: contexts at a time; FLOPs are of one.
        repeats: timed runs of each.
        warmup: runs before them that are not timed.
        seed: of the token ids, which are random.
        progress: wraps the loop over lengths.

    Returns:
        Rows: `length`, the knobs, `native_layers`, `n_mapped` and `n_recomputed` tokens of a context;
        `layer_token_share` (`native_share`) and `flop_share` of re-prefill, `{part}_flops` by part
        (`handoff_flops`); `hand_off_{p20,p50,p80}_ms`, `re_prefill_{p20,p50,p80}_ms` and `time_share`, the
        median over turns of the one's time over the other's; `batch_size`, `n_repeats`, `device`, `dtype`,
        `threads`.

    Raises:
        KvmapError: repeats, warm-up or batch size out of range, or a length with nothing to map or too long.
    """
    _check(pair, lengths, options, batch_size, repeats, warmup)
    source, target = pair.source, pair.target
    mapper = mapper.to(target.device)
    vocabulary = min(source.geometry.vocab_size, target.geometry.vocab_size)
    generator = torch.Generator().manual_seed(seed)
    rows: list[Row] = []
    for length in progress(lengths, len(lengths), "hand-off cost"):
        ids = torch.randint(vocabulary, (batch_size, length), generator=generator)
        hand_off = partial(transfer, prefill(source, ids), mapper, target, ids, **asdict(options))
        done = hand_off()
        calls: dict[str, Callable[[], object]] = {
            "hand_off": hand_off,
            "re_prefill": partial(prefill, target, ids),
        }
        seconds = time_interleaved(calls, repeats, warmup, (source.device, target.device))
        flops = handoff_flops(target, mapper, length, options)
        rows.append(
            {
                "length": length,
                **asdict(options),
                "native_layers": mapper.native_layers,
                "n_mapped": done.n_mapped // batch_size,
                "n_recomputed": done.n_recomputed // batch_size,
                "layer_token_share": native_share(
                    target.geometry,
                    length,
                    mapper.native_layers,
                    options.native_head,
                    options.hold_back,
                    options.recompute_share,
                    options.recompute_rule,
                ),
                "flop_share": flops.share,
                **{f"{part}_flops": value for part, value in asdict(flops).items()},
                **_milliseconds(seconds),
                "batch_size": batch_size,
                "n_repeats": repeats,
                "device": _device_name(target.device),
                "dtype": str(target.dtype).removeprefix("torch."),
                "threads": torch.get_num_threads(),
            }
        )
    return rows


def _milliseconds(seconds: dict[str, list[float]]) -> Row:
    row = {
        f"{call}_{name}_ms": float(np.percentile(taken, percentile) * 1e3)
        for call, taken in seconds.items()
        for name, percentile in PERCENTILES.items()
    }
    # by turns, so that what slows a whole turn down cancels
    ratios = np.asarray(seconds["hand_off"]) / np.asarray(seconds["re_prefill"])
    return row | {"time_share": float(np.median(ratios))}


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _check(
    pair: ModelPair,
    lengths: Sequence[int],
    options: TransferOptions,
    batch_size: int,
    repeats: int,
    warmup: int,
) -> None:
    if batch_size < 1 or repeats < 1 or warmup < 0:
        raise KvmapError(
            f"batch_size={batch_size}, repeats={repeats}, warmup={warmup}: expected at least 1, 1 and 0"
        )
    own = options.hold_back + options.native_head
    most = min(pair.source_geometry.max_positions, pair.target_geometry.max_positions)
    for length in lengths:
        if not own < length <= most:
            raise KvmapError(
                f"length {length}: expected more than the {own} tokens of hold_back={options.hold_back} and "
                f"native_head={options.native_head}, or nothing is mapped, and no more than {most}, which is "
                f"what the models take"
            )
