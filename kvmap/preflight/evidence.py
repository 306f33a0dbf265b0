"""The recorded cases: what a preflight measured of a pair, and what a mapper really kept of its accuracy."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvmap.errors import KvmapError
from kvmap.evaluation.run_tables import run_record
from kvmap.files import write_csv
from kvmap.preflight.prediction import Reference

if TYPE_CHECKING:
    import pandas as pd

SHIPPED = Path(__file__).with_name("evidence.csv")

PAIR, MAPPER, SEED, TOP_K = "pair", "mapper", "seed", "top_k"
RETENTION, CARRIED, KL = "retention", "context_carried", "kl_nats"
FACTS = (PAIR, MAPPER, TOP_K, SEED, "n_items", RETENTION, "standard_error", CARRIED, KL)
"""Columns that say which case it is, and what came of it; the rest are `<probe>/<diagnostic>`."""

FAMILY = "family"
"""Column that may be left out, or empty: the beginning of the sha256 of the tokenizer, by which a pair takes
the cases of its own family alone. A case without it serves every pair."""

CONTROL = "bias_only"

TASKS = ("average", "tasks_average")
"""Tasks whose retention is a case's, the first that the run has."""

KEY = "preflight/held_out/"
KEYS = {KEY: "", "preflight/prompts/": "prompts_"}
"""Metrics `<key><probe>/<name>` of a run, and what stands before the name in the columns of a table."""


@dataclass(frozen=True, eq=False)
class Evidence:
    """Cases, one row each.

    Attributes:
        table: `FACTS`, and `<probe>/<diagnostic>`: what a mapper fitted in the preflight (a probe) showed.
    """

    table: pd.DataFrame
    _references: dict[tuple[str, str], Reference] = field(default_factory=dict)

    @property
    def n_cases(self) -> int:
        """Rows: pair × mapper × seed."""
        return len(self.table)

    @property
    def pairs(self) -> list[str]:
        """Ordered pairs, source → target."""
        return sorted(set(self.table[PAIR].astype(str)))

    @property
    def mappers(self) -> list[str]:
        """Mappers whose outcome is known of some pair."""
        return list(dict.fromkeys(self.table[MAPPER].astype(str)))

    @cached_property
    def probes(self) -> list[str]:
        """Mappers that preflights have fitted, the control not among them."""
        found = dict.fromkeys(name.split("/")[0] for name in map(str, self.table) if "/" in name)
        return [name for name in found if name != CONTROL]

    def of(self, mapper: str) -> pd.DataFrame:
        """Cases of one mapper that have an outcome."""
        return self.table[(self.table[MAPPER] == mapper) & self.table[RETENTION].notna()]

    def reference(self, mapper: str, probe: str) -> Reference:
        """What the cases of a mapper say of it, by the diagnostics of a probe; made once."""
        key = mapper, probe
        if key not in self._references:
            self._references[key] = Reference.of(self.of(mapper), probe)
        return self._references[key]

    def without(self, pair: str) -> Evidence:
        """All cases but those of one pair."""
        return Evidence(self.table[self.table[PAIR] != pair])

    def of_family(self, tokenizer: str) -> Evidence:
        """Cases of pairs that share a tokenizer, and those that serve every pair.

        Args:
            tokenizer: its sha256 in hex, or what column `family` holds of it.
        """
        if FAMILY not in self.table:
            return self
        family = self.table[FAMILY]
        return Evidence(self.table[(family == "") | (family == family_of(tokenizer))].reset_index(drop=True))

    def largest_passing_kl(self, min_retention: float) -> float:
        """KL of full calibrations, nats a token, above which no case kept so much; nan without such cases."""
        passed = self.table[self.table["true"] >= min_retention]
        return float(passed[KL].max()) if len(passed) else math.nan


def family_of(tokenizer: str) -> str:
    """What column `family` holds of pairs with that tokenizer."""
    return tokenizer[:12]


def read_evidence(files: Iterable[Path] = (), *, shipped: bool = True) -> Evidence:
    """The shipped table and further ones, together.

    A case that stands in several files is that of the last. Column `true` is added: the mean retention of a
    pair and mapper over its seeds, since a seed draws calibration text and questions, and no other pair.

    Args:
        files: as `python -m kvmap.preflight table` writes them.
        shipped: whether the shipped table is one of them.

    Raises:
        KvmapError: a file that is no such table, naming what it lacks.
    """
    import pandas as pd

    tables = [_read(path) for path in ([SHIPPED] if shipped else []) + [Path(file) for file in files]]
    whole = pd.concat([table for table in tables if len(table)] or [pd.DataFrame(columns=list(FACTS))])
    if FAMILY in whole:
        whole[FAMILY] = whole[FAMILY].fillna("").astype(str)
    whole = whole.drop_duplicates([PAIR, MAPPER, TOP_K, SEED], keep="last").reset_index(drop=True)
    by_case = whole.groupby([PAIR, MAPPER, TOP_K])[RETENTION] if len(whole) else None
    return Evidence(whole.assign(true=math.nan if by_case is None else by_case.transform("mean")))


def _read(path: Path) -> pd.DataFrame:
    import pandas as pd

    try:
        table = pd.read_csv(
            Path(path).expanduser(), dtype=dict.fromkeys((PAIR, MAPPER, TOP_K, SEED, FAMILY), str)
        )
    except (OSError, ValueError) as error:
        raise KvmapError(
            f"preflight.evidence: {path} cannot be read as a table ({error}); python -m kvmap.preflight "
            "table makes one"
        ) from error
    missing = [name for name in FACTS if name not in table]
    if missing:
        raise KvmapError(
            f"preflight.evidence: {path} has no column {', '.join(missing)}; expected a table of cases, "
            "which python -m kvmap.preflight table makes"
        )
    return table


def cases_of(paths: Sequence[Path]) -> pd.DataFrame:
    """The cases that finished runs hold: those of the stages preflight, fit and evaluate.

    Args:
        paths: runs, or sweeps with runs in them. Those without runs are passed over where others have some,
            and runs without a preflight or without a retention of the mapped arm.

    Returns:
        One row a run: `FACTS`, `FAMILY`, and every diagnostic of a probe by `KEYS`.

    Raises:
        KvmapError: no runs, or none that is a case.
    """
    import pandas as pd

    from kvmap.studies.runs import runs_table

    # a sweep whose every point was done before leaves a directory without runs
    there = [path for path in map(Path, paths) if any(path.glob("run.json")) or any(path.glob("*/run.json"))]
    runs = runs_table(there or paths).to_dict("records")
    rows = [row for run in runs if (row := _case(run)) is not None]
    if not rows:
        raise KvmapError(
            f"{', '.join(map(str, paths))}: no run has both metrics {KEY}… and evaluate/average/mapped/"
            "retention; run stages=[preflight,fit,evaluate] with questions, as experiment=preflight does"
        )
    table = pd.DataFrame(rows)
    diagnostics = sorted(name for name in map(str, table) if "/" in name)
    return (
        table[[*FACTS, FAMILY, *diagnostics]].sort_values([PAIR, MAPPER, TOP_K, SEED]).reset_index(drop=True)
    )


def write_cases(file: Path, cases: pd.DataFrame) -> None:
    """Cases as a table on disk, six digits a number."""
    rows = [
        {name: float(f"{value:.6g}") if isinstance(value, float) else value for name, value in row.items()}
        for row in cases.to_dict("records")
    ]
    write_csv(file, rows)


def _case(run: dict[str, Any]) -> dict[str, Any] | None:
    outcomes = [key for task in TASKS if _is_number(run.get(key := f"evaluate/{task}/mapped/retention"))]
    measured = {
        f"{probe}/{before}{diagnostic}": value
        for key, before in KEYS.items()
        for name, value in run.items()
        if str(name).startswith(key) and ":" not in str(name) and _is_number(value)
        for probe, diagnostic in [str(name).removeprefix(key).split("/", 1)]
    }
    if not outcomes or not measured:
        return None
    outcome = outcomes[0]
    text = "evaluate/perplexity/mapped"
    return {
        PAIR: run["ordered_pair"],
        MAPPER: run["mapper"],
        TOP_K: str(run["mapper.top_k"]),
        SEED: str(run["calibration.data.seed"]),
        "n_items": run.get(f"{outcome.rsplit('/', 1)[0]}/accuracy:n", math.nan),
        RETENTION: run[outcome],
        "standard_error": run.get(f"{outcome}:standard_error", math.nan),
        CARRIED: run.get(f"{text}/context_carried", math.nan),
        KL: run.get(f"{text}/kl_nats", math.nan),
        FAMILY: _family(run),
        **measured,
    }


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _family(run: Mapping[str, Any]) -> str:
    models = run_record(Path(run["run"]))["facts"].get("models", {})
    return family_of(models.get("target", {}).get("tokenizer", ""))
