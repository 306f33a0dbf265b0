"""Where the Triton path finds features: caches as they are, workspaces, and the tables that turn keys."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kvmap.kernels.map_cache.spec import Inputs, Slot
from kvmap.kernels.map_cache.triton_launch import StripGroup
from kvmap.kernels.map_cache.triton_layout import FUSED, STAGED, Access
from kvmap.models.rope import Rotation


class Turns:
    """Tables of cosines and sines, one for each distinct rotation. Rotations are told apart by identity: to
    compare their numbers would wait for the device.
    """

    def __init__(self, positions: Tensor, device: torch.device) -> None:
        """Args: (batch, tokens); a device copy is made where they are elsewhere."""
        self._positions = positions.to(device)
        self._tables: dict[tuple[int, float], tuple[Rotation, Tensor, Tensor]] = {}

    def address(self, rotation: Rotation | None, *, undo: bool) -> int:
        """Of a table (2, batch · tokens, r/2) float32, which `fill` computes: cos and sin times s, or to undo
        by s; 0 where nothing turns.
        """
        if rotation is None or rotation.rotary_dim == 0:
            return 0
        scale = 1.0 / rotation.scaling if undo else float(rotation.scaling)
        key = (id(rotation), scale)
        if key not in self._tables:
            frequencies = rotation.inv_freq.to(self._positions.device).float()
            shape = (2, self._positions.numel(), frequencies.numel())
            table = torch.empty(shape, dtype=torch.float32, device=frequencies.device)
            self._tables[key] = (rotation, frequencies, table)
        return self._tables[key][2].data_ptr()

    def fill(self) -> None:
        """Compute all tables from the positions: the float32 angle that models use."""
        if not self._tables:
            return
        positions = self._positions.reshape(-1, 1).float()
        for (_, scale), (_, frequencies, table) in self._tables.items():
            angle = positions * frequencies
            torch.cos(angle, out=table[0])
            torch.sin(angle, out=table[1])
            if scale != 1.0:
                table.mul_(scale)


class SourceRow(NamedTuple):
    """Where an access begins, at head 0 of token 0 of row 0; strides in elements; `in_chunk` as of
    `STEP_FIELDS`; bytes of an element.
    """

    address: int
    batch: int
    head: int
    token: int
    in_chunk: int
    size: int


class Sources:
    """All that a call reads, access by access."""

    def __init__(
        self,
        inputs: Inputs,
        accesses: Sequence[Access],
        turns: Turns,
        batch: int,
        chunk_tokens: int,
        device: torch.device,
    ) -> None:
        """Makes the workspace: staged tensors one after the other, each (batch, chunk_tokens, heads, d).

        Args:
            inputs: what is mapped.
            accesses: how.
            turns: tables of its rotations.
            batch: rows.
            chunk_tokens: columns a workspace has room for.
            device: of the workspace.
        """
        self._inputs, self._turns, self._chunk = inputs, turns, chunk_tokens
        places, end = [], 0
        for slot, how, compute in accesses:
            places.append(end)
            if how == STAGED:
                _, heads, _, width = self._tensor(slot).shape
                end += -(-batch * chunk_tokens * heads * width * compute.itemsize // 256) * 256
        self._workspace = torch.empty(end, dtype=torch.uint8, device=device)
        self._accesses = accesses
        self._rows = [self._row(access, place) for access, place in zip(accesses, places, strict=True)]

    @property
    def workspace_bytes(self) -> int:
        """Of the workspace."""
        return self._workspace.numel()

    def steps(self, cut: Tensor) -> Tensor:
        """(steps, fields) int64, see `STEP_FIELDS`.

        Args:
            cut: (steps, 5) int64, see `triton_layout.LaidOut`.
        """
        source, head, channel, width, weight_row = cut.unbind(1)
        rows = torch.tensor(self._rows, dtype=torch.int64).view(-1, len(SourceRow._fields))
        address, batch, head_stride, token, in_chunk, size = rows[source].unbind(1)
        first = address + size * (head * head_stride + channel)
        return torch.stack([first, batch, token, in_chunk, width, weight_row], dim=1)

    def vector(self, accesses: Sequence[int], widths: int) -> int:
        """Neighbouring features that can be read at once in all of these; `widths` in view of widths."""
        found = widths
        for number in accesses:
            row = self._rows[number]
            found = math.gcd(found, 16 // row.size, row.address // row.size, row.batch, row.head, row.token)
        return found

    def strips(self) -> dict[StripGroup, list[list[int]]]:
        """By launch, rows of `STRIP_FIELDS`."""
        groups: dict[StripGroup, list[list[int]]] = {}
        for access, row in zip(self._accesses, self._rows, strict=True):
            if access.how != STAGED:
                continue
            tensor, rotation = self._tensor(access.slot), self._rotation(access.slot)
            half = rotation is not None and rotation.layout == "half"
            rotary = 0 if rotation is None else rotation.rotary_dim
            _, heads, _, width = tensor.shape
            vector = math.gcd(vector_of(tensor), width // 2, rotary // 2) if tensor.stride(3) == 1 else 0
            group = StripGroup(tensor.dtype, access.compute, heads, width, rotary, half, vector)
            addresses = (row.address, self._turns.address(rotation, undo=True))
            groups.setdefault(group, []).append([tensor.data_ptr(), *tensor.stride(), *addresses])
        return groups

    def _row(self, access: Access, place: int) -> SourceRow:
        tensor = self._tensor(access.slot)
        if access.how == STAGED:
            _, heads, _, width = tensor.shape
            address, row = self._workspace.data_ptr() + place, heads * width
            return SourceRow(address, self._chunk * row, width, row, 1, access.compute.itemsize)
        batch, head, token, _ = tensor.stride()
        fused = access.how == FUSED
        turns = self._turns.address(self._rotation(access.slot), undo=True) if fused else 0
        return SourceRow(tensor.data_ptr(), batch, head, token, turns, tensor.element_size())

    def _tensor(self, slot: Slot) -> Tensor:
        """(batch, heads, tokens, head_dim)."""
        return self._inputs.side(slot.origin).tensor(slot.kind, slot.layer)

    def _rotation(self, slot: Slot) -> Rotation | None:
        """What is to be undone."""
        return self._inputs.side(slot.origin).rotation(slot.kind, slot.layer)


def vector_of(tensor: Tensor) -> int:
    """Neighbouring channels, a power of two of up to 16 bytes, that stand at a multiple of their own size
    wherever a head of a token begins.
    """
    size = tensor.element_size()
    return math.gcd(16 // size, tensor.data_ptr() // size, *tensor.stride()[:3])
