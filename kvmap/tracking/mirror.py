"""What a copy of a run can be told. Copies may fail and never break: see `bounded`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from kvmap.metrics import Metric

STEPS_PER_ATTEMPT = 1_000_000
"""A run that is taken up again goes on at the next multiple: no row takes the place of an earlier attempt's,
wherever that one was killed."""


@dataclass(frozen=True)
class Identity:
    """One run, as its copies know it.

    Attributes:
        directory: The run directory.
        study: Name of the study.
        name: What a reader is shown: the study, and which run of it.
        id: The same for every attempt in this directory, and of no other run.
        attempt: 0, or how many earlier attempts this directory has seen.
        resumed: Whether an earlier attempt had this id.
    """

    directory: Path
    study: str
    name: str
    id: str
    attempt: int
    resumed: bool


class Mirror(Protocol):
    """One copy of the run that is going on."""

    def log(self, metrics: Mapping[str, Metric]) -> None:
        """Metrics, as they are merged into metrics.json."""

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> None:
        """The last state of a table."""

    def figure(self, name: str, path: Path) -> None:
        """A picture that lies on disk."""

    def note(self, facts: Mapping[str, Any]) -> None:
        """Facts learnt after the start."""

    def results(
        self,
        metrics: Mapping[str, Metric],
        arms: tuple[Sequence[str], Sequence[Mapping[str, Any]]] | None,
        usage: Mapping[str, float],
    ) -> None:
        """What the run came to: all metrics, columns and rows of the table `arms`, what it used."""

    def hurry(self) -> None:
        """The run has ended: all that follows gets the time of one call."""

    def finish(self, exit_code: int) -> None:
        """The end."""


def flat(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """Values under their keys, evidence under `<key>.n` and `<key>.standard_error`."""
    numbers: dict[str, float] = {}
    for key, metric in metrics.items():
        numbers[key] = metric.value
        if metric.n is not None:
            numbers[f"{key}.n"] = metric.n
        if metric.standard_error is not None:
            numbers[f"{key}.standard_error"] = metric.standard_error
    return numbers
