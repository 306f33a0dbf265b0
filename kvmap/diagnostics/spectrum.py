"""In how many directions of a head the error lies, and its true vectors vary."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

import torch
from torch import Tensor

from kvmap.diagnostics.sums import TextSums
from kvmap.diagnostics.token_groups import N_KINDS
from kvmap.fit.features import KINDS

Row: TypeAlias = dict[str, Any]

TOP = 8
"""Components that `share_top8` counts."""


def shares(gram: Tensor) -> Tensor:
    """Eigenvalues of symmetric matrices (..., d, d) over their sum, the largest first: (..., d) float64.

    What rounding makes negative is 0. nan where all are 0.
    """
    eigenvalues = torch.linalg.eigvalsh(gram.double()).flip(-1).clamp(min=0)
    return eigenvalues / eigenvalues.sum(-1, keepdim=True)


def effective_rank(share: Tensor) -> Tensor:
    """Participation ratio `(Σλ)² / Σλ²`, from 1 (one direction) to d (all alike), of shares (..., d)."""
    return share.sum(-1).square() / share.square().sum(-1)


def spectrum_rows(sums: TextSums) -> list[Row]:
    """Rows {text, kind, layer, head, component, error_share, target_share}, component 1 the largest.

    Shares of the eigenvalues of `Σ e eᵀ`, e = ŷ − y uncentred, as R² counts it, and of `Σ (y − ȳ)(y − ȳ)ᵀ`,
    over the counted tokens, each sorted by itself; keys as the RoPE strategy maps them. Mapped layers only.
    """
    return [
        {"text": sums.text, "kind": kind, "layer": layer, "head": head, "component": number + 1}
        | {"error_share": e, "target_share": y}
        for kind, layer, error, target in _spectra(sums)
        for head in range(len(error))
        for number, (e, y) in enumerate(zip(error[head].tolist(), target[head].tolist(), strict=True))
    ]


def spectrum_summary_rows(sums: TextSums) -> list[Row]:
    """Rows {text, kind, layer, head, effective_rank, effective_rank_target, share_top8, share_top8_target}.

    Of the error and, by the names that say so, of the true vectors. nan where there is no error.
    """
    rows = []
    for kind, layer, error, target in _spectra(sums):
        columns = {
            "effective_rank": effective_rank(error),
            "effective_rank_target": effective_rank(target),
            "share_top8": error[:, :TOP].sum(1),
            "share_top8_target": target[:, :TOP].sum(1),
        }
        rows += [
            {"text": sums.text, "kind": kind, "layer": layer, "head": head}
            | {name: float(values[head]) for name, values in columns.items()}
            for head in range(len(error))
        ]
    return rows


def _spectra(sums: TextSums) -> Iterator[tuple[str, int, Tensor, Tensor]]:
    """Kind, layer, and the shares (n_kv_heads, d) of error and target."""
    for kind in KINDS:
        for layer in sums.mapped_layers:
            found = sums.layers[layer]
            total = found[f"{kind}_total"][:N_KINDS].sum(0)
            centred = found[f"{kind}_gram"] - total[:, :, None] * total[:, None, :] / sums.n_tokens
            yield kind, layer, shares(found[f"{kind}_error_gram"]), shares(centred)
