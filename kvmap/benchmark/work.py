"""What each arm has to do: floating-point operations, and the bytes it cannot avoid to move."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from kvmap.mappers import Mapper
from kvmap.models.loaded import LoadedModel
from kvmap.transfer import TransferOptions, handoff_flops
from kvmap.transfer.cost import decoder_work


@dataclass(frozen=True)
class Work:
    """Of one call.

    Attributes:
        flops: floating-point operations; a multiply-add counts as two.
        n_bytes: the least memory traffic: weights and caches read once, caches written once.
    """

    flops: float
    n_bytes: float


def arm_work(
    source: LoadedModel,
    target: LoadedModel,
    mapper: Mapper,
    options: TransferOptions,
    *,
    length: int,
    batch_size: int,
    source_bytes: int,
    mapped_bytes: int,
) -> dict[str, Work]:
    """The work of every arm, see `kvmap.benchmark.latency.latency_rows`.

    Prefills make no logits; `hand_off` and `first_token` do. A hand-off reads the target's weights once for
    the held-back tokens, once more for a native head, and those of native layers once more. The transport
    moves the source's cache, which is read and written.

    Args:
        source, target, mapper, options: of the benchmark.
        length: tokens of a context.
        batch_size: contexts.
        source_bytes, mapped_bytes: of the two caches of the whole batch.
    """
    reading, own = decoder_work(source), decoder_work(target)
    weights = {"source": _body_bytes(source), "target": _body_bytes(target)}
    head = own.logits * target.dtype.itemsize
    handed = handoff_flops(target, mapper, length, options).total
    runs = 1 + (options.native_head > 0)
    native = native_layer_bytes(target, mapper.native_layers)
    mapped = source_bytes + mapper.nbytes + mapped_bytes
    return {
        "source_prefill": Work(batch_size * reading.run(1, length), weights["source"] + source_bytes),
        "map": Work(batch_size * 2.0 * length * mapper.n_weights, mapped),
        "hand_off": Work(batch_size * handed, mapped + runs * weights["target"] + head + native),
        "re_prefill": Work(batch_size * own.run(1, length), weights["target"] + mapped_bytes),
        "first_token": Work(
            batch_size * (own.run(length + 1, length + 1) + 2 * own.logits),
            weights["target"] + head + mapped_bytes,
        ),
        "transport": Work(0.0, 2.0 * source_bytes),
    }


def native_layer_bytes(target: LoadedModel, native_layers: int) -> int:
    """Weights of native_layers − 1 whole layers, and of the next those that make its keys and values."""
    if native_layers == 0:
        return 0
    layers: Any = target.body.layers
    whole = sum(_weight_bytes(layer) for layer in layers[: native_layers - 1])
    last = target.geometry.layers[native_layers - 1]
    projected = 2 * last.n_kv_heads * last.head_dim * target.geometry.hidden_size
    return whole + projected * target.dtype.itemsize


def _body_bytes(model: LoadedModel) -> int:
    """Weights of all layers: of the embedding a few rows are read, which are left out."""
    layers: Any = model.body.layers
    return sum(_weight_bytes(layer) for layer in layers)


def _weight_bytes(module: nn.Module) -> int:
    return sum(weight.numel() * weight.element_size() for weight in module.parameters())
