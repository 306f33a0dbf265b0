"""How the Triton path cuts its work: one table, to be tuned on a device and nowhere else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

SHARED_BYTES = 227 * 1024
"""Shared memory of a program on Hopper."""

_STEP_BYTES = 2 * 1024  # of it, for the addresses of the steps under way

REGISTER_ROW = 256
"""Columns of float32 sums for 128 rows and 8 warps, beyond which registers spill: 128 a thread."""


@dataclass(frozen=True)
class Tile:
    """What one program of a product works on.

    Attributes:
        block_tokens: rows of a tile, a power of two from 16.
        block_columns: columns of a tile, a power of two. A tile holds whole heads, and by head one: see
            `heads`.
        block_features: features in one step of the sum, a power of two from 16 (32 where the rotation is
            undone in the step: two halves of pairs).
        warps: 4 or 8.
        stages: steps under way at once.
        group_tokens: tokens over which programs that run side by side share weights; the inputs of so many
            tokens should fit in L2 beside them.
        strip_tokens: rows of a tile of the strip kernel.
    """

    block_tokens: int
    block_columns: int
    block_features: int
    warps: int
    stages: int
    group_tokens: int = 1024
    strip_tokens: int = 32

    def heads(self, n_heads: int, padded_dim: int, shared: bool) -> int:
        """Target heads of a tile: one by head, else the power of two that fills the columns."""
        if not shared:
            return 1
        heads = max(1, self.block_columns // padded_dim)
        while heads > 1 and heads >= 2 * n_heads:
            heads //= 2
        return heads

    def fitted(self, columns: int, itemsize: int, shared_bytes: int = SHARED_BYTES) -> Tile:
        """With so many columns in place of its own: rows, features and stages that registers and shared
        memory hold.

        Args:
            columns: of whole heads.
            itemsize: bytes of a factor.
            shared_bytes: that a program may have.
        """
        rows = self.block_tokens
        while rows > 16 and rows * columns > 128 * REGISTER_ROW * self.warps // 8:
            rows //= 2
        features = max(16, self.block_features * 2 // itemsize) if itemsize > 2 else self.block_features
        stages = self.stages
        room = shared_bytes - _STEP_BYTES
        while stages > 1 and stages * (rows + columns) * features * itemsize > room:
            stages -= 1
        while rows > 16 and (rows + columns) * features * itemsize > room:
            rows //= 2
        return replace(self, block_tokens=rows, block_columns=columns, block_features=features, stages=stages)


@dataclass(frozen=True)
class Class:
    """Shapes that take one tile: all heads read the same or not, undone in the step or before; up to how many
    tokens of a row.
    """

    shared: bool
    fused: bool
    up_to: int
    tile: Tile


_ANY = 1 << 62

TILES: tuple[Class, ...] = (
    # Few tokens: bound by the weights' bytes. Narrow tiles, so that two programs stream on each processor.
    Class(True, False, 64, Tile(64, 128, 64, 4, 4)),
    Class(True, False, 256, Tile(128, 128, 64, 8, 3)),
    # Many: 128 × 256 sums are what registers hold, and 85 FLOP come on each byte from L2.
    Class(True, False, _ANY, Tile(128, 256, 64, 8, 4)),
    Class(False, False, 64, Tile(64, 128, 64, 4, 4)),
    Class(False, False, 512, Tile(128, 128, 64, 4, 3)),
    Class(False, False, _ANY, Tile(256, 128, 64, 8, 4)),
    Class(True, True, 64, Tile(64, 128, 64, 4, 3)),
    Class(True, True, _ANY, Tile(128, 128, 64, 8, 3)),
    Class(False, True, 64, Tile(64, 128, 64, 4, 3)),
    Class(False, True, _ANY, Tile(128, 128, 64, 8, 3)),
)
"""From offline compilation and byte counts; not measured on a device."""

FUSE_UP_TO = {True: 0, False: 256}
"""By whether all heads read the same features: tokens up to which the rotation is undone inside the step.
Beyond, and always where every head would undo it again, it is undone once, before."""

CANDIDATES: tuple[Tile, ...] = tuple(
    Tile(rows, columns, features, warps, stages, group)
    for rows, columns, features, warps, stages in (
        (64, 128, 64, 4, 4),
        (64, 256, 64, 4, 4),
        (128, 128, 64, 4, 3),
        (128, 128, 64, 8, 3),
        (128, 128, 64, 8, 4),
        (128, 256, 64, 8, 3),
        (128, 256, 64, 8, 4),
        (256, 128, 64, 8, 3),
        (256, 128, 64, 8, 4),
        (128, 256, 32, 8, 4),
        (256, 128, 128, 8, 2),
    )
    for group in (1024, 2048, 4096)
)
"""What a tuner may try in place of `TILES`."""


def tile_for(shared: bool, fused: bool, n_tokens: int, classes: Sequence[Class] = TILES) -> Tile:
    """The tile of a shape, before it is fitted to the columns.

    Args:
        shared: whether all heads read the same features.
        fused: whether the rotation is undone in the step.
        n_tokens: of a row.
        classes: the table.
    """
    return next(
        entry.tile
        for entry in classes
        if (entry.shared, entry.fused) == (shared, fused) and n_tokens <= entry.up_to
    )


def features_of_step(widths: Sequence[int], block_features: int) -> int:
    """Features in a step so that runs of these widths are cut with little or no remainder."""
    for features in (block_features, block_features // 2):
        if features >= 16 and all(width % features == 0 for width in widths):
            return features
    return max(16, min(block_features, 32))


def power_of_two(number: int) -> int:
    """The least power of two that is not below `number`."""
    return 1 << max(0, number - 1).bit_length()
