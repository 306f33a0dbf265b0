"""Caches and maps of many shapes for `map_cache`, and what comes of them by complex numbers in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from kvmap.kernels.map_cache import KINDS, CacheMap, Columns, Inputs, Pages, Product, Side, Slot
from kvmap.models.rope import Layout, Rotation

Expected = dict[tuple[str, int], Tensor]


@dataclass(frozen=True)
class Case:
    """One map and what it is applied to; the first `native` target layers are read, not mapped."""

    shared: bool = True
    heads: tuple[int, int] = (2, 3)  # of source and target
    widths: tuple[int, int] = (8, 6)
    k: int = 2
    native: int = 0
    both_kinds: bool = False
    batch: int = 2
    tokens: int = 7
    cache: torch.dtype = torch.float32
    weight: torch.dtype = torch.float32
    out: torch.dtype = torch.float32
    layouts: tuple[Layout, Layout] = ("half", "half")
    rotary: tuple[int, int] = (8, 6)
    scaling: tuple[float, float] = (1.0, 1.0)
    unrotated: tuple[int, ...] = ()  # layers of either model without a rotation
    carried: bool = True
    turned: bool = True
    keep: bool = False
    strided: bool = False
    seed: int = 0
    n_source: int = field(default=3)
    n_target: int = field(default=3)

    def generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed)

    def rotations(self, model: int, n_layers: int) -> list[Rotation | None]:
        inv_freq = 30.0 ** -(torch.arange(self.rotary[model] // 2) / self.rotary[model]) * (1 + 0.1 * model)
        rotation = Rotation(inv_freq, self.scaling[model], self.layouts[model])
        return [None if layer in self.unrotated else rotation for layer in range(n_layers)]

    def build(self) -> tuple[CacheMap, Inputs]:
        generator = self.generator()

        def cache(model: int, n_layers: int) -> Side:
            shape = (self.batch, self.heads[model], self.tokens, self.widths[model])

            def layer() -> Tensor:
                if not self.strided:
                    return torch.randn(shape, generator=generator).to(self.cache)
                batch, heads, tokens, width = shape
                wide = torch.randn(tokens, batch, heads, 2 * width + 1, generator=generator).to(self.cache)
                return wide[..., 1::2].permute(1, 2, 0, 3)

            rotations = self.rotations(model, n_layers) if self.carried else None
            parts = [[layer() for _ in range(n_layers)] for _ in KINDS]
            return Side(parts[0], parts[1], rotations)

        source, native = cache(0, self.n_source), cache(1, self.native) if self.native else None
        positions = torch.randint(0, 50, (self.batch, self.tokens), generator=generator)
        keep = torch.rand(self.batch, self.tokens, generator=generator) < 0.7 if self.keep else None
        products: dict[str, dict[int, Product]] = {
            kind: {layer: self._product(kind, generator) for layer in range(self.native, self.n_target)}
            for kind in KINDS
        }
        return CacheMap(products), Inputs(source, positions, native, keep)

    def _product(self, kind: str, generator: torch.Generator) -> Product:
        kinds = (kind, "value" if kind == "key" else "key") if self.both_kinds else (kind,)
        slots = [
            Slot("source", k, int(s))
            for k in kinds
            for s in torch.randperm(self.n_source, generator=generator)[: self.k]
        ]
        slots += [Slot("native", k, n) for k in kinds for n in range(self.native)]
        p = sum(
            self.widths[slot.origin == "native"] * (self.heads[slot.origin == "native"] if self.shared else 1)
            for slot in slots
        )
        heads, width = self.heads[1], self.widths[1]
        shape = (p, heads * width) if self.shared else (heads, p, width)
        weight = torch.randn(shape, generator=generator) / p**0.5
        wide = torch.promote_types(self.weight, torch.float32) if self.weight.itemsize > 1 else torch.float32
        bias = torch.randn(heads, width, generator=generator).to(wide)
        if self.weight.itemsize > 1:
            return Product(tuple(slots), weight.to(self.weight), bias)
        scale = torch.rand(heads, width, generator=generator) + 0.5
        return Product(tuple(slots), weight.to(self.weight), bias, scale)

    def columns(self, cache_map: CacheMap) -> Columns:
        """Output filled with 7, in the order (batch, token, head, channel)."""
        shape = (self.batch, self.tokens, self.heads[1], self.widths[1])
        keys, values = (
            {layer: torch.full(shape, 7.0).to(self.out).transpose(1, 2) for layer in cache_map.layers}
            for _ in KINDS
        )
        return Columns(keys, values, self.rotations(1, self.n_target) if self.turned else None)

    def pages(self, cache_map: CacheMap, block_size: int = 4) -> Pages:
        """Shuffled blocks filled with 7, rows that begin at different places."""
        first = torch.arange(self.batch) + 1
        blocks = -(-(self.tokens + self.batch) // block_size) + 1
        order = torch.randperm(self.batch * blocks + 2, generator=self.generator())[: self.batch * blocks]
        shape = (self.batch * blocks + 2, block_size, self.heads[1], self.widths[1])
        keys, values = ({i: torch.full(shape, 7.0).to(self.out) for i in cache_map.layers} for _ in KINDS)
        rotations = self.rotations(1, self.n_target) if self.turned else None
        return Pages(keys, values, order.view(self.batch, blocks).int(), first, rotations)


def rotors(positions: Tensor, rotation: Rotation) -> Tensor:
    """(batch, 1, tokens, pairs): each pair of channels is one complex number times this."""
    angle = (positions.float()[:, None, :, None] * rotation.inv_freq).double()
    return torch.polar(torch.full_like(angle, rotation.scaling), angle)


def multiplied(x: Tensor, factors: Tensor, layout: str) -> Tensor:
    """Channel pairs of x, float64, times complex factors; channels past the last pair stay."""
    n = factors.shape[-1]
    first, second = (
        (slice(0, n), slice(n, 2 * n)) if layout == "half" else (slice(0, 2 * n, 2), slice(1, 2 * n, 2))
    )
    result = x.clone()
    found = torch.complex(x[..., first], x[..., second]) * factors
    result[..., first], result[..., second] = found.real, found.imag
    return result


def by_complex_numbers(cache_map: CacheMap, inputs: Inputs, output: Columns | Pages) -> Expected:
    """(batch, H_t, tokens, d_t) float64 of every layer and kind, element by element of the equation."""

    def content(slot: Slot) -> Tensor:
        side = inputs.side(slot.origin)
        x, rotation = side.tensor(slot.kind, slot.layer).double(), side.rotation(slot.kind, slot.layer)
        return (
            x if rotation is None else multiplied(x, 1 / rotors(inputs.positions, rotation), rotation.layout)
        )

    expected = {}
    for kind in KINDS:
        for layer, product in cache_map.products[kind].items():
            n_heads, width = product.bias.shape
            heads = []
            for head in range(n_heads):
                sources = []
                for slot in product.slots:
                    x = content(slot)
                    chosen = range(x.shape[1]) if product.shared else [head * x.shape[1] // n_heads]
                    sources += [x[:, h] for h in chosen]
                if product.shared:
                    weight = product.weight.double().view(-1, n_heads, width)[:, head]
                else:
                    weight = product.weight[head].double()
                scale = 1.0 if product.scale is None else product.scale[head].double()
                found = torch.einsum("btp,pd->btd", torch.cat(sources, -1), weight)
                heads.append(found * scale + product.bias[head].double())
            mapped = torch.stack(heads, 1)
            rotation = output.rotation(kind, layer)
            if rotation is not None:
                mapped = multiplied(mapped, rotors(inputs.positions, rotation), rotation.layout)
            if inputs.keep is not None:
                mapped[~inputs.keep[:, None, :, None].expand_as(mapped)] = 0.0
            expected[kind, layer] = mapped
    return expected


def read_pages(pages: Pages, kind: str, layer: int, tokens: int) -> Tensor:
    """(batch, H_t, tokens, d_t), token by token through the block table."""
    pool = pages.tensor(kind, layer)
    rows = []
    for row, table in enumerate(pages.block_table.tolist()):
        start = 0 if pages.first is None else int(pages.first[row])
        places = [divmod(start + token, pool.shape[1]) for token in range(tokens)]
        rows.append(torch.stack([pool[table[block], slot] for block, slot in places]))
    return torch.stack(rows).transpose(1, 2)


CASES = {
    "plain": Case(),
    "rotations of both layouts": Case(layouts=("half", "interleaved")),
    "interleaved to half, partly rotary": Case(layouts=("interleaved", "half"), rotary=(4, 2)),
    "partly rotary, interleaved": Case(layouts=("half", "interleaved"), rotary=(6, 4)),
    "stretched rotations": Case(scaling=(0.8, 1.3)),
    "layers without rotation": Case(unrotated=(0, 2)),
    "content in, content out": Case(carried=False, turned=False),
    "content out": Case(turned=False),
    "native layers and both kinds": Case(native=2, both_kinds=True),
    "one token": Case(tokens=1, batch=1),
    "some columns kept": Case(keep=True, tokens=11),
    "strided inputs": Case(strided=True),
    "one head to many": Case(heads=(1, 4)),
    "by head, as many": Case(shared=False, heads=(2, 2)),
    "by head, three to five": Case(shared=False, heads=(3, 5)),
    "by head, eight to two": Case(shared=False, heads=(8, 2), scaling=(1.2, 1.0)),
    "by head, native, both kinds, kept": Case(shared=False, native=1, both_kinds=True, keep=True),
    "by head, strided, one row": Case(shared=False, strided=True, batch=1, tokens=13),
    "wide heads": Case(widths=(80, 96), rotary=(80, 96), tokens=5),
    "uneven sizes": Case(heads=(3, 5), widths=(10, 14), rotary=(10, 14), k=3, tokens=9),
}


def assert_computes_the_equation(
    case: Case, run: Callable[[CacheMap, Inputs, Columns | Pages], Tensor]
) -> None:
    """Into columns and into pages, in float64 and in float32; `run` gives the counts."""
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 2e-6)):
        exact = replace(case, cache=dtype, weight=dtype, out=dtype)
        cache_map, inputs = exact.build()
        columns, pages = exact.columns(cache_map), exact.pages(cache_map)
        expected = by_complex_numbers(cache_map, inputs, columns)
        for output in (columns, pages):
            counts = run(cache_map, inputs, output)
            assert counts.shape == (len(cache_map.layers), 2, 2)
            assert not counts.any()
        for (kind, layer), wanted in expected.items():
            torch.testing.assert_close(
                columns.tensor(kind, layer).double(), wanted, rtol=tolerance, atol=10 * tolerance
            )
            assert torch.equal(read_pages(pages, kind, layer, case.tokens), columns.tensor(kind, layer))
