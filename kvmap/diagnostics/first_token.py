"""How well a mapper rebuilds the first token of a context, the attention sink: no moment holds it apart."""

from __future__ import annotations

import math
from collections.abc import Iterable
from statistics import fmean
from typing import Any, TypeAlias

import torch
from torch import Tensor

from kvmap.errors import KvmapError
from kvmap.fit.features import KINDS
from kvmap.fit.view import cache_view
from kvmap.mappers import Mapper
from kvmap.metrics import Metric
from kvmap.models.cache import KVCache
from kvmap.models.capture import prefill
from kvmap.models.pair import LoadedModel, ModelPair

Row: TypeAlias = dict[str, Any]

TOKENS_AT_ONCE = 64


def first_token_rows(
    pair: ModelPair, mapper: Mapper, input_ids: Tensor, rope: str = "strip", *, sequential: bool = False
) -> list[Row]:
    """Error of the mapped first token for every target layer, head and kind, over all sequences.

    A causal model's keys and values of the first token depend on that token alone, so each distinct one is
    read once, by itself, and weighs as often as it begins a sequence. With y the target's own vector and ŷ
    the mapped one, keys as the strategy maps them, `Σ‖ŷ − y‖² / Σ‖y‖²`: nothing is centred, as most
    sequences begin with the same token. float64. Layers that the target computes itself make no error and
    get no rows.

    Args:
        pair: source and target.
        mapper: of this pair.
        input_ids: (sequences, tokens) int64, not padded on the left; the first column is read.
        rope: strategy the mapper was fitted for.
        sequential: one model in memory at a time; the source is released.

    Returns:
        Rows {layer, head, kind, relative_error, sink_norm_ratio}; the last is `√(Σ‖ŷ‖² / Σ‖y‖²)`. Both are
        nan where the target's own vectors are zero.

    Raises:
        KvmapError: no tokens, or a mapper of other models, shapes or another strategy.
    """
    if input_ids.ndim != 2 or 0 in input_ids.shape:
        raise KvmapError(
            f"input_ids have shape {tuple(input_ids.shape)}: expected (sequences, tokens), one or more each"
        )
    mapper.check_models(pair.source_identity, pair.target_identity, rope)
    tokens, counts = input_ids[:, 0].unique(return_counts=True)
    if sequential:
        pair.release("target")
    # a few columns: on the CPU, whatever the models are on
    sources = _read(pair.source, tokens, rope)
    if sequential:
        pair.release("source")
    targets = _read(pair.target, tokens, rope)
    sums: dict[tuple[int, int, str], list[Tensor]] = {}
    for source, target, weights in zip(sources, targets, counts.cpu().split(TOKENS_AT_ONCE), strict=True):
        mapped = mapper.map(source.to(device=mapper.device), _native(target, mapper))
        for kind in KINDS:
            layers = (mapped.keys, target.keys) if kind == "key" else (mapped.values, target.values)
            for layer in range(mapper.native_layers, target.n_layers):
                for head, part in enumerate(_sums(layers[0][layer], layers[1][layer], weights)):
                    sums.setdefault((layer, head, kind), []).append(part)
    return [
        {"layer": layer, "head": head, "kind": kind, **_ratios(torch.stack(parts).sum(0))}
        for (layer, head, kind), parts in sorted(sums.items())
    ]


def first_token_metrics(rows: Iterable[Row], arm: str = "mapped") -> dict[str, Metric]:
    """Mean over layers and heads, by `diagnose/first_token/<arm>/relative_error_<kind>`; n counts the heads.

    Heads whose error is not a number are left out.
    """
    groups: dict[str, list[float]] = {}
    for row in rows:
        if not math.isnan(row["relative_error"]):
            groups.setdefault(row["kind"], []).append(row["relative_error"])
    return {
        f"diagnose/first_token/{arm}/relative_error_{kind}": Metric(fmean(values), n=len(values))
        for kind, values in groups.items()
    }


def _read(model: LoadedModel, tokens: Tensor, rope: str) -> list[KVCache]:
    """The cache of each token alone, as the strategy sees it: (tokens, heads, 1, width), in chunks."""
    return [
        cache_view(prefill(model, chunk.unsqueeze(1)).to(device="cpu"), rope)
        for chunk in tokens.split(TOKENS_AT_ONCE)
    ]


def _native(target: KVCache, mapper: Mapper) -> KVCache | None:
    """The target's own first layers as the mapper reads them; None where it reads none."""
    count = mapper.native_layers
    if count == 0:
        return None
    return target.first_layers(count).to(device=mapper.device)


def _sums(found: Tensor, true: Tensor, weights: Tensor) -> Tensor:
    """(heads, 3) float64: weighted sums over tokens of ‖ŷ − y‖², ‖ŷ‖² and ‖y‖²."""
    found, true = found.cpu().double(), true.double()
    squares = torch.stack([(x * x).sum((2, 3)) for x in (found - true, found, true)], dim=-1)
    return (squares * weights.double()[:, None, None]).sum(0)


def _ratios(sums: Tensor) -> dict[str, float]:
    error, found, true = sums.tolist()
    if true == 0:
        return {"relative_error": math.nan, "sink_norm_ratio": math.nan}
    return {"relative_error": error / true, "sink_norm_ratio": math.sqrt(found / true)}
