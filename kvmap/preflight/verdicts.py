"""The verdicts that are kept beside mappers, and the canary that each is to be watched by."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from kvmap.mappers import VERDICTS, Canary, Verdict
from kvmap.preflight.evidence import Evidence
from kvmap.preflight.measures import CANARY_TOKENS
from kvmap.preflight.rules import FAIL, PASS, Judgement, Rules, is_exact

NO_CASES = (
    "no cases of this family (pairs with this tokenizer): give prompts without answers, which need none "
    "(preflight.prompts.paths), record cases and name them in preflight.evidence, or extrapolate from other "
    "families with preflight.family=any"
)

CANARY_MULTIPLE = 4.0
"""Of the KL measured, where the cases say nothing."""


def canary_of(values: Mapping[str, float], evidence: Evidence, rules: Rules) -> tuple[Canary, str] | None:
    """The canary of a mapper, and why its threshold is what it is; None where no KL was measured.

    The KL above which none of the cases kept `min_retention`, or, where that is larger, what the mapper
    itself reaches on one in a hundred runs of eight tokens: a mean over a corpus is no bound for eight.
    Without such cases, `CANARY_MULTIPLE` of the KL measured, or those runs.
    """
    kl, window = values["kl_nats"], values.get("kl_window_nats", math.nan)
    if not math.isfinite(kl):
        return None
    if is_exact(values, rules):
        bound = rules.exact_kl_nats
        return Canary(bound, CANARY_TOKENS), f"canary {bound:.3g} nats: rounding"
    known = evidence.largest_passing_kl(rules.min_retention)
    bound, why = known, f"above it no case kept {rules.min_retention:g}"
    if not math.isfinite(known):
        bound, why = CANARY_MULTIPLE * kl, f"{CANARY_MULTIPLE:g} times the KL measured, as no case says"
    if math.isfinite(window) and window > bound:
        bound, why = window, f"the 99th percentile of {CANARY_TOKENS} tokens measured, {why} ({bound:.3g})"
    return Canary(bound, CANARY_TOKENS), f"canary {bound:.3g} nats: {why}"


def verdict_of(
    judgement: Judgement,
    pair_verdict: str,
    named: Judgement | None,
    values: Mapping[str, float],
    evidence: Evidence,
    rules: Rules,
) -> Verdict:
    """What is kept beside one mapper.

    Args:
        judgement: of it.
        pair_verdict: of the pair as a whole.
        named: the cheapest mapper that passes, if any.
        values: its diagnostics.
        evidence: the cases.
        rules: what was asked for.
    """
    reasons = [judgement.reason]
    if judgement.decision == PASS:
        verdict = "go"
    elif judgement.decision == FAIL:
        verdict = "try_mlp" if pair_verdict == "try_mlp" else "no_go"
        if named is not None:
            reasons.append(f"the cheapest that passes: {named.mapper} ({named.reason})")
    else:
        verdict = "not_enough_evidence"
    canary = canary_of(values, evidence, rules)
    if canary is not None:
        reasons.append(canary[1])
    value, low, high = interval_of(judgement)
    predicted = judgement.predicted
    return Verdict(
        verdict=verdict,
        predicted_retention=value,
        low=low,
        high=high,
        min_retention=rules.min_retention,
        reasons=tuple(reasons),
        canary=None if canary is None else canary[0],
        n_cases=0 if predicted is None else predicted.n_cases,
        n_pairs=0 if predicted is None else predicted.n_pairs,
        measured=dict(values),
    )


def interval_of(judgement: Judgement) -> tuple[float | None, float | None, float | None]:
    """Predicted retention and its bounds; 1 of an exact map, None where nothing was predicted."""
    if judgement.predicted is not None:
        return judgement.predicted.value, judgement.predicted.low, judgement.predicted.high
    return (1.0, 1.0, 1.0) if judgement.decision == PASS else (None, None, None)


def said(
    verdict: str, named: Judgement | None, judgements: Sequence[Judgement], rules: Rules, evidence: Evidence
) -> list[str]:
    """The verdict of a pair in lines for people, the short answer first, and which pairs it rests on."""
    if named is not None:
        first = f"{named.mapper} is the cheapest that keeps {rules.min_retention:g} ({named.reason})"
    elif verdict == "no_go":
        first = f"no mapper is shown to keep {rules.min_retention:g} of the target's accuracy"
    else:
        first = "the cases cannot tell"
    pairs = evidence.pairs
    return [
        f"Preflight: {VERDICTS[verdict]}: {first}.",
        *(f"{found.mapper}: {found.decision}, {found.reason}" for found in judgements),
        f"{evidence.n_cases} cases of {len(pairs)} pairs: {'; '.join(pairs)}" if pairs else NO_CASES,
    ]
