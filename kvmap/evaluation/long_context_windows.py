"""What a model adds to a cache, summed window by window: how it predicts, and how far its columns are off."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from kvmap.errors import KvmapError
from kvmap.evaluation.perplexity import CHUNK_TOKENS, Predictions, divergence
from kvmap.models.cache import KVCache

KINDS = ("key", "value")


@dataclass
class Drift:
    """How far columns are off a native run's, layer by layer; every list has one entry a layer.

    Attributes:
        error: Σ‖x − x_native‖² over heads and tokens.
        spread: Σ‖x_native − mean‖², about each head's mean over the tokens of this window.
        cosine: the mean over heads and tokens of cos(x, x_native).
    """

    error: list[float]
    spread: list[float]
    cosine: list[float]


@dataclass
class Window:
    """Tokens `start` to `stop` that were added to the prefix, counted from 0, of one sequence.

    Attributes:
        nll: summed negative log-likelihood of the tokens that follow each of them, nats.
        n_tokens: how many these are: stop − start.
        kl: summed KL(native ‖ arm) at these positions, nats; nan where it could not be had.
        agreement: positions whose likeliest next token is native's.
        drift: of their content keys and values, by kind; empty for the source, whose caches are its own.
    """

    start: int
    stop: int
    nll: float
    n_tokens: int
    kl: float
    agreement: int
    drift: dict[str, Drift] = field(default_factory=dict)


@dataclass(frozen=True)
class Growth:
    """One sequence under one arm.

    Attributes:
        windows: in order; together they are the whole continuation.
        content: hash of the sequence's prefix and continuation, by which runs know that they grew the same.
    """

    windows: tuple[Window, ...]
    content: str = ""

    @property
    def is_whole(self) -> bool:
        """Whether everything could be had, KL included."""
        return not any(math.isnan(window.kl) for window in self.windows)

    def row(self) -> dict[str, Any]:
        """The windows, as JSON can hold them."""
        return {"windows": [asdict(window) for window in self.windows]}

    @classmethod
    def from_row(cls, row: Mapping[str, Any], content: str = "") -> Growth:
        """Inverse of `row`, of a sequence with this content."""
        windows = [
            Window(**{**window, "drift": {kind: Drift(**drift) for kind, drift in window["drift"].items()}})
            for window in row["windows"]
        ]
        return cls(tuple(windows), content)


def window_edges(n_tokens: int, n_windows: int) -> tuple[int, ...]:
    """Where windows begin and end: 0 to `n_tokens` in `n_windows` parts, none of which is empty.

    Raises:
        KvmapError: more windows than tokens, or fewer than one.
    """
    if not 1 <= n_windows <= n_tokens:
        raise KvmapError(f"n_windows={n_windows} of {n_tokens} tokens: expected 1 to {n_tokens}")
    return tuple(round(number * n_tokens / n_windows) for number in range(n_windows + 1))


@dataclass(frozen=True)
class Piece:
    """Added tokens that are run in one forward, and which window they belong to."""

    window: int
    start: int
    stop: int


def pieces_of(edges: Sequence[int]) -> list[Piece]:
    """Windows cut into pieces whose logits are small enough to hold."""
    return [
        Piece(window, at, min(at + CHUNK_TOKENS, stop))
        for window, (start, stop) in enumerate(pairwise(edges))
        for at in range(start, stop, CHUNK_TOKENS)
    ]


class WindowSums:
    """Sums over one window under one arm, row by row; float64 on the CPU."""

    def __init__(self) -> None:
        self.start: int | None = None
        self.stop = 0
        self.tokens: dict[str, Tensor] = {}
        self.columns: dict[str, dict[str, Tensor]] = {kind: {} for kind in KINDS}

    def add_tokens(self, piece: Piece, native: Predictions, predicted: Predictions) -> None:
        self.start = piece.start if self.start is None else self.start
        self.stop = piece.stop
        token = predicted["token"].double().cpu()
        kl = torch.full_like(token, math.nan)
        if "all" in predicted:
            kl = divergence(native["all"], predicted["all"]).cpu()
        same = (predicted["top"].to(native["top"].device) == native["top"]).cpu()
        _add(self.tokens, {"nll": -token.sum(1), "kl": kl.sum(1), "agreement": same.sum(1)})

    def add_columns(self, native: KVCache, own: KVCache) -> None:
        """Columns (batch, n_kv_heads, tokens, head_dim) of each layer; content keys."""
        pairs = {
            "key": list(zip(native.keys, own.keys, strict=True)),
            "value": list(zip(native.values, own.values, strict=True)),
        }
        for kind, layers in pairs.items():
            found: dict[str, list[Tensor]] = {}
            for true, x in ((true.double(), x.double()) for true, x in layers):
                cosine = torch.nn.functional.cosine_similarity(x, true, dim=-1)
                for name, value in (
                    ("error", (x - true).square().sum((1, 2, 3))),
                    ("cosine", cosine.sum((1, 2))),
                    ("square", true.square().sum((1, 2, 3))),
                    ("total", true.sum(2)),
                ):
                    found.setdefault(name, []).append(value.cpu())
            # heads and widths are the same in every layer of the supported families
            stacked = {name: torch.stack(values, 1) for name, values in found.items()}
            n_columns = native.n_tokens * native.keys[0].shape[1]
            _add(self.columns[kind], stacked | {"n_columns": torch.tensor(n_columns)})

    def window(self, row: int) -> Window:
        """One row's sums."""
        start = self.start or 0
        return Window(
            start=start,
            stop=self.stop,
            nll=float(self.tokens["nll"][row]),
            n_tokens=self.stop - start,
            kl=float(self.tokens["kl"][row]),
            agreement=int(self.tokens["agreement"][row]),
            drift={kind: _drift(sums, row, self.stop - start) for kind, sums in self.columns.items() if sums},
        )


def _drift(sums: Mapping[str, Tensor], row: int, n_tokens: int) -> Drift:
    mean_square = sums["total"][row].square().sum((-2, -1)) / n_tokens  # n ‖mean‖², summed over heads
    return Drift(
        error=sums["error"][row].tolist(),
        spread=(sums["square"][row] - mean_square).tolist(),
        cosine=(sums["cosine"][row] / sums["n_columns"]).tolist(),
    )


def _add(sums: dict[str, Tensor], more: Mapping[str, Tensor]) -> None:
    for name, value in more.items():
        sums[name] = sums[name] + value if name in sums else value
