"""Correlations and predictors as text for people."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from kvmap.evaluation.run_tables import text_table, written
from kvmap.prediction.columns import short_name
from kvmap.prediction.correlation import MIN_FREEDOM, MIN_PAIRS

if TYPE_CHECKING:
    import pandas as pd

NOT_TOLD = "not told from zero"  # the intervals say it already
SAID_ABOVE = ("too few pairs", "too few configurations for an interval")
_CELLS = (
    ("pooled", "pearson", "pooled r"),
    ("pooled", "spearman", "pooled ρ"),
    ("within", "pearson", "within r"),
    ("within", "spearman", "within ρ"),
    ("between", "spearman", "between ρ"),
)


def correlation_text(rows: pd.DataFrame, task: str, outcome: str) -> str:
    """One outcome's correlations, those of the largest pooled Spearman's ρ first.

    Args:
        rows: of `kvmap.prediction.correlate`.
        task: of the outcome; outcome: its metric.
    """
    own = rows[(rows["task"] == task) & (rows["outcome"] == outcome)]
    found: dict[str, dict[tuple[str, str], Any]] = {}
    for row in own.to_dict("records"):
        found.setdefault(row["diagnostic"], {})[row["scope"], row["method"]] = row

    def size(name: str) -> float:
        value = abs(found[name]["pooled", "spearman"]["value"])
        return value if math.isfinite(value) else -1.0

    order = sorted(found, key=size, reverse=True)
    columns = ["diagnostic", *(title for _, _, title in _CELLS), "p pooled", "p within", "note"]
    cells = [
        [
            short_name(name),
            *(_cell(found[name][scope, method]) for scope, method, _ in _CELLS),
            written(found[name]["pooled", "spearman"]["p"]),
            written(found[name]["within", "spearman"]["p"]),
            _notes(found[name]),
        ]
        for name in order
    ]
    return f"{_title(own, task, outcome)}\n{text_table(columns, cells)}\n{_by_chance(own)}"


def predictor_text(scores: pd.DataFrame, outcome: str) -> str:
    """What predictors make of pairs that they have not seen; see `kvmap.prediction.leave_one_pair_out`."""
    columns = ["predictor", "R² out of pair", "mean error", "ρ", "ρ within pairs", "penalty"]
    cells = [
        [
            row["predictor"],
            _with_interval(row["r2"], row["r2_low"], row["r2_high"]),
            written(row["mean_absolute_error"]),
            _fixed(row["rank_correlation"]),
            _fixed(row["rank_within_pairs"]),
            written(row["penalty"]),
        ]
        for row in scores.to_dict("records")
    ]
    counts = [counted(scores["n_configurations"], "configuration"), counted(scores["n_pairs"], "pair")]
    title = f"{outcome} of pairs left out: {', '.join(counts)}"
    said = scores["note"].iloc[0]
    note = f"\n{said}" if said else ""
    if not scores["r2"].notna().any():
        return f"{title}{note}"
    return f"{title}\n{text_table(columns, cells)}{note}"


def _title(rows: pd.DataFrame, task: str, outcome: str) -> str:
    pooled = rows[rows["scope"] == "pooled"]
    counts = [
        counted(pooled[column], what)
        for column, what in (
            ("n_configurations", "configuration"),
            ("n_runs", "run"),
            ("n_pairs", "pair"),
        )
    ]
    warnings = []
    if pooled["n_pairs"].max() < MIN_PAIRS:
        warnings.append(f"; too few pairs: no interval over them below {MIN_PAIRS}")
    if (pooled["n_configurations"] - pooled["n_pairs"]).max() < MIN_FREEDOM:
        warnings.append(f"; no interval within pairs below {MIN_FREEDOM} configurations more than pairs")
    return f"{task} {outcome}: {', '.join(counts)}{''.join(warnings)}"


def counted(column: pd.Series, what: str) -> str:
    """`3 pairs`, `1 pair`, or `2–3 pairs` where rows differ."""
    low, high = int(column.min()), int(column.max())
    return f"{low if low == high else f'{low}–{high}'} {what}{'' if high == 1 else 's'}"


def _cell(row: dict[str, Any]) -> str:
    return _with_interval(row["value"], row["low"], row["high"])


def _with_interval(value: float, low: float, high: float) -> str:
    known = math.isfinite(low) and math.isfinite(high)
    return f"{_fixed(value)} [{_fixed(low)}, {_fixed(high)}]" if known else _fixed(value)


def _fixed(value: float) -> str:
    """Two decimals, and no minus before zero."""
    return f"{value:.2f}".replace("-0.00", "0.00") if math.isfinite(value) else "–"


def _notes(by_cell: dict[tuple[str, str], Any]) -> str:
    """Notes of the pooled correlation, and those of other scopes that it does not have."""
    said: dict[str, str] = {}
    for (scope, _), row in by_cell.items():
        for note in row["note"].split("; "):
            if note and note != NOT_TOLD and not note.startswith(SAID_ABOVE):
                said.setdefault(note, note if scope == "pooled" or scope in note else f"{scope}: {note}")
    return "; ".join(said.values())


def _by_chance(rows: pd.DataFrame) -> str:
    tested = rows[(rows["scope"] == "pooled") & (rows["method"] == "spearman") & rows["p"].notna()]
    if tested.empty:
        return "Nothing is tested."
    told = int((tested["p"] <= 0.05).sum())
    kept = int((tested["q"] <= 0.05).sum())
    return (
        f"Of {len(tested)} diagnostics {told} have p ≤ 0.05 (pooled ρ), where chance alone would give "
        f"{len(tested) / 20:.1f}; {kept} have it adjusted for their number (q)."
    )
