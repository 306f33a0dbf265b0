"""Reading and writing a layer's pages, in whatever order its attention backend keeps them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvmap.errors import KvmapError

_BITS = {2: torch.int16, 4: torch.int32}


class UnknownPages(KvmapError):
    """Pages that cannot be read back as they were written."""


class LayerPages:
    """One layer's keys and values.

    Pages are written by the backend's own operation. How it lays out a page (the CPU's packs keys for its
    matrix unit) is learned by writing a page of numbered entries once, and reading where each came to lie.

    Attributes:
        n_heads, width: KV heads and their width.
        block_tokens: tokens of a page.
        dtype, device: of the pages.
    """

    def __init__(self, layer: Any, order: PageOrder) -> None:
        """Args: vLLM's attention layer, with its pages bound; and the order of its pages."""
        self._layer, self._order = layer, order
        self.n_heads, self.width, self.block_tokens = order.n_heads, order.width, order.block_tokens
        self.dtype, self.device = order.dtype, order.device

    def read(self, block_ids: Tensor, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a request's tokens start:stop.

        Args:
            block_ids: (blocks,) int64, the request's pages from its first token on.
            start, stop: tokens.

        Returns:
            Each (1, n_heads, stop − start, width), contiguous, on the device of the pages.
        """
        first = start // self.block_tokens
        blocks = block_ids[first : -(-stop // self.block_tokens)]
        skip = start - first * self.block_tokens
        return self._order.read(self._layer.kv_cache, blocks, skip, skip + stop - start)

    def write(self, block_ids: Tensor, start: int, keys: Tensor, values: Tensor) -> None:
        """Keys and values as a request's tokens from `start` on.

        Args:
            block_ids: as of `read`.
            start: the first token.
            keys: (tokens, n_heads, width) in the dtype of the pages, on their device.
            values: likewise.
        """
        tokens = torch.arange(start, start + len(keys))
        slots = block_ids[tokens // self.block_tokens] * self.block_tokens + tokens % self.block_tokens
        _write(self._layer, keys, values, self._layer.kv_cache, slots.to(self.device))


def write_columns(pages: LayerPages, block_ids: Tensor, at: int, keys: Tensor, values: Tensor) -> None:
    """Write (1, n_kv_heads, tokens, width) as a request's tokens from `at` on, wherever they are."""
    by_token = [part[0].transpose(0, 1).contiguous().to(pages.device) for part in (keys, values)]
    pages.write(block_ids, at, *by_token)


class PageOrder:
    """Where a backend puts the entries of a page, for layers of one shape and dtype."""

    def __init__(self, layer: Any) -> None:
        """Args: one of the layers.

        Raises:
            UnknownPages: a backend whose pages are not blocks of heads, or that changes what it stores.
        """
        cache = layer.kv_cache
        self.dtype, self.device = cache.dtype, cache.device
        if cache.ndim != 4 or self.dtype.itemsize not in _BITS:
            raise UnknownPages(
                f"pages of shape {tuple(cache.shape)}: expected (blocks, heads, tokens, 2 · width)"
            )
        _, self.n_heads, self.block_tokens, both = cache.shape
        self.width = both // 2
        if self.n_heads != layer.num_kv_heads or self.width != layer.head_size:
            raise UnknownPages(
                f"pages of {self.n_heads} heads of width {self.width}; the layer has {layer.num_kv_heads} of "
                f"{layer.head_size}"
            )
        self._keys, self._values = self._learned(layer)
        self._prove(layer)

    def read(self, cache: Tensor, blocks: Tensor, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Of the tokens of some blocks in a row, start:stop; each (1, n_heads, stop − start, width)."""
        flat = cache[blocks.to(self.device)].reshape(len(blocks), self.n_heads, -1)
        found = []
        for order in (self._keys, self._values):
            entries = flat.index_select(2, order).view(
                len(blocks), self.n_heads, self.block_tokens, self.width
            )
            tokens = entries.transpose(0, 1).reshape(1, self.n_heads, -1, self.width)
            found.append(tokens[:, :, start:stop].contiguous())
        return found[0], found[1]

    def _learned(self, layer: Any) -> tuple[Tensor, Tensor]:
        """For each entry (token, channel) of a head, keys and values apart, its place in the head's page."""
        n, bits = self.block_tokens * self.width, _BITS[self.dtype.itemsize]
        numbered = self._numbered(n)
        by_token = numbered.view(self.block_tokens, 1, self.width).expand(-1, self.n_heads, -1).contiguous()
        nothing = torch.zeros_like(by_token)
        found = []
        for keys, values in ((by_token, nothing), (nothing, by_token)):
            page = self._scratch(1)
            _write(layer, keys, values, page, torch.arange(self.block_tokens, device=self.device))
            codes = page[0, 0].flatten().view(bits).long()
            places = torch.full((n + 1,), -1, dtype=torch.long, device=self.device)
            held = (codes > 0) & (codes <= n)
            places[codes[held]] = held.nonzero().flatten()
            if bool((places[1:] < 0).any()):
                raise UnknownPages("the attention backend does not keep entries as it is given them")
            found.append(places[1:])
        return found[0], found[1]

    def _numbered(self, n: int) -> Tensor:
        """As many different finite positive numbers, by their bits: 1 … n."""
        # bits from 0x7C00 on are no numbers in float16, and from 0x7F80 on in bfloat16
        if n >= 0x7C00 and self.dtype.itemsize == 2:
            raise UnknownPages(
                f"a page of {n} entries a head has more than {self.dtype} has numbers: use smaller blocks"
            )
        numbers = torch.arange(1, n + 1, dtype=_BITS[self.dtype.itemsize], device=self.device)
        return numbers.view(self.dtype)

    def _scratch(self, n_blocks: int) -> Tensor:
        shape = (n_blocks, self.n_heads, self.block_tokens, 2 * self.width)
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def _prove(self, layer: Any) -> None:
        """Read back what was written into three pages, out of order, some of it only in part.

        Raises:
            UnknownPages: it is not the same.
        """
        generator = torch.Generator().manual_seed(0)
        n = 2 * self.block_tokens + self.block_tokens // 2 + 1
        keys, values = (
            torch.randn(n, self.n_heads, self.width, generator=generator).to(self.device, self.dtype)
            for _ in range(2)
        )
        cache = self._scratch(4)
        blocks = torch.tensor([2, 0, 3])
        tokens = torch.arange(n)
        slots = blocks[tokens // self.block_tokens] * self.block_tokens + tokens % self.block_tokens
        for part in (slice(0, 5), slice(5, n)):
            own = slots[part].to(self.device)
            _write(layer, keys[part].contiguous(), values[part].contiguous(), cache, own)
        for written, read in zip((keys, values), self.read(cache, blocks, 0, n), strict=True):
            if not torch.equal(written, read[0].transpose(0, 1)):
                raise UnknownPages("pages do not read back as they were written")


def _write(layer: Any, keys: Tensor, values: Tensor, cache: Tensor, slots: Tensor) -> None:
    layer.impl.do_kv_cache_update(layer, keys, values, cache, slots)
