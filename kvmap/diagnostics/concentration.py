"""Whether the error of a mapped cache lies where the target's attention reads ([H] §5; METHOD: measures)."""

from __future__ import annotations

import torch
from torch import Tensor


def key_concentration(query_gram: Tensor, error_gram: Tensor) -> Tensor:
    """Weight of a head's queries in the directions of its key errors, over the mean of all directions.

    With Q (n, d) the queries of head h, σ_j and v_j its singular values and right singular vectors, and E
    (n, d) the errors of the keys it reads, mapped less own, both rotated::

        C_K = (Σ_j σ_j² ‖E v_j‖² / Σ_j σ_j²) / (‖E‖²_F / d)  =  d · tr(QᵀQ EᵀE) / (tr QᵀQ · tr EᵀE)

    so that the Gram matrices are enough. Above 1: the error lies in directions that queries are long in; d at
    most. 1 where there is no error, or no query.

    Args:
        query_gram: (n_heads, d, d) float64 QᵀQ; error_gram: (n_kv_heads, d, d) float64 EᵀE.

    Returns:
        (n_heads,) float64.
    """
    errors = error_gram.repeat_interleave(len(query_gram) // len(error_gram), dim=0)
    both = (query_gram * errors).sum((1, 2))
    apart = query_gram.diagonal(dim1=1, dim2=2).sum(1) * errors.diagonal(dim1=1, dim2=2).sum(1)
    return _ratio(query_gram.shape[-1] * both, apart)


def value_concentration(
    weighed_error: Tensor, weight: Tensor, squared_error: Tensor, n_tokens: int
) -> Tensor:
    """Squared attention on the tokens whose values are wrong, over the mean of all tokens.

    With a the head's own attention, `r_i = Σ_u a_ui²` over its queries u, and e_i the error of value i::

        C_V = (Σ_i r_i ‖e_i‖² / Σ_i r_i) / (Σ_i ‖e_i‖² / n)

    Above 1: the error sits where attention reads. 1 where there is no error, or no attention on such tokens.

    Args:
        weighed_error: (n_heads,) Σ_i r_i ‖e_i‖²; weight: (n_heads,) Σ_i r_i.
        squared_error: (n_kv_heads,) Σ_i ‖e_i‖².
        n_tokens: n.

    Returns:
        (n_heads,) float64.
    """
    errors = squared_error.repeat_interleave(len(weight) // len(squared_error))
    return _ratio(n_tokens * weighed_error, weight * errors)


def concentration_sums(
    query: Tensor, key_error: Tensor, value_error: Tensor, squares: Tensor, counted: Tensor
) -> dict[str, Tensor]:
    """What the two concentrations are made of, in one layer of one batch.

    Args:
        query: (batch, n_heads, tokens, head_dim), as multiplied with keys.
        key_error, value_error: (rows, n_kv_heads, head_dim) float32 of the counted tokens, keys rotated.
        squares: (batch, n_heads, tokens) float32 r, see `attention_sums`.
        counted: (batch, tokens) bool, `rows` of them.

    Returns:
        `query_gram` (n_heads, d, d), `turned_gram` (n_kv_heads, d, d), `weighed_error` and `weight`
        (n_heads,). The first multiplied in float32, the rest in float64.
    """
    queries = query.transpose(1, 2)[counted].float().transpose(0, 1)
    weights = squares.transpose(1, 2)[counted].double()
    errors = value_error.double().square().sum(2)
    errors = errors.repeat_interleave(weights.shape[1] // errors.shape[1], dim=1)
    return {
        "query_gram": queries.transpose(1, 2) @ queries,
        "turned_gram": gram(key_error),
        "weighed_error": (weights * errors).sum(0),
        "weight": weights.sum(0),
    }


def gram(x: Tensor) -> Tensor:
    """XᵀX of each head, (heads, d, d) float64, of x (rows, heads, d)."""
    by_head = x.double().transpose(0, 1)
    return by_head.transpose(1, 2) @ by_head


def _ratio(above: Tensor, below: Tensor) -> Tensor:
    return torch.where(below > 0, above / below.where(below > 0, 1.0), 1.0)
