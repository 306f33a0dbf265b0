"""What the streaming diagnostics of one mapper cost, against the native forward passes they need."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from kvmap.benchmark.random_models import random_mapper_of
from kvmap.benchmark.timing import Row, time_interleaved, torch_threads
from kvmap.diagnostics.findings import text_metrics, text_tables
from kvmap.diagnostics.streaming import diagnose_texts
from kvmap.diagnostics.texts import Text
from kvmap.diagnostics.token_kinds import TokenKinds
from kvmap.errors import KvmapError
from kvmap.files import write_json
from kvmap.mappers import Mapper
from kvmap.models.capture import prefill
from kvmap.models.pair import ModelPair, ModelSpec
from kvmap.transfer import TransferOptions

WARM_TOKENS = 16


def diagnostics_row(
    pair: ModelPair,
    mapper: Mapper,
    *,
    n_sequences: int,
    length: int,
    batch_size: int = 8,
    repeats: int = 1,
    seed: int = 0,
) -> Row:
    """Seconds of all streaming diagnostics of one mapper on a text, over those of both models reading it.

    Native is what cannot be done without: the source reads the text, and the target reads it, both without
    logits. The diagnostics do that too, hand over, judge every layer, read the second halves once more from
    the mapped cache, and make all tables and metrics. Both take turns. The ids are random: time does not
    depend on them.

    Returns:
        {n_sequences, length, batch_size, native_seconds, diagnostics_seconds, ratio, native_cpu_seconds,
        diagnostics_cpu_seconds, cpu_ratio, n_repeats, dtype, device, threads}; seconds are medians over
        turns, and a ratio is that of the turns' ratios. Seconds of the process's CPU say the same of a model
        on the CPU, and are moved less by what else the machine does.

    Raises:
        KvmapError: sizes below 1, or a text that leaves nothing to map.
    """
    if min(n_sequences, length, batch_size, repeats) < 1:
        raise KvmapError(
            f"n_sequences={n_sequences}, length={length}, batch_size={batch_size}, repeats={repeats}: "
            "expected 1 or more each"
        )
    source, target = pair.source, pair.target
    vocabulary = min(source.geometry.vocab_size, target.geometry.vocab_size)
    ids = torch.randint(vocabulary, (n_sequences, length), generator=torch.Generator().manual_seed(seed))
    diagnose = partial(_diagnose, pair, mapper, batch_size=batch_size)
    if length > WARM_TOKENS:
        diagnose(ids[:1, :WARM_TOKENS])
    cpu: dict[str, list[float]] = {"native": [], "diagnostics": []}
    calls: dict[str, Callable[[], object]] = {
        "native": _counting(cpu["native"], partial(_read_natively, pair, ids, batch_size)),
        "diagnostics": _counting(cpu["diagnostics"], partial(diagnose, ids)),
    }
    seconds = time_interleaved(calls, repeats, 0, (source.device, target.device))
    return {
        "n_sequences": n_sequences,
        "length": length,
        "batch_size": batch_size,
        **_compared(seconds, ""),
        **_compared(cpu, "cpu_"),
        "n_repeats": repeats,
        "dtype": str(target.dtype).removeprefix("torch."),
        "device": str(target.device),
        "threads": torch.get_num_threads(),
    }


def _counting(seconds: list[float], call: Callable[[], object]) -> Callable[[], object]:
    """The call, which adds the CPU seconds it took to the list."""

    def counted() -> object:
        start = time.process_time()
        found = call()
        seconds.append(time.process_time() - start)
        return found

    return counted


def _compared(seconds: dict[str, list[float]], prefix: str) -> Row:
    native, diagnostics = (np.asarray(seconds[name]) for name in ("native", "diagnostics"))
    return {
        f"native_{prefix}seconds": float(np.median(native)),
        f"diagnostics_{prefix}seconds": float(np.median(diagnostics)),
        f"{prefix}ratio": float(np.median(diagnostics / native)),
    }


def _diagnose(pair: ModelPair, mapper: Mapper, ids: Tensor, *, batch_size: int) -> object:
    text, kinds = Text.of_sequences("evaluation", ids), TokenKinds(pair.tokenizer, ids)
    sums = diagnose_texts(pair, mapper, [text], kinds, TransferOptions(), batch_size=batch_size)
    tables = text_tables(sums.values())
    return tables, text_metrics(sums["evaluation"], tables)


def _read_natively(pair: ModelPair, ids: Tensor, batch_size: int) -> None:
    for batch in ids.split(batch_size):
        prefill(pair.source, batch)
        prefill(pair.target, batch)


def main(arguments: list[str] | None = None) -> int:
    """Measure, print the sizes and, on the last line, the row as JSON."""
    asked = _parser().parse_args(arguments)
    try:
        with torch_threads(asked.threads):
            pair = ModelPair(*(ModelSpec(name, dtype=asked.dtype) for name in (asked.source, asked.target)))
            row = {"source": asked.source, "target": asked.target, "top_k": asked.top_k} | diagnostics_row(
                pair,
                random_mapper_of(pair, asked.top_k, dtype=torch.float32),
                n_sequences=asked.sequences,
                length=asked.length,
                batch_size=asked.batch_size,
                repeats=asked.repeats,
            )
    except KvmapError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(
        f"native {row['native_seconds']:.3g} s, diagnostics {row['diagnostics_seconds']:.3g} s: "
        f"{row['ratio']:.2f} times ({row['cpu_ratio']:.2f} in CPU seconds)"
    )
    if asked.output is not None:
        write_json(asked.output, row)
    print(json.dumps(row))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m kvmap.benchmark.diagnostics",
        description="Measure what the streaming diagnostics of one mapper cost, against forward passes of "
        "both models over the same tokens. The mapper is a linear one of random weights.",
    )
    parser.add_argument("--source", required=True, help="source model: a folder or a hub id")
    parser.add_argument("--target", required=True, help="target model")
    parser.add_argument("--dtype", default="auto", help="of both models (default: of the checkpoint)")
    parser.add_argument("--sequences", type=int, default=16, help="default 16")
    parser.add_argument("--length", type=int, default=512, help="tokens of each (default 512)")
    parser.add_argument("--batch-size", type=int, default=8, help="sequences at a time (default 8)")
    parser.add_argument("--top-k", type=int, default=8, help="source layers a target layer reads (default 8)")
    parser.add_argument("--repeats", type=int, default=1, help="turns of each (default 1)")
    parser.add_argument("--threads", type=int, default=1, help="of torch (default 1)")
    parser.add_argument("--output", type=Path, help="also write the row there, as JSON")
    return parser


if __name__ == "__main__":
    sys.exit(main())
