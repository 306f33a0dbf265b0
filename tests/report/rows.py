"""Rows as the stages write them, made up."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from kvmap.tracking import Metric, Run

ACCURACY = {"no_context": 0.14, "mapped": 0.52, "target": 0.73, "source": 0.45, "random": 0.12}


def arms_rows() -> list[dict[str, Any]]:
    rows = [
        {"task": task, "arm": arm, "metric": "accuracy", "value": value, "n": 120, "standard_error": 0.045}
        for task in ("lookup", "comparison_of_two_people_in_one_town")
        for arm, value in ACCURACY.items()
    ]
    rows.append({"task": "lookup", "arm": "raw", "metric": "accuracy", "value": math.nan, "n": 0})
    rows[-1]["note"] = "unavailable: shapes [2, 16] and [4, 16] differ"
    for arm, value in {"target": 24.5, "mapped": 28.7, "random": 15000.0}.items():
        rows.append({"task": "world", "arm": arm, "metric": "perplexity", "value": value, "n": 4096})
    kept = {"metric": "retention", "value": 0.712, "low": 0.61, "high": 0.815, "n": 120}
    rows.append({"task": "lookup", "arm": "mapped", **kept})
    lead = {"metric": "accuracy_minus_source", "value": 0.07, "low": -0.031, "high": 0.172, "n": 120}
    rows.append({"task": "lookup", "arm": "mapped", **lead})
    rows.append({"task": "lookup", "arm": "mapped", "metric": "mcnemar_source_p", "value": 0.185, "n": 120})
    return rows


def r2_rows(n_layers: int = 4, n_heads: int = 2) -> list[dict[str, Any]]:
    return [
        {"layer": layer, "head": head, "kind": kind, "split": split, "r2": 0.9 - 0.3 * layer / n_layers}
        for layer in range(n_layers)
        for head in range(n_heads)
        for kind in ("key", "value")
        for split in ("fit", "held_out")
    ]


def latency_rows() -> list[dict[str, Any]]:
    return [
        {
            "length": length,
            "arm": arm,
            "p20_ms": 0.9 * time,
            "p50_ms": time,
            "p80_ms": 1.2 * time,
            "n_repeats": 5,
        }
        for length in (64, 1024)
        for arm, time in (("map", length / 100), ("re_prefill", length / 20))
    ]


TEXTS = ("evaluation", "questions")
TOKEN_KINDS = {"first": 12.0, "newline_punctuation": 0.2, "rare": 0.8, "rest": 0.3}
BINS = ((0, 0), (1, 1), (2, 3), (4, 7), (8, 15), (16, 31), (32, 63), (64, 127))


def diagnostic_tables(
    n_layers: int = 3,
    n_heads: int = 4,
    n_kv_heads: int = 2,
    head_dim: int = 8,
    texts: tuple[str, ...] = TEXTS,
) -> dict[str, list[dict[str, Any]]]:
    """Every table of the stage `diagnose`, with numbers that rise with layer and head."""
    layers = range(n_layers)
    spectrum = [1 / (component + 1) for component in range(head_dim)]
    shares = [value / sum(spectrum) for value in spectrum]
    return {
        "probes": [
            {
                "source_layer": source,
                "target_layer": layer,
                "kind": kind,
                "r2": 0.9 - 0.2 * abs(source - layer),
            }
            for layer in layers
            for source in range(2)
            for kind in ("key", "value")
        ],
        "attention_output": [
            {
                "text": text,
                "layer": layer,
                "head": head,
                "kv_head": head * n_kv_heads // n_heads,
                "cosine": 0.9 - 0.1 * layer / n_layers,
                "concentration_key": 0.5 * 2**layer,
                "concentration_value": 1.0 + 0.1 * head,
                "sink_mass": 0.4,
                "sink_mass_mapped": 0.5,
                "n": 504,
            }
            for text in texts
            for layer in layers
            for head in range(n_heads)
        ],
        "errors_by_token": [
            {
                "text": text,
                "token_kind": kind,
                "layer": layer,
                "key_error": error * (1 + layer / 10),
                "value_error": 1.5 * error,
                "cosine": 0.9,
                "n": 10 * place + 4,
            }
            for text in texts
            for place, (kind, error) in enumerate(TOKEN_KINDS.items())
            for layer in layers
        ],
        "errors_by_position": [
            {
                "text": text,
                "low": low,
                "high": high,
                "layer": layer,
                "key_error": 0.2 + 0.01 * layer,
                "value_error": 0.4,
                "cosine": 0.9,
                "n": 8 * (high - low + 1),
            }
            for text in texts
            for low, high in BINS
            for layer in layers
        ],
        "spectrum": [
            {
                "text": text,
                "kind": kind,
                "layer": layer,
                "head": head,
                "component": component + 1,
                "error_share": shares[component],
                "target_share": 1 / head_dim,
            }
            for text in texts
            for kind in ("key", "value")
            for layer in layers
            for head in range(n_kv_heads)
            for component in range(head_dim)
        ],
        "spectrum_summary": [
            {
                "text": text,
                "kind": kind,
                "layer": layer,
                "head": head,
                "effective_rank": 1 / sum(share**2 for share in shares),
                "effective_rank_target": float(head_dim),
                "share_top8": 1.0,
                "share_top8_target": 1.0,
            }
            for text in texts
            for kind in ("key", "value")
            for layer in layers
            for head in range(n_kv_heads)
        ],
        "next_token": [
            {
                "text": text,
                "low": low,
                "high": high,
                "token_kind": None,
                "kl_nats": 0.3,
                "top1_agreement": 0.8,
                "n": 8,
            }
            for text in texts
            for low, high in BINS[1:]
        ]
        + [
            {
                "text": text,
                "low": None,
                "high": None,
                "token_kind": kind,
                "kl_nats": 0.4,
                "top1_agreement": 0.7,
                "n": 20,
            }
            for text in texts
            for kind in list(TOKEN_KINDS)[1:]
        ],
    }


def write_run(directory: Path, *, diagnosed: bool = False) -> Path:
    """A finished run's directory; diagnosed: with every table of the stage `diagnose`."""
    with Run(directory, "tiny", {"mapper": {"top_k": 8}}, "none") as run, run.stage("evaluate"):
        for name, rows in (diagnostic_tables() if diagnosed else {}).items():
            run.table(name, rows)
        run.table("arms", arms_rows())
        run.table("r2", r2_rows())
        run.table("latency", latency_rows())
        run.log({"evaluate/lookup/mapped/accuracy": Metric(0.52, 120, 0.045)})
    return directory
