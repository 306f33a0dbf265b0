"""Content-keyed store of what is costly to make: moments, mappers, captured data.

An artifact is the folder `<root>/<kind>/<key>/`. The key is the sha256 of exactly what determines the
content, so whoever wants the same thing finds it, and a change of any setting makes another. A folder comes
into being whole (built beside, checksummed, fsynced, renamed under a lock) or not at all, and is checked
against its checksums before it is used: half-written or altered ones are never used.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import math
import os
import re
import secrets
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvmap.files import (
    ArtifactCorrupt,
    ArtifactMissing,
    StorageError,
    fsync,
    load_metadata,
    load_tensors,
    read_json,
    save_tensors,
    sha256_file,
    storage_errors,
    write_json,
    write_text,
)
from kvmap.locks import BuildLock, machine, process_lives

__all__ = [
    "Artifact",
    "ArtifactCorrupt",
    "ArtifactMissing",
    "ArtifactStore",
    "StorageError",
    "content_key",
    "load_metadata",
    "load_tensors",
    "read_json",
    "save_tensors",
    "write_json",
    "write_text",
]

SCHEMA_VERSION = 1
MANIFEST = "artifact.json"  # not manifest.json, which a saved mapper has of its own

_logger = logging.getLogger(__name__)
_SAFE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


@dataclass(frozen=True)
class Artifact:
    """A checked artifact.

    Attributes:
        path: Its folder; treat as read-only.
        manifest: schema, kind, key, spec, kvmap version, and size and sha256 of every file.
        built: True when this very call made it, False when it was found.
    """

    path: Path
    manifest: dict[str, Any]
    built: bool


def content_key(kind: str, spec: Mapping[str, Any]) -> str:
    """The sha256, in hex, of the canonical JSON of schema version, kind and spec.

    It depends on nothing else: not on the order of the keys, the process or PYTHONHASHSEED.

    Args:
        kind: What sort of thing, a plain name such as `moments`.
        spec: Exactly what determines the content: None, bools, integers, finite floats, strings, lists,
            tuples and dicts with string keys. Tuples count as lists.

    Raises:
        TypeError: For any other value, naming where in the spec it stands.
        ValueError: For a NaN or an infinity, or a kind that is no plain name.
    """
    _check_name("artifact kind", kind)
    content = {"schema": SCHEMA_VERSION, "kind": kind, "spec": _plain(spec, "spec")}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _check_name(what: str, name: str) -> None:
    if not _SAFE_NAME.fullmatch(name):
        raise ValueError(f"{what} {name!r} is no plain name: letters, digits, '_', '-' and '.' are allowed")


def _plain(value: Any, where: str) -> Any:
    """`value` in JSON's own types; anything whose text could differ between processes is refused."""
    if value is None or isinstance(value, bool | str):
        return value
    if type(value) in (int, float):  # exactly: numpy's float64 is a float by inheritance, its kin are not
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{where} is {value}: an artifact's spec holds finite numbers only")
        return value
    if isinstance(value, list | tuple):
        return [_plain(item, f"{where}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise TypeError(f"{where} has the key {key!r}: an artifact's spec has string keys only")
        return {key: _plain(item, f"{where}.{key}") for key, item in value.items()}
    raise TypeError(
        f"{where} is a {type(value).__name__}: an artifact's spec holds None, bool, int, float, str, list "
        "and dict only; turn it into one of them"
    )


class ArtifactStore:
    """The artifacts under one root, shared by any number of processes and machines.

    Args:
        root: Folder of the store, made when first written to.
        stale_seconds: A builder that has given no sign of life for so long is taken for dead.
    """

    def __init__(self, root: Path, *, stale_seconds: float = 120.0) -> None:
        self.root = Path(root)
        self.stale_seconds = stale_seconds
        self._checked: dict[Path, tuple[Any, ...]] = {}

    def path(self, kind: str, spec: Mapping[str, Any]) -> Path:
        """Where the artifact lies or would lie."""
        return self.root / kind / content_key(kind, spec)

    def load(self, kind: str, spec: Mapping[str, Any]) -> Artifact:
        """The artifact, checked against its checksums (once per process, while its files stay untouched).

        Raises:
            ArtifactMissing: There is none.
            ArtifactCorrupt: A file is missing, truncated, altered or foreign; the message names it.
        """
        path = self.path(kind, spec)
        if not path.is_dir():
            raise ArtifactMissing(f"no artifact {path}: run the stage that makes {kind!r} first")
        manifest = _read_manifest(path, kind, spec)
        signature = _signature(path)
        if self._checked.get(path) != signature:
            _check_files(path, manifest["files"])
            self._checked[path] = signature
        return Artifact(path, manifest, built=False)

    def get_or_build(self, kind: str, spec: Mapping[str, Any], build: Callable[[Path], None]) -> Artifact:
        """The artifact, made by `build` where there is none that is sound.

        `build` is given an empty folder and fills it. Of several processes that want one artifact, one builds
        and the others wait. A corrupt artifact is renamed to `<key>.corrupt-<n>`, with a warning, and built
        again. If `build` raises or is interrupted, nothing is left behind.

        Raises:
            StorageError: The disk is full or the root cannot be written to.
        """
        path = self.path(kind, spec)
        while True:
            found, fault = self._look(kind, spec, path)
            if found:
                return found
            with storage_errors(path):
                path.parent.mkdir(parents=True, exist_ok=True)
                lock = BuildLock(path.with_name(path.name + ".lock"), self.stale_seconds)
                if not lock.acquire(unless=None if fault else path.exists):
                    continue
            with lock:
                found, fault = self._look(kind, spec, path)
                if found:
                    return found
                with storage_errors(path):
                    if fault:
                        _set_aside(path, fault)
                    manifest = _build(path, kind, spec, build)
                if manifest is None:
                    continue
                self._checked[path] = _signature(path)
                return Artifact(path, manifest, built=True)

    def _look(
        self, kind: str, spec: Mapping[str, Any], path: Path
    ) -> tuple[Artifact | None, ArtifactCorrupt | None]:
        try:
            return self.load(kind, spec), None
        except ArtifactMissing:
            return None, None
        except ArtifactCorrupt as fault:
            return None, fault


def _build(
    path: Path, kind: str, spec: Mapping[str, Any], build: Callable[[Path], None]
) -> dict[str, Any] | None:
    """Makes the artifact and gives its manifest; None where another had made it meanwhile."""
    _sweep_leftovers(path)
    temporary = path.with_name(f"{path.name}.tmp-{machine()}-{os.getpid()}-{secrets.token_hex(4)}")
    temporary.mkdir()
    try:
        build(temporary)
        manifest = {
            "schema": SCHEMA_VERSION,
            "kind": kind,
            "key": path.name,
            "spec": _plain(spec, "spec"),
            "kvmap_version": _kvmap_version(),
            "files": _checksums(temporary),
        }
        write_json(temporary / MANIFEST, manifest)
        for folder in [temporary, *(entry for entry in temporary.rglob("*") if entry.is_dir())]:
            fsync(folder)
        try:
            os.rename(temporary, path)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                return None  # we were taken for dead and replaced; the other's content is as good
            raise
        fsync(path.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return manifest


def _sweep_leftovers(path: Path) -> None:
    """Removes what builders that were killed on this machine left beside `path`."""
    for folder in path.parent.glob(f"{path.name}.tmp-{machine()}-*"):
        pid = folder.name.split("-")[-2]
        if pid.isdigit() and not process_lives(int(pid)):
            shutil.rmtree(folder, ignore_errors=True)


def _set_aside(path: Path, fault: ArtifactCorrupt) -> None:
    number = 1
    while (aside := path.with_name(f"{path.name}.corrupt-{number}")).exists():
        number += 1
    os.rename(path, aside)
    _logger.warning("%s; set aside as %s and built again", fault, aside.name)


def _files(folder: Path) -> list[Path]:
    return sorted(entry for entry in folder.rglob("*") if not entry.is_dir() and entry != folder / MANIFEST)


def _checksums(folder: Path) -> dict[str, dict[str, Any]]:
    table = {}
    for file in _files(folder):
        fsync(file)
        table[file.relative_to(folder).as_posix()] = {
            "bytes": file.stat().st_size,
            "sha256": sha256_file(file),
        }
    return table


def _read_manifest(path: Path, kind: str, spec: Mapping[str, Any]) -> dict[str, Any]:
    file = path / MANIFEST
    manifest = read_json(file) if file.is_file() else None
    if manifest is None:
        raise ArtifactCorrupt(f"artifact {path} has no {MANIFEST}")
    expected = {"schema": SCHEMA_VERSION, "kind": kind, "key": path.name, "spec": _plain(spec, "spec")}
    for name, value in expected.items():
        if not isinstance(manifest, dict) or manifest.get(name) != value:
            raise ArtifactCorrupt(f"{file} does not describe the artifact it lies in: {name!r} differs")
    if not isinstance(manifest.get("files"), dict):
        raise ArtifactCorrupt(f"{file} lists no files")
    return manifest


def _check_files(path: Path, expected: Mapping[str, Mapping[str, Any]]) -> None:
    # Names beginning with a dot are the file system's own (.nfs*, .DS_Store).
    present = {file.relative_to(path).as_posix() for file in _files(path) if not file.name.startswith(".")}
    listed = {name for name in expected if not Path(name).name.startswith(".")}
    if foreign := sorted(present - listed):
        raise ArtifactCorrupt(f"artifact {path} holds {foreign[0]}, which its manifest does not list")
    for name, facts in expected.items():
        file = path / name
        if not file.is_file():
            raise ArtifactCorrupt(f"artifact file {file} is missing")
        if file.stat().st_size != facts["bytes"]:
            raise ArtifactCorrupt(
                f"artifact file {file} has {file.stat().st_size} bytes instead of {facts['bytes']}"
            )
        if sha256_file(file) != facts["sha256"]:
            raise ArtifactCorrupt(f"artifact file {file} is altered: its sha256 is not the manifest's")


def _signature(path: Path) -> tuple[Any, ...]:
    """Changes whenever a file of the artifact is written to, so that a check is repeated then."""
    states = ((file, file.stat()) for file in [*_files(path), path / MANIFEST] if file.exists())
    return tuple((str(file), state.st_ino, state.st_size, state.st_mtime_ns) for file, state in states)


def _kvmap_version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("kvmap")
    except PackageNotFoundError:
        return "uninstalled"
