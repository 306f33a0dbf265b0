"""What one job does before its run: it compares itself with its submission and takes its turn."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

from kvmap.config import Config
from kvmap.errors import KvmapError
from kvmap.files import write_json
from kvmap.sweeps.board import REFUSED, SKIPPED
from kvmap.sweeps.register import Register
from kvmap.sweeps.turn import Turn, take_afresh, take_turn


def turn_of(cfg: Config, identity: str, own: Path, *, in_sweep: bool) -> AbstractContextManager[Turn]:
    """The turn of a job in its study.

    Args:
        cfg: Its configuration.
        identity: Of the job.
        own: The directory that Hydra gave it.
        in_sweep: A single run is made afresh, and so is a job with `sweep.skip_done=false`.
    """
    register = Register(Path(cfg.outputs) / cfg.study)
    take = take_turn if in_sweep and cfg.sweep.skip_done else take_afresh
    return take(register, identity, own)


def say(turn: Turn, identity: str, own: Path) -> None:
    """Prints where the run is, if it is not in the job's own directory, and leaves that there."""
    if turn.directory == own:
        return
    said = {
        "done": f"done already: {turn.directory}",
        "running": f"running already: {turn.holder}, {turn.directory}",
        "new": f"in its earlier directory: {turn.directory}",
        "resumed": f"going on: {turn.directory}",
    }
    print(said[turn.status], flush=True)
    directory = None if turn.directory is None else str(turn.directory.resolve())
    write_json(own / SKIPPED, {"identity": identity, "status": turn.status, "directory": directory})


@contextmanager
def refusal_recorded(own: Path) -> Iterator[None]:
    """Leaves `refused.json` in a job's directory where it ends before there is a run to say why."""
    try:
        yield
    except KvmapError as error:
        with suppress(KvmapError, OSError):
            write_json(own / REFUSED, {"error": str(error)})
        raise
    with suppress(FileNotFoundError):
        (own / REFUSED).unlink()
