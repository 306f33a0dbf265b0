"""Repeated hand-off: A reads, B takes over, hands back to A, and so on. How the error compounds.

A is the pair's source, B its target. Hop 1 maps A's own cache to B; hop 2 maps what B then holds back to A
with the reverse mapper. Every hop is a whole hand-off (`kvmap.transfer`): each holder has its own first and
last tokens, as the options say, and hands on all its columns. A hop is judged by the model that then holds
the cache, against its own cache of the same context.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from kvmap.data import TokenBlocks, prompt_prefix
from kvmap.errors import KvmapError
from kvmap.evaluation.answers import CONTENT_CHARACTERS, Answers, item_key
from kvmap.evaluation.arms import (
    Batch,
    Progress,
    placed,
    target_hand_offs,
    tokenizer_of,
)
from kvmap.evaluation.perplexity import Predictions, divergence, predictions, sequence_key
from kvmap.fit.features import KINDS
from kvmap.mappers import Mapper
from kvmap.models.cache import KVCache
from kvmap.models.capture import forward, prefill
from kvmap.models.pair import LoadedModel, ModelPair
from kvmap.progress import track
from kvmap.transfer import TransferOptions, native

Side = Literal["source", "target"]
Row: TypeAlias = dict[str, Any]

ANSWERS_VERSION = 1
"""Of what a relay measures; it is part of the key under which answers are kept."""


@dataclass(frozen=True)
class HopResult:
    """One sequence after one hop.

    Attributes:
        sequence: its number among the blocks.
        hop: from 1.
        holder: which model holds the cache after the hop, `target` after odd hops.
        n_tokens: scored tokens of the continuation.
        nll: their summed negative log-likelihood from the relayed cache, nats.
        nll_native: the same from the holder's own cache.
        nll_none: the same from nothing.
        kl: summed KL(native ‖ relayed) of the next-token distributions, nats.
        agreement: positions whose likeliest token is native's.
        key_r2, value_r2: of the mapped columns against the holder's own content keys and values, see
            `cache_r2`.
        content: hash of the sequence's prefix and continuation.
    """

    sequence: int
    hop: int
    holder: Side
    n_tokens: int
    nll: float
    nll_native: float
    nll_none: float
    kl: float
    agreement: int
    key_r2: float
    value_r2: float
    content: str

    def row(self) -> Row:
        """The result as one row of a table."""
        return {"arm": "mapped", **asdict(self)}


def evaluate_relay(
    pair: ModelPair,
    mapper: Mapper,
    reverse_mapper: Mapper,
    blocks: TokenBlocks,
    *,
    prefix_tokens: int,
    n_hops: int,
    options: TransferOptions,
    batch_size: int = 1,
    answers: Answers | None = None,
    progress: Progress = track,
    on_batch: Callable[[list[HopResult]], None] | None = None,
) -> list[HopResult]:
    """Hands each block's prefix back and forth, and scores its continuation after every hop.

    Args:
        pair: source (A) and target (B), both in memory.
        mapper: from A's cache to B's.
        reverse_mapper: from B's cache to A's.
        blocks: sequences of equal length, disjoint from the calibration text.
        prefix_tokens: the context; the rest is the continuation, whose first token is fed and not scored.
        n_hops: how often the cache changes hands.
        options: of every hand-off.
        batch_size: sequences at a time.
        answers: where sequences are kept; those kept already are not relayed again.
        progress: wraps the loop over batches.
        on_batch: called with the results of each batch as they are had.

    Returns:
        By sequence and hop.

    Raises:
        KvmapError: `rope="no_rerotate"`, whose caches cannot be handed on; lengths that leave nothing to map
            or to score; no hop.
    """
    _check(blocks, prefix_tokens, n_hops, options)
    kept = answers or Answers.in_memory()
    contents = [sequence_key(blocks, number, prefix_tokens) for number in range(blocks.n_sequences)]
    keys = [item_key(ANSWERS_VERSION, content, n_hops) for content in contents]

    def results(number: int, hops: list[Row]) -> list[HopResult]:
        content = contents[number][:CONTENT_CHARACTERS]
        return [HopResult(sequence=number, content=content, **hop) for hop in hops]

    found = {
        number: results(number, row["hops"])
        for number, key in enumerate(keys)
        if (row := kept.get(key)) is not None
    }
    asked = [number for number in range(blocks.n_sequences) if number not in found]
    if asked:
        relay = _Relay(pair, mapper, reverse_mapper, blocks.input_ids, prefix_tokens, n_hops, options)
        batches = [asked[start : start + batch_size] for start in range(0, len(asked), batch_size)]
        for numbers in progress(batches, len(batches), "evaluate relay"):
            measured = relay.run(numbers)
            kept.add({keys[number]: {"hops": hops} for number, hops in measured.items()})
            found |= {number: results(number, hops) for number, hops in measured.items()}
            if on_batch is not None:
                on_batch([result for number in numbers for result in found[number]])
    return [result for number in sorted(found) for result in found[number]]


def cache_r2(relayed: KVCache, own: KVCache, columns: Tensor) -> dict[str, Tensor]:
    """How much of the holder's own content keys and values a relayed cache has, for each sequence and layer.

    ``R² = 1 − Σ‖x̂ − x‖² / Σ‖x − x̄‖²`` per head, summed over the columns and the head's channels, x̄ the mean
    of the sequence's own columns; mean over heads. 1: the same; 0: no better than that mean. float64.

    Args:
        relayed: what the holder has been handed.
        own: what it would have computed, with the same columns.
        columns: (batch, tokens) bool, which columns count.

    Returns:
        By kind, (batch, n_layers).
    """
    found: dict[str, list[Tensor]] = {kind: [] for kind in KINDS}
    weight = columns[:, None, :, None].double()
    stripped, true = relayed.strip(), own.strip()
    for kind in KINDS:
        parts = [(kv.keys if kind == "key" else kv.values) for kv in (stripped, true)]
        for got, wanted in zip(*parts, strict=True):
            counts = weight.to(wanted.device)
            x, x_hat = wanted.double(), got.to(wanted.device).double()
            centre = (x * counts).sum(2, keepdim=True) / counts.sum(2, keepdim=True)
            error = ((x_hat - x).square() * counts).sum((2, 3))
            spread = ((x - centre).square() * counts).sum((2, 3))
            found[kind].append((1 - error / spread).mean(1).cpu())
    return {kind: torch.stack(layers, dim=1) for kind, layers in found.items()}


def _check(blocks: TokenBlocks, prefix_tokens: int, n_hops: int, options: TransferOptions) -> None:
    if n_hops < 1:
        raise KvmapError(f"n_hops={n_hops}: expected at least 1")
    if options.rope == "no_rerotate":
        raise KvmapError(
            "rope='no_rerotate' leaves mapped keys unrotated, so their cache cannot be handed on; relay with "
            "'strip' or 'coupled'"
        )
    if not 1 <= prefix_tokens <= blocks.length - 2:
        raise KvmapError(
            f"prefix_tokens={prefix_tokens} of blocks of {blocks.length} tokens: expected at least one token "
            "of prefix and two of continuation, of which the second is the first that is scored"
        )
    n_columns = prefix_tokens - options.native_head - options.hold_back
    if n_columns < 2:
        raise KvmapError(
            f"prefix_tokens={prefix_tokens}: native_head={options.native_head} and "
            f"hold_back={options.hold_back} leave {max(n_columns, 0)} columns to map and compare; expected "
            "at least 2. Give longer contexts"
        )


class _Relay:
    """One pair, its two mappers, and the hops of a batch."""

    def __init__(
        self,
        pair: ModelPair,
        mapper: Mapper,
        reverse_mapper: Mapper,
        input_ids: Tensor,
        prefix_tokens: int,
        n_hops: int,
        options: TransferOptions,
    ) -> None:
        self.input_ids = input_ids
        self.models: dict[Side, LoadedModel] = {"source": pair.source, "target": pair.target}
        self.tokenizer = tokenizer_of(pair)
        self.mappers: dict[Side, Mapper | None] = {
            "target": placed({"mapped": mapper}, pair.target)["mapped"],
            "source": placed({"mapped": reverse_mapper}, pair.source)["mapped"],
        }
        self.prefix_tokens, self.n_hops, self.options = prefix_tokens, n_hops, options

    def run(self, numbers: Sequence[int]) -> dict[int, list[Row]]:
        """What each of these sequences comes to after each hop: the fields of `HopResult`."""
        ids = self.input_ids[list(numbers)]
        context, continuation = ids[:, : self.prefix_tokens], ids[:, self.prefix_tokens :]
        batch = Batch(tuple(numbers), context, torch.ones_like(context, dtype=torch.bool))
        caches: dict[int, KVCache] = {}
        kv = prefill(self.models["source"], context)
        for hop in range(1, self.n_hops + 1):
            caches[hop] = kv = self._handed_over(batch, kv, holder_of(hop))
        results: dict[int, list[Row]] = {}
        for side in self.models:
            held = {hop: cache for hop, cache in caches.items() if holder_of(hop) == side}
            if held:
                results |= self._judged(side, batch, held, continuation)
        return {number: [results[hop][row] for hop in sorted(results)] for row, number in enumerate(numbers)}

    def _handed_over(self, batch: Batch, kv: KVCache, holder: Side) -> KVCache:
        arms = {"mapped": self.mappers[holder]}
        model = self.models[holder]
        hand_offs = target_hand_offs(model, self.tokenizer, batch, arms, kv, self.options)
        return next(hand_off.kv for _, hand_off in hand_offs)

    def _judged(
        self, side: Side, batch: Batch, held: Mapping[int, KVCache], continuation: Tensor
    ) -> dict[int, list[Row]]:
        """All hops after which one model holds the cache; what it does by itself is run once for all."""
        model = self.models[side]
        own = native(model, batch.input_ids, hold_back=self.options.hold_back).kv
        prefix = prompt_prefix(self.tokenizer)
        none = forward(model, torch.tensor([prefix] * len(batch.index)), None)[1] if prefix else None
        known: dict[Any, KVCache | None] = {"native": own, "none": none, **held}
        streams = {name: predictions(model, kv, continuation) for name, kv in known.items()}
        scores = _scored(streams, len(batch.index))
        mapped = self.mappers[side]
        first = 0 if mapped is None else mapped.native_layers
        found = {}
        for hop, cache in held.items():
            r2 = {kind: layers[:, first:].mean(1) for kind, layers in self._r2(cache, own).items()}
            found[hop] = [
                {
                    "hop": hop,
                    "holder": side,
                    "n_tokens": continuation.shape[1] - 1,
                    "nll": scores[hop]["nll"][row],
                    "nll_native": scores["native"]["nll"][row],
                    "nll_none": scores["none"]["nll"][row],
                    "kl": scores[hop]["kl"][row],
                    "agreement": round(scores[hop]["agreement"][row]),
                    "key_r2": float(r2["key"][row]),
                    "value_r2": float(r2["value"][row]),
                }
                for row in range(len(batch.index))
            ]
        return found

    def _r2(self, relayed: KVCache, own: KVCache) -> dict[str, Tensor]:
        columns = torch.zeros_like(own.mask)
        columns[:, self.options.native_head : own.n_tokens - self.options.hold_back] = True
        return cache_r2(relayed, own, columns)


def holder_of(hop: int) -> Side:
    """Which model holds the cache after a hop: B after odd ones."""
    return "target" if hop % 2 else "source"


def _scored(streams: Mapping[Any, Iterator[Predictions]], n_rows: int) -> dict[Any, dict[str, list[float]]]:
    """By stream, sums over the scored tokens of each row: `nll`; `kl` and `agreement` against `native`."""
    sums = {name: {key: [0.0] * n_rows for key in ("nll", "kl", "agreement")} for name in streams}
    others = {name: stream for name, stream in streams.items() if name != "native"}
    for own in streams["native"]:
        chunks = {"native": own} | {name: next(stream) for name, stream in others.items()}
        for name, chunk in chunks.items():
            added = {
                "nll": -chunk["token"].double().sum(1),
                "kl": divergence(own["all"], chunk["all"]).sum(1),
                "agreement": (chunk["top"] == own["top"]).sum(1),
            }
            for key, values in added.items():
                for row, value in enumerate(values.tolist()):
                    sums[name][key][row] += value
    return sums
