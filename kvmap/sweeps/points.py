"""The jobs of a multirun before it starts: their overrides, and what each composes to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvmap.sweeps.identity import job_identity
from kvmap.sweeps.submission import Point

_BASIC_SWEEPER = "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"


@dataclass(frozen=True)
class Placed:
    """A point, and where its job belongs: `hydra.sweep.dir`, study and outputs as they compose for it."""

    point: Point
    directory: Path
    study: str
    outputs: Path


def sweep_overrides(config: Any) -> list[list[str]]:
    """The overrides of every job, as Hydra's own sweeper makes them; empty for another sweeper.

    Args:
        config: What a multirun composes to, Hydra's settings included.
    """
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.override_parser.overrides_parser import OverridesParser

    sweeper = config.hydra.sweeper
    if sweeper._target_ != _BASIC_SWEEPER:
        return []
    given = [f"{key}={value}" for key, value in (sweeper.params or {}).items()]
    parser = OverridesParser.create(config_loader=GlobalHydra.instance().config_loader())
    parsed = parser.parse_overrides([*given, *given_overrides(config, "task")])
    (batch,) = BasicSweeper.split_arguments(parsed, None)
    return [list(job) for job in batch]


def given_overrides(config: Any, kind: str) -> list[str]:
    """Overrides as they were given, references in them unresolved: those of `task`, or of `hydra` itself."""
    from omegaconf import OmegaConf

    # omegaconf types the result as anything a node can be; this one is a list.
    given: list[str] = OmegaConf.to_container(config.hydra.overrides[kind], resolve=False)  # type: ignore[assignment]
    return given


def place_points(config: Any, overrides: Sequence[Sequence[str]]) -> list[Placed] | None:
    """Composes every job; None where one cannot be composed, of which Hydra is going to speak itself."""
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    loader = GlobalHydra.instance().config_loader()
    try:
        return [_placed(loader, config, number, list(job)) for number, job in enumerate(overrides)]
    except (HydraException, OmegaConfBaseException):
        return None


def _placed(loader: Any, config: Any, number: int, overrides: list[str]) -> Placed:
    composed = loader.load_sweep_config(config, overrides)
    directory = Path(str(composed.hydra.sweep.dir)).absolute()
    point = Point(number, tuple(overrides), job_identity(plain_config(composed)))
    return Placed(point, directory, str(composed.study), Path(str(composed.outputs)))


def plain_config(config: Any) -> Mapping[str, Any]:
    """The resolved settings as plain values, Hydra's own left out."""
    from omegaconf import OmegaConf

    chosen = {key: config[key] for key in config if key != "hydra"}
    return {
        key: OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
        for key, value in chosen.items()
    }


def job_directory_name(number: int, *, _root_: Any) -> str:
    """The resolver `${kvmap.job_directory:<number>}`: the number, unless another job's run lies there.

    In a sweep directory that is used again, the run of another configuration keeps its place, and the job
    adds its identity to the number.
    """
    from kvmap.files import read_json

    file = Path(str(_root_.hydra.sweep.dir)) / str(number) / "run.json"
    if not file.is_file():
        return str(number)
    identity = job_identity(plain_config(_root_))
    found = read_json(file)["facts"].get("identity")
    return str(number) if found == identity else f"{number}-{identity}"


def register_resolver() -> None:
    """Makes `${kvmap.job_directory:}` known."""
    from omegaconf import OmegaConf

    OmegaConf.register_new_resolver("kvmap.job_directory", job_directory_name, replace=True)
