"""What the target's own attention makes of a mapped cache: outputs beside its own, and mass on the sink."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from kvmap.diagnostics.concentration import key_concentration, value_concentration
from kvmap.diagnostics.sums import TextSums
from kvmap.diagnostics.token_groups import N_KINDS
from kvmap.models.queries import (
    attention_outputs,
    attention_scores,
    attention_weights,
    visible_columns,
)

Row: TypeAlias = dict[str, Any]
KeyValue: TypeAlias = tuple[Tensor, Tensor]


def attention_sums(
    query: Tensor,
    own: KeyValue,
    found: KeyValue,
    mask: Tensor,
    counted: Tensor,
    groups: Tensor,
    scaling: float,
    softcap: float | None,
    query_block: int,
    window: int | None = None,
) -> tuple[dict[str, Tensor], Tensor]:
    """One layer's attention on the target's own cache and on the mapped one (METHOD: measures; [H] §5).

    With q the target's queries of its own, native run::

        o_u = Σ_i softmax(scaling·q_u·k_i)_i v_i        cosine_u = o_u·ô_u / (‖o_u‖ ‖ô_u‖)

    Both softmaxes run over the same columns, causally: each query, its own column included, sees what it sees
    natively. Scores, softmax and outputs in float32, cosines and sums in float64. Memory: twice
    batch · n_heads · query_block · tokens float32 numbers.

    Args:
        query: (batch, n_heads, tokens, head_dim), as multiplied with keys.
        own, found: keys and values (batch, n_kv_heads, tokens, head_dim) each, rotated.
        mask: (batch, tokens) bool, real tokens; padding on the left.
        counted: (batch, tokens) bool, queries that count.
        groups: (counted tokens, n_groups) float64, see `membership`.
        scaling, softcap: of the scores.
        query_block: queries at a time.
        window: of the layer, `LayerGeometry.window`.

    Returns:
        `cosine` (n_groups, n_heads), `sink_mass` and `sink_mass_mapped` (n_heads,): sums over the counted
        queries, the latter two of the weight on the first real column. And r, (batch, n_heads, tokens)
        float32, `r_i = Σ_u a_ui²` over counted queries, natively.
    """
    batch, n_heads, n, _ = query.shape
    caches = [tuple(part.float() for part in cache) for cache in (own, found)]
    first = n - mask.sum(-1)
    columns = torch.arange(n, device=query.device)
    cosines = query.new_zeros(batch, n, n_heads, dtype=torch.float64)
    squares = query.new_zeros(batch, n_heads, n, dtype=torch.float32)
    masses = [query.new_zeros(n_heads, dtype=torch.float64) for _ in caches]
    for start in range(0, n, query_block):
        stop = min(start + query_block, n)
        kept = counted[:, start:stop]
        visible = visible_columns(mask[:, :stop], columns[start:stop], window)
        q = query[:, :, start:stop].float()
        outputs = []
        for number, (key, value) in enumerate(caches):
            weights = attention_weights(attention_scores(q, key[:, :, :stop], scaling, softcap), visible)
            outputs.append(attention_outputs(weights, value[:, :, :stop]).flatten(1, 2))
            by_head = weights.flatten(1, 2)
            # in a block of pads alone the first real column is not there yet, and nothing counts
            place = first.clamp(max=stop - 1)[:, None, None, None].expand(-1, *by_head.shape[1:3], 1)
            sink = by_head.gather(3, place)[..., 0]
            masses[number] += (sink.double() * kept[:, None]).sum((0, 2))
            if number == 0:
                seen = by_head if bool(kept.all()) else by_head * kept[:, None, :, None]
                squares[:, :, :stop] += seen.square().sum(2)
        one, other = (output.double() for output in outputs)
        cosines[:, start:stop] = cosine_similarity(one, other, dim=-1).transpose(1, 2)
    sums = {"cosine": groups.T @ cosines[counted], "sink_mass": masses[0], "sink_mass_mapped": masses[1]}
    return sums, squares


def attention_rows(sums: TextSums) -> list[Row]:
    """Rows {text, layer, head, kv_head, cosine, concentration_key, concentration_value, sink_mass,
    sink_mass_mapped, n} of every layer and query head, means over the n counted tokens.

    In layers that the target computes itself the two caches are one: cosine 1, concentration 1.
    """
    rows, n = [], sums.n_tokens
    for layer, found in sorted(sums.layers.items()):
        columns = {
            "cosine": found["cosine"][:N_KINDS].sum(0) / n,
            **_concentrations(sums, layer),
            "sink_mass": found["sink_mass"] / n,
            "sink_mass_mapped": found["sink_mass_mapped"] / n,
        }
        group = len(columns["cosine"]) // len(found["turned_gram"])
        rows += [
            {"text": sums.text, "layer": layer, "head": head, "kv_head": head // group}
            | {name: float(values[head]) for name, values in columns.items()}
            | {"n": n}
            for head in range(len(columns["cosine"]))
        ]
    return rows


def _concentrations(sums: TextSums, layer: int) -> dict[str, Tensor]:
    """Of each query head, (n_heads,) float64."""
    found = sums.layers[layer]
    if layer < sums.native_layers:
        ones = torch.ones_like(found["weight"])
        return {"concentration_key": ones, "concentration_value": ones}
    errors = found["value_error"][:N_KINDS].sum(0)
    return {
        "concentration_key": key_concentration(found["query_gram"], found["turned_gram"]),
        "concentration_value": value_concentration(
            found["weighed_error"], found["weight"], errors, sums.n_tokens
        ),
    }
