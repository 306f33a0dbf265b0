"""Caches on their way: how long a network takes, and from which bandwidth on it pays to send them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from kvmap.benchmark.timing import Row

LINK_GBIT_PER_S = (10, 25, 50, 100, 400)


def transport_ms(n_bytes: float, gbit_per_s: float) -> float:
    """Milliseconds that so many bytes take over a link of so many 10⁹ bits a second, at full rate."""
    return n_bytes * 8 / (gbit_per_s * 1e9) * 1e3


def transport_rows(rows: Iterable[Row], gbit_per_s: Sequence[float] = LINK_GBIT_PER_S) -> list[Row]:
    """How long each cache takes over a link, at full rate and without latency.

    Args:
        rows: of `kvmap.benchmark.latency.latency_rows`.
        gbit_per_s: of the links.

    Returns:
        Rows {length, cache, bytes, gbit_per_s, transport_ms}; `cache` is `source` (mapped where it arrives)
        or `mapped` (mapped where it was read).
    """
    sizes = {row["length"]: (row["source_bytes"], row["mapped_bytes"]) for row in rows}
    return [
        {
            "length": length,
            "cache": cache,
            "bytes": n_bytes,
            "gbit_per_s": rate,
            "transport_ms": transport_ms(n_bytes, rate),
        }
        for length, pair_of_sizes in sizes.items()
        for cache, n_bytes in zip(("source", "mapped"), pair_of_sizes, strict=True)
        for rate in gbit_per_s
    ]


def network_rows(rows: Iterable[Row], gbit_per_s: Sequence[float] = LINK_GBIT_PER_S) -> list[Row]:
    """What a context that was read on another machine takes to its first logits, by link.

    The cache is sent, then mapped, or mapped, then sent; nothing overlaps, so that it is the most a hand-off
    over that link takes.

    Args:
        rows: of `kvmap.benchmark.latency.latency_rows`.
        gbit_per_s: of the links.

    Returns:
        Rows {length, cache, gbit_per_s, transport_ms, remote_ms, ratio, break_even_gbit_per_s}: transport and
        hand-off together, re-prefill over that, and the bandwidth above which the hand-off is the faster:
        ``8·bytes / (re_prefill − hand_off)``, infinite where no bandwidth is enough.
    """
    found = []
    by_length = medians(rows)
    sizes = {row["length"]: row for row in rows}
    for length, arms in sorted(by_length.items()):
        for cache in ("source", "mapped"):
            n_bytes = sizes[length][f"{cache}_bytes"]
            spare = arms["re_prefill"] - arms["hand_off"]
            needed = transport_ms(n_bytes, 1.0) / spare if spare > 0 else math.inf
            for rate in gbit_per_s:
                sent = transport_ms(n_bytes, rate)
                remote = sent + arms["hand_off"]
                found.append(
                    {
                        "length": length,
                        "cache": cache,
                        "gbit_per_s": rate,
                        "transport_ms": sent,
                        "remote_ms": remote,
                        "ratio": arms["re_prefill"] / remote,
                        "break_even_gbit_per_s": needed,
                    }
                )
    return found


def medians(rows: Iterable[Row]) -> Mapping[int, dict[str, float]]:
    """By length and arm, the median in ms of all layers: measured, or scaled to them."""
    found: dict[int, dict[str, float]] = {}
    for row in rows:
        found.setdefault(int(row["length"]), {})[row["arm"]] = float(row["whole_p50_ms"])
    return found


def ratio_rows(rows: Iterable[Row]) -> list[Row]:
    """How many times faster than reading again, by medians of one run.

    Returns:
        Rows {length, map_ratio, warm_ratio, cold_ratio}: re_prefill over map, over hand_off, and over
        source_prefill and hand_off together.
    """
    return [
        {
            "length": length,
            "map_ratio": arms["re_prefill"] / arms["map"],
            "warm_ratio": arms["re_prefill"] / arms["hand_off"],
            "cold_ratio": arms["re_prefill"] / (arms["source_prefill"] + arms["hand_off"]),
        }
        for length, arms in sorted(medians(rows).items())
    ]


def break_even(rows: Iterable[Row]) -> Row:
    """The context length from which a hand-off pays, warm and cold.

    Returns:
        {warm_length, cold_length, note}: the shortest measured length from which on every measured one is
        faster handed over; None where none is. The note says it in a sentence.
    """
    ratios = ratio_rows(rows)
    lengths = {case: _pays_from(ratios, f"{case}_ratio") for case in ("warm", "cold")}
    measured = f"{ratios[0]['length']} to {ratios[-1]['length']} tokens" if ratios else "nothing"
    said = ", ".join(
        f"{case} {'never' if length is None else f'from {length} tokens on'}"
        for case, length in lengths.items()
    )
    return {
        "warm_length": lengths["warm"],
        "cold_length": lengths["cold"],
        "note": f"a hand-off is faster than re-prefill: {said} (measured: {measured})",
    }


def _pays_from(ratios: Sequence[Row], case: str) -> int | None:
    found = None
    for row in reversed(ratios):
        if not row[case] > 1 or math.isnan(row[case]):
            break
        found = row["length"]
    return found
