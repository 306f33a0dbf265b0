"""What a sweep was submitted as, and the comparison that every job makes with it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kvmap import provenance
from kvmap.errors import KvmapError
from kvmap.files import read_json, write_json
from kvmap.locks import machine, process_start
from kvmap.sweeps.code import code_hash, loaded_files, source_files

FILE = "submission.json"
SCHEMA_VERSION = 1
NAMES_LISTED = 5


class CodeChanged(KvmapError):
    """Code or configuration is no longer what was submitted."""


@dataclass(frozen=True)
class Point:
    """One job of a sweep.

    Attributes:
        number: of the job.
        overrides: exactly what Hydra composes it from.
        identity: of what they compose to.
    """

    number: int
    overrides: tuple[str, ...]
    identity: str


@dataclass(frozen=True)
class Submission:
    """One submission; `record` is its file's content.

    Attributes:
        file: where it is written down, in the sweep's directory.
        record: everything that is known of it.
        points: its jobs.
    """

    file: Path
    record: Mapping[str, Any]
    points: tuple[Point, ...]

    @property
    def directory(self) -> Path:
        """The sweep's directory."""
        return self.file.parent


def write_submission(
    directory: Path,
    points: Sequence[Point],
    *,
    study: str,
    outputs: Path,
    hydra_overrides: Sequence[str],
    task_overrides: Sequence[str],
    files: Mapping[str, str] | None = None,
) -> Submission:
    """Writes `submission.json` into a sweep's directory; an earlier one there becomes `submission-<n>.json`.

    Args:
        directory: Of the sweep.
        points: Its jobs.
        study: Name of the study.
        outputs: The outputs folder.
        hydra_overrides: Those of Hydra's own settings.
        task_overrides: All others as they were given, the sweep's ranges among them.
        files: What `source_files` found; None asks it.
    """
    files = source_files() if files is None else files
    git, _ = provenance.git_state()
    record = {
        "schema": SCHEMA_VERSION,
        "submitted": datetime.now(UTC).isoformat(timespec="microseconds"),
        "study": study,
        "outputs": str(outputs),
        "argv": list(sys.argv),
        "cwd": os.getcwd(),
        "process": {"machine": machine(), "pid": os.getpid(), "start": process_start(os.getpid())},
        "code": {"hash": code_hash(files), "files": dict(files)},
        "git": git,
        "versions": provenance.package_versions(),
        "hydra_overrides": list(hydra_overrides),
        "task_overrides": list(task_overrides),
        "points": [asdict(point) for point in points],
    }
    file = Path(directory) / FILE
    if file.is_file():
        write_json(file.with_name(f"submission-{len(read_submissions(directory))}.json"), read_json(file))
    write_json(file, record)
    return Submission(file, record, tuple(points))


def read_submissions(directory: Path) -> list[Submission]:
    """Those of one sweep's directory, the newest first."""
    earlier = sorted(Path(directory).glob("submission-*.json"), key=lambda path: int(path.stem.split("-")[1]))
    files = [path for path in (Path(directory) / FILE, *reversed(earlier)) if path.is_file()]
    return [_read(file) for file in files]


def submissions_below(root: Path) -> list[Submission]:
    """Those of a sweep, or of all sweeps of a study, the newest first."""
    folders = [Path(root), *(path for path in Path(root).glob("*") if path.is_dir())]
    found = [submission for folder in folders for submission in read_submissions(folder)]
    return sorted(found, key=lambda submission: str(submission.record["submitted"]), reverse=True)


def _read(file: Path) -> Submission:
    record = read_json(file)
    points = (
        Point(point["number"], tuple(point["overrides"]), point["identity"]) for point in record["points"]
    )
    return Submission(file, record, tuple(points))


def check_submission(directory: Path, number: int, identity: str, *, allow_changed_code: bool) -> None:
    """Compares a job that starts with what was submitted; nothing where nothing is written down.

    In the process that submitted, Python files that are loaded are what was submitted, whatever lies on disk
    by now. Option files are judged by the identity they compose to, unless a sweeper made its points later.

    Args:
        directory: Of the sweep.
        number: Of the job.
        identity: Of the configuration that it was given now.
        allow_changed_code: `sweep.allow_changed_code`.

    Raises:
        CodeChanged: names what differs.
    """
    submissions = read_submissions(directory)
    if not submissions or allow_changed_code:
        return
    of_number = [(s, point) for s in submissions for point in s.points if point.number == number]
    known = [s for s, point in of_number if point.identity == identity]
    if of_number and not known:
        raise CodeChanged(
            f"job {number} of {directory}: its configuration is {identity} now, and was "
            f"{of_number[0][1].identity} when it was submitted: a file of conf/ has changed; {_REMEDY}"
        )
    submission = known[0] if known else submissions[0]
    if changed := _changed(submission, with_conf=not known):
        raise CodeChanged(
            f"job {number} of {directory}: {_listed(changed)} changed since it was submitted "
            f"({submission.record['submitted']}); {_REMEDY}"
        )


_REMEDY = "submit the sweep again (what is done is skipped), or set sweep.allow_changed_code=true"


def _changed(submission: Submission, *, with_conf: bool) -> list[str]:
    now, process = source_files(), submission.record["process"]
    own = (process["machine"], process["pid"]) == (machine(), os.getpid())
    at_hand = loaded_files() if own and process["start"] == process_start(os.getpid()) else set()
    return [
        name
        for name, content in submission.record["code"]["files"].items()
        if now.get(name) != content and name not in at_hand and (with_conf or name.startswith("kvmap/"))
    ]


def _listed(names: Iterable[str]) -> str:
    shown = list(names)
    rest = len(shown) - NAMES_LISTED
    return ", ".join(shown[:NAMES_LISTED]) + (f" and {rest} more" if rest > 0 else "")
