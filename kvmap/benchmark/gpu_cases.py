"""What `kvmap.benchmark.gpu` maps: random caches and maps of one pair's shape, and a call for every path."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from kvmap.benchmark.mapping import empty_columns, map_per_head
from kvmap.benchmark.random_models import random_mapper
from kvmap.benchmark.timing import Call
from kvmap.errors import KvmapError
from kvmap.fit.quantise import quantise_columns
from kvmap.kernels.map_cache import CacheMap, Columns, Inputs, Product, Side, map_cache
from kvmap.kernels.map_cache.batched import LayerCore, map_cache_batched, mapped_layer
from kvmap.models.rope import Rotation

PATHS = ("per_head_stripped", "batched", "compiled", "batched_graph", "triton", "triton_graph")
WITH_FP8 = ("triton_fp8", "triton_fp8_graph")
"""The same kernels over float8 weights; a name ending in `_graph` is replayed as a CUDA graph."""


@dataclass(frozen=True)
class PairShape:
    """Two caches.

    Attributes:
        n_source, n_target: layers.
        n_heads, head_dim: KV heads and their width, of both models alike.
        theta: of both rotations.
    """

    n_source: int
    n_target: int
    n_heads: int
    head_dim: int
    theta: float = 1e6

    def rotation(self, device: torch.device) -> Rotation:
        """Half-split, over the whole head."""
        place = torch.arange(0, self.head_dim, 2, dtype=torch.float32, device=device)
        return Rotation(self.theta ** (-place / self.head_dim), 1.0, "half")

    def cache_map(
        self, support: str, top_k: int, dtype: torch.dtype, device: torch.device, seed: int = 0
    ) -> CacheMap:
        """A map of noise.

        Raises:
            KvmapError: fewer source layers than `top_k`.
        """
        layer = (self.n_heads, self.head_dim)
        mapper = random_mapper(
            (layer,) * self.n_source,
            (layer,) * self.n_target,
            top_k,
            support,
            dtype=dtype,
            device=device,
            seed=seed,
        )
        found = mapper.cache_map()
        assert found is not None  # a linear mapper is a table of weights
        return found


@dataclass(frozen=True, eq=False)
class GpuCase:
    """One cache to be mapped, by one map and its float8 version.

    Attributes:
        maps: by "" and "fp8".
        inputs, output: what is read and written.
    """

    maps: Mapping[str, CacheMap]
    inputs: Inputs
    output: Columns

    @classmethod
    def prepare(
        cls,
        shape: PairShape,
        maps: Mapping[str, CacheMap],
        n_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        batch_size: int = 1,
        seed: int = 0,
    ) -> GpuCase:
        """Noise in the place of a source cache, and a target cache that is still to be written."""
        generator = torch.Generator(device).manual_seed(seed)
        size = (batch_size, shape.n_heads, n_tokens, shape.head_dim)

        def layers() -> tuple[Tensor, ...]:
            return tuple(
                torch.randn(size, generator=generator, device=device).to(dtype) for _ in range(shape.n_source)
            )

        rotation = shape.rotation(device)
        source = Side(layers(), layers(), (rotation,) * shape.n_source)
        positions = torch.arange(n_tokens, device=device).expand(batch_size, -1)
        output = empty_columns(
            ((shape.n_heads, shape.head_dim),) * shape.n_target,
            range(shape.n_target),
            (batch_size, n_tokens),
            dtype=dtype,
            device=device,
            rotations=(rotation,) * shape.n_target,
        )
        return cls(maps, Inputs(source, positions), output)

    @property
    def source_bytes(self) -> int:
        """Of the source's cache."""
        return sum(tensor.nbytes for tensor in (*self.inputs.source.keys, *self.inputs.source.values))

    @property
    def output_bytes(self) -> int:
        """Of the target's."""
        return sum(t.nbytes for t in (*self.output.keys.values(), *self.output.values.values()))

    def map_of(self, path: str) -> CacheMap:
        """The weights that a path reads."""
        return self.maps["fp8" if "fp8" in path else ""]

    def call(self, path: str) -> Call:
        """A call of a path in `PATHS` or `WITH_FP8`, compiled and captured where its name says so.

        Raises:
            KvmapError: a graph without a CUDA device, or tensors that the path cannot serve.
        """
        cache_map, name = self.map_of(path), path.removesuffix("_graph").removesuffix("_fp8")
        if path.endswith("_graph") and self.inputs.positions.device.type != "cuda":
            raise KvmapError(f"path {path}: there is no CUDA device to capture a graph on")
        if name == "triton" and path.endswith("_graph"):
            from kvmap.kernels.map_cache.triton_path import GraphedMap, Plan

            return GraphedMap.capture(Plan(cache_map, self.inputs, self.output)).replay
        given = (cache_map, self.inputs, self.output)
        plain: Call = partial(map_cache, *given, path=name)
        if name == "compiled":
            plain = partial(_compiled, *given)
        if name == "per_head_stripped":
            plain = partial(map_per_head, *given, stripped_once=True)
        return graphed(plain) if path.endswith("_graph") else plain


def in_fp8(cache_map: CacheMap) -> CacheMap:
    """The same map with float8 weights, one scale a column."""
    return CacheMap(
        {
            kind: {layer: _quantised(product) for layer, product in products.items()}
            for kind, products in cache_map.products.items()
        }
    )


def graphed(call: Call) -> Callable[[], None]:
    """A call captured as a CUDA graph, after two that warm it up; replaying it does the same work again."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = call()

    def replay() -> None:
        graph.replay()
        _ = kept  # what the graph writes must not be freed

    return replay


def weight_count(cache_map: CacheMap) -> int:
    """Weights of all products."""
    return cache_map.flops(1) // 2


def _quantised(product: Product) -> Product:
    found = quantise_columns(product.weight)
    return Product(product.slots, found.values, product.bias, found.scale.reshape(product.bias.shape).float())


def _compiled(cache_map: CacheMap, inputs: Inputs, output: Columns) -> object:
    core = _compiled_core(inputs.positions.device.type)
    return map_cache_batched(cache_map, inputs, output, core=core)


@functools.cache
def _compiled_core(device: str) -> LayerCore:
    """What it has compiled serves every length. On a CPU it is traced alone: compiling takes a minute."""
    backend = "inductor" if device == "cuda" else "eager"
    core: LayerCore = torch.compile(mapped_layer, fullgraph=True, dynamic=True, backend=backend)
    return core
