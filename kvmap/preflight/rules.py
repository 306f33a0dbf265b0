"""From measures and cases to a verdict: what is refused outright, and what the table decides."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist

from kvmap.preflight.evidence import Evidence
from kvmap.preflight.prediction import Measures, Predicted, probe_for, usable

CHEAPEST_FIRST = (
    "head_local",
    "linear",
    "banded",
    "native_features",
    "native_features_2",
    "mlp_values",
    "mlp",
    "residual",
)
"""By what a hand-off costs: products a token, time of the fit, then layers that the target runs itself."""
NETWORKS = ("mlp_values", "mlp", "residual")
PROMPTS = "prompts"
"""Stands for the probe where a map was judged by what it does after prompts."""

PASS, FAIL, UNKNOWN = "pass", "fail", "unknown"

EXACT_KL = {"float32": 1e-5, "float64": 1e-5}
EXACT_KL_ROUNDED = 2e-3
"""KL in nats a token up to which a mapped cache is the target's own but for rounding, by dtype of the target;
that of 16 bits where it is none of these."""

NO_BETTER = 0.9
"""Share of the control's KL from which on a map says no more than the mean cache."""
OVERFITTED_GAP, OVERFITTED_ROWS = 0.1, 2.0
"""R² lost between fitted and held-out rows, with fewer rows a feature than that, that says over-fitted."""


@dataclass(frozen=True)
class Rules:
    """What is asked for.

    Attributes:
        min_retention: accuracy mapped / accuracy target that must be kept.
        confidence: of each bound.
        min_pairs: pairs that the cases of a mapper must come from.
        reach: see `Reference.predict`.
        exact_kl_nats: see `EXACT_KL`.
    """

    min_retention: float = 0.9
    confidence: float = 0.8
    min_pairs: int = 9
    reach: float = 0.5
    exact_kl_nats: float = 1e-5


@dataclass(frozen=True)
class Judgement:
    """Of one mapper.

    Attributes:
        mapper: its name.
        decision: "pass", "fail" or "unknown".
        reason: one line.
        probe: whose diagnostics it was judged by; None where there were none.
        predicted: from the cases; None where they were not asked.
    """

    mapper: str
    decision: str
    reason: str
    probe: str | None = None
    predicted: Predicted | None = None


def is_exact(values: Mapping[str, float], rules: Rules) -> bool:
    """Whether the mapped cache is the target's own but for rounding."""
    return values["kl_nats"] <= rules.exact_kl_nats


def rejections(values: Mapping[str, float]) -> list[str]:
    """What refuses a map without any table.

    Args:
        values: of `measure`, with `kl_share`.
    """
    found = []
    broken = [name for name in ("kl_nats", "r2_key", "r2_value") if not math.isfinite(values[name])]
    if broken:
        found.append(f"{', '.join(broken)}: not a number")
    for kind in ("key", "value"):
        if values[f"r2_{kind}"] < 0:
            found.append(f"held-out R² of {kind}s {values[f'r2_{kind}']:.2f}: worse than their mean")
        if values["rows_per_feature"] < OVERFITTED_ROWS and values[f"gap_{kind}"] > OVERFITTED_GAP:
            found.append(
                f"over-fitted: R² of {kind}s {values[f'r2_{kind}_fit']:.2f} on fitted rows and "
                f"{values[f'r2_{kind}']:.2f} held out, with {values['rows_per_feature']:.2g} rows a feature"
            )
    if values["kl_share"] >= NO_BETTER:
        found.append(
            f"KL {values['kl_nats']:.3g} nats a token, {values['kl_share']:.2f} of the control bias_only's: "
            "no better than the mean cache"
        )
    return found


def judge(mapper: str, measured: Measures, evidence: Evidence, rules: Rules) -> Judgement:
    """One mapper, by its own diagnostics where the preflight fitted it, else by those of a probe.

    What it does after prompts refuses it whatever the cases say, and lets it pass where they say nothing.

    Args:
        mapper: to be judged.
        measured: diagnostics by probe, the control not among them.
        evidence: cases of other pairs.
        rules: what is asked for.
    """
    own = measured.get(mapper)
    if own is not None and is_exact(own, rules):
        return Judgement(mapper, PASS, f"exact: KL {own['kl_nats']:.1e} nats a token", mapper)
    if own is not None and (found := rejections(own)):
        return Judgement(mapper, FAIL, "; ".join(found), mapper)
    prompted = None if own is None else by_prompts(own, rules)
    if prompted is not None and prompted.high < rules.min_retention:
        return _decide(mapper, PROMPTS, prompted, rules)
    by_cases = _by_cases(mapper, measured, evidence, rules)
    if by_cases.decision == UNKNOWN and prompted is not None and prompted.low >= rules.min_retention:
        return _decide(mapper, PROMPTS, prompted, rules)
    return by_cases


def by_prompts(values: Mapping[str, float], rules: Rules) -> Predicted | None:
    """Retention as prompts without answers tell it: the share on which the target's next token stays first.

    `ĝ` of n prompts, with the bounds of Wilson, each of the confidence asked for. No table is needed, and no
    family: what is measured is the traffic that is meant. None where there were no prompts.

    Args:
        values: of `measure`, and `prompts_n`, the number of prompts.
        rules: what is asked for.
    """
    n, agreed = values.get("prompts_n", 0), values.get("prompts_top1_agreement", math.nan)
    if not n or not math.isfinite(agreed):
        return None
    z = NormalDist().inv_cdf(rules.confidence)
    middle = (agreed + z * z / (2 * n)) / (1 + z * z / n)
    room = z / (1 + z * z / n) * math.sqrt(agreed * (1 - agreed) / n + z * z / (4 * n * n))
    return Predicted(agreed, max(0.0, middle - room), min(1.0, middle + room), int(n), 0)


def _by_cases(mapper: str, measured: Measures, evidence: Evidence, rules: Rules) -> Judgement:
    """By what the cases of other pairs retained."""
    own = measured.get(mapper)
    if own is None and measured and all(rejections(values) for values in measured.values()):
        return Judgement(mapper, FAIL, f"refused with {', '.join(measured)}: what they read says too little")
    probe = probe_for(mapper, measured, evidence.probes)
    n_pairs = 0 if probe is None else int(usable(evidence.of(mapper), probe)["pair"].nunique())
    if probe is None or n_pairs < rules.min_pairs:
        return Judgement(mapper, UNKNOWN, f"cases of {n_pairs} pairs, {rules.min_pairs} are needed", probe)
    reference = evidence.reference(mapper, probe)
    predicted = reference.predict(measured[probe], confidence=rules.confidence, reach=rules.reach)
    return _decide(mapper, probe, predicted, rules)


def _decide(mapper: str, probe: str, found: Predicted, rules: Rules) -> Judgement:
    source = f"{found.n_cases} prompts" if probe == PROMPTS else probe
    said = f"predicted {found.value:.2f} [{found.low:.2f}, {found.high:.2f}] from {source}"
    if found.below and found.high < rules.min_retention:
        return Judgement(
            mapper, FAIL, f"{said}: worse than every case ({'; '.join(found.below)})", probe, found
        )
    if found.below or found.above:
        outside = "; ".join((*found.below, *found.above))
        return Judgement(mapper, UNKNOWN, f"far from every case: {outside}", probe, found)
    passes = found.low >= rules.min_retention
    return Judgement(mapper, PASS if passes else FAIL, said, probe, found)


def candidates(measured: Measures, evidence: Evidence) -> list[str]:
    """Mappers to be judged, the cheapest first: those fitted, and those that the cases know."""
    names = dict.fromkeys([*measured, *evidence.mappers])
    order = {name: number for number, name in enumerate(CHEAPEST_FIRST)}
    return sorted(names, key=lambda name: order.get(name, len(order)))


def overall(judgements: Sequence[Judgement]) -> tuple[str, Judgement | None]:
    """The verdict of a pair, and the cheapest mapper that passes.

    `go`: a map that is no network passes. `try_mlp`: none does, but a network. `no_go`: all fail.
    `not_enough_evidence`: none passes, and of some it cannot be told.
    """
    passing = [found for found in judgements if found.decision == PASS]
    cheap = [found for found in passing if found.mapper not in NETWORKS]
    if cheap:
        return "go", cheap[0]
    if passing:
        return "try_mlp", passing[0]
    if any(found.decision == UNKNOWN for found in judgements):
        return "not_enough_evidence", None
    return "no_go", None
