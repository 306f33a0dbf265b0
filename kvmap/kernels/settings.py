"""How operations are carried out in this process: on which path, in which pieces. No result depends on it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from kvmap.errors import KvmapError, UnknownName

MAP_CACHE_PATHS = ("auto", "reference", "batched", "triton")
MOMENTS_PATHS = ("auto", "torch", "triton")


class SettingsError(KvmapError):
    """A setting of the kernels out of range."""


@dataclass(frozen=True)
class KernelSettings:
    """How operations are carried out.

    All paths of an operation give one result within the rounding of a product, so none of this belongs to
    what determines one.

    Attributes:
        map_cache: path of `kvmap.kernels.map_cache`; "auto" chooses by device and shape.
        chunk_tokens: tokens, over all rows of a batch, that `map_cache` works on at a time: what it holds
            besides its inputs and its output grows with them.
        moments: path of `kvmap.kernels.second_moments`; "auto" chooses by device.
    """

    map_cache: str = "auto"
    chunk_tokens: int = 2048
    moments: str = "auto"

    def __post_init__(self) -> None:
        """Refuse what no operation can do.

        Raises:
            UnknownName: another path.
            SettingsError: fewer than one token a chunk.
        """
        if self.map_cache not in MAP_CACHE_PATHS:
            raise UnknownName("map_cache path", self.map_cache, MAP_CACHE_PATHS)
        if self.moments not in MOMENTS_PATHS:
            raise UnknownName("moments path", self.moments, MOMENTS_PATHS)
        if self.chunk_tokens < 1:
            raise SettingsError(f"chunk_tokens={self.chunk_tokens}: expected 1 or more")


_process = [KernelSettings()]
"""The last entry holds, for all threads."""


def current() -> KernelSettings:
    """What holds in this process."""
    return _process[-1]


@contextmanager
def use(settings: KernelSettings) -> Iterator[KernelSettings]:
    """`settings` hold in all threads of this process until the block is left."""
    _process.append(settings)
    try:
        yield settings
    finally:
        _process.pop()
