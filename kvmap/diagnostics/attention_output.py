"""What the target's own attention makes of a mapped cache: the cosine of its outputs with the true ones."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from kvmap.errors import KvmapError
from kvmap.mappers import Mapper
from kvmap.metrics import Metric
from kvmap.models.cache import KVCache
from kvmap.models.capture import prefill
from kvmap.models.pair import LoadedModel, ModelPair
from kvmap.models.queries import attention_outputs, attention_scores, attention_weights, read_queries
from kvmap.models.storage import load_kv, save_kv
from kvmap.progress import track
from kvmap.transfer import TransferOptions, transfer

Row: TypeAlias = dict[str, Any]
Batch: TypeAlias = tuple[Tensor, Tensor]


def attention_output_rows(
    pair: ModelPair,
    mapper: Mapper,
    input_ids: Tensor,
    options: TransferOptions,
    attention_mask: Tensor | None = None,
    *,
    batch_size: int = 8,
    query_block: int = 128,
    sequential: bool = False,
) -> list[Row]:
    """Attention-output cosine of every target layer and query head (METHOD: measures; [H] §5).

    With q the target's queries of its own, native run, once on its own cache and once on the mapped one::

        o_u = Σ_i softmax(scaling·q_u·k_i)_i v_i        cosine = mean_u  o_u·ô_u / (‖o_u‖ ‖ô_u‖)

    The mapped cache is that of `transfer` with one token held back: its columns before that token, those of
    the native head (and of layers the target computes itself) included as the exact ones they are. The true
    cache is cut to the same columns, so both softmaxes run over the same ones, causally: each query, its own
    column included, sees what it sees natively. The queries are those of these columns, less those that see
    no mapped column (the native head's), whose cosine is 1 by construction.

    Scores, softmax and outputs in float32, cosines and their sums in float64. Layers pass one by one; memory
    for a batch is three caches and twice batch · n_heads · query_block · tokens float32 numbers.

    Args:
        pair: source and target.
        mapper: of this pair.
        input_ids: (sequences, tokens) int64; attention_mask: (sequences, tokens), left padding, or None.
        options: how the cache is handed over; `hold_back` is taken as 1.
        batch_size: sequences at a time.
        query_block: query tokens at a time.
        sequential: one model in memory at a time; the source is released, and its caches wait on disk.

    Returns:
        Rows {layer, head, cosine, n}, by query head; n counts tokens.

    Raises:
        KvmapError: no tokens, nothing to map, or a mapper of other models, shapes or another strategy.
        UnsupportedModel: a target whose queries cannot be had.
    """
    batches = _batches(input_ids, attention_mask, options, batch_size, query_block)
    mapper.check_models(pair.source_identity, pair.target_identity, options.rope)
    sums: dict[int, Tensor] = {}
    n_counted = 0
    with _source_caches(pair, batches, sequential) as caches:
        for (ids, mask), source_kv in caches:
            handed = transfer(
                source_kv, mapper, pair.target, ids, mask, native_head=options.native_head, rope=options.rope
            )
            mapped = handed.kv.slice_tokens(0, ids.shape[1] - 1)
            judge = _Judge(mapped, options.native_head, query_block, sums)
            read_queries(pair.target, ids, mask, judge)
            n_counted += int(judge.counted.sum())
    return [
        {"layer": layer, "head": head, "cosine": total / n_counted, "n": n_counted}
        for layer, totals in sorted(sums.items())
        for head, total in enumerate(totals.tolist())
    ]


def attention_output_metrics(rows: Iterable[Row], arm: str = "mapped") -> dict[str, Metric]:
    """Mean over tokens, heads and layers, `diagnose/attention_output/<arm>/cosine`; n counts the heads."""
    cosines = [row["cosine"] for row in rows]
    return {f"diagnose/attention_output/{arm}/cosine": Metric(fmean(cosines), n=len(cosines))}


class _Judge:
    """An `OnLayer` that adds each head's cosines of one batch to the sums, (n_heads,) float64 by layer."""

    def __init__(self, mapped: KVCache, native_head: int, query_block: int, sums: dict[int, Tensor]) -> None:
        self.mapped, self.query_block, self.sums = mapped, query_block, sums
        self.counted = mapped.mask & (mapped.positions >= native_head)

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, softcap: float | None, /
    ) -> None:
        mask, counted = self.mapped.mask.to(query.device), self.counted.to(query.device)
        caches = ((key, value), (self.mapped.keys[layer], self.mapped.values[layer]))
        total = torch.zeros(query.shape[1], dtype=torch.float64)
        for start in range(0, mask.shape[1], self.query_block):
            stop = min(start + self.query_block, mask.shape[1])
            columns = torch.arange(stop, device=query.device)
            visible = mask[:, None, :stop] & (columns <= columns[start:, None])
            q = query[:, :, start:stop].float()
            own, found = (
                _outputs(q, k[:, :, :stop].to(q), v[:, :, :stop].to(q), visible, scaling, softcap)
                for k, v in caches
            )
            cosines = cosine_similarity(own.double(), found.double(), dim=-1)
            kept = counted[:, None, None, start:stop]
            total += torch.where(kept, cosines, 0.0).sum((0, 3)).flatten().cpu()
        self.sums[layer] = self.sums.get(layer, torch.zeros_like(total)) + total


def _outputs(
    query: Tensor, key: Tensor, value: Tensor, visible: Tensor, scaling: float, softcap: float | None
) -> Tensor:
    """Post-softmax outputs (batch, n_kv_heads, group, n, head_dim)."""
    return attention_outputs(
        attention_weights(attention_scores(query, key, scaling, softcap), visible), value
    )


def _batches(
    input_ids: Tensor, attention_mask: Tensor | None, options: TransferOptions, batch_size: int, block: int
) -> list[Batch]:
    """Ids and masks, and a refusal of what cannot be read."""
    if batch_size < 1 or block < 1:
        raise KvmapError(f"batch_size={batch_size}, query_block={block}: expected 1 or more each")
    if input_ids.ndim != 2 or 0 in input_ids.shape:
        raise KvmapError(
            f"input_ids have shape {tuple(input_ids.shape)}: expected (sequences, tokens), one or more each"
        )
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    if mask.shape != input_ids.shape:
        raise KvmapError(f"attention_mask has shape {tuple(mask.shape)}; input_ids {tuple(input_ids.shape)}")
    longest = int(mask.sum(-1).max())
    if longest - 1 <= options.native_head:
        raise KvmapError(
            f"contexts of {longest} tokens leave nothing to map: the last token and native_head="
            f"{options.native_head} are the target's own; give longer ones"
        )
    return list(zip(input_ids.split(batch_size), mask.bool().split(batch_size), strict=True))


@contextmanager
def _source_caches(
    pair: ModelPair, batches: list[Batch], sequential: bool
) -> Iterator[Iterator[tuple[Batch, KVCache]]]:
    """Each batch with the source's cache of it; a sequential source has read all and is gone by the first."""
    what = "diagnose: attention outputs"
    if not sequential:
        yield ((batch, prefill(pair.source, *batch)) for batch in track(batches, len(batches), what))
        return
    with tempfile.TemporaryDirectory(prefix="kvmap-") as name:
        files = [Path(name) / f"{number}.safetensors" for number in range(len(batches))]
        pair.release("target")
        _spill(pair.source, batches, files, f"{what} (source)")
        pair.release("source")
        numbered = list(zip(batches, files, strict=True))
        yield ((batch, _read(file)) for batch, file in track(numbered, len(numbered), what))


def _spill(source: LoadedModel, batches: list[Batch], files: list[Path], what: str) -> None:
    for batch, file in zip(track(batches, len(batches), what), files, strict=True):
        save_kv(prefill(source, *batch), file)


def _read(file: Path) -> KVCache:
    kv = load_kv(file)
    file.unlink()
    return kv
