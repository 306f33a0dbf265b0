"""How closely each diagnostic goes with what became of the hand-off: correlations over runs and intervals."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

from kvmap.errors import KvmapError, UnknownName
from kvmap.prediction.columns import Outcome, diagnostics_of, outcomes_of, short_name, with_ratios
from kvmap.prediction.configurations import N_RUNS, PAIR, configurations
from kvmap.prediction.resampling import (
    Floats,
    Labels,
    bootstrap_weights,
    interval_ends,
    permutations_within,
)
from kvmap.prediction.scores import correlations, pair_means, scored, unit_scale

if TYPE_CHECKING:
    import pandas as pd

Scope: TypeAlias = Literal["pooled", "within", "between"]

SCOPES: tuple[Scope, ...] = ("pooled", "within", "between")
METHODS = ("pearson", "spearman")
MIN_PAIRS = 4
MIN_RUNS = 3
MIN_FREEDOM = 5
"""Configurations beyond one a pair, below which a bootstrap within pairs only repeats them."""

N_RESAMPLES = 2000
CHUNK_ELEMENTS = 4_000_000  # numbers held at once: bounds memory, changes no result
_TIE = 1e-9


@dataclass(frozen=True, eq=False)
class _Block:
    """Diagnostics and outcomes that the same configurations have.

    Attributes:
        x: (d, n), y: (o, n), of unit scale.
        labels: (n,) pairs, 0 to J − 1.
        diagnostics: d columns.
        outcomes: o of them.
        n_runs: behind the configurations.
    """

    x: Floats
    y: Floats
    labels: Labels
    diagnostics: tuple[str, ...]
    outcomes: tuple[Outcome, ...]
    n_runs: int

    @property
    def n_pairs(self) -> int:
        return int(self.labels.max(initial=-1)) + 1

    @property
    def n(self) -> int:
        return len(self.labels)

    @property
    def freedom(self) -> int:
        return self.n - self.n_pairs


def correlate(
    table: pd.DataFrame,
    outcomes: Sequence[str] | None = None,
    *,
    diagnostics: Sequence[str] | None = None,
    group: str = PAIR,
    n_resamples: int = N_RESAMPLES,
    n_permutations: int = N_RESAMPLES,
    seed: int = 0,
) -> pd.DataFrame:
    """Pearson and Spearman correlation of every diagnostic with every outcome, task by task.

    Runs that differ in seeds alone are averaged first. Then, by scope:

    * `pooled`: over all configurations. It mixes what differs between pairs with what settings change in one.
    * `within`: both centred by pair, `r = Σ_g Σ_i (x_gi − x̄_g)(y_gi − ȳ_g) / √(…)`; for Spearman's, ranks
      within each pair as a share of its configurations. What changing a setting does, whatever the pair.
    * `between`: of the means of pairs, one point a pair.

    Intervals are 95 % percentiles of a bootstrap that draws pairs and then configurations within them
    (`between`: pairs alone); with one configuration a pair the percentiles are expanded, see
    `kvmap.prediction.resampling.interval_ends`. `p` is two-sided, of permutations that exchange the means of
    pairs among pairs and what is left among the configurations of a pair (`within`: the latter alone). `q` is
    p adjusted for the number of diagnostics held against that outcome (Benjamini and Hochberg 1995).

    Args:
        table: one row a run, see `kvmap.studies.runs.runs_table`.
        outcomes: `retention` (of every task) or `average/retention`; None: those of `columns.OUTCOMES`.
        diagnostics: columns; None: all `diagnose/…/mapped/…` and facts of the fit.
        group: column that says which pair a run is of.
        n_resamples: of the bootstrap; n_permutations: of the test.
        seed: of both.

    Returns:
        Rows {task, outcome, diagnostic, scope, method, value, low, high, p, q, n_configurations, n_runs,
        n_pairs, note}; what is undefined is nan, and the note says why. Fewer than `MIN_PAIRS` pairs: no
        interval over pairs; the one of `within` is then of these pairs' configurations alone, and there is
        none with fewer than `MIN_FREEDOM` configurations beyond one a pair.

    Raises:
        KvmapError: no such group, or runs without diagnostics or outcomes.
        UnknownName: an outcome or a diagnostic that no run has.
    """
    import pandas as pd

    if n_resamples < 1 or n_permutations < 1:
        raise KvmapError(f"{n_resamples} resamples, {n_permutations} permutations: expected 1 or more each")
    table = configurations(with_ratios(table), group)
    wanted = outcomes_of(table, outcomes)
    columns = _diagnostics(table, diagnostics)
    found = [
        row
        for block in _blocks(table, columns, wanted, group)
        for scope in SCOPES
        for method in METHODS
        for row in _rows(block, scope, method, n_resamples, n_permutations, seed)
    ]
    missing = {name: int((~np.isfinite(_numbers(table, name))).sum()) for name in _names(columns, wanted)}
    rows = pd.DataFrame([_with_missing(row, missing, len(table)) for row in found])
    order = {"task": [o.task for o in wanted], "outcome": [o.metric for o in wanted], "diagnostic": columns}
    places = {name: {value: place for place, value in enumerate(values)} for name, values in order.items()}
    rows = rows.sort_values(
        list(order), key=lambda column: column.map(places[str(column.name)]), kind="stable"
    ).reset_index(drop=True)
    return _with_q(rows.drop(columns="column"))


def _diagnostics(table: pd.DataFrame, names: Sequence[str] | None) -> list[str]:
    known = diagnostics_of(table)
    if names is None:
        if not known:
            raise KvmapError("the runs have no metric diagnose/…/mapped/…: give runs of the stage diagnose")
        return known
    for name in names:
        if name not in table:
            raise UnknownName("diagnostic", name, known)
    return list(dict.fromkeys(names))


def _names(diagnostics: Sequence[str], outcomes: Sequence[Outcome]) -> list[str]:
    return [*diagnostics, *(outcome.column for outcome in outcomes)]


def _numbers(table: pd.DataFrame, name: str) -> Floats:
    import pandas as pd

    return np.asarray(pd.to_numeric(table[name], errors="coerce"), dtype=np.float64)


def _blocks(
    table: pd.DataFrame, diagnostics: Sequence[str], outcomes: Sequence[Outcome], group: str
) -> Iterator[_Block]:
    """Every diagnostic with every outcome once, those together that the same rows have."""
    numbers = {name: _numbers(table, name) for name in _names(diagnostics, outcomes)}
    parts: dict[bytes, dict[str, list[Outcome]]] = {}
    for outcome in outcomes:
        for diagnostic in diagnostics:
            rows = np.isfinite(numbers[diagnostic]) & np.isfinite(numbers[outcome.column])
            parts.setdefault(rows.tobytes(), {}).setdefault(diagnostic, []).append(outcome)
    for key, by_diagnostic in parts.items():
        rows = np.frombuffer(key, dtype=bool)
        alike: dict[tuple[Outcome, ...], list[str]] = {}
        for diagnostic, of_it in by_diagnostic.items():
            alike.setdefault(tuple(of_it), []).append(diagnostic)
        for together, names in alike.items():
            yield _Block(
                x=unit_scale(np.stack([numbers[name][rows] for name in names])),
                y=unit_scale(np.stack([numbers[outcome.column][rows] for outcome in together])),
                labels=np.unique(table[group].astype(str).to_numpy()[rows], return_inverse=True)[1],
                diagnostics=tuple(names),
                outcomes=together,
                n_runs=int(table[N_RUNS].to_numpy()[rows].sum()),
            )


def _rows(
    block: _Block, scope: Scope, method: str, n_resamples: int, n_permutations: int, seed: int
) -> Iterator[dict[str, Any]]:
    d, o = len(block.diagnostics), len(block.outcomes)
    value, low, high, p = (np.full((d, o), np.nan) for _ in range(4))
    why = _too_few(block, scope)
    if not why:
        units = _between(block) if scope == "between" else block
        value = _values(units, scope, method, np.ones((1, units.n)))[0]
        random = np.random.default_rng(seed)
        if scope == "within" or block.n_pairs >= MIN_PAIRS:
            p = _p_values(units, scope, method, n_permutations, random)
            if scope != "within" or block.freedom >= MIN_FREEDOM:
                low, high = _interval(units, scope, method, n_resamples, random)
    for place, diagnostic in enumerate(block.diagnostics):
        for other, outcome in enumerate(block.outcomes):
            at = place, other
            ends = float(low[at]), float(high[at])
            note = why or _note(block, scope, at, float(value[at]), ends)
            yield {
                "task": outcome.task,
                "outcome": outcome.metric,
                "diagnostic": diagnostic,
                "scope": scope,
                "method": method,
                "value": float(value[at]),
                "low": ends[0],
                "high": ends[1],
                "p": float(p[at]) if math.isfinite(value[at]) else math.nan,
                "q": math.nan,
                "n_configurations": block.n,
                "n_runs": block.n_runs,
                "n_pairs": block.n_pairs,
                "note": note,
                "column": outcome.column,
            }


def _between(block: _Block) -> _Block:
    """Pairs as units: the mean of each."""
    x, y = (unit_scale(pair_means(columns, block.labels)) for columns in (block.x, block.y))
    return replace(block, x=x, y=y, labels=np.arange(block.n_pairs))


def _too_few(block: _Block, scope: Scope) -> str:
    if block.n < MIN_RUNS:
        return f"too few configurations ({block.n})"
    if scope == "between" and block.n_pairs < MIN_PAIRS:
        return f"too few pairs ({block.n_pairs})"
    if scope == "within" and block.freedom < 2:
        return "one configuration a pair: nothing varies within"
    return ""


def _note(block: _Block, scope: Scope, at: tuple[int, int], value: float, ends: tuple[float, float]) -> str:
    notes = []
    if not math.isfinite(value):
        where = {"pooled": "", "within": " within pairs", "between": " between pairs"}[scope]
        constant = not block.x[at[0]].any() or not block.y[at[1]].any()
        notes.append("constant" if constant else f"constant{where}")
    few = block.n_pairs < MIN_PAIRS
    if scope == "within" and block.freedom < MIN_FREEDOM:
        notes.append(f"too few configurations for an interval ({block.n} of {block.n_pairs} pairs)")
    elif few and scope == "within":
        notes.append(f"too few pairs ({block.n_pairs}): the interval is of these alone")
    elif few:
        notes.append(f"too few pairs ({block.n_pairs})")
    if ends[0] <= 0 <= ends[1]:
        notes.append("not told from zero")
    return "; ".join(notes)


def _values(block: _Block, scope: Scope, method: str, weights: Floats) -> Floats:
    """(B, d, o) for weights (B, n)."""
    labels = block.labels if scope == "within" else None
    x, y = (scored(columns, method, weights, labels) for columns in (block.x, block.y))
    return correlations(x, y, weights)


def _interval(
    block: _Block, scope: Scope, method: str, n_resamples: int, random: np.random.Generator
) -> tuple[Floats, Floats]:
    draw_pairs = scope != "within" or block.n_pairs >= MIN_PAIRS
    weights = bootstrap_weights(block.labels, n_resamples, random, draw_pairs=draw_pairs)
    parts = [_values(block, scope, method, chunk) for chunk in _chunks(block, weights)]
    return interval_ends(np.concatenate(parts), block.n_pairs if block.n == block.n_pairs else None)


def _p_values(
    block: _Block, scope: Scope, method: str, n_permutations: int, random: np.random.Generator
) -> Floats:
    """`(1 + #{|r*| ≥ |r|}) / (1 + B)`, (d, o)."""
    ones = np.ones((1, block.n))
    labels = block.labels if scope == "within" else None
    x, y = (scored(columns, method, ones, labels) for columns in (block.x, block.y))
    value = np.abs(correlations(x, y, ones)[0])
    means = pair_means(y[0], block.labels)
    rest = y[0] - means[:, block.labels]
    within = permutations_within(block.labels, n_permutations, random)
    pairs = permutations_within(np.zeros(block.n_pairs, dtype=np.int64), n_permutations, random)
    reached = np.zeros_like(value)
    for runs, of_pairs in zip(_chunks(block, within), _chunks(block, pairs), strict=True):
        exchanged = (rest[:, runs] + means[:, of_pairs[:, block.labels]]).swapaxes(0, 1)
        reached += (np.abs(correlations(x, exchanged, ones)) >= value - _TIE).sum(axis=0)
    return (1 + reached) / (1 + n_permutations)


def _chunks(block: _Block, rows: Any) -> Iterator[Any]:
    """Rows of (B, ...), as many at once as memory is to hold."""
    d, o = len(block.diagnostics), len(block.outcomes)
    size = max(1, CHUNK_ELEMENTS // ((d + o) * block.n + d * o))
    for start in range(0, len(rows), size):
        yield rows[start : start + size]


def _with_missing(row: dict[str, Any], missing: dict[str, int], n: int) -> dict[str, Any]:
    lacks = [
        f"no {name} in {missing[column]} of {n} configurations"
        for column, name in (
            (row["diagnostic"], short_name(row["diagnostic"])),
            (row["column"], f"{row['task']} {row['outcome']}"),
        )
        if missing[column]
    ]
    return row | {"note": "; ".join([*([row["note"]] if row["note"] else []), *lacks])}


def _with_q(rows: pd.DataFrame) -> pd.DataFrame:
    """Benjamini and Hochberg's adjusted p, over the diagnostics of one outcome, scope and method."""
    adjusted = rows["p"].to_numpy(copy=True)
    for at in rows.groupby(["task", "outcome", "scope", "method"]).indices.values():
        tested = at[np.isfinite(adjusted[at])]
        order = tested[np.argsort(-adjusted[tested], kind="stable")]
        m = len(order)
        scaled = adjusted[order] * m / np.arange(m, 0, -1)
        adjusted[order] = np.minimum(np.minimum.accumulate(scaled), 1.0) if m else scaled
    return rows.assign(q=adjusted)
