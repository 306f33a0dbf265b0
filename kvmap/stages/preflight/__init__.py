"""Stage `preflight`: before a full calibration, what a small one says of the pair, and a verdict."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeAlias

from kvmap.files import link_or_copy, read_json, write_json
from kvmap.mappers import attach_verdict
from kvmap.mappers.store import MANIFEST_NAME, TENSORS_NAME
from kvmap.metrics import Metric
from kvmap.preflight.evidence import CONTROL, Evidence, read_evidence
from kvmap.preflight.measures import PROMPTS, TEXT
from kvmap.preflight.prediction import Measures
from kvmap.preflight.rates import left_out, rates
from kvmap.preflight.rules import (
    EXACT_KL,
    EXACT_KL_ROUNDED,
    FAIL,
    Judgement,
    Rules,
    candidates,
    judge,
    overall,
)
from kvmap.preflight.verdicts import interval_of, said, verdict_of
from kvmap.stages.context import Context
from kvmap.stages.preflight.contexts import ALONE, contexts_of
from kvmap.stages.preflight.measuring import identity_failures, measured_of

Row: TypeAlias = dict[str, Any]

RATES, FOLDER = "preflight_rates", "preflight"
FILE = "rates.json"
VERSION = 2


def run(ctx: Context) -> None:
    """Fit, measure, judge: tables `preflight` (mappers judged), `preflight_measures`, `preflight_rates`.

    The verdict goes to run.json under `preflight`, and beside each mapper that was fitted, which is kept in
    the run's folder `preflight/<mapper>`.
    """
    contexts = contexts_of(ctx)
    if not ctx.cfg.calibration.sequential:
        _ = ctx.pair.source, ctx.pair.target  # loaded before the clock starts: any other stage would have to
    began = time.monotonic()
    rules = _rules(ctx)
    measured, unmeasured = measured_of(contexts)
    broken = identity_failures(contexts[CONTROL], rules)
    ctx.run.log({"preflight/cost/all/seconds": Metric(time.monotonic() - began)})
    evidence = _evidence(ctx)
    judgements = _judge(ctx, measured, unmeasured, broken, evidence.without(_pair_name(ctx)), rules)
    verdict, named = overall(judgements)
    lines = said(verdict, named, judgements, rules, evidence)
    _record(ctx, verdict, named, judgements, measured, lines)
    ctx.run.table("preflight_rates", _rates(ctx, evidence, rules))
    _attach(ctx, contexts, measured, judgements, verdict, named, evidence, rules)


def _evidence(ctx: Context) -> Evidence:
    """The cases in use: the shipped ones and the run's own, of this family unless any is to count."""
    asked = ctx.cfg.preflight
    evidence = read_evidence([Path(path) for path in asked.evidence])
    return evidence if asked.family == "any" else evidence.of_family(ctx.pair.target_identity.tokenizer)


def _rules(ctx: Context) -> Rules:
    asked = ctx.cfg.preflight
    dtype = str(ctx.pair.target.model.dtype).removeprefix("torch.")
    return Rules(
        min_retention=asked.min_retention,
        confidence=asked.confidence,
        min_pairs=asked.min_pairs,
        reach=asked.reach,
        exact_kl_nats=EXACT_KL.get(dtype, EXACT_KL_ROUNDED),
    )


def _judge(
    ctx: Context,
    measured: dict[str, Row],
    unmeasured: dict[str, str],
    broken: list[str],
    evidence: Evidence,
    rules: Rules,
) -> list[Judgement]:
    own: Measures = {
        name: values for name, values in measured.items() if name != CONTROL or ctx.cfg.mapper.kind == CONTROL
    }
    names = list(own) if ctx.cfg.mapper.kind in ALONE else candidates(own, evidence)
    judgements = []
    for name in [*names, *(name for name in unmeasured if name not in names)]:
        if broken:
            judgements.append(Judgement(name, FAIL, "; ".join(broken)))
        elif name in unmeasured:
            judgements.append(Judgement(name, "unknown", unmeasured[name]))
        else:
            judgements.append(judge(name, own, evidence, rules))
    return judgements


def _rates(ctx: Context, evidence: Evidence, rules: Rules) -> list[Row]:
    """What the rule gets wrong on the cases; once for each table and rule."""
    cases = hashlib.sha256(evidence.table.to_csv(index=False).encode()).hexdigest()
    family = ctx.cfg.preflight.family
    spec = {"version": VERSION, "cases": cases, "rules": asdict(rules), "family": family}

    def build(folder: Path) -> None:
        write_json(folder / FILE, rates(left_out(evidence, rules, family), rules.min_retention).rows())

    return list(read_json(ctx.store.get_or_build(RATES, spec, build).path / FILE))


def _pair_name(ctx: Context) -> str:
    """As cases call it: a pair is never judged by cases of its own."""
    names = [ctx.models[role].id.rsplit("/", 1)[-1].removeprefix("zoo:") for role in ("source", "target")]
    return " → ".join(names)


def _record(
    ctx: Context,
    verdict: str,
    named: Judgement | None,
    judgements: list[Judgement],
    measured: dict[str, Row],
    lines: list[str],
) -> None:
    ctx.run.table("preflight", list(_judgement_rows(judgements)))
    ctx.run.table("preflight_measures", [{"mapper": name, **values} for name, values in measured.items()])
    ctx.run.note(
        preflight={
            "verdict": verdict,
            "mapper": None if named is None else named.mapper,
            "min_retention": ctx.cfg.preflight.min_retention,
            "lines": lines,
        }
    )
    ctx.run.log(
        {
            f"preflight/{_of_text(name, diagnostic)}": Metric(value)
            for name, values in measured.items()
            for diagnostic, value in values.items()
        }
    )


def _of_text(mapper: str, diagnostic: str) -> str:
    plain = diagnostic.removeprefix(f"{PROMPTS}_")
    return f"{TEXT if plain == diagnostic else PROMPTS}/{mapper}/{plain}"


def _judgement_rows(judgements: list[Judgement]) -> Iterator[Row]:
    for found in judgements:
        value, low, high = interval_of(found)
        yield {
            "mapper": found.mapper,
            "decision": found.decision,
            "predicted": value,
            "low": low,
            "high": high,
            "probe": found.probe,
            "n_cases": None if found.predicted is None else found.predicted.n_cases,
            "n_pairs": None if found.predicted is None else found.predicted.n_pairs,
            "reason": found.reason,
        }


def _attach(
    ctx: Context,
    contexts: dict[str, Context],
    measured: dict[str, Row],
    judgements: list[Judgement],
    verdict: str,
    named: Judgement | None,
    evidence: Evidence,
    rules: Rules,
) -> None:
    """Each mapper that was fitted, with its verdict, in a folder of the run; the store stays as it is."""
    for found in judgements:
        if found.mapper not in measured:
            continue
        folder = ctx.run.directory / FOLDER / found.mapper
        made = contexts[found.mapper].mapper_artifact.path
        folder.mkdir(parents=True, exist_ok=True)
        for name in (TENSORS_NAME, MANIFEST_NAME):
            (folder / name).unlink(missing_ok=True)
            link_or_copy(made / name, folder / name)
        values = measured[found.mapper]
        attach_verdict(folder, verdict_of(found, verdict, named, values, evidence, rules))
