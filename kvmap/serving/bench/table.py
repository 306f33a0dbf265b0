"""Measurements as rows, with the ratios that they are read for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, TypeAlias

from kvmap.serving.bench.client import Measured
from kvmap.serving.bench.points import (
    COLD,
    GATEWAY_COLD,
    GATEWAY_REPREFILL,
    GATEWAY_WARM,
    PUBLISH,
    REPREFILL,
    WARM,
    Point,
)

Row: TypeAlias = dict[str, Any]

OUTCOMES = ("applied", "fell_back", "unsupported")
#: modes that have a row, in order; the gateway's where they were run
_ROWS = (PUBLISH, REPREFILL, WARM, COLD, GATEWAY_REPREFILL, GATEWAY_COLD, GATEWAY_WARM)


def rows_of(measured: Mapping[Point, Measured]) -> list[Row]:
    """One row a mode, length and concurrency: medians over the repeats.

    `of_re_prefill` is the time to first token over that of re-prefill of the same repeat: these follow each
    other closely, and are not parted by what else the machine does. `hand_off_cold` is a hand-off whose
    source has not read yet, one after the other: the time of the source's request and the time to first token
    after it. `gateway_hand_off_cold` is one whose target takes while the source reads.
    """
    by_case: dict[tuple[int, int], list[Mapping[str, Measured]]] = {}
    for together in _repeats(measured):
        point = next(iter(together))
        by_case.setdefault((point.n_tokens, point.concurrency), []).append(
            {each.mode: found for each, found in together.items()}
        )
    return [
        _row(mode, n_tokens, concurrency, repeats)
        for (n_tokens, concurrency), repeats in by_case.items()
        for mode in _ROWS
        if mode == COLD or mode in repeats[0]
    ]


def _repeats(measured: Mapping[Point, Measured]) -> list[dict[Point, Measured]]:
    """Points that were run one after another."""
    found: list[dict[Point, Measured]] = []
    for point, values in measured.items():
        if point.mode == REPREFILL:
            found.append({})
        found[-1][point] = values
    return found


def _row(mode: str, n_tokens: int, concurrency: int, repeats: Sequence[Mapping[str, Measured]]) -> Row:
    served = [each[WARM if mode == COLD else mode] for each in repeats]
    first = [_first_token_ms(mode, each) for each in repeats]
    plain = [each[REPREFILL].ttft_ms for each in repeats]
    row: Row = {"mode": mode, "n_tokens": n_tokens, "concurrency": concurrency, "repeats": len(repeats)}
    row |= {"requests": sum(each.n_completed for each in served)}
    row |= {name: sum(each.counts.get(name, 0) for each in served) for name in OUTCOMES}
    row |= {
        "ttft_ms": median(first),
        "of_re_prefill": median(a / b for a, b in zip(first, plain, strict=True)),
    }
    if mode not in (PUBLISH, COLD):
        row |= {
            "ttft_p90_ms": median(each.ttft_p90_ms for each in served),
            "tpot_ms": median(each.tpot_ms for each in served),
            "tokens_per_second": median(each.tokens_per_second for each in served),
        }
    return row


def _first_token_ms(mode: str, repeat: Mapping[str, Measured]) -> float:
    if mode == COLD:
        return repeat[PUBLISH].whole_ms + repeat[WARM].ttft_ms
    return repeat[PUBLISH].whole_ms if mode == PUBLISH else repeat[mode].ttft_ms
