"""What a target makes of caches that came to it by several routes, against its own cache of the same text."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from kvmap.data import prompt_prefix
from kvmap.evaluation.perplexity import divergence, predictions
from kvmap.evaluation.relay import cache_r2
from kvmap.fit.view import cache_view
from kvmap.mappers import Mapper
from kvmap.models.cache import KVCache
from kvmap.models.capture import forward
from kvmap.models.loaded import LoadedModel
from kvmap.transfer import TransferOptions, native, transfer

K = TypeVar("K", bound=Hashable)

_SUMS = ("nll", "kl", "agreement")


@dataclass(frozen=True)
class Judged:
    """One sequence whose context came by one route. Sums are over the scored tokens of its continuation.

    Attributes:
        n_tokens: how many are scored.
        nll, nll_native, nll_none: negative log-likelihood from the handed cache, the target's own, and
            nothing, nats.
        kl: KL(native ‖ handed) of the next-token distributions, nats.
        agreement: positions whose likeliest token is native's.
        key_r2, value_r2: of the mapped columns against the target's own, see
            `kvmap.evaluation.relay.cache_r2`; mean over layers and heads.
    """

    n_tokens: int
    nll: float
    nll_native: float
    nll_none: float
    kl: float
    agreement: float
    key_r2: float
    value_r2: float


def relayed(source: KVCache, mapper: Mapper, middle: KVCache, rope: str = "strip") -> KVCache:
    """What model B would be handed, all columns of it mapped: a source for the mapper of B → C.

    B does not run: no column is its own, and the caller's options have no part in it.

    Args:
        source: A's cache, as captured.
        mapper: A → B, without native layers.
        middle: any cache of B of the same columns, for its rotations.
        rope: strategy of both maps; "coupled" leaves the keys rotated as B's are.

    Returns:
        (batch, heads, tokens, head_dim) layers of B's shape, `exact=False`; stripped unless "coupled".
    """
    kv = mapper.map(cache_view(source, rope).to(device=mapper.device))
    return replace(kv, rotations=middle.rotations) if rope == "coupled" else kv


def judge(
    target: LoadedModel,
    tokenizer: Any,
    mapper: Mapper,
    sources: Mapping[K, KVCache],
    own: KVCache,
    input_ids: Tensor,
    *,
    prefix_tokens: int,
    options: TransferOptions,
) -> dict[K, list[Judged]]:
    """Hand the prefix over from each source cache by one and the same mapper, and score the continuation.

    Args:
        target: C, in memory.
        tokenizer: of all models.
        mapper: of the last step, B → C.
        sources: by route, caches of B's shape over all columns of `input_ids`: B's own, or `relayed`.
        own: the target's own cache of the same columns, which native is read from: it is not prefilled.
        input_ids: (batch, tokens); the context is the first `prefix_tokens` of them.
        prefix_tokens: the context; the rest is the continuation, whose first token is fed and not scored.
        options: of the hand-off to the target.

    Returns:
        By route, one `Judged` a sequence.
    """
    context, continuation = input_ids[:, :prefix_tokens], input_ids[:, prefix_tokens:]
    own = replace(own, owner=target.identity).slice_tokens(0, prefix_tokens).to(device=target.device)
    reference = native(target, context, hold_back=options.hold_back, cache=own).kv
    prefix = prompt_prefix(tokenizer)
    none = forward(target, torch.tensor([prefix] * len(context)), None)[1] if prefix else None
    handed = {
        route: transfer(
            kv.slice_tokens(0, prefix_tokens), mapper, target, context, **asdict(options), every_column=True
        ).kv
        for route, kv in sources.items()
    }
    sums = _scored(target, {"native": reference, "none": none}, handed, continuation)
    columns = torch.zeros_like(own.mask)
    columns[:, options.native_head : prefix_tokens - options.hold_back] = True
    found: dict[K, list[Judged]] = {}
    for route, kv in handed.items():
        r2 = {kind: by_layer.mean(1) for kind, by_layer in cache_r2(kv, own, columns).items()}
        found[route] = [
            Judged(
                n_tokens=continuation.shape[1] - 1,
                nll_native=sums["native"]["nll"][row],
                nll_none=sums["none"]["nll"][row],
                **{name: sums[route][name][row] for name in _SUMS},
                key_r2=float(r2["key"][row]),
                value_r2=float(r2["value"][row]),
            )
            for row in range(len(context))
        ]
    return found


def _scored(
    target: LoadedModel,
    references: Mapping[str, KVCache | None],
    handed: Mapping[K, KVCache],
    continuation: Tensor,
) -> dict[Any, dict[str, list[float]]]:
    """By stream, sums over the scored tokens of each row: `nll`; `kl` and `agreement` against "native".

    All streams advance together, chunk by chunk, so that no route's distributions are kept.
    """
    caches: dict[Any, KVCache | None] = {**references, **handed}
    streams = {name: predictions(target, kv, continuation) for name, kv in caches.items()}
    sums = {
        name: {key: torch.zeros(len(continuation), dtype=torch.float64) for key in _SUMS} for name in caches
    }
    reference = streams.pop("native")
    for own in reference:
        for name, chunk in [("native", own), *((name, next(stream)) for name, stream in streams.items())]:
            sums[name]["nll"] -= chunk["token"].double().sum(1).cpu()
            sums[name]["kl"] += divergence(own["all"], chunk["all"]).sum(1).cpu()
            sums[name]["agreement"] += (chunk["top"] == own["top"]).sum(1).cpu()
    return {name: {key: values.tolist() for key, values in by.items()} for name, by in sums.items()}
