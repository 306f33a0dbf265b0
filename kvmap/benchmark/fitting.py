"""What fitting costs, measured on captured caches.

    python -m kvmap.benchmark.fitting CAPTURES

Every figure is a ratio of two things measured in one run with one number of threads: the whole sweep over k,
λ and supports against the calibration pass that made its moments and against scikit-learn's fits of the same
points from rows; accumulation against the machine's matmul; peak memory against the planner's figure.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvmap.benchmark.accumulation import accumulation_rows, memory_rows
from kvmap.benchmark.sweep import (
    CROSS_RATIO,
    LAMBDAS,
    Row,
    SweepSettings,
    calibrate,
    forward_seconds,
    layout_of,
    ratio_rows,
    refit_rows,
    sweep_rows,
)
from kvmap.benchmark.timing import torch_threads
from kvmap.data.splits import split_sequences
from kvmap.errors import KvmapError
from kvmap.files import write_json
from kvmap.fit.calibrate import CalibrationOptions
from kvmap.fit.captures import ROLES, Captures
from kvmap.fit.moments import PRODUCT_DTYPES
from kvmap.models.pair import ModelPair, ModelSpec

PARTS = ("memory", "accumulation", "sweep")
TOP_K = (1, 2, 4, 8)
HELD_OUT_SHARE = 0.2


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of `python -m kvmap.benchmark.fitting`."""
    asked = _parser().parse_args(arguments)
    try:
        _check(asked)
        with torch_threads(asked.threads):
            tables = _measured(asked)
    except KvmapError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for name, rows in tables.items():
        if name != "points":
            print(f"\n{name}")
            print(as_text(rows))
    if asked.output is not None:
        write_json(asked.output, tables)
    return 0


def as_text(rows: Sequence[Row]) -> str:
    """Rows as a table of aligned columns, numbers in four digits."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    cells = [names] + [[_written(row.get(name)) for name in names] for row in rows]
    widths = [max(len(line[i]) for line in cells) for i in range(len(names))]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in cells
    )


def _written(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _check(asked: argparse.Namespace) -> None:
    if bool(asked.source) != bool(asked.target):
        raise KvmapError("--source and --target go together: give both models, or --seconds-per-token")
    if asked.threads < 1 or asked.repeats < 1:
        raise KvmapError(f"--threads={asked.threads}, --repeats={asked.repeats}: expected at least 1 of each")


def _measured(asked: argparse.Namespace) -> dict[str, list[Row]]:
    captures = Captures.open(asked.captures)
    tables: dict[str, list[Row]] = {}
    if "memory" in asked.parts:  # first, while the machine's memory is free
        tables["memory"] = memory_rows(captures, product_dtype=asked.product_dtype)
    if "accumulation" in asked.parts:
        tables["accumulation"] = accumulation_rows(captures, asked.repeats)
    if "sweep" in asked.parts:
        with _threads_of_numpy(asked.threads):
            tables |= _sweep_tables(captures, asked)
    return tables


def _sweep_tables(captures: Captures, asked: argparse.Namespace) -> dict[str, list[Row]]:
    n_layers = len(layout_of(captures).source_shape)
    named = [n_layers if k is None else min(k, n_layers) for k in asked.top_k]
    settings = SweepSettings(
        tuple(sorted(set(named))), tuple(asked.ridge_lambda), asked.cross_ratio, asked.rule
    )
    n_sequences = captures.batches[-1][1] if asked.sequences is None else asked.sequences
    fit, held_out = split_sequences(n_sequences, HELD_OUT_SHARE, seed=0)
    splits = {"fit": fit, "held_out": held_out}
    options = CalibrationOptions(product_dtype=asked.product_dtype)
    per_token = asked.seconds_per_token
    if asked.source and asked.target:
        pair = ModelPair(*(ModelSpec(name, dtype=asked.dtype) for name in (asked.source, asked.target)))
        (start, stop), length = captures.batches[0], captures.mask(captures.batches[0][0]).shape[1]
        per_token = forward_seconds(pair, stop - start, length)
        for side in ROLES:
            pair.release(side)
    made = calibrate(captures, splits, options)
    sweep, points = sweep_rows(made.moments, settings)
    refits = refit_rows(captures, splits, made.moments, settings, options) if asked.sklearn else []
    ratios = ratio_rows(sweep, made, per_token, refits)
    return {"sweep": sweep, "points": points, "refits": refits, "ratios": ratios}


@contextmanager
def _threads_of_numpy(threads: int) -> Iterator[None]:
    """As many threads for scikit-learn's linear algebra as torch has."""
    try:  # it comes with scikit-learn, and without types
        from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]
    except ImportError:  # it comes with scikit-learn, and nothing else here needs it
        yield
        return
    with threadpool_limits(threads):
        yield


def _top_k(text: str) -> int | None:
    """A number of source layers; None: all of them."""
    if text != "all" and not (text.isdecimal() and int(text)):
        raise argparse.ArgumentTypeError(f"{text!r}: expected 1 or more, or 'all'")
    return None if text == "all" else int(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m kvmap.benchmark.fitting",
        description="Measure what fitting costs on captured caches: the sweep over k, lambda and supports "
        "against the calibration pass and scikit-learn, the rate of accumulation, and peak memory.",
    )
    parser.add_argument("captures", type=Path, help="folder of caches that a run or kvmap.fit.captures wrote")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="default: all")
    parser.add_argument("--threads", type=int, default=1, help="of torch and numpy alike (default 1)")
    parser.add_argument("--repeats", type=int, default=3, help="timed turns of accumulation (default 3)")
    parser.add_argument("--sequences", type=int, help="of the captures, for the sweep (default all)")
    parser.add_argument(
        "--product-dtype", choices=list(PRODUCT_DTYPES), default="float64", help="of the moments' products"
    )
    parser.add_argument(
        "--top-k", nargs="+", type=_top_k, default=[*TOP_K, None], metavar="K", help="default: 1 2 4 8 all"
    )
    parser.add_argument("--ridge-lambda", nargs="+", type=float, default=list(LAMBDAS), help="absolute")
    parser.add_argument(
        "--cross-ratio", type=float, default=CROSS_RATIO, help="lambda_cross over lambda_own (default 10)"
    )
    parser.add_argument("--rule", default="r2", help="that ranks the source layers (default r2)")
    models = parser.add_argument_group("what the models' own forward takes, for the whole calibration pass")
    models.add_argument("--source", help="source model, with --target: both read two batches of random ids")
    models.add_argument("--target", help="target model")
    models.add_argument("--dtype", default="auto", help="of both models (default: of the checkpoint)")
    models.add_argument("--seconds-per-token", type=float, help="of both models, where it is known already")
    parser.add_argument("--no-sklearn", dest="sklearn", action="store_false", help="leave its fits out")
    parser.add_argument("--output", type=Path, help="also write everything there, as JSON")
    return parser


if __name__ == "__main__":
    sys.exit(main())
