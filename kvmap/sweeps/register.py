"""A study's register: where the run of each identity lies, and the lock that is held while it runs."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

from kvmap.files import read_json, storage_errors, write_json
from kvmap.locks import BuildLock

FOLDER = ".jobs"
STALE_SECONDS = 120.0


class Register:
    """`<study>/.jobs/<identity>.json` and `<identity>.lock`.

    An entry is never taken back; a directory that was deleted counts as not there.

    Args:
        study: The study's folder.
        stale_seconds: A holder of another machine that gave no sign of life for so long is taken for dead.
    """

    def __init__(self, study: Path, stale_seconds: float = STALE_SECONDS) -> None:
        self.study = Path(study)
        self.folder = self.study / FOLDER
        self.stale_seconds = stale_seconds

    def identities(self) -> list[str]:
        """All that are registered."""
        return sorted(file.stem for file in self.folder.glob("*.json") if not file.name.startswith("."))

    def directory(self, identity: str) -> Path | None:
        """The directory that is to hold, or holds, the run of this identity; None where there is none.

        Raises:
            ArtifactCorrupt: The entry is no sound JSON.
        """
        file = self.folder / f"{identity}.json"
        if not file.is_file():
            return None
        directory = self.study / read_json(file)["directory"]
        return directory if directory.is_dir() else None

    def record(self, identity: str, directory: Path) -> None:
        """Says that the run of this identity is in this directory. Kept relative where it is in the study.

        Raises:
            StorageError: The study's folder cannot be written to.
        """
        place, study = Path(directory).resolve(), self.study.resolve()
        relative = place.relative_to(study) if place.is_relative_to(study) else place
        write_json(self.folder / f"{identity}.json", {"identity": identity, "directory": relative.as_posix()})

    def lock(self, identity: str) -> BuildLock:
        """The lock of this identity.

        Raises:
            StorageError: The study's folder cannot be written to.
        """
        with storage_errors(self.folder / "lock"):
            self.folder.mkdir(parents=True, exist_ok=True)
        return BuildLock(self.lock_path(identity), self.stale_seconds)

    def lock_path(self, identity: str) -> Path:
        """Where its file lies while somebody holds it."""
        return self.folder / f"{identity}.lock"

    def seconds_since_beat(self, identity: str) -> float | None:
        """How old the holder's last heartbeat is by the file system's clock; None where nobody holds it."""
        with suppress(FileNotFoundError):
            beat = self.lock_path(identity).stat().st_mtime
            return max(0.0, self._now() - beat)
        return None

    def _now(self) -> float:
        """The time as the file system has it, which need not be this machine's."""
        probe = self.folder / f".now.{os.getpid()}"
        try:
            probe.touch()
            return probe.stat().st_mtime
        except OSError:
            return time.time()
        finally:
            with suppress(OSError):
                probe.unlink()
