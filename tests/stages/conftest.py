"""Stages run in this process on the shipped family, into an outputs folder that a module's runs share."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvmap.config import Config, validate
from kvmap.mappers import Mapper, load_mapper
from kvmap.stages import run_stages
from tests.test_config import with_settings

SMALL = (
    "experiment=debug calibration.n_sequences=15 calibration.sequence_length=96 diagnostics.n_sequences=1 "
    "mapper.compression.n_sequences=1"
)


@dataclass(frozen=True)
class Finished:
    """A run that is over, and what it left."""

    directory: Path
    outputs: Path

    def json(self, name: str) -> dict[str, Any]:
        return dict(json.loads((self.directory / f"{name}.json").read_text()))

    def metric(self, name: str) -> float:
        return float(self.json("metrics")[name]["value"])

    def table(self, name: str) -> list[dict[str, str]]:
        with open(self.directory / "tables" / f"{name}.csv", newline="") as stream:
            return list(csv.DictReader(stream))

    @property
    def tables(self) -> set[str]:
        return {path.stem for path in (self.directory / "tables").glob("*.csv")}

    def artifact(self, kind: str) -> Path:
        """The folder of the artifact that the run made or found."""
        store = kind.removesuffix("_part") if kind == "mapper" else kind
        return self.outputs / "artifacts" / store / self.json("run")["facts"]["artifacts"][kind]

    @property
    def mapper(self) -> Mapper:
        return load_mapper(self.artifact("mapper"))[0]


Runner = Callable[..., Finished]


def configured(overrides: str, outputs: Path) -> Config:
    """A small run's configuration, judged."""
    cfg = with_settings(f"{SMALL} {overrides}")
    cfg.outputs = str(outputs)
    assert validate(cfg) == []
    return cfg


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One outputs folder for the module, so that its artifacts are made once."""
    return tmp_path_factory.mktemp("outputs")


@pytest.fixture(scope="module")
def run(outputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Runner:
    """Runs the stages that overrides (parted by spaces) name: `run("stages=[fit] mapper=mlp")`.

    What has run in the module's own outputs is not run twice, unless `again` is true.
    """
    done: dict[str, Finished] = {}

    def runner(overrides: str, into: Path | None = None, *, again: bool = False) -> Finished:
        if into is None and not again and overrides in done:
            return done[overrides]
        directory = tmp_path_factory.mktemp("run")
        run_stages(configured(overrides, into or outputs), directory)
        finished = Finished(directory, into or outputs)
        if into is None:
            done[overrides] = finished
        return finished

    return runner
