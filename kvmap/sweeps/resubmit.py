"""Starts chosen points of earlier submissions again: same overrides, same launcher, one array each."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from kvmap.config import config_path, outputs_root
from kvmap.errors import KvmapError
from kvmap.sweeps.board import Entry
from kvmap.sweeps.callback import submit
from kvmap.sweeps.submission import Submission
from kvmap.sweeps.summary import is_of

CHOICES = {
    "failed": ("failed", "died", "preempted"),
    "missing": ("missing",),
    "all": ("failed", "died", "preempted", "missing"),
}


def choose(entries: Iterable[Entry], which: str) -> list[tuple[Submission, list[Entry]]]:
    """Points to start again, by the submission that holds them; never what is done or running.

    A single run has no submission and is left out.
    """
    chosen: dict[Path, tuple[Submission, list[Entry]]] = {}
    for entry in entries:
        if entry.submission is not None and entry.state.status in CHOICES[which]:
            chosen.setdefault(entry.submission.file, (entry.submission, []))[1].append(entry)
    return list(chosen.values())


def command(submission: Submission, entry: Entry) -> str:
    """What starts one point by hand."""
    parts = ["python", "-m", "kvmap.run", "-m", *_hydra_overrides(submission)]
    return shlex.join([*parts, *overrides_of(submission, entry)])


def overrides_of(submission: Submission, entry: Entry) -> list[str]:
    """The point's own overrides, and the outputs folder where neither they nor the surroundings name it."""
    assert entry.point is not None
    return [*entry.point.overrides, *_outputs(submission, entry.point.overrides)]


def _outputs(submission: Submission, given: Iterable[str]) -> list[str]:
    path = str(submission.record["outputs"])
    if path == outputs_root() or any(is_of("outputs", override) for override in given):
        return []
    if re.fullmatch(r"[\w./-]+", path, re.ASCII):
        return [f"outputs={path}"]
    quoted = path.replace("'", "\\'")
    return [f"outputs='{quoted}'"]


def _hydra_overrides(submission: Submission) -> list[str]:
    given = submission.record["hydra_overrides"]
    return [override for override in given if override != "hydra.mode=MULTIRUN"]


def launch(submission: Submission, entries: Sequence[Entry], job: Callable[[Any], None]) -> Path:
    """Starts the points as one multirun in a sweep directory of its own, and waits for it.

    Args:
        submission: Where they were submitted; its folder of that time is the working directory again.
        entries: The points.
        job: What runs one composed configuration.

    Returns:
        The new sweep's directory.

    Raises:
        KvmapError: The working directory of that time is gone.
    """
    from hydra._internal.callbacks import Callbacks
    from hydra._internal.hydra import Hydra
    from hydra._internal.utils import create_config_search_path
    from hydra.core.global_hydra import GlobalHydra
    from hydra.types import HydraContext, RunMode

    folder = submission.record["cwd"]
    if not os.path.isdir(folder):
        raise KvmapError(
            f"{submission.file}: the sweep was started in {folder}, which is gone; paths among its settings "
            "may hang on it: make it again, or start the points by hand (--dry-run prints how)"
        )
    os.chdir(folder)
    GlobalHydra.instance().clear()
    hydra = Hydra.create_main_hydra2("run", create_config_search_path(_search_path()))
    try:
        asked = [*submission.record["hydra_overrides"], *submission.record["task_overrides"]]
        asked += _outputs(submission, asked)
        asked += [] if "hydra.mode=MULTIRUN" in asked else ["hydra.mode=MULTIRUN"]
        config = hydra.compose_config("config", asked, with_log_configuration=True, run_mode=RunMode.MULTIRUN)
        callbacks = Callbacks(config)
        jobs = [overrides_of(submission, entry) for entry in entries]
        submit(config, jobs)
        context = HydraContext(config_loader=hydra.config_loader, callbacks=callbacks)
        directory = Path(str(config.hydra.sweep.dir))
        _sweep(config, context, job, jobs)
        return directory
    finally:
        GlobalHydra.instance().clear()


def _search_path() -> str:
    path = config_path()
    return path if path.startswith("pkg://") else f"file://{path}"


def _sweep(config: Any, context: Any, job: Callable[[Any], None], jobs: list[list[str]]) -> None:
    """Hands the list of points to the launcher, in the place of a sweeper."""
    from hydra.core.plugins import Plugins
    from omegaconf import OmegaConf

    launcher = Plugins.instance().instantiate_launcher(
        hydra_context=context, task_function=job, config=config
    )
    directory = Path(str(config.hydra.sweep.dir))
    directory.mkdir(parents=True, exist_ok=True)
    OmegaConf.save(config, directory / "multirun.yaml")
    for result in launcher.launch(jobs, initial_job_idx=0):
        _ = result.return_value  # raises what the job raised
