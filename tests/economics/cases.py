"""Latencies for the tests of economics, made up and measured-looking."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvmap.economics import Latencies

LENGTHS = (128.0, 512.0, 2048.0, 8192.0)
ARMS = {
    "source_prefill": (4.0, 12.0, 60.0, 400.0),
    "re_prefill": (10.0, 40.0, 210.0, 1500.0),
    "hand_off": (12.0, 14.0, 22.0, 60.0),
    "source_token": (1.0, 1.1, 1.3, 2.0),
    "target_token": (5.0, 5.2, 5.9, 8.0),
}
SIZES = {"source_bytes": 1e5, "mapped_bytes": 2.5e5}  # of a token


def latencies(batch_size: int = 1, beyond: str = "refuse", **changed: tuple[float, ...]) -> Latencies:
    """Four lengths of a pair for which a hand-off pays from some hundred tokens on."""
    lengths = np.array(LENGTHS)
    return Latencies(
        lengths,
        {arm: np.array(values) for arm, values in (ARMS | changed).items()},
        {name: per_token * lengths for name, per_token in SIZES.items()},
        batch_size,
        "made up",
        beyond=beyond,
    )


def benchmark_rows(**extra: Any) -> list[dict[str, Any]]:
    """The rows that the benchmark would have written of the same."""
    arms = {arm: values for arm, values in ARMS.items() if not arm.endswith("_token")}
    arms["first_token"] = ARMS["target_token"]
    return [
        {
            "length": int(length),
            "arm": arm,
            "how": "measured",
            "p50_ms": values[place],
            "whole_p50_ms": values[place],
            **{name: per_token * length for name, per_token in SIZES.items()},
            "batch_size": 1,
            **extra,
        }
        for place, length in enumerate(LENGTHS)
        for arm, values in arms.items()
    ]
