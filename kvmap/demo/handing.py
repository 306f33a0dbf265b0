"""The one hand-off of a conversation, and what it would have cost otherwise."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

from kvmap.evaluation.conversation_encoding import Ids
from kvmap.evaluation.conversation_speakers import as_batch
from kvmap.evaluation.stopwatch import Stopwatch
from kvmap.mappers import Canary, Mapper
from kvmap.models.cache import KVCache
from kvmap.models.loaded import LoadedModel
from kvmap.transfer import Gate, HandOff, TransferOptions, gated_transfer, native

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Handed:
    """A context that the target is ready to go on from, whatever became of the map.

    Attributes:
        hand_off: the mapped one if `applied`, else the target's own.
        status: `applied`, `fell_back`, `unsupported`.
        cause, reason: as `kvmap.transfer.Gated` has them.
        seconds: it took, a canary not counted.
        prefill_seconds: of the target's own reading of the same context.
        canary_kl_nats: see `kvmap.demo.events.HandedOver`.
    """

    hand_off: HandOff
    status: str
    cause: str | None
    reason: str
    seconds: float
    prefill_seconds: float
    canary_kl_nats: float | None


def watching_gate(mapper: Mapper, max_kl_nats: float | None = None, allow: tuple[str, ...] = ()) -> Gate:
    """A gate that compares every hand-off with the target's own logits, since a demo shows both.

    Args:
        mapper: whose verdict's canary says what is compared, and how far it may be off.
        max_kl_nats: how far in place of that; None and no canary: any KL passes.
        allow: verdicts beside "go" that are let through.
    """
    known = None if mapper.verdict is None else mapper.verdict.canary
    canary = Canary(math.inf) if known is None else known
    largest = canary.max_kl_nats if max_kl_nats is None else max_kl_nats
    return Gate(allow=allow, canary=replace(canary, max_kl_nats=largest, share=1.0))


def hand_over(
    source_kv: KVCache, mapper: Mapper, target: LoadedModel, ids: Ids, options: TransferOptions, gate: Gate
) -> Handed:
    """Map the source's cache of `ids` if it passes the gate; either way with the time of the target's own."""
    context = as_batch(ids)
    gated = gated_transfer(source_kv, mapper, target, context, options=options, gate=gate)
    prefill_seconds = gated.native_seconds
    if prefill_seconds is None:
        _, prefill_seconds = timed(target, lambda: native(target, context, hold_back=options.hold_back))
    return Handed(
        gated.hand_off,
        gated.status,
        gated.cause,
        gated.reason,
        gated.transfer_seconds,
        prefill_seconds,
        gated.canary_kl_nats,
    )


def mapped_bytes(hand_off: HandOff) -> int:
    """Bytes of keys and values that were mapped: ``Σ_ℓ n_ℓ · 2 H_t d_t · itemsize``."""
    return sum(
        n_mapped * tensor.shape[1] * tensor.shape[3] * tensor.element_size()
        for kind in (hand_off.kv.keys, hand_off.kv.values)
        for n_mapped, tensor in zip(hand_off.n_mapped_of_layer, kind, strict=True)
    )


def timed(model: LoadedModel, action: Callable[[], T]) -> tuple[T, float]:
    """What an action of a model returns, and the seconds until its work was done."""
    watch = Stopwatch()
    with watch.lap("action", model, (0,)):
        result = action()
    return result, float(watch.record()["action"]["seconds"])
