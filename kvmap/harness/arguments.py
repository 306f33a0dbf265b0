"""From lm-eval's model arguments to a pool: a mapper's folder knows its models and how it was fitted."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from kvmap.errors import KvmapError, UnknownName
from kvmap.evaluation.arms import ARMS, MAPPERLESS
from kvmap.evaluation.conditions import spec_conditions
from kvmap.files import read_json
from kvmap.fit.features import geometry_shape
from kvmap.harness.pool import Pool
from kvmap.mappers import Mapper, RawMapper, check_identities, load_mapper
from kvmap.models.pair import ModelPair, ModelSpec
from kvmap.transfer import TransferOptions

FITTED_CONTROLS = ("bias_only", "random")
SHARED = ("dtype", "device", "device_map", "attn_implementation")
"""Arguments that both models share."""

OF_ONE = ("revision", "gguf_file", "dtype", "device", "device_map")
"""Arguments that one model has of its own, as `source_revision` or `target_dtype`."""

OPTIONS = tuple(field.name for field in fields(TransferOptions))


def pool_from_arguments(
    arm: str,
    *,
    mapper: str | None = None,
    source: str | None = None,
    target: str | None = None,
    batch_size: int = 1,
    max_tokens: int | None = None,
    sequential: bool = False,
    **arguments: Any,
) -> Pool:
    """The pool of one arm, from what `--model_args` says.

    Args:
        arm: one of `kvmap.evaluation.arms.ARMS`.
        mapper: folder of a saved mapper, or of a run that fitted one. It names both models, the RoPE strategy
            and the native head; what is given besides goes before.
        source: hub id, local folder or `zoo:<name>`; None: as the mapper's folder says.
        target: likewise. Both are needed for every arm: they decide together where contexts are cut.
        batch_size: contexts at a time.
        max_tokens: a limit below what both models take.
        sequential: one model in memory at a time.
        arguments: transfer options (`hold_back`, `native_head`, `rope`, ...), `dtype`, `device`, `device_map`
            and `attn_implementation` of both models, and of each `source_revision`, `source_gguf_file`,
            `source_dtype`, `source_device`, `source_device_map`, and as many for the target.

    Raises:
        UnknownName: an arm or argument that does not exist.
        KvmapError: what is missing, or a mapper of other models.
    """
    if arm not in ARMS:
        raise UnknownName("arm", arm, ARMS)
    _check_known(arguments)
    folder = None if mapper is None else mapper_folder(mapper)
    loaded, manifest = (None, dict[str, Any]()) if folder is None else load_mapper(folder)
    specs = {
        side: _spec(side, given, manifest, arguments)
        for side, given in (("source", source), ("target", target))
    }
    pair = ModelPair(specs["source"], specs["target"])
    pair.check()
    if loaded is not None:
        check_identities(manifest, pair.source_identity, pair.target_identity)
    return Pool(
        pair,
        {arm: _mapper_of(arm, loaded, pair)},
        _options(manifest, arguments),
        batch_size=batch_size,
        max_tokens=max_tokens,
        sequential=sequential,
        model_conditions={
            "source": spec_conditions(specs["source"], pair.tokenizer),
            "target": spec_conditions(specs["target"], pair.tokenizer),
        },
    )


def mapper_folder(path: str) -> Path:
    """The folder of a saved mapper: the one given, or that of the mapper a run's folder names.

    Raises:
        KvmapError: a run that made no mapper, or one whose mapper is gone.
    """
    folder = Path(path).expanduser()
    record = folder / "run.json"
    if not record.is_file():
        return folder
    run = read_json(record)
    key = run.get("facts", {}).get("artifacts", {}).get("mapper")
    if key is None:
        raise KvmapError(f"mapper={path}: this run fitted no mapper; name a run whose stages include fit")
    found = Path(run["config"]["outputs"]) / "artifacts" / "mapper" / str(key)
    if not found.is_dir():
        raise KvmapError(f"mapper={path}: the mapper of this run, {found}, is gone; run its stage fit again")
    return found


def whole_number(name: str, value: Any, least: int = 1) -> int:
    """A whole number of at least `least`, from what a command line gave.

    Raises:
        KvmapError: anything else, such as lm-eval's `batch_size=auto`.
    """
    try:
        number = int(value)
    except (TypeError, ValueError):
        number = least - 1
    if number < least:
        raise KvmapError(f"{name}={value!r}: expected a whole number of at least {least}")
    return number


def usable_device(device: str | None) -> str:
    """Where the models go; None: a GPU if there is one.

    lm-eval's command names `cuda:0` where nobody named anything, and its own models then take what there is.
    """
    named_gpu = device is not None and device.startswith("cuda")
    return "auto" if device is None or (named_gpu and not torch.cuda.is_available()) else device


def _check_known(arguments: dict[str, Any]) -> None:
    own = [f"{side}_{name}" for side in ("source", "target") for name in OF_ONE]
    known = {"mapper", "source", "target", "arm", "answers", "max_length", "rolling_context", "sequential"}
    known |= {*OPTIONS, *SHARED, *own}
    for name in arguments:
        if name not in known:
            raise UnknownName("model argument", name, known)


def _spec(side: str, given: str | None, manifest: dict[str, Any], arguments: dict[str, Any]) -> ModelSpec:
    """Where a model is: as given, else as the mapper's manifest says; in the dtype of the fit unless told."""
    of_fit = manifest.get(side) or {}
    if given is None and not of_fit.get("name"):
        raise KvmapError(
            f"{side} is not named: give {side}=<hub id, folder or zoo:name>, or mapper=<folder of a saved "
            "mapper>, which knows its models. Both models are needed for every arm: they decide together "
            "where contexts are cut"
        )
    own = {name: arguments[key] for name in OF_ONE if (key := f"{side}_{name}") in arguments}
    shared = {name: arguments[name] for name in SHARED if name in arguments}
    dtype = {"dtype": of_fit["dtype"]} if of_fit.get("dtype") else {}
    base = _named(of_fit["name"]) if given is None else {"id": given}
    return ModelSpec(**base | dtype | shared | own)


def _named(name: str) -> dict[str, Any]:
    """Inverse of `ModelSpec.name`: id, revision after `@`, GGUF file after the last `:`."""
    rest, colon, gguf = name.rpartition(":")
    if not (colon and gguf.endswith(".gguf")):
        rest, gguf = name, ""
    model, _, revision = rest.partition("@")
    return {"id": model, "revision": revision or None, "gguf_file": gguf or None}


def _options(manifest: dict[str, Any], arguments: dict[str, Any]) -> TransferOptions:
    """As given, else as the mapper was fitted, else the defaults."""
    fitted = {"rope": manifest.get("rope"), "native_head": manifest.get("native_head")}
    chosen = {name: value for name, value in fitted.items() if value is not None}
    return TransferOptions(**chosen | {name: arguments[name] for name in OPTIONS if name in arguments})


def _mapper_of(arm: str, loaded: Mapper | None, pair: ModelPair) -> Mapper | None:
    """The mapper that an arm uses; None where it uses none.

    Raises:
        KvmapError: an arm whose mapper is not given, or another one.
    """
    if arm in MAPPERLESS:
        return None
    if arm == "raw":
        native_layers = 0 if loaded is None else loaded.native_layers
        shapes = (geometry_shape(pair.source_geometry), geometry_shape(pair.target_geometry))
        return RawMapper(*shapes, native_layers)
    if loaded is None:
        raise KvmapError(f"arm={arm}: mapper is not named; give mapper=<folder of a mapper or of a run>")
    if arm in FITTED_CONTROLS and loaded.kind != arm:
        raise KvmapError(
            f"arm={arm}: the mapper is of kind {loaded.kind!r}; this control is fitted from the calibration, "
            f"which a mapper's folder does not hold. Make one (python -m kvmap.run mapper={arm} "
            "stages=[calibrate,fit]) and name its folder, or let stages=[evaluate] run all arms"
        )
    return loaded
