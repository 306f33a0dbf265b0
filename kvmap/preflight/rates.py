"""How often the rule is wrong on the recorded cases, each pair judged by the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvmap.preflight.evidence import FAMILY, MAPPER, PAIR, Evidence
from kvmap.preflight.rules import CHEAPEST_FIRST, PASS, UNKNOWN, Rules, judge

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Rates:
    """Counts of cases that were judged with their pair left out of the table.

    Attributes:
        n_pairs: that were left out in turn.
        n_good: cases that kept `min_retention`; n_bad: that did not.
        false_accepts: of the bad, those that passed.
        false_rejects: of the good, those that did not pass.
        n_unknown: of all, those that nothing was said of.
        n_verdicts: preflights judged as a whole (a pair and a seed).
        n_go: that named a mapper; n_wrong_go: that named one which keeps less than `min_retention`.
    """

    n_pairs: int = 0
    n_good: int = 0
    n_bad: int = 0
    false_accepts: int = 0
    false_rejects: int = 0
    n_unknown: int = 0
    n_verdicts: int = 0
    n_go: int = 0
    n_wrong_go: int = 0

    def rows(self) -> list[dict[str, Any]]:
        """Table {rate, value, wrong, n}: each rate with what it is of; None where there is nothing."""
        rates = (
            ("false accepts", self.false_accepts, self.n_bad),
            ("false rejects", self.false_rejects, self.n_good),
            ("not enough evidence", self.n_unknown, self.n_good + self.n_bad),
            ("mapper named that keeps too little", self.n_wrong_go, self.n_go),
        )
        return [
            {"rate": name, "value": wrong / n if n else None, "wrong": wrong, "n": n, "pairs": self.n_pairs}
            for name, wrong, n in rates
        ]


def left_out(evidence: Evidence, rules: Rules, family: str = "own") -> pd.DataFrame:
    """Every case, judged by the cases of other pairs alone.

    Args:
        evidence: the cases.
        rules: what is asked for.
        family: "own": by those of pairs that share the tokenizer; "any": by all.

    Returns:
        Rows {pair, seed, mapper, true, decision, predicted, low, high, reason}.
    """
    import pandas as pd

    rows: list[dict[str, Any]] = []
    for pair in evidence.pairs:
        cases = evidence.table[evidence.table[PAIR] == pair].to_dict("records")
        others = _judges(evidence, pair, str(cases[0].get(FAMILY) or "") if family == "own" else "")
        for case in cases:
            found = judge(case[MAPPER], measures_of(case, evidence.probes), others, rules)
            predicted = found.predicted
            rows.append(
                {name: case[name] for name in (PAIR, "seed", MAPPER, "true")}
                | {"decision": found.decision, "reason": found.reason}
                | {
                    name: None if predicted is None else getattr(predicted, attribute)
                    for name, attribute in (("predicted", "value"), ("low", "low"), ("high", "high"))
                }
            )
    return pd.DataFrame(rows)


def _judges(evidence: Evidence, pair: str, family: str) -> Evidence:
    """The cases of other pairs: of that family, or of all where none is given."""
    others = evidence.without(pair)
    return others.of_family(family) if family else others


def measures_of(case: Mapping[str, Any], probes: Sequence[str]) -> dict[str, dict[str, float]]:
    """What the preflight of a case measured, by probe; probes that it did not fit are left out."""
    found: dict[str, dict[str, float]] = {}
    for probe in probes:
        values = {
            str(name).split("/")[1]: float(value)
            for name, value in case.items()
            if str(name).startswith(f"{probe}/")
        }
        if values.get("kl_nats", float("nan")) == values.get("kl_nats"):
            found[probe] = values
    return found


def rates(judged: pd.DataFrame, min_retention: float) -> Rates:
    """The rates of `left_out`; a case is good if the mean of its seeds keeps `min_retention`."""
    if judged.empty:
        return Rates()
    good = judged["true"] >= min_retention
    passed = judged["decision"] == PASS
    named = _named(judged)
    return Rates(
        n_pairs=int(judged[PAIR].nunique()),
        n_good=int(good.sum()),
        n_bad=int((~good).sum()),
        false_accepts=int((passed & ~good).sum()),
        false_rejects=int((~passed & good).sum()),
        n_unknown=int((judged["decision"] == UNKNOWN).sum()),
        n_verdicts=judged.groupby([PAIR, "seed"]).ngroups,
        n_go=len(named),
        n_wrong_go=sum(true < min_retention for true in named),
    )


def _named(judged: pd.DataFrame) -> list[float]:
    """True retention of the mapper that each preflight names."""
    order = {name: number for number, name in enumerate(CHEAPEST_FIRST)}
    found = []
    for _, of_one in judged[judged["decision"] == PASS].groupby([PAIR, "seed"]):
        cheapest = min(of_one.to_dict("records"), key=lambda row: order.get(row[MAPPER], len(order)))
        found.append(float(cheapest["true"]))
    return found
