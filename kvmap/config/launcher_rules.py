"""The rules of the launcher settings, which are Hydra's and so no part of the schema."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

# Slurm looks at time limits once a minute.
SLURM_CLOCK_SECONDS = 60


def launcher_mistakes(launcher: Mapping[str, Any]) -> list[str]:
    """Every mistake in `hydra.launcher` that would only show when jobs run, as one line each."""
    kind = str(launcher.get("_target_", "")).rpartition(".")[2]
    if kind == "SlurmLauncher":
        return [*_slurm(launcher)]
    if kind == "JoblibLauncher":
        return [*_joblib(launcher)]
    return []


def _slurm(launcher: Mapping[str, Any]) -> Iterator[str]:
    for key in ("nodes", "tasks_per_node"):
        if launcher.get(key, 1) != 1:
            yield (
                f"hydra.launcher.{key}={launcher[key]}: Slurm would start each job so many times, in one "
                "directory; expected 1. More GPUs or cores: gpus_per_node, cpus_per_task"
            )
    limit, delay = 60 * launcher.get("timeout_min", 60), launcher.get("signal_delay_s", 0)
    if limit <= delay + SLURM_CLOCK_SECONDS:
        yield (
            f"hydra.launcher.timeout_min={launcher.get('timeout_min', 60)}: with signal_delay_s={delay} "
            "Slurm may warn a job as soon as it starts; expected more than "
            f"{(delay + SLURM_CLOCK_SECONDS) / 60:g}, or a smaller hydra.launcher.signal_delay_s"
        )
    if launcher.get("array_parallelism", 1) < 1:
        yield f"hydra.launcher.array_parallelism={launcher['array_parallelism']}: expected at least 1"


def _joblib(launcher: Mapping[str, Any]) -> Iterator[str]:
    if launcher.get("n_jobs") == 0:
        yield "hydra.launcher.n_jobs=0: expected how many jobs run at once, or -1 for one a core"
