"""The groups that tokens are counted under: their kind, and a bin of positions."""

from __future__ import annotations

import torch
from torch import Tensor

from kvmap.diagnostics.token_kinds import TOKEN_KINDS

N_KINDS = len(TOKEN_KINDS)


def position_bins(positions: Tensor) -> Tensor:
    """Bin of each position p ≥ 0, int64 of the same shape: 0 is bin 0, and 2^(b−1) … 2^b − 1 are bin b."""
    edges = 2 ** torch.arange(62, device=positions.device)
    return torch.bucketize(positions, edges, right=True)


def bin_bounds(number: int) -> tuple[int, int]:
    """First and last position of a bin."""
    return (0, 0) if number == 0 else (2 ** (number - 1), 2**number - 1)


def n_bins(n_tokens: int) -> int:
    """Bins that positions below `n_tokens` fall into."""
    return int(position_bins(torch.tensor(n_tokens - 1))) + 1


def membership(kinds: Tensor, positions: Tensor, bins: int) -> Tensor:
    """(rows, N_KINDS + bins) float64: 1 at the kind of each row's token, and 1 at the bin of its position.

    Args:
        kinds: (rows,) int64, see `TokenKinds.of`; positions: (rows,) int64; bins: see `n_bins`.
    """
    found = torch.zeros(len(kinds), N_KINDS + bins, dtype=torch.float64, device=kinds.device)
    rows = torch.arange(len(kinds), device=kinds.device)
    found[rows, kinds] = 1
    found[rows, N_KINDS + position_bins(positions)] = 1
    return found
