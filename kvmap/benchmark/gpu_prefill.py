"""Reading the context again, by models of random weights: what mapping is held against."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from kvmap.benchmark.gpu_study import Record, Study, free
from kvmap.benchmark.random_models import Depth, random_model
from kvmap.benchmark.timing import Row, peak_bytes, percentiles, time_interleaved
from kvmap.errors import KvmapError
from kvmap.models.capture import prefill
from kvmap.models.shapes import shape_config, shape_geometry
from kvmap.models.spec import ModelSpec


def prefill_rows(study: Study, record: Record) -> Iterator[Row]:
    """Prefill of both models with random weights, the target first.

    Yields:
        Rows {role, model, length, how, p20_ms, p50_ms, p80_ms, whole_p50_ms, n_repeats, peak_bytes}; `how` is
        measured, or "scaled from n of m layers", which `whole_p50_ms` then is.
    """
    for role, name in (("target", study.target), ("source", study.source)):
        spec = ModelSpec(name, dtype=str(study.dtype).removeprefix("torch."), device=study.device.type)
        if record.left < 30:
            record.skip(f"prefill of the {role}")
            continue
        longest = max(study.lengths)
        run = study.max_layers or _layers_that_fit(spec, longest, study.device)
        model = random_model(spec, n_positions=longest + 1, max_layers=run)
        depth = Depth(model.geometry.n_layers, shape_config(spec).num_hidden_layers)
        record.say(f"{role}: {depth.run} of {depth.whole} layers of {name}")
        last = 0.0
        for length in study.lengths:
            repeats = max(study.repeats_at(length) // 4, 1) if length < 32768 else 1
            # time grows at most with the square of the length: four times at each step of two
            if last * 4.5 * (repeats + 2) > record.left - 10:
                record.skip(f"prefill of the {role} at {length} tokens")
                continue
            ids = torch.randint(model.geometry.vocab_size, (1, length), device=study.device)

            call = partial(prefill, model, ids)
            seconds = time_interleaved({"prefill": call}, repeats, 1, (study.device,))["prefill"]
            last = max(seconds)
            row: Row = {"role": role, "model": name, "length": length, **percentiles(seconds)}
            whole = depth.run == depth.whole
            row["how"] = "measured" if whole else f"scaled from {depth.run} of {depth.whole} layers"
            row["whole_p50_ms"] = row["p50_ms"] * depth.scale
            row |= {"n_repeats": repeats, "peak_bytes": peak_bytes(call, study.device)}
            record.say(f"prefill of the {role}, {length} tokens: {row['whole_p50_ms']:.1f} ms ({row['how']})")
            yield row
        del model, call
        free(study.device)


def _layers_that_fit(spec: ModelSpec, length: int, device: torch.device) -> int | None:
    """Layers whose weights and cache fit into free memory beside one layer's activations; None: all."""
    if device.type != "cuda":
        return None
    config, geometry = shape_config(spec), shape_geometry(spec)
    layer = geometry.layers[0]
    heads = (2 * geometry.n_heads + 2 * layer.n_kv_heads) * layer.head_dim
    weights = 2 * geometry.hidden_size * (heads + 3 * config.intermediate_size)
    cache = geometry.kv_bytes(length, 2) // geometry.n_layers
    free, _ = torch.cuda.mem_get_info(device)
    ends = 4 * geometry.vocab_size * geometry.hidden_size
    activations = 2 * length * (4 * config.intermediate_size + 8 * geometry.hidden_size)
    fitting = int((0.92 * free - ends - activations) / (weights + cache))
    if fitting < 1:
        raise KvmapError(f"{spec.id}: not one layer fits into {free:,} free bytes for {length} tokens")
    return None if fitting >= geometry.n_layers else fitting
