"""Error of mapped keys and values on a text: R² by head, and by token kind and position."""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import torch
from torch import Tensor

from kvmap.diagnostics.concentration import gram
from kvmap.diagnostics.sums import TextSums
from kvmap.diagnostics.token_groups import N_KINDS, bin_bounds
from kvmap.diagnostics.token_kinds import TOKEN_KINDS
from kvmap.fit.features import KINDS
from kvmap.models.rope import Rotation, strip_rotation

Row: TypeAlias = dict[str, Any]


def key_view(
    own: Tensor, found: Tensor, positions: Tensor, rotation: Rotation | None, rope: str, turned: Tensor
) -> tuple[Tensor, Tensor]:
    """Error ŷ − y and true vectors y of a layer's keys as the RoPE strategy maps them (see `cache_view`).

    Args:
        own, found: (batch, n_kv_heads, tokens, head_dim) float32, the target's own and the mapped, as cached.
        positions: (batch, tokens) int64.
        rotation: that own keys carry.
        rope: the strategy.
        turned: (batch, tokens) bool, which of the mapped keys carry it; of "no_rerotate" alone are some bare.

    Returns:
        Both of the shape of the keys, float32.
    """
    if rope == "coupled":
        return found - own, own
    true = strip_rotation(own, positions, rotation)
    if rope == "strip":
        # R⁻¹ is linear
        return strip_rotation(found - own, positions, rotation), true
    stripped = strip_rotation(found, positions, rotation)
    return torch.where(turned[:, None, :, None], stripped, found) - true, true


def error_sums(kind: str, error: Tensor, true: Tensor, groups: Tensor) -> dict[str, Tensor]:
    """Sums of one layer's errors e = ŷ − y and true vectors y over the counted tokens of one batch; float64.

    Args:
        kind: "key" or "value", which the names begin with.
        error, true: (rows, n_kv_heads, head_dim), keys as the RoPE strategy maps them.
        groups: (rows, n_groups) float64, see `membership`.

    Returns:
        `<kind>_error` Σ‖e‖² and `<kind>_square` Σ‖y‖², (n_groups, n_kv_heads); `<kind>_total` Σy, (n_groups,
        n_kv_heads, head_dim); `<kind>_error_gram` Σ e eᵀ and `<kind>_gram` Σ y yᵀ, (n_kv_heads, d, d).
    """
    error, true = error.double(), true.double()
    return {
        f"{kind}_error": groups.T @ error.square().sum(2),
        f"{kind}_square": groups.T @ true.square().sum(2),
        f"{kind}_total": (groups.T @ true.flatten(1)).unflatten(1, true.shape[1:]),
        f"{kind}_error_gram": gram(error),
        f"{kind}_gram": gram(true),
    }


def spreads(sums: TextSums, layer: int, kind: str) -> Tensor:
    """`Σ‖y − ȳ‖²` over the tokens of each group, ȳ the mean of all counted tokens: (n_groups, n_kv_heads)."""
    found = sums.layers[layer]
    square, total = found[f"{kind}_square"], found[f"{kind}_total"]
    mean = total[:N_KINDS].sum(0) / sums.n_tokens
    within = square - 2 * (total * mean).sum(2) + sums.counts[:, None] * mean.square().sum(1)
    return within.clamp(min=0)


def text_r2_rows(sums: TextSums) -> list[Row]:
    """R² of every mapped layer, head and kind on the text: rows {layer, head, kind, split, r2}.

    `1 − Σ‖ŷ − y‖² / Σ‖y − ȳ‖²` over the counted tokens, ȳ their own mean; `split` is the name of the text.
    nan where the true vectors do not vary.
    """
    rows = []
    for kind in KINDS:
        for layer in sums.mapped_layers:
            error = sums.layers[layer][f"{kind}_error"][:N_KINDS].sum(0)
            spread = spreads(sums, layer, kind)[:N_KINDS].sum(0)
            rows += [
                {"layer": layer, "head": head, "kind": kind, "split": sums.text, "r2": 1 - ratio}
                for head, ratio in enumerate(_ratios(error, spread))
            ]
    return rows


def error_by_token_rows(sums: TextSums) -> list[Row]:
    """Rows {text, token_kind, layer, key_error, value_error, cosine, n} of the mapped layers.

    The errors are relative, all heads together: `Σ‖ŷ − y‖² / Σ‖y − ȳ‖²` over the n counted tokens of the
    kind, ȳ each head's mean over all counted tokens of the text. Errors of the kinds, weighed by their
    spread, so give that of the layer. `cosine` is the mean over those tokens' queries and all heads. Kinds
    without tokens have no rows.
    """
    names = [{"token_kind": kind} for kind in TOKEN_KINDS]
    return _group_rows(sums, dict(enumerate(names)))


def error_by_position_rows(sums: TextSums) -> list[Row]:
    """Rows {text, low, high, layer, key_error, value_error, cosine, n}: as by token, by position.

    Positions low to high count from 0, both bounds within; each bin is twice as wide as the one before.
    """
    bins = range(sums.n_groups - N_KINDS)
    bounds = {
        N_KINDS + number: dict(zip(("low", "high"), bin_bounds(number), strict=True)) for number in bins
    }
    return _group_rows(sums, bounds)


def _group_rows(sums: TextSums, groups: dict[int, Row]) -> list[Row]:
    by_layer = {}
    for layer in sums.mapped_layers:
        found = sums.layers[layer]
        columns = {
            f"{kind}_error": _ratios(found[f"{kind}_error"].sum(1), spreads(sums, layer, kind).sum(1))
            for kind in KINDS
        }
        columns["cosine"] = (found["cosine"].mean(1) / sums.counts.clamp(min=1)).tolist()
        by_layer[layer] = columns
    return [
        {"text": sums.text, **named, "layer": layer}
        | {column: values[group] for column, values in columns.items()}
        | {"n": int(sums.counts[group])}
        for group, named in groups.items()
        if sums.counts[group] > 0
        for layer, columns in by_layer.items()
    ]


def _ratios(above: Tensor, below: Tensor) -> list[float]:
    """The ratio; nan where below is 0."""
    return torch.where(below > 0, above / below, math.nan).tolist()
