"""One call of `map_cache` on the Triton path: host work done once, then launches that can be repeated."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvmap.kernels.map_cache.spec import KINDS, CacheMap, Inputs, KernelError, Output, Pages, Slot
from kvmap.kernels.map_cache.triton_launch import (
    Frame,
    Launch,
    StripGroup,
    Vectors,
    product_launch,
    strip_launch,
)
from kvmap.kernels.map_cache.triton_layout import (
    STAGED,
    Choice,
    LaidOut,
    Layout,
    OutFacts,
    SlotFacts,
    lay_out,
)
from kvmap.kernels.map_cache.triton_sources import Sources, Turns, vector_of
from kvmap.kernels.map_cache.triton_tiles import FUSE_UP_TO, SHARED_BYTES, Tile, tile_for
from kvmap.kernels.map_cache.triton_weights import prepared
from kvmap.models.rope import Rotation

CHUNK_TOKENS = 4096
"""Tokens over all rows that a workspace holds, where nothing else is asked for."""

STRIPS = ("auto", "fused", "before")
"""Undoing rotations: by the shape; in the step wherever that can be; once before."""


class Plan:
    """Everything about one call that does not depend on what the tensors hold.

    `run` does the work; it may be called again, and captured in a CUDA graph, as long as the tensors stay
    where they are.

    Attributes:
        launches: in order; each is called with the columns it works on.
        layout: what they do. strips: and by launch the tensors that are set down before.
        counts: (layers, 2, 2) int64, of the last run.
    """

    def __init__(
        self,
        cache_map: CacheMap,
        inputs: Inputs,
        output: Output,
        layers: Sequence[int] | None = None,
        *,
        chunk_tokens: int | None = None,
        strip: str = "auto",
        tile: Tile | None = None,
    ) -> None:
        """Args: as of `map_cache_triton`.

        Raises:
            KernelError: tensors that do not fit together, or another `strip`.
        """
        if strip not in STRIPS:
            raise KernelError(f"strip={strip!r}: expected one of {', '.join(STRIPS)}")
        self.map, self.inputs, self.output = cache_map, inputs, output
        self.layers = cache_map.layers if layers is None else tuple(layers)
        self.batch, self.tokens = inputs.positions.shape
        self.launches: list[Launch] = []
        self._kept = prepared(cache_map)
        self._chunk = self.tokens
        self._sources: Sources | None = None
        first = next((self.map.products["key"][layer] for layer in self.layers), None)
        self.device = torch.device("cpu") if first is None else first.weight.device
        self.counts = torch.zeros(len(self.layers), 2, 2, dtype=torch.int64, device=self.device)
        self._turns = Turns(inputs.positions, self.device)
        self.layout = Layout([], [])
        self.strips: dict[StripGroup, list[list[int]]] = {}
        if self.batch * self.tokens > 0 and self.layers:
            self.layout = self._layout(self._choice(strip, tile))
            if any(access.how == STAGED for access in self.layout.accesses):
                self._chunk = min(max(1, (chunk_tokens or CHUNK_TOKENS) // self.batch), self.tokens)
            self._prepare(self.layout)

    def run(self) -> Tensor:
        """Launch everything; returns the counts, which the next run overwrites."""
        self.counts.zero_()
        with torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext():
            self._turns.fill()
            for start in range(0, self.tokens if self.launches else 0, max(1, self._chunk)):
                for launch in self.launches:
                    launch(start, min(start + self._chunk, self.tokens))
        return self.counts

    @property
    def workspace_bytes(self) -> int:
        """What holds content that had to be set down before: at most that of one chunk."""
        return 0 if self._sources is None else self._sources.workspace_bytes

    def _choice(self, strip: str, tile: Tile | None) -> Choice:
        """How work is cut at this many tokens."""
        shared_bytes = SHARED_BYTES
        if self.device.type == "cuda":
            about: Any = torch.cuda.get_device_properties(self.device)
            shared_bytes = about.shared_memory_per_block_optin
        tiles, fuses = [], []
        for shared in (True, False):
            few = self.tokens * self.batch <= FUSE_UP_TO[shared]
            if strip == "fused" or (strip == "auto" and few):
                fuses.append((shared, True))
            for fused in (True, False):
                tiles.append((shared, fused, tile or tile_for(shared, fused, self.tokens)))
        return Choice(tuple(tiles), tuple(fuses), shared_bytes)

    def _layout(self, choice: Choice) -> Layout:
        """The layout of this call, made anew only for the first of its shape."""
        slots = self._kept.slots(self.map, self.layers)
        rotations: dict[int, int] = {}
        read = [self._slot_facts(slot, rotations) for slot in slots]
        kinds = [(kind, layer) for layer in self.layers for kind in KINDS]
        written = [self._out_facts(kind, layer) for kind, layer in kinds]
        key = (self.layers, tuple(read), tuple(written), choice)

        def build() -> Layout:
            facts = dict(zip(slots, read, strict=True))
            outs = dict(zip(kinds, written, strict=True))
            return lay_out(self.map, self._kept, self.layers, facts, outs, choice)

        return self._kept.layout(key, build)

    def _slot_facts(self, slot: Slot, rotations: dict[int, int]) -> SlotFacts:
        side = self.inputs.side(slot.origin)
        tensor, rotation = side.tensor(slot.kind, slot.layer), side.rotation(slot.kind, slot.layer)
        batch, heads, tokens, width = tensor.shape
        if (batch, tokens) != (self.batch, self.tokens):
            raise KernelError(
                f"{slot.origin} layer {slot.layer} holds {batch} rows of {tokens} tokens; positions are for "
                f"{self.batch} rows of {self.tokens}"
            )
        neighbours = tensor.stride(3) == 1
        aligned = neighbours and vector_of(tensor) * tensor.element_size() == 16
        number = rotations.setdefault(id(rotation), len(rotations))
        return SlotFacts(heads, width, tensor.dtype, *_turning(rotation), number, neighbours, aligned)

    def _out_facts(self, kind: str, layer: int) -> OutFacts:
        n_heads, dim = self.map.products[kind][layer].bias.shape
        out = self.output.tensor(kind, layer)
        paged = isinstance(self.output, Pages)
        asked = (*out.shape[:2], n_heads, dim) if paged else (self.batch, n_heads, self.tokens, dim)
        if tuple(out.shape) != asked:
            raise KernelError(
                f"{kind}s of target layer {layer} are {tuple(out.shape)}, expected {asked} of the map"
            )
        rotation = self.output.rotation(kind, layer)
        return OutFacts(out.dtype, *_turning(rotation), out.shape[1] if paged else 0)

    def _prepare(self, layout: Layout) -> None:
        """Fill in addresses, and make the launches."""
        sources = Sources(self.inputs, layout.accesses, self._turns, self.batch, self._chunk, self.device)
        strips = self.strips = sources.strips()
        tables = [torch.tensor(table, dtype=torch.int64) for table in strips.values()]
        for laid_out in layout.launches:
            tables += [self._product_rows(laid_out), sources.steps(laid_out.cut)]
        placed = iter(self._placed(tables))
        frame = self._frame()
        for strip, table in strips.items():
            block_tokens = layout.launches[0].group.tile.strip_tokens
            launch = strip_launch(strip, next(placed), len(table), frame, self._chunk, block_tokens)
            self.launches.append(launch)
        for laid_out in layout.launches:
            vectors = Vectors(
                sources.vector(laid_out.accesses, laid_out.feature_vector),
                laid_out.weight_vector,
                self._out_vector(laid_out),
            )
            products, steps = next(placed), next(placed)
            launch = product_launch(laid_out.group, products, steps, len(laid_out.members), frame, vectors)
            self.launches.append(launch)
        self._sources = sources  # the workspace lives as long as its addresses

    def _placed(self, tables: list[Tensor]) -> list[Tensor]:
        """Tables on the device, sent as one. Each begins at a multiple of 16 bytes, in every call: Triton
        compiles anew for a pointer that is aligned otherwise.
        """
        flat = [pad(table.flatten(), (0, table.numel() % 2)) for table in tables]
        joined = torch.cat(flat)
        if self.device.type == "cuda":
            joined = joined.pin_memory().to(self.device, non_blocking=True)
        return list(joined.split([table.numel() for table in flat]))

    def _product_rows(self, laid_out: LaidOut) -> Tensor:
        """(products, fields) int64, see `PRODUCT_FIELDS`."""
        paged = isinstance(self.output, Pages)
        rows = []
        for kind, layer, _, _ in laid_out.members:
            out = self.output.tensor(kind, layer)
            batch, second, third, channel = out.stride()
            strides = (batch, second, third, channel) if paged else (batch, third, second, channel)
            turns = self._turns.address(self.output.rotation(kind, layer), undo=False)
            rows.append([out.data_ptr(), *strides, turns])
        return torch.cat([laid_out.weights, torch.tensor(rows, dtype=torch.int64)], dim=1)

    def _out_vector(self, laid_out: LaidOut) -> int:
        """Neighbouring channels that can be written at once; 0 where channels are not neighbours."""
        outs = [self.output.tensor(kind, layer) for kind, layer, _, _ in laid_out.members]
        if any(out.stride(3) != 1 for out in outs):
            return 0
        return math.gcd(laid_out.out_vector, *map(vector_of, outs))

    def _frame(self) -> Frame:
        """What all product launches of this call are given."""
        keep, table, first = self.inputs.keep, None, None
        if isinstance(self.output, Pages):
            table = self.output.block_table.to(self.device)
            first = None if self.output.first is None else self.output.first.to(self.device).contiguous()
        return Frame(
            batch=self.batch,
            tokens=self.tokens,
            counts=self.counts,
            keep=None if keep is None else keep.to(self.device).view(torch.uint8),
            block_table=table,
            first=first,
        )


def _turning(rotation: Rotation | None) -> tuple[int, bool]:
    """How many channels turn, and whether in halves."""
    return (0, False) if rotation is None else (rotation.rotary_dim, rotation.layout == "half")
