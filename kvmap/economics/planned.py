"""Latencies of a pair on a named device, from its configs and the planner's rates: nothing is run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from kvmap.economics.curves import Latencies
from kvmap.economics.errors import EconomicsError
from kvmap.planning.devices import Device
from kvmap.planning.models import ModelFacts

LENGTHS = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768)


@dataclass(frozen=True)
class PlannedMap:
    """A map as a plan knows it.

    Attributes:
        n_weights: W, one product each for a mapped token.
        n_bytes: of weights and biases.
        dtype: that it multiplies in.
        native_layers: of the target, that it runs itself.
        native_head, hold_back: tokens that the target runs itself, at the start and at the end.
    """

    n_weights: int
    n_bytes: int
    dtype: str
    native_layers: int = 0
    native_head: int = 1
    hold_back: int = 1


def planned_latencies(
    source: ModelFacts,
    target: ModelFacts,
    mapping: PlannedMap,
    device: Device,
    lengths: Sequence[int] = LENGTHS,
    *,
    source_gpus: int = 1,
    target_gpus: int = 1,
    source_token_ms: float | None = None,
    target_token_ms: float | None = None,
    beyond: str = "refuse",
) -> Latencies:
    """Curves through `max(FLOPs / (share · peak), bytes / bandwidth)` of each part, batch 1.

    FLOPs are those of products and of causal attention (`kvmap.transfer.cost`), bytes are weights, once, and
    the caches read and written. A hand-off is the map over all columns between head and tail, and the
    target's run of both (of the native layers over the whole context too), one after the other. n GPUs have n
    times the rates of one, at no cost of their own. Kernels too small for the device, launches and Python are
    not in it: short contexts take longer, hand-offs above all.

    Args:
        source, target: the two models.
        mapping: the map.
        device: of the planner's table, one GPU.
        lengths: tokens, rising, each within what both models hold.
        source_gpus, target_gpus: that each model is spread over.
        source_token_ms, target_token_ms: of one more token at any length, in place of the plan.
        beyond: see `Latencies`.

    Raises:
        EconomicsError: a length out of range.
    """
    own = mapping.native_head + mapping.hold_back
    most = min(source.geometry.max_positions, target.geometry.max_positions)
    wrong = [length for length in lengths if not own < length <= most]
    if wrong or not len(lengths):
        raise EconomicsError(
            f"lengths={list(lengths)}: expected at least one, more than {own} tokens (native head and "
            f"hold-back) and at most {most}, what both models hold"
        )
    of_source, of_target = spread(device, source_gpus), spread(device, target_gpus)
    columns = sorted(set(lengths))
    ms = {
        "source_prefill": [prefill_ms(source, of_source, n) for n in columns],
        "re_prefill": [prefill_ms(target, of_target, n) for n in columns],
        "hand_off": [hand_off_ms(source, target, mapping, of_target, n) for n in columns],
        "source_token": [source_token_ms or token_ms(source, of_source, n) for n in columns],
        "target_token": [target_token_ms or token_ms(target, of_target, n) for n in columns],
    }
    sizes = {
        f"{name}_bytes": [model.geometry.kv_bytes(n, model.item_bytes) for n in columns]
        for name, model in (("source", source), ("mapped", target))
    }
    return Latencies(
        np.array(columns, dtype=np.float64),
        {name: np.array(values, dtype=np.float64) for name, values in ms.items()},
        {name: np.array(values, dtype=np.float64) for name, values in sizes.items()},
        origin=f"planned for {device.name} at {device.efficiency:.0%} of its peak, {source_gpus} GPU of the "
        f"source, {target_gpus} of the target",
        notes=("planned, not measured: launches and Python are not counted, and GPUs share work at no cost",),
        beyond=beyond,
    )


def spread(device: Device, n: int) -> Device:
    """So many of a device as one."""
    rates = {dtype: n * rate for dtype, rate in device.flops_per_s.items()}
    return replace(device, flops_per_s=rates, bytes_per_s=n * device.bytes_per_s)


def prefill_ms(model: ModelFacts, device: Device, n_tokens: int) -> float:
    """Token ids → the model's own cache, without logits."""
    n_bytes = model.weights_bytes(fp8=device.fp8) + model.geometry.kv_bytes(n_tokens, model.item_bytes)
    return 1e3 * device.seconds(model.work.run(1, n_tokens), model.dtype, n_bytes)


def token_ms(model: ModelFacts, device: Device, n_tokens: int) -> float:
    """One more token over a context of so many."""
    flops = model.work.run(n_tokens + 1, n_tokens + 1) + 2 * model.work.logits
    n_bytes = model.weights_bytes(fp8=device.fp8) + model.geometry.kv_bytes(n_tokens, model.item_bytes)
    return 1e3 * device.seconds(flops, model.dtype, n_bytes)


def hand_off_ms(
    source: ModelFacts, target: ModelFacts, mapping: PlannedMap, device: Device, n_tokens: int
) -> float:
    """The source's cache → the target's first logits."""
    n_cut = n_tokens - mapping.hold_back
    n_mapped = n_cut - mapping.native_head
    caches = source.geometry.kv_bytes(n_mapped, source.item_bytes) + target.geometry.kv_bytes(
        n_mapped, target.item_bytes
    )
    mapped = device.seconds(2.0 * n_mapped * mapping.n_weights, mapping.dtype, mapping.n_bytes + caches)
    work = target.work
    flops = work.run(n_cut + 1, n_tokens) + 2 * mapping.hold_back * work.logits
    flops += work.run(1, mapping.native_head) + work.first_layers(n_cut, mapping.native_layers)
    n_bytes = target.weights_bytes(fp8=device.fp8) + target.geometry.kv_bytes(n_tokens, target.item_bytes)
    return 1e3 * (mapped + device.seconds(flops, target.dtype, n_bytes))
