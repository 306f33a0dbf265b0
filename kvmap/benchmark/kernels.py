"""The paths of the kernels against each other, by ratio, in one run on one device.

    python -m kvmap.benchmark.kernels

Every path does the same work in turn, and what it computes is compared before anything is timed. A ratio is
the median of a base over that of the path: of `map_cache` the base is a loop over heads, of second moments
PyTorch with float64 products. The last line is JSON; the exit status is 2 where a path strays from what it
must compute, or a ratio is below what `--at-least` asks.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvmap.benchmark.fitting import as_text
from kvmap.benchmark.mapping import MAPPING_PATHS, empty_columns
from kvmap.benchmark.mapping import Mapping as PreparedMapping
from kvmap.benchmark.random_models import random_mapper
from kvmap.benchmark.timing import (
    Call,
    Row,
    in_turn,
    n_copies,
    percentiles,
    setting,
    time_interleaved,
    torch_threads,
)
from kvmap.errors import KvmapError
from kvmap.fit.features import CacheShape, n_channels
from kvmap.kernels.second_moments import Rows, Sums, add_second_moments
from kvmap.mappers import Mapper
from kvmap.mappers.compressed import CompressedLinearMapper
from kvmap.models.cache import KVCache
from kvmap.models.rope import Rotation

OPERATIONS = ("map_cache", "second_moments")
SUPPORTS = ("full_head", "head_local")
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
WEIGHTS = (*DTYPES, "float8")

_COPIES = 3  # of a cache, which take turns
_BLOCK = 512


@dataclass(frozen=True, eq=False)
class Case:
    """One piece of work, and the paths that do it.

    Attributes:
        name: what the names of its rows begin with.
        calls: by path, what is timed.
        found: what a path computes, anew.
        base: path that the others are timed against; truth: path that they must agree with.
        tolerance: largest difference from `truth`, over the largest number there.
        flops: floating-point operations of a call.
    """

    name: str
    calls: Mapping[str, Call]
    found: Callable[[str], Sequence[Tensor]]
    base: str
    truth: str
    tolerance: float
    flops: int


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of `python -m kvmap.benchmark.kernels`."""
    asked = _parser().parse_args(arguments)
    try:
        _check(asked)
        with torch_threads(asked.threads):
            rows = [row for case in _cases(asked) for row in case_rows(case, asked.repeats, asked.warmup)]
            about = setting(torch.device(asked.device), DTYPES[asked.dtype], asked.repeats) | _sizes(asked)
        failures = shortfalls(rows, dict(asked.at_least))
    except KvmapError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(as_text([{k: v for k, v in row.items() if k != "skipped"} for row in rows if not row["skipped"]]))
    for row in rows:
        if row["skipped"]:
            print(f"{row['name']}: {row['skipped']}")
    for failure in failures:
        print(f"error: {failure}", file=sys.stderr)
    ratios = {row["name"]: row["ratio"] for row in rows if row["skipped"] is None}
    print(json.dumps({"setting": about, "ratios": ratios, "failures": failures, "rows": rows}))
    return 2 if failures else 0


def map_case(
    source: CacheShape,
    target: CacheShape,
    *,
    support: str,
    top_k: int,
    n_tokens: int,
    dtype: torch.dtype,
    weights: str,
    device: torch.device,
) -> Case:
    """A random cache through a random linear map, by every path of `map_cache`.

    Args:
        source, target: `(n_kv_heads, head_dim)` of each layer.
        support, top_k: of the map, see `random_mapper`.
        n_tokens: of one context.
        dtype: of both caches.
        weights: dtype of the weights, of `WEIGHTS`.
        device: of everything.
    """
    compute_dtype = DTYPES.get(weights, torch.bfloat16)
    linear = random_mapper(source, target, top_k, support, dtype=compute_dtype, device=device)
    mapper: Mapper = linear if weights in DTYPES else CompressedLinearMapper.from_linear(linear, "fp8")
    kv = _random_cache(source, n_tokens, dtype, device)
    output = empty_columns(
        target,
        range(len(target)),
        (1, n_tokens),
        dtype=dtype,
        device=device,
        rotations=_rotations(target, device),
    )
    mapping = PreparedMapping(mapper, kv, None, output)
    copies = [mapping, *(mapping.copy() for _ in range(n_copies(_COPIES, mapping.nbytes) - 1))]
    paths = [path for path in MAPPING_PATHS if path != "auto"]

    def found(path: str) -> list[Tensor]:
        written = (*output.keys.values(), *output.values.values())
        for tensor in written:
            tensor.fill_(float("nan"))
        mapping.call(path)()
        return [tensor.clone() for tensor in written]

    cache_map = mapper.cache_map()
    assert cache_map is not None  # the map is linear
    return Case(
        f"map_cache/{support}/{weights}",
        {path: in_turn([copy.call(path) for copy in copies]) for path in paths},
        found,
        base="per_head",
        truth="reference",
        # products, and sums with biases, may each be rounded to the smaller of the dtypes
        tolerance=max(4 * torch.finfo(dtype).eps, 4 * torch.finfo(compute_dtype).eps, 1e-5),
        flops=cache_map.flops(n_tokens),
    )


def moments_case(n: int, p: int, q: int, *, dtype: torch.dtype, weighted: bool, device: torch.device) -> Case:
    """Second moments of a chunk of n random rows of p features and q targets, by every path."""
    generator = torch.Generator().manual_seed(0)
    x, y = ((torch.randn(n, width, generator=generator) + 1).to(device, dtype) for width in (p, q))
    weights = torch.rand(n, generator=generator, dtype=torch.float64).to(device) if weighted else None
    s_xx, s_xy, s_yy = (
        torch.zeros(shape, dtype=torch.float64, device=device) for shape in ((p, p), (p, q), (q,))
    )
    sums = Sums(s_xx, s_xy, s_yy, _BLOCK)
    calls: dict[str, Call] = {
        f"{path}/{product}": partial(
            add_second_moments, Rows(x, y, weights), sums, product_dtype=getattr(torch, product), path=path
        )
        for path, product in (("torch", "float64"), ("torch", "float32"), ("triton", "float32"))
    }

    def found(path: str) -> list[Tensor]:
        for table in (s_xx, s_xy, s_yy):
            table.zero_()
        calls[path]()
        return [s_xx.triu(), s_xy.clone(), s_yy.clone()]

    return Case(
        f"second_moments/{'weighted' if weighted else 'plain'}",
        calls,
        found,
        base="torch/float64",
        truth="torch/float64",
        tolerance=1e-5,  # of products in float32
        flops=n * p * (p + 2 * q),
    )


def case_rows(case: Case, repeats: int, warmup: int) -> list[Row]:
    """What every path of a case computes and takes.

    Returns:
        Rows {name, p20_ms, p50_ms, p80_ms, ratio, gflop_per_s, error, tolerance, skipped}, one a path:
        `ratio` is the base's median over the path's, `error` the largest difference from the truth over the
        largest number there, `skipped` why a path cannot serve the case (of which the rest is None then).
    """
    truth = case.found(case.truth)
    device = truth[0].device
    errors: dict[str, float] = {}
    skipped: dict[str, str] = {}
    for path in case.calls:
        try:
            errors[path] = _difference(case.found(path), truth)
        except KvmapError as reason:
            skipped[path] = str(reason)
    del truth
    seconds = time_interleaved({path: case.calls[path] for path in errors}, repeats, warmup, [device])
    milliseconds = {path: percentiles(found) for path, found in seconds.items()}
    base = milliseconds[case.base]["p50_ms"]
    rows = []
    for path in case.calls:
        row: Row = {"name": f"{case.name}/{path}", **dict.fromkeys(_MEASURED), "skipped": skipped.get(path)}
        if path in errors:
            taken = milliseconds[path]["p50_ms"]
            row |= milliseconds[path] | {"ratio": base / taken, "gflop_per_s": case.flops / taken / 1e6}
            row |= {"error": errors[path], "tolerance": case.tolerance}
        rows.append(row)
    return rows


_MEASURED = ("p20_ms", "p50_ms", "p80_ms", "ratio", "gflop_per_s", "error", "tolerance")


def shortfalls(rows: Sequence[Row], at_least: Mapping[str, float]) -> list[str]:
    """What is wrong: results that stray from the truth, and ratios below those asked.

    Raises:
        KvmapError: a ratio is asked of something that was not measured.
    """
    done = {row["name"]: row for row in rows if row["skipped"] is None}
    for name in at_least:
        if name not in done:
            raise KvmapError(f"--at-least {name}: not measured; measured were {', '.join(done)}")
    strays = [row for row in done.values() if not row["error"] <= row["tolerance"]]
    slow = [(name, ratio) for name, ratio in at_least.items() if not done[name]["ratio"] >= ratio]
    return [
        *(f"{row['name']} is off by {row['error']:.2g}, allowed {row['tolerance']:.2g}" for row in strays),
        *(f"{name} is {done[name]['ratio']:.3g} times as fast as its base, asked {r:g}" for name, r in slow),
    ]


def _cases(asked: argparse.Namespace) -> Iterator[Case]:
    device, dtype = torch.device(asked.device), DTYPES[asked.dtype]
    if "map_cache" in asked.operations:
        for support in SUPPORTS:
            for weights in asked.weights:
                yield map_case(
                    asked.source,
                    asked.target,
                    support=support,
                    top_k=asked.top_k,
                    n_tokens=asked.tokens,
                    dtype=dtype,
                    weights=weights,
                    device=device,
                )
    if "second_moments" in asked.operations:
        p, q = (n_channels(shape[: asked.top_k]) for shape in (asked.source, asked.target))
        for weighted in (False, True):
            yield moments_case(asked.rows, p, q, dtype=dtype, weighted=weighted, device=device)


def _difference(found: Sequence[Tensor], truth: Sequence[Tensor]) -> float:
    """Largest difference over the truth's largest number, of the worst tensor; NaN where there is one."""
    pairs = zip(found, truth, strict=True)
    return float(np.max([float((a - b).abs().max() / b.abs().max()) for a, b in pairs]))


def _random_cache(shape: CacheShape, n_tokens: int, dtype: torch.dtype, device: torch.device) -> KVCache:
    generator = torch.Generator(device).manual_seed(1)

    def drawn(n_heads: int, dim: int) -> Tensor:
        return torch.randn(1, n_heads, n_tokens, dim, generator=generator, device=device).to(dtype)

    keys, values = (tuple(drawn(*layer) for layer in shape) for _ in range(2))
    positions = torch.arange(n_tokens, device=device)[None]
    mask = torch.ones(1, n_tokens, dtype=torch.bool, device=device)
    return KVCache(keys, values, positions, mask, _rotations(shape, device))


def _rotations(shape: CacheShape, device: torch.device) -> tuple[Rotation, ...]:
    """Layers of one width share theirs, as those of a model do."""
    made = {
        dim: Rotation(1e6 ** -(torch.arange(0, dim, 2, device=device) / dim), 1.0, "half") for _, dim in shape
    }
    return tuple(made[dim] for _, dim in shape)


def _sizes(asked: argparse.Namespace) -> dict[str, Any]:
    names = ("source", "target", "top_k", "tokens", "rows", "warmup")
    sizes = {name: getattr(asked, name) for name in names}
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    return sizes | {"torch": torch.__version__, "triton_interpreted": interpreted}


def _check(asked: argparse.Namespace) -> None:
    for name in ("tokens", "rows", "top_k", "repeats", "threads"):
        if getattr(asked, name) < 1:
            raise KvmapError(f"--{name.replace('_', '-')}={getattr(asked, name)}: expected 1 or more")
    if torch.device(asked.device).type == "cuda" and not torch.cuda.is_available():
        raise KvmapError(f"--device={asked.device}: there is no CUDA device; leave --device out")


def _shape(text: str) -> CacheShape:
    parts = text.split("x")
    if len(parts) != 3 or not all(part.isdecimal() and int(part) for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r}: expected LAYERSxHEADSxDIM, such as 24x2x64")
    n_layers, n_heads, dim = map(int, parts)
    return ((n_heads, dim),) * n_layers


def _asked_ratio(text: str) -> tuple[str, float]:
    name, _, ratio = text.partition("=")
    try:
        return name, float(ratio)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r}: expected NAME=RATIO, such as map_cache/full_head/bfloat16/batched=2"
        ) from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m kvmap.benchmark.kernels",
        description="Time every path of map_cache and of second moments on random tensors, in turn, and "
        "compare what they compute. The last line is JSON.",
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--operations", nargs="+", choices=OPERATIONS, default=list(OPERATIONS))
    parser.add_argument("--source", type=_shape, default="24x2x64", help="LAYERSxHEADSxDIM (24x2x64)")
    parser.add_argument("--target", type=_shape, default="28x2x128", help="likewise (28x2x128)")
    parser.add_argument("--top-k", type=int, default=8, help="source layers for each target layer (8)")
    parser.add_argument("--tokens", type=int, default=512, help="that are mapped (512)")
    parser.add_argument("--rows", type=int, default=2048, help="of a chunk of moments (2048)")
    parser.add_argument("--dtype", choices=list(DTYPES), default="bfloat16", help="of caches and rows")
    parser.add_argument("--weights", nargs="+", choices=WEIGHTS, default=["bfloat16"], help="of the map")
    parser.add_argument("--device", default=device, help="default: a GPU where there is one")
    parser.add_argument("--threads", type=int, default=1, help="of torch (1)")
    parser.add_argument("--repeats", type=int, default=7, help="timed turns (7)")
    parser.add_argument("--warmup", type=int, default=2, help="turns before them (2)")
    parser.add_argument(
        "--at-least", nargs="+", type=_asked_ratio, default=[], metavar="NAME=RATIO", help="or exit with 2"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
