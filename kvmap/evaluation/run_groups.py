"""Runs by configuration: which of them differ in seeds alone."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvmap.errors import KvmapError
from kvmap.evaluation.run_tables import rows_of, run_record, settings_of

NO_RESULT = (
    "study",
    "outputs",
    "threads",
    "stages",
    "seed",
    "evaluation.seed",
    "evaluation.reuse_answers",
    "evaluation.bootstrap_samples",
)
NO_RESULT_GROUPS = (
    "tracking.",
    "sweep.",
    "kernels.",
    "benchmark.",
    "diagnostics.",
    "preflight.",
    "evaluation.cost.",
)
"""Settings that change no answer, the run's own seed and that of the bootstrap among them: runs that differ
in them are of one configuration, and no second draw."""


@dataclass(frozen=True)
class Group:
    """Runs of one configuration.

    Attributes:
        settings: those in which this group differs from the others.
        seeds: of each run, the settings that were taken together.
        runs: their directories.
    """

    settings: dict[str, Any]
    seeds: tuple[dict[str, Any], ...]
    runs: tuple[Path, ...]

    def describe(self) -> str:
        """What sets the group apart, how many runs it has, and the seeds in which they differ."""
        varied = [n for n in self.seeds[0] if len({_canonical(seeds.get(n)) for seeds in self.seeds}) > 1]
        seeds = "; ".join(f"{n}={','.join(str(s.get(n)) for s in self.seeds)}" for n in varied)
        title = ", ".join(f"{name}={value}" for name, value in self.settings.items())
        return f"{title or 'one configuration'}: {len(self.runs)} runs ({seeds or 'one draw'})"


def find_runs(paths: Iterable[Path]) -> list[Path]:
    """Directories of runs: those given, and those inside a directory that is a sweep.

    Raises:
        KvmapError: a directory that holds neither a run nor jobs.
    """
    found: list[Path] = []
    for path in paths:
        inside = (
            [path] if (path / "run.json").is_file() else sorted(p.parent for p in path.glob("*/run.json"))
        )
        if not inside:
            raise KvmapError(f"{path} holds no run.json and no jobs (*/run.json): give runs or a sweep")
        found += inside
    return list(dict.fromkeys(found))


def finished(runs: Sequence[Path]) -> list[Path]:
    """Those that came to their end.

    Raises:
        KvmapError: none did.
    """
    done = [run for run in runs if run_record(run)["status"] == "done"]
    if not done:
        raise KvmapError(f"none of {len(runs)} runs is finished: run them first")
    return done


def group_runs(runs: Sequence[Path], over: Sequence[str] = ("seed",)) -> list[Group]:
    """Runs by configuration.

    Args:
        runs: directories.
        over: settings to take together: a full key (`mapper.seed`), or a last part (`seed`: every setting
            that ends in `.seed` or `_seed`). `NO_RESULT` is never among them.

    Of runs that agree in seeds too, the one that started last counts: it is no second draw. Nor is one of
    other seeds that came to nothing else, see `draw_of`.
    """
    started = {run: str(run_record(run)["started"]) for run in runs}
    settings = {run: settings_of(run_record(run)) for run in runs}
    parts: dict[str, dict[str, tuple[Path, str]]] = {}
    for run in sorted(runs, key=started.__getitem__):
        used = {key: value for key, value in settings[run].items() if _matters(key)}
        rest = {key: value for key, value in used.items() if not _is_over(key, over)}
        seeds = _canonical({key: value for key, value in used.items() if _is_over(key, over)})
        parts.setdefault(_canonical(rest), {})[draw_of(run, settings[run]) or seeds] = run, seeds
    configurations = [json.loads(rest) for rest in parts]
    names = dict.fromkeys(name for configuration in configurations for name in configuration)
    varied = [n for n in names if len({_canonical(c.get(n)) for c in configurations}) > 1]
    return [
        Group(
            settings={name: configuration.get(name) for name in varied},
            seeds=tuple(json.loads(seeds) for _, seeds in by_draw.values()),
            runs=tuple(run for run, _ in by_draw.values()),
        )
        for configuration, by_draw in zip(configurations, parts.values(), strict=True)
    ]


def draw_of(run: Path, settings: Mapping[str, Any]) -> str | None:
    """What a run's seeds have come to; two runs of one configuration that agree in it are one draw.

    It is the key of the mapper, what every item of its tables asked, and those seeds that change answers and
    neither of these: of recompute where it draws, and of few-shot examples. The control `random` is drawn by
    the mapper's seed, but its draws are none of the mapper's.

    Returns:
        None where the run's record names no mapper.
    """
    mapper = run_record(run)["facts"].get("artifacts", {}).get("mapper")
    if mapper is None:
        return None
    asked: set[tuple[str, ...]] = set()
    for table in sorted((run / "tables").glob("*.csv")):
        asked |= {(table.stem, row.get("task") or "", row["content"]) for row in rows_of(table, "content")}
    return _canonical({"mapper": mapper, "asked": sorted(asked), "seeds": _acting_seeds(settings)})


def _acting_seeds(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Seeds by which runs with one mapper and the same items may still answer differently."""
    acting = []
    if settings.get("transfer.recompute_share") and settings.get("transfer.recompute_rule") == "random":
        acting.append("transfer.recompute_seed")
    if settings.get("evaluation.tasks"):
        acting.append("evaluation.fewshot_seed")
    return {name: settings.get(name) for name in acting}


def _is_over(name: str, over: Sequence[str]) -> bool:
    """Whether a setting is one of those; a last part also stands for what ends in an underscore and it."""
    last = name.rsplit(".", 1)[-1]
    return any(name == key or ("." not in key and (last == key or last.endswith(f"_{key}"))) for key in over)


def _matters(name: str) -> bool:
    return name not in NO_RESULT and not name.startswith(NO_RESULT_GROUPS)


def _canonical(content: Any) -> str:
    return json.dumps(content, sort_keys=True)
