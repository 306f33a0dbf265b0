"""Every point of a sweep or study once, with how far it got."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvmap.errors import KvmapError
from kvmap.files import read_json
from kvmap.sweeps.register import FOLDER, Register
from kvmap.sweeps.states import RunState, read_state
from kvmap.sweeps.submission import Point, Submission, submissions_below

SKIPPED, REFUSED = "skipped.json", "refused.json"


@dataclass(frozen=True)
class Entry:
    """One point.

    Attributes:
        identity: of its configuration.
        state: how far its run got.
        point: as it was submitted last; None for a single run.
        submission: the last one that holds it.
    """

    identity: str
    state: RunState
    point: Point | None = None
    submission: Submission | None = None


@dataclass(frozen=True)
class Board:
    """A sweep or study.

    Attributes:
        root: its folder.
        study: the study's folder.
        entries: by submission, the newest first, and by number; then what was run singly.
        n_skipped: jobs that found their point done or running.
    """

    root: Path
    study: Path
    entries: list[Entry]
    n_skipped: int

    @classmethod
    def read(cls, root: Path) -> Board:
        """Of a sweep's or a study's folder.

        Raises:
            KvmapError: There is neither a submission nor a register.
        """
        root = Path(root)
        submissions = submissions_below(root)
        if not submissions and not (root / FOLDER).is_dir():
            raise KvmapError(
                f"{root} holds neither */submission.json nor {FOLDER}/: give the folder of a study "
                "(outputs/<study>) or of a sweep in it"
            )
        study = _study(root, submissions)
        register = Register(study)
        entries = list(_submitted(submissions, register))
        if root.resolve() == study.resolve():
            known = {entry.identity for entry in entries}
            single = (identity for identity in register.identities() if identity not in known)
            entries += [Entry(identity, read_state(register, identity)) for identity in single]
        folders = {submission.directory for submission in submissions}
        skipped = [read_json(file)["status"] for folder in folders for file in folder.glob(f"*/{SKIPPED}")]
        return cls(root, study, entries, sum(status in ("done", "running") for status in skipped))


def _study(root: Path, submissions: list[Submission]) -> Path:
    """The study's folder: where the register is, now that outputs may have been moved."""
    for folder in (root, root.absolute().parent):
        if (folder / FOLDER).is_dir():
            return folder
    record = submissions[0].record
    return Path(record["outputs"]) / record["study"]


def _submitted(submissions: list[Submission], register: Register) -> Iterator[Entry]:
    seen: set[str] = set()
    for submission in submissions:
        for point in submission.points:
            if point.identity in seen:
                continue
            seen.add(point.identity)
            state = read_state(register, point.identity)
            if state.status == "missing":
                state = _refused(submissions, point) or state
            yield Entry(point.identity, state, point, submission)


def _refused(submissions: list[Submission], point: Point) -> RunState | None:
    """What a job left that ended before there was a run: of the newest submission that holds the point."""
    for submission in submissions:
        for other in submission.points:
            if other.identity != point.identity:
                continue
            for name in (str(other.number), f"{other.number}-{other.identity}"):
                file = submission.directory / name / REFUSED
                if file.is_file():
                    error = " ".join(str(read_json(file)["error"]).split())
                    return RunState("failed", file.parent, error=error)
            return None
    return None
