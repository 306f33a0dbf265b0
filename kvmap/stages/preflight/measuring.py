"""What the maps of a preflight show on text, kept in the store; what its models make of their own caches."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, TypeAlias

from kvmap.diagnostics.token_kinds import TokenKinds
from kvmap.files import read_json, write_json
from kvmap.fit.ridge import TooFewRows
from kvmap.preflight.evidence import CONTROL
from kvmap.preflight.measures import check_identity, measure
from kvmap.preflight.rules import Rules
from kvmap.stages.context import Context, plain
from kvmap.stages.preflight.prompts import prompts_of, prompts_spec

Row: TypeAlias = dict[str, Any]

MEASURED = "preflight"
FILE = "measured.json"
VERSION = 2


def measured_of(contexts: dict[str, Context]) -> tuple[dict[str, Row], dict[str, str]]:
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
    control = dict(measured[CONTROL])
    for values in measured.values():
        for key in [name for name in values if name.endswith("kl_nats")]:
            share = f"{key.removesuffix('kl_nats')}kl_share"
            values[share] = values[key] / control[key] if control[key] > 0 else float("nan")
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
            prompts=prompts,
        )

    prompts = prompts_of(first)
    found = of(missing) if missing else {}
    kept: dict[str, Row] = {}
    for name, spec in specs.items():

        def build(folder: Path, name: str = name) -> None:
            # one that lay there and was damaged is measured anew
            values = found[name] if name in found else of([name])[name]
            write_json(folder / FILE, {key: str(value) for key, value in values.items()})

        artifact = first.store.get_or_build(MEASURED, spec, build)
        kept[name] = {key: float(value) for key, value in read_json(artifact.path / FILE).items()}
        if prompts:
            kept[name]["prompts_n"] = float(len(prompts))
    return kept


def _measured_spec(own: Context) -> Row:
    from kvmap.stages.build import content_settings

    spec = {
        "version": VERSION,
        "rows": own.calibrated.rows_spec,
        "mapper": content_settings(own),
        "transfer": asdict(own.options),
        "rare_share": own.cfg.diagnostics.rare_share,
        "prompts": prompts_spec(own),
    }
    return dict(plain(spec))


def identity_failures(own: Context, rules: Rules) -> list[str]:
    """Models that do not go on from their own cache as they would natively."""
    ids = own.tokens.input_ids[own.calibrated.splits["held_out"][:1]]
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
