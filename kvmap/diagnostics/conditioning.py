"""How well-posed the systems of a linear map are: condition numbers and effective degrees of freedom."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median
from typing import Any

from kvmap.fit.conditioning import conditioning
from kvmap.fit.features import Recipe
from kvmap.fit.linear import Penalties, systems
from kvmap.fit.pair_moments import PairMoments
from kvmap.metrics import Metric
from kvmap.progress import track


def conditioning_rows(moments: PairMoments, recipe: Recipe, penalties: Penalties) -> list[dict[str, Any]]:
    """One row for each system that gave a target head its map; see `kvmap.fit.conditioning.conditioning`.

    Args:
        moments: of the fit split, unweighted.
        recipe, penalties: of the map.

    Returns:
        Rows {kind, layers, heads, n_features, n_rows, condition_number, degrees_of_freedom, rank}; layers and
        heads that one system serves are joined by spaces.
    """
    found = systems(moments, recipe, penalties)
    rows = []
    for system in track(found, len(found), "diagnose: conditioning of the systems"):
        cut = moments.cut("fit", system.features, system.targets[:1])
        penalty = system.penalty.vector(system.bands.to(cut.s_xx.device), cut.s_xx.diagonal())
        state = conditioning(cut.s_xx, penalty)
        rows.append(
            {
                "kind": system.kind,
                "layers": " ".join(str(layer) for layer in sorted({layer for layer, _ in system.heads})),
                "heads": " ".join(str(head) for head in sorted({head for _, head in system.heads})),
                "n_features": len(system.features),
                "n_rows": cut.n_rows,
                "condition_number": float(state.condition_number),
                "degrees_of_freedom": float(state.degrees_of_freedom),
                "rank": int(state.rank),
            }
        )
    return rows


def conditioning_metrics(rows: Iterable[dict[str, Any]], arm: str = "mapped") -> dict[str, Metric]:
    """Worst condition number and median degrees of freedom, by kind; n counts the systems."""
    by_kind: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by_kind.setdefault(row["kind"], []).append(row)
    metrics = {}
    for kind, found in by_kind.items():
        place = f"diagnose/conditioning/{arm}"
        n = len(found)
        freedom = median(row["degrees_of_freedom"] for row in found)
        metrics[f"{place}/worst_condition_number_{kind}"] = Metric(
            max(r["condition_number"] for r in found), n=n
        )
        metrics[f"{place}/median_degrees_of_freedom_{kind}"] = Metric(freedom, n=n)
    return metrics
