"""The rates of the rule as text for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvmap.evaluation.run_tables import text_table
from kvmap.preflight.evidence import Evidence
from kvmap.preflight.rates import Rates
from kvmap.preflight.rules import Rules


def rates_text(found: Rates, rules: Rules) -> str:
    """What the rule gets wrong on the cases, each pair judged by the others."""
    rows = found.rows()
    cells = [[row["rate"], share_of(row), str(row["n"])] for row in rows]
    title = (
        f"Each of {found.n_pairs} pairs judged by the cases of the others, at min_retention="
        f"{rules.min_retention:g} and confidence={rules.confidence:g}:"
    )
    return f"{title}\n{text_table(['rate', 'share', 'n'], cells)}"


def share_of(row: Mapping[str, Any]) -> str:
    """`0.08 (3)`: the rate, and how many; a dash where there is nothing to count."""
    return "–" if row["value"] is None else f"{float(row['value']):.3f} ({row['wrong']})"


def evidence_text(evidence: Evidence) -> str:
    """How many cases there are of each mapper, and what they retained."""
    rows: Sequence[list[str]] = [
        [
            mapper,
            str(cases["pair"].nunique()),
            str(len(cases)),
            f"{cases['true'].mean():.2f} [{cases['true'].min():.2f}, {cases['true'].max():.2f}]",
        ]
        for mapper in evidence.mappers
        if len(cases := evidence.of(mapper))
    ]
    return text_table(["mapper", "pairs", "cases", "retention, mean [least, most]"], rows)
