"""The points that are swept, and what every job of them does."""

from __future__ import annotations

PAIRS = ("tiny_medium_large", "tiny_medium_wide", "tiny_unmatched")
TOP_K = ("1", "2", "3", "4", "all")
RIDGE_LAMBDA = ("1e-4", "1e-2", "1.0", "1e2")
STAGES = "stages=[calibrate,fit,evaluate]"
QUESTIONS = "evaluation.world.n_per_kind=20"
STUDY = "sweep_faults"


def sweep_of(n_pairs: int, n_points: int) -> list[str]:
    """Overrides of a sweep over pairs x k x lambda, cut to about so many points by its lambdas and k."""
    n_lambda = max(1, min(len(RIDGE_LAMBDA), n_points // (n_pairs * len(TOP_K))))
    n_k = max(1, min(len(TOP_K), n_points // (n_pairs * n_lambda)))
    return [
        STAGES,
        QUESTIONS,
        f"study={STUDY}",
        "tracking=none",
        f"mapper.top_k={','.join(TOP_K[:n_k])}",
        f"mapper.ridge_lambda={','.join(RIDGE_LAMBDA[:n_lambda])}",
        f"pair={','.join(PAIRS[:n_pairs])}",
    ]
