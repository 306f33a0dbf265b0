"""One request's pages, filled piece by piece as the parts of a source's cache arrive."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from kvmap.serving.compatibility import Incompatible, check_published, is_exact_copy
from kvmap.serving.vllm.column_map import ColumnMap
from kvmap.serving.vllm.heads import Layers
from kvmap.serving.vllm.loading import Arrived
from kvmap.serving.vllm.messages import Take
from kvmap.serving.vllm.own_tokens import TargetParts, compute_own
from kvmap.serving.vllm.pages import write_columns


@dataclass(eq=False)
class _Run:
    """Tokens start:stop of the source's layers, the first so many that have come, in order.

    Attributes:
        lacking: target layers that are not filled over these tokens.
    """

    start: int
    stop: int
    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)
    lacking: list[int] = field(default_factory=list)


class _Piece(NamedTuple):
    """Columns at:end of some target layers, of which all that is needed has come."""

    run: _Run
    layers: Sequence[int]
    at: int
    end: int


class Filling:
    """A request's pages. Touched by the engine's own thread alone.

    A target layer is mapped over a run of tokens as soon as the source layers that it reads have come. The
    pages are to be read when all of them are full.
    """

    def __init__(self, parts: TargetParts, take: Take, chunk_tokens: int) -> None:
        """Args: the engine's parts; whose pages; and how many tokens are mapped at a time.

        Raises:
            Incompatible: a cache of another source than the mapper's.
        """
        check_published(take.manifest, parts.mapper.mapper)
        self._parts, self._take, self._chunk_tokens = parts, take, chunk_tokens
        self._block_ids = torch.tensor(take.block_ids, dtype=torch.long)
        mapper, facts = parts.mapper.mapper, parts.facts
        self._is_copy = is_exact_copy(take.manifest, mapper, facts)
        start, stop = take.n_own, len(take.token_ids)
        self._first = start if self._is_copy else max(start, min(parts.mapper.native_head, stop))
        rotations = take.manifest.rotations, facts.rotations
        self._columns = ColumnMap(mapper, parts.mapper.rope, *rotations, parts.pages[0].dtype)
        self._layers = range(len(facts.shape)) if self._is_copy else self._columns.layers
        self._own: Layers = []
        self._runs: dict[int, _Run] = {}
        self._pieces: deque[_Piece] = deque()
        self._n_filled = 0

    @property
    def n_head(self) -> int:
        """Tokens that the target's own layers compute in full."""
        return self._first - self._take.n_own

    @property
    def n_mapped(self) -> int:
        """Tokens that are filled from the cache."""
        return len(self._take.token_ids) - self._first

    @torch.inference_mode()
    def begin(self) -> bool:
        """What the target computes itself; comes before all else. Whether its layers had to run."""
        if self._is_copy:
            return False
        self._own, has_run = compute_own(self._parts, self._take, self._block_ids, self._first)
        return has_run

    def add(self, part: Arrived) -> None:
        """A part has come.

        Raises:
            Incompatible: it is 0 throughout in its last token, which no model caches.
        """
        for kind, layer in (("keys", part.keys), ("values", part.values)):
            if not bool(layer[:, :, -1].any()):
                raise Incompatible(
                    "empty_layer", f"{kind} of source layer {part.layer} are 0 at token {part.stop - 1}"
                )
        run = self._runs.setdefault(part.start, _Run(part.start, part.stop, lacking=list(self._layers)))
        if not run.lacking:
            return  # nothing reads it
        device = self._parts.pages[0].device
        run.keys.append(part.keys.to(device))
        run.values.append(part.values.to(device))

    @property
    def has_work(self) -> bool:
        """Whether something can be filled before more has come."""
        if not self._pieces:
            self._find_pieces()
        return bool(self._pieces)

    @torch.inference_mode()
    def work(self) -> bool:
        """Fill one piece, if there is one to be had; whether there was.

        Raises:
            Incompatible: mapped numbers that are not finite or do not fit the dtype.
        """
        if not self.has_work:
            return False
        piece = self._pieces.popleft()
        if self._is_copy:
            self._copy(piece)
        else:
            self._map(piece)
        self._n_filled += len(piece.layers) * (piece.end - piece.at)
        return True

    def check_full(self) -> None:
        """Refuse pages that are not full though nothing more comes.

        Raises:
            Incompatible: cause "partial".
        """
        n_most = self.n_mapped * len(self._layers)
        if self._n_filled != n_most:
            raise Incompatible("partial", f"{self._n_filled} of {n_most} columns of layers came")

    def _find_pieces(self) -> None:
        """Of the first run that has layers to be filled, all of them, cut by tokens."""
        for run in list(self._runs.values()):
            ready = [layer for layer in run.lacking if self._needs(layer) <= len(run.keys)]
            if not ready:
                continue
            run.lacking = [layer for layer in run.lacking if layer not in ready]
            if not run.lacking:  # the pieces have it; what comes of it yet is read by nothing
                self._runs[run.start] = _Run(run.start, run.stop)
            low, high = max(run.start, self._first), min(run.stop, len(self._take.token_ids))
            for at in range(low, high, self._chunk_tokens):
                self._pieces.append(_Piece(run, ready, at, min(at + self._chunk_tokens, high)))
            if self._pieces:
                return

    def _needs(self, layer: int) -> int:
        return layer + 1 if self._is_copy else self._columns.needs(layer)

    def _copy(self, piece: _Piece) -> None:
        cut = slice(piece.at - piece.run.start, piece.end - piece.run.start)
        for layer in piece.layers:
            keys, values = piece.run.keys[layer][:, :, cut], piece.run.values[layer][:, :, cut]
            for kind, part in (("keys", keys), ("values", values)):
                if not bool(torch.isfinite(part).all()):
                    raise Incompatible("not_finite", f"{kind} of source layer {layer} are NaN or infinite")
            self._write(layer, piece.at, keys, values)

    def _map(self, piece: _Piece) -> None:
        run, own_start = piece.run, self._take.n_own
        cut = slice(piece.at - run.start, piece.end - run.start)
        own_cut = slice(piece.at - own_start, piece.end - own_start)
        mapped = self._columns.map(
            [key[:, :, cut] for key in run.keys],
            [value[:, :, cut] for value in run.values],
            piece.at,
            [(keys[:, :, own_cut], values[:, :, own_cut]) for keys, values in self._own],
            piece.layers,
        )
        if mapped.n_bad:
            raise Incompatible("not_finite", f"{mapped.n_bad} mapped numbers are NaN or infinite")
        if mapped.n_clamped:
            dtype = self._parts.pages[0].dtype
            raise Incompatible("clamped", f"{mapped.n_clamped} mapped numbers do not fit {dtype}")
        for layer in piece.layers:
            self._write(layer, piece.at, mapped.keys[layer], mapped.values[layer])

    def _write(self, layer: int, at: int, keys: Tensor, values: Tensor) -> None:
        write_columns(self._parts.pages[layer], self._block_ids, at, keys, values)
