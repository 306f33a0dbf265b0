"""What Hydra calls as a sweep begins, as its jobs end, and as it ends."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from kvmap.config import ConfigError
from kvmap.config.launcher_rules import launcher_mistakes
from kvmap.sweeps.code import source_files
from kvmap.sweeps.points import Placed, given_overrides, place_points, sweep_overrides
from kvmap.sweeps.submission import Point, write_submission
from kvmap.sweeps.summary import write_summary


class SweepCallback:
    """`hydra.callbacks.kvmap`: writes `submission.json` and `summary.csv`.

    Hydra turns what is raised here into a warning: a job compares itself with its submission elsewhere.
    """

    def __init__(self) -> None:
        self.studies: list[str] = []

    def on_run_start(self, config: Any, **_: Any) -> None:
        """A single run leaves no submission."""

    def on_run_end(self, config: Any, **_: Any) -> None:
        """Nor a summary."""

    def on_job_start(self, config: Any, **_: Any) -> None:
        """A job's turn is taken by the job itself."""

    def on_multirun_start(self, config: Any, **_: Any) -> None:
        """Writes down what is submitted; where the launcher's settings are wrong, nothing is."""
        if mistakes := launcher_mistakes(config.hydra.launcher):
            print(f"kvmap: {ConfigError(mistakes)}", file=sys.stderr)
            raise SystemExit(2)  # Hydra turns exceptions into warnings, this one not
        placed = submit(config, sweep_overrides(config))
        self.studies = sorted({str(place.outputs / place.study) for place in placed})

    def on_job_end(self, config: Any, **_: Any) -> None:
        """Brings the sweep's summary up to date, whatever becomes of its other jobs."""
        if config.hydra.mode is not None and config.hydra.mode.name == "MULTIRUN":
            write_summary(Path(str(config.hydra.sweep.dir)))

    def on_multirun_end(self, config: Any, **_: Any) -> None:
        """Brings the summaries of the studies up to date."""
        for study in self.studies:
            write_summary(Path(study))


def submit(config: Any, overrides: list[list[str]]) -> list[Placed]:
    """Writes `submission.json` into the sweep's directory; into each of them, where jobs differ in study.

    Not where a job cannot be composed: then none is going to start.

    Args:
        config: What the multirun composes to, Hydra's settings included.
        overrides: Those of every job; empty where a sweeper finds them as it goes.
    """
    # Asked first: the time in it is then kept, and all jobs are composed with the same.
    home = Path(str(config.hydra.sweep.dir)).absolute()
    placed = place_points(config, overrides)
    if placed is None:
        return []
    files = source_files()
    places: dict[tuple[str, str, str], list[Point]] = {_place(each): [] for each in placed}
    for each in placed:
        places[_place(each)].append(each.point)
    if not placed:
        places[str(home), str(config.study), str(config.outputs)] = []
    for (directory, study, outputs), points in places.items():
        write_submission(
            Path(directory),
            points,
            study=study,
            outputs=Path(outputs),
            hydra_overrides=given_overrides(config, "hydra"),
            task_overrides=given_overrides(config, "task"),
            files=files,
        )
    return placed


def _place(placed: Placed) -> tuple[str, str, str]:
    return str(placed.directory), placed.study, str(placed.outputs)
