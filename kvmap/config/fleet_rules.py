"""What a fleet can be made of, and which settings it has no use for."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from typing import Any

from kvmap.config.judging import unknown_name
from kvmap.config.schema import DTYPES, Config, GeometryFacts, ModelConfig

FLEET_SIZES = (2, 8)
_FIELDS = tuple(field.name for field in fields(ModelConfig))
_KINDS = ("linear", "mlp", "bias_only", "random")


def fleet_models(cfg: Config) -> list[ModelConfig]:
    """The models of `fleet`, as settings.

    An entry is an id, or a mapping of what a model of a pair has. What it does not say is that of
    `pair.source`, but for what belongs to one model alone: revision, GGUF file and geometry.
    """
    base = replace(cfg.pair.source, id="???", revision=None, gguf_file=None, geometry=GeometryFacts())
    return [replace(base, **_settings(entry)) for entry in cfg.fleet]


def fleet_mistakes(cfg: Config) -> Iterator[str]:
    """Mistakes of `fleet`, and of settings beside a stage `fleet` that it cannot serve."""
    yield from _entry_mistakes(cfg)
    if "fleet" not in cfg.stages:
        return
    low, high = FLEET_SIZES
    if not low <= len(cfg.fleet) <= high:
        yield (
            f"fleet={list(cfg.fleet)}: {len(cfg.fleet)} models; stage fleet takes {low} to {high}. Name "
            "them: fleet=[zoo:tiny-small,zoo:tiny-medium,zoo:tiny-large]"
        )
    yield from _settings_mistakes(cfg)
    own = cfg.transfer.native_head + cfg.transfer.hold_back
    if cfg.calibration.sequence_length // 2 < own + 2:
        yield (
            f"calibration.sequence_length={cfg.calibration.sequence_length}: the fleet hands over half of a "
            f"held-out sequence, of which transfer.native_head + transfer.hold_back = {own} leave less than "
            f"2 tokens to map; expected at least {2 * (own + 2)}"
        )


def _settings(entry: Any) -> dict[str, Any]:
    return {"id": entry} if isinstance(entry, str) else dict(entry)


def _entry_mistakes(cfg: Config) -> Iterator[str]:
    seen: dict[str, int] = {}
    for number, entry in enumerate(cfg.fleet):
        key = f"fleet[{number}]"
        if not isinstance(entry, str | Mapping) or not _settings(entry).get("id"):
            yield f"{key}={entry!r}: expected a model's id, or a mapping with at least id"
            continue
        settings = _settings(entry)
        for name in settings:
            if name not in _FIELDS:
                near = difflib.get_close_matches(str(name), _FIELDS, n=1)
                hint = f" (did you mean {near[0]!r}?)" if near else ""
                yield f"{key}.{name}: no setting of a model; expected {', '.join(_FIELDS)}{hint}"
        if settings.get("dtype", "auto") not in DTYPES:
            yield unknown_name(f"{key}.dtype", settings["dtype"], DTYPES)
        same = repr(sorted((name, str(value)) for name, value in settings.items()))
        if same in seen:
            yield f"{key}={entry!r}: stands at fleet[{seen[same]}] too; name each model once"
        seen[same] = number


def _settings_mistakes(cfg: Config) -> Iterator[str]:
    mapper, needs = cfg.mapper, "each model is read once, alone, and no model runs in the middle of a relay"
    if mapper.kind not in _KINDS:
        yield unknown_name("mapper.kind (of a fleet)", mapper.kind, _KINDS)
    refused: dict[str, tuple[Any, Any]] = {
        "mapper.native_layers": (mapper.native_layers, 0),
        "mapper.row_weights": (mapper.row_weights, "none"),
        "mapper.compression.method": (mapper.compression.method, "none"),
        "calibration.outliers.policy": (cfg.calibration.outliers.policy, "keep"),
        "pair.alignment": (cfg.pair.alignment, "refuse"),
    }
    for key, (value, wanted) in refused.items():
        if value != wanted:
            yield f"{key}={value} with stage fleet: {needs}; expected {key}={wanted}"
    if cfg.rope.strategy == "no_rerotate":
        yield (
            "rope.strategy=no_rerotate with stage fleet: it leaves mapped keys unrotated, so they cannot be "
            "held against the target's own; expected strip or coupled"
        )
