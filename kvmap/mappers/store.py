"""Mappers on disk: safetensors and a manifest, written whole or not at all, checked when read."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file

from kvmap import __version__
from kvmap.files import save_tensors, sha256_file, write_json
from kvmap.mappers.base import (
    TENSORS_NAME,
    FittedFor,
    Mapper,
    MapperFileError,
    MapperMismatch,
    get_mapper,
)
from kvmap.mappers.verdict import VERDICT_NAME, read_verdict
from kvmap.models.identity import ModelIdentity

FORMAT = "kvmap-mapper"
SCHEMA_VERSION = 1
MANIFEST_NAME = "manifest.json"
_OWN_KEYS = ("format", "schema_version", "kind", "settings", "tensors", "sha256", "kvmap_version", "checksum")


def save_mapper(mapper: Mapper, folder: Path, manifest: Mapping[str, Any]) -> None:
    """Write `mapper.safetensors` and `manifest.json` into a folder.

    Each file is written whole or not at all; the manifest comes last and carries the checksum of the tensors
    and of itself, so that any half-written state is refused when read.

    Args:
        mapper: what to save.
        folder: made if it is not there; a mapper that lies in it is replaced, and its verdict removed.
        manifest: what the mapper belongs to, as JSON can hold it: `source` and `target` identities
            (`identity_record`) and the `rope` strategy, which `load_mapper` gives the mapper to know;
            calibration, selection rule, λ.

    Raises:
        MapperFileError: a manifest key that save_mapper writes itself, or one that JSON cannot hold.
    """
    taken = sorted(set(manifest) & set(_OWN_KEYS))
    if taken:
        raise MapperFileError(f"manifest keys {taken} are written by save_mapper itself: rename them")
    folder = Path(folder)
    tensors = mapper.tensors()
    record = {
        **manifest,
        "format": FORMAT,
        "schema_version": SCHEMA_VERSION,
        "kind": mapper.kind,
        "settings": mapper.settings(),
        "tensors": {name: [str(t.dtype), list(t.shape)] for name, t in tensors.items()},
        "kvmap_version": __version__,
    }
    try:
        json.dumps(record, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise MapperFileError(f"the manifest holds something that JSON cannot: {error}") from error
    (folder / VERDICT_NAME).unlink(missing_ok=True)
    save_tensors(folder / TENSORS_NAME, tensors)
    record["sha256"] = sha256_file(folder / TENSORS_NAME)
    record["checksum"] = _record_digest(record)
    write_json(folder / MANIFEST_NAME, record)


def load_mapper(folder: Path, device: str = "cpu") -> tuple[Mapper, dict[str, Any]]:
    """Read a mapper back, after checking that nothing in the folder was cut or changed.

    Returns:
        The mapper and its manifest, as given to `save_mapper` with kvmap's own keys added. Where the
        manifest names source and target, the mapper knows them (`Mapper.fitted_for`), and what a preflight
        found of it, where that is kept beside it (`Mapper.verdict`).

    Raises:
        MapperFileError: naming the file and what is wrong with it.
    """
    folder = Path(folder)
    record = _read_manifest(folder / MANIFEST_NAME)
    path = folder / TENSORS_NAME
    if not path.is_file():
        raise MapperFileError(f"{path} is missing: the mapper was not written to its end; fit it again")
    if sha256_file(path) != record["sha256"]:
        raise MapperFileError(
            f"{path} does not have the checksum its manifest names: it was cut or changed; fit it again"
        )
    try:
        tensors = load_file(path, device=device)
        mapper = get_mapper(record["kind"]).from_state(record["settings"], tensors)
        mapper.fitted_for = _fitted_for(record)
        mapper.verdict = read_verdict(folder, mapper_sha256=record["sha256"])
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise MapperFileError(f"{folder} does not hold a whole {record['kind']!r} mapper: {error}") from error
    return mapper, record


def identity_record(identity: ModelIdentity) -> dict[str, str]:
    """A model's identity as a manifest keeps it."""
    return asdict(identity)


def check_identities(manifest: Mapping[str, Any], source: ModelIdentity, target: ModelIdentity) -> None:
    """Refuse a mapper fitted for other models, however alike their shapes.

    Raises:
        MapperMismatch: naming each thing that differs, or a manifest that names no models.
    """
    fitted_for = _fitted_for(manifest)
    if fitted_for is None:
        role = "target" if isinstance(manifest.get("source"), Mapping) else "source"
        raise MapperMismatch(f"the mapper's manifest names no {role} model, so it cannot be trusted with any")
    found = fitted_for.mismatches(source, target)
    if found:
        raise MapperMismatch(
            "this mapper was fitted for other models: " + "; ".join(found) + ". Fit a mapper for this pair"
        )


def _fitted_for(manifest: Mapping[str, Any]) -> FittedFor | None:
    """What a manifest says the mapper belongs to; None where it names no two models."""
    source, target = manifest.get("source"), manifest.get("target")
    if not isinstance(source, Mapping) or not isinstance(target, Mapping):
        return None
    return FittedFor(ModelIdentity(**source), ModelIdentity(**target), manifest.get("rope"))


def _read_manifest(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise MapperFileError(f"{path} is missing: no mapper was written to its end there; fit it first")
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise MapperFileError(
            f"{path} is not JSON ({error}): it was cut or changed; fit the mapper again"
        ) from error
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise MapperFileError(f"{path} is not the manifest of a kvmap mapper (format {FORMAT!r} expected)")
    if record.get("schema_version") != SCHEMA_VERSION:
        raise MapperFileError(
            f"{path} has schema_version {record.get('schema_version')}; this kvmap reads "
            f"{SCHEMA_VERSION}: fit again"
        )
    if record.get("checksum") != _record_digest(record):
        raise MapperFileError(f"{path} was changed after it was written; fit the mapper again")
    return record


def _record_digest(record: Mapping[str, Any]) -> str:
    """Digest of a manifest without its own checksum, as it reads back from JSON."""
    content = {key: value for key, value in record.items() if key != "checksum"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
