"""What reaches the process that started a job, when the job or its process came to a bad end."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvmap.errors import KvmapError

LAUNCHERS = ("submitit", "joblib", "loky")


class JobFailed(KvmapError):
    """A job of a sweep ended with an error that is not the user's mistake."""


@contextmanager
def crossing(directory: Path) -> Iterator[None]:
    """Lets only errors out that survive the way to another process.

    Any class of error may refuse to be rebuilt there, and that would end the whole sweep.

    Args:
        directory: of the run, where the traceback is.

    Raises:
        JobFailed: in place of anything that is no KvmapError.
    """
    try:
        yield
    except KvmapError:
        raise
    except Exception as error:
        said = " ".join(f"{type(error).__name__}: {error}".split())[:500]
        raise JobFailed(f"{said} (traceback: {directory / 'traceback.txt'})") from error


def launcher_failure(error: BaseException) -> str | None:
    """What a launcher says of a job it could not start, or whose process is gone; None for other errors."""
    if type(error).__module__.split(".")[0] not in LAUNCHERS:
        return None
    said = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    if raised := re.findall(r"^[\w.]+: .+$", str(error), re.MULTILINE):  # the end of a traceback
        said = f"{said} {raised[-1]}"
    return (
        f"the launcher reports: {said}\nstart the sweep again: what is done is skipped, what was begun goes "
        "on (python -m kvmap.sweep status says how far it got)"
    )
