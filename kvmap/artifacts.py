"""Content-keyed store of what is costly to make: moments, mappers, captured data.

An artifact is the folder `<root>/<kind>/<key>/`. The key is the sha256 of exactly what determines the
content, so whoever wants the same thing finds it, and a change of any setting makes another. A folder comes
into being whole (built beside, checksummed, fsynced, renamed under a lock) or not at all, and is checked
against its checksums before it is used: half-written or altered ones are never used.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
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
from kvmap.keys import SCHEMA_VERSION, content_key, plain_spec
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

LEFTOVER_SECONDS = 24 * 3600.0
MANIFEST = "artifact.json"  # not manifest.json, which a saved mapper has of its own

_logger = logging.getLogger(__name__)


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
        lock = self.lock(kind, spec)
        while True:
            found = self._look(kind, spec)
            if isinstance(found, Artifact):
                return found
            path = self.path(kind, spec)
            with storage_errors(path):
                path.parent.mkdir(parents=True, exist_ok=True)
                if not lock.acquire(unless=None if found else path.exists):
                    continue
            with lock:
                if artifact := self._build_locked(kind, spec, build):
                    return artifact

    def build_if_free(
        self,
        kind: str,
        spec: Mapping[str, Any],
        build: Callable[[Path], None],
        lock: BuildLock,
        unless: Callable[[], bool],
    ) -> bool:
        """Makes the artifact if there is no sound one and nobody else is making it; does not wait.

        Args:
            kind, spec, build: See `get_or_build`.
            lock: That of `lock(kind, spec)`, the same in every call: it watches whether a holder lives.
            unless: Nothing is made if this is true once the lock is had.

        Returns:
            Whether this call made it.

        Raises:
            StorageError: The disk is full or the root cannot be written to.
        """
        path = self.path(kind, spec)
        with storage_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            if not lock.try_acquire():
                return False
        with lock:
            artifact = None if unless() else self._build_locked(kind, spec, build)
        return artifact is not None and artifact.built

    def lock(self, kind: str, spec: Mapping[str, Any]) -> BuildLock:
        """The lock that whoever makes this artifact holds."""
        path = self.path(kind, spec)
        return BuildLock(path.with_name(path.name + ".lock"), self.stale_seconds)

    def discard(self, kind: str, spec: Mapping[str, Any]) -> None:
        """Removes an artifact that nobody needs any more, in one step for whoever looks for it."""
        path = self.path(kind, spec)
        aside = _temporary(path)
        with suppress(FileNotFoundError):
            os.rename(path, aside)
        shutil.rmtree(aside, ignore_errors=True)

    def _look(self, kind: str, spec: Mapping[str, Any]) -> Artifact | ArtifactCorrupt | None:
        try:
            return self.load(kind, spec)
        except ArtifactMissing:
            return None
        except ArtifactCorrupt as fault:
            return fault

    def _build_locked(
        self, kind: str, spec: Mapping[str, Any], build: Callable[[Path], None]
    ) -> Artifact | None:
        """The artifact, found or made by the holder of its lock; None where another was first to finish."""
        path = self.path(kind, spec)
        judged = path.stat().st_ino if path.is_dir() else None
        found = self._look(kind, spec)
        if isinstance(found, Artifact):
            return found
        with storage_errors(path):
            if found is not None:
                _set_aside(path, found, judged)
            manifest = _build(path, kind, spec, build)
        if manifest is None:
            return None
        self._checked[path] = _signature(path)
        return Artifact(path, manifest, built=True)


def _build(
    path: Path, kind: str, spec: Mapping[str, Any], build: Callable[[Path], None]
) -> dict[str, Any] | None:
    """Makes the artifact and gives its manifest; None where another had made it meanwhile."""
    _sweep_leftovers(path)
    temporary = _temporary(path)
    temporary.mkdir()
    try:
        build(temporary)
        manifest = {
            "schema": SCHEMA_VERSION,
            "kind": kind,
            "key": path.name,
            "spec": plain_spec(spec),
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


def _temporary(path: Path) -> Path:
    return path.with_name(f"{path.name}.tmp-{machine()}-{os.getpid()}-{secrets.token_hex(4)}")


def _sweep_leftovers(path: Path) -> None:
    """Removes what builders that were killed left beside `path`.

    Of this machine, where the process is gone; of another, where nothing was written for a day. Both times
    are the file system's own.
    """
    for folder in path.parent.glob(f"{path.name}.tmp-*"):
        place, _, rest = folder.name.removeprefix(f"{path.name}.tmp-").partition("-")
        pid = rest.partition("-")[0]
        gone = place == machine() and pid.isdigit() and not process_lives(int(pid))
        if gone or (place != machine() and _age(folder, path.parent) > LEFTOVER_SECONDS):
            shutil.rmtree(folder, ignore_errors=True)


def _age(folder: Path, beside: Path) -> float:
    """Seconds between the last write in a folder and the last change of the one that holds it."""
    with suppress(OSError):
        return beside.stat().st_mtime - max(entry.stat().st_mtime for entry in [folder, *folder.rglob("*")])
    return 0.0


def _set_aside(path: Path, fault: ArtifactCorrupt, judged: int | None) -> None:
    """Renames a corrupt artifact; `judged` is its inode, as it was when it was found to be corrupt."""
    number = 1
    while (aside := path.with_name(f"{path.name}.corrupt-{number}")).exists():
        number += 1
    os.rename(path, aside)
    if judged is not None and aside.stat().st_ino != judged:
        # Stopped since we judged, we lost the lock, and what lay here was another's sound one.
        with suppress(OSError):
            os.rename(aside, path)
        return
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
    expected = {"schema": SCHEMA_VERSION, "kind": kind, "key": path.name, "spec": plain_spec(spec)}
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
