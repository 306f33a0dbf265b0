"""What was asked of the mapping kernel on a GPU, against what `kvmap.benchmark.gpu` found."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvmap.benchmark.timing import Row

AT = 32768
"""Tokens at which times are asked."""
MAP_MS = {"full_head": 130.0, "head_local": 20.0}
RE_PREFILL_TIMES = {"full_head": 25.0, "head_local": 150.0}
FIXED_AT, FIXED_MS = 64, 1.5
ROOFLINE_FROM, ROOFLINE_SHARE = 4096, 0.7


def reach_rows(found: Mapping[str, Any]) -> list[Row]:
    """Every line of what was asked.

    Args:
        found: what has been measured, by part.

    Returns:
        Rows {what, asked, got, unit, by, reached}; `reached` is None where it was not measured, `by` the path
        that counted: the fastest with weights of the caches' dtype.
    """
    mapping = [row for row in found.get("mapping", []) if row.get("p50_ms") and "fp8" not in row["path"]]
    rows: list[Row] = []
    for support in MAP_MS:
        rows += _of_support([row for row in mapping if row["support"] == support], support, found)
    checks = [row for row in found.get("checks", []) if row["passed"] is not None]
    n_failed = sum(row["passed"] is False for row in checks)
    rows.append(_line("checks against the reference that fail", 0, n_failed if checks else None, "", None))
    return rows


def chunk_bytes(row: Row, shape_bytes: float, chunk_tokens: int) -> float:
    """Bytes of one chunk: the source's columns, and the target's, of so many tokens."""
    return shape_bytes / row["length"] * min(chunk_tokens, row["length"])


def _of_support(rows: Sequence[Row], support: str, found: Mapping[str, Any]) -> Iterator[Row]:
    at = _fastest(rows, AT)
    milliseconds = _got(at, "p50_ms")
    yield _line(f"{support}: mapping {AT} tokens", MAP_MS[support], milliseconds, "ms", _by(at), most=True)
    again = next(
        (
            row["whole_p50_ms"]
            for row in found.get("re_prefill", [])
            if row["role"] == "target" and row["length"] == AT
        ),
        None,
    )
    times = again / milliseconds if again and milliseconds else None
    yield _line(
        f"{support}: re-prefill over mapping, {AT} tokens",
        RE_PREFILL_TIMES[support],
        times,
        "times",
        _by(at),
    )
    fixed = _fastest([row for row in rows if row["path"].endswith("_graph")], FIXED_AT)
    yield _line(
        f"{support}: fixed cost at {FIXED_AT} tokens, as a graph",
        FIXED_MS,
        _got(fixed, "p50_ms"),
        "ms",
        _by(fixed),
        most=True,
    )
    lengths = sorted({row["length"] for row in rows if row["length"] >= ROOFLINE_FROM})
    best = [row for row in (_fastest(rows, length) for length in lengths) if row is not None]
    least = min(best, key=lambda row: row["roofline_share"], default=None)
    yield _line(
        f"{support}: least roofline share from {ROOFLINE_FROM} tokens on",
        ROOFLINE_SHARE,
        _got(least, "roofline_share"),
        "",
        _by(least, where=True),
    )
    yield _memory(rows, support, found)


def _memory(rows: Sequence[Row], support: str, found: Mapping[str, Any]) -> Row:
    """What the best path holds besides output and mapper, over one chunk of both caches."""
    known = [row for row in rows if row.get("peak_bytes") is not None and row["path"] != "per_head_stripped"]
    longest = max((row["length"] for row in known), default=0)
    best = _fastest(known, longest)
    share = None
    if best is not None:
        both = best["source_bytes"] + best["output_bytes"]
        chunk = chunk_bytes(best, both, found["study"]["chunk_tokens"])
        share = best["peak_bytes"] / chunk
    what = f"{support}: memory besides output and mapper, over one chunk of both caches"
    return _line(what, 1.0, share, "", _by(best, where=True), most=True)


def _got(row: Row | None, name: str) -> float | None:
    return None if row is None else row[name]


def _by(row: Row | None, where: bool = False) -> str | None:
    """The path that counted."""
    return None if row is None else f"{row['path']} at {row['length']}" if where else str(row["path"])


def _fastest(rows: Sequence[Row], length: int) -> Row | None:
    return min((row for row in rows if row["length"] == length), key=lambda r: r["p50_ms"], default=None)


def _line(
    what: str, asked: float, got: float | None, unit: str, by: str | None, *, most: bool | None = None
) -> Row:
    """One line; `most`: no more than `asked` is wanted. Counts of 0 are wanted exactly."""
    if got is None:
        reached = None
    elif most or asked == 0:
        reached = got <= asked
    else:
        reached = got >= asked
    sign = "≤" if most or asked == 0 else "≥"
    return {
        "what": what,
        "asked": f"{sign} {asked:g}",
        "got": got,
        "unit": unit,
        "by": by,
        "reached": reached,
    }
