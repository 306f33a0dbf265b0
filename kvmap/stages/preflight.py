"""Stage `preflight`: before a full calibration, what a small one says of the pair, and a verdict."""

from __future__ import annotations

import copy
import hashlib
import logging
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

from kvmap.config.schema import PREFLIGHT_MAPPERS, CalibrationConfig, MapperConfig
from kvmap.diagnostics.token_kinds import TokenKinds
from kvmap.files import link_or_copy, read_json, write_json
from kvmap.fit.ridge import TooFewRows
from kvmap.mappers import attach_verdict
from kvmap.mappers.store import MANIFEST_NAME, TENSORS_NAME
from kvmap.metrics import Metric
from kvmap.preflight.evidence import CONTROL, Evidence, read_evidence
from kvmap.preflight.measures import TEXT, check_identity, measure
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
from kvmap.stages.context import Context, plain

Row: TypeAlias = dict[str, Any]

MEASURED, RATES, FOLDER = "preflight", "preflight_rates", "preflight"
FILE = "measured.json"
VERSION = 1
LINEAR: Row = {
    "kind": "linear",
    "support": "head_local",
    "regressors": "own_kind",
    "native_layers": 0,
    "ridge_lambda": 0.01,
    "lambda_cross": None,
    "lambda_native": None,
    "penalty": "absolute",
    "row_weights": "none",
}
SETTINGS: dict[str, Row] = {
    "head_local": LINEAR,
    "native_features": LINEAR | {"native_layers": 1},
    "native_features_2": LINEAR | {"native_layers": 2},
    "linear": LINEAR | {"support": "full_head"},
    "banded": LINEAR | {"support": "banded", "ridge_lambda": "auto", "lambda_cross": "auto"},
    CONTROL: {"kind": "bias_only", "native_layers": 0},
}
"""What each mapper is in a preflight, whatever the run's own is: that of `conf/mapper/<name>.yaml`, since
cases are known by that name. `top_k`, `dtype` and the grid of `mapper.tuning` are the run's."""
ALONE = ("identity", "raw", "random", "bias_only")
"""Kinds that are judged by themselves where the run's own mapper is one: no other is fitted in its place."""

_logger = logging.getLogger(__name__)


def run(ctx: Context) -> None:
    """Fit, measure, judge: tables `preflight` (mappers judged), `preflight_measures`, `preflight_rates`.

    The verdict goes to run.json under `preflight`, and beside each mapper that was fitted, which is kept in
    the run's folder `preflight/<mapper>`.
    """
    contexts = contexts_of(ctx)
    if not ctx.cfg.calibration.sequential:
        _ = ctx.pair.source, ctx.pair.target  # loaded before the clock starts: any other stage would have to
    began = time.monotonic()
    measured, unmeasured = _measure(contexts)
    ctx.run.log({"preflight/cost/all/seconds": Metric(time.monotonic() - began)})
    rules = _rules(ctx)
    evidence = _evidence(ctx)
    broken = _identity_failures(contexts[CONTROL], rules)
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


def contexts_of(ctx: Context) -> dict[str, Context]:
    """By name, a context for each mapper that is fitted, all of one small calibration, and the control."""
    names = [ctx.cfg.mapper.kind] if ctx.cfg.mapper.kind in ALONE else _ordered(ctx.cfg.preflight.mappers)
    mappers = {name: _mapper(ctx, name) for name in (*names, CONTROL)}
    calibration = replace(
        ctx.cfg.calibration,
        n_sequences=min(ctx.cfg.preflight.n_sequences, ctx.cfg.calibration.n_sequences),
        native_layers=max(mapper.native_layers for mapper in mappers.values()),
        token_stride=1,
        keep_captures="auto",
        shards=1,
        worker=None,
    )
    found = {name: _context(ctx, mapper, calibration) for name, mapper in mappers.items()}
    widest = found[max(names, key=lambda name: mappers[name].support != "head_local")]
    # one table that serves every mapper is one pass over the text; what is selected serves one alone
    if widest.calibrated.plan.mode == "full":
        shared = replace(calibration, mode="full")
        found = {name: _context(ctx, mapper, shared) for name, mapper in mappers.items()}
    first = found[CONTROL]
    for other in found.values():
        other.tokens = first.tokens
    return found


def _ordered(names: list[str]) -> list[str]:
    """The cheapest first, whatever order they are named in."""
    return sorted(names, key=PREFLIGHT_MAPPERS.index)


def _mapper(ctx: Context, name: str) -> MapperConfig:
    own = ctx.cfg.mapper
    if own.kind == name and name in ALONE:
        return own
    return replace(own, **SETTINGS[name], compression=replace(own.compression, method="none"))


def _context(ctx: Context, mapper: MapperConfig, calibration: CalibrationConfig) -> Context:
    cfg = copy.copy(ctx.cfg)
    cfg.mapper, cfg.calibration = mapper, calibration
    made = Context(cfg, ctx.run)
    made.pair = ctx.pair
    return made


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


def _measure(contexts: dict[str, Context]) -> tuple[dict[str, Row], dict[str, str]]:
    """Diagnostics by mapper, the control's last; and why there are none of those that could not be fitted."""
    unmeasured: dict[str, str] = {}
    fitted: dict[str, Context] = {}
    for name, own in contexts.items():
        try:
            _ = own.mapper
            fitted[name] = own
        except TooFewRows as error:
            unmeasured[name] = f"raise preflight.n_sequences: {error}"
    measured = _measured(fitted)
    control = measured[CONTROL]["kl_nats"]
    for values in measured.values():
        values["kl_share"] = values["kl_nats"] / control if control > 0 else float("nan")
    return measured, unmeasured


def _measured(contexts: dict[str, Context]) -> dict[str, Row]:
    """Of each mapper; what an earlier run has measured of the same is found in the store."""
    first = contexts[CONTROL]
    specs = {name: _measured_spec(own) for name, own in contexts.items()}
    missing = [name for name, spec in specs.items() if not first.store.path(MEASURED, spec).is_dir()]

    def of(names: list[str]) -> dict[str, dict[str, float]]:
        rare = first.cfg.diagnostics.rare_share
        return measure(
            first.pair,
            {name: contexts[name].mapper for name in names},
            {name: contexts[name].moments for name in names},
            first.tokens.input_ids[first.calibrated.splits["held_out"]],
            TokenKinds(first.pair.tokenizer, first.tokens.input_ids, rare),
            first.options,
            batch_size=first.cfg.calibration.batch_size,
            sequential=first.cfg.calibration.sequential,
        )

    found = of(missing) if missing else {}
    kept: dict[str, Row] = {}
    for name, spec in specs.items():

        def build(folder: Path, name: str = name) -> None:
            # one that lay there and was damaged is measured anew
            values = found[name] if name in found else of([name])[name]
            write_json(folder / FILE, {key: str(value) for key, value in values.items()})

        artifact = first.store.get_or_build(MEASURED, spec, build)
        kept[name] = {key: float(value) for key, value in read_json(artifact.path / FILE).items()}
    return kept


def _measured_spec(own: Context) -> Row:
    from kvmap.stages.build import content_settings

    spec = {
        "version": VERSION,
        "rows": own.calibrated.rows_spec,
        "mapper": content_settings(own),
        "transfer": asdict(own.options),
        "rare_share": own.cfg.diagnostics.rare_share,
    }
    return dict(plain(spec))


def _identity_failures(own: Context, rules: Rules) -> list[str]:
    """Models that do not go on from their own cache as they would natively."""
    ids = own.tokens.input_ids[own.calibrated.splits["held_out"][:2]]
    found = []
    roles: tuple[Literal["source"], Literal["target"]] = ("source", "target")
    for role in roles:
        kl = check_identity(own.pair.source if role == "source" else own.pair.target, ids, own.options)
        if not kl <= rules.exact_kl_nats:
            found.append(
                f"the {role} does not go on from its own cache under rope={own.options.rope}: KL {kl:.2g} "
                f"nats, at most {rules.exact_kl_nats:.0e} is rounding"
            )
        if own.cfg.calibration.sequential:
            own.pair.release(role)
    return found


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
    spec = {"version": VERSION, "cases": cases, "rules": asdict(rules)}

    def build(folder: Path) -> None:
        write_json(folder / FILE, rates(left_out(evidence, rules), rules.min_retention).rows())

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
            f"preflight/{TEXT}/{name}/{diagnostic}": Metric(value)
            for name, values in measured.items()
            for diagnostic, value in values.items()
        }
    )


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
