"""The one place that touches Weights & Biases. It copies what already lies on disk; it may fail, never break.

Every call runs in a thread with a time limit. An error or a time-out is one warning, after which the mirror
stays silent: results, exit status and the local files are the same with and without it.
"""

from __future__ import annotations

import logging
import math
import os
import re
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvmap.metrics import Metric

JOB_TYPE = "run"
ARTIFACT_TYPE = "results"
RETENTION_TABLE = "arms"
RECORDS = ("run.json", "metrics.json", "report.md", "report.html")
TAG_CHARACTERS = 64  # W&B takes no longer ones

HEADLINE = {
    "accuracy": ("evaluate", "accuracy"),
    "retention": ("evaluate", "retention"),
    "floor_retention": ("evaluate", "floor_retention"),
    "gain_recovered": ("evaluate", "gain_recovered"),
    "context_carried": ("evaluate", "context_carried"),
    "perplexity": ("evaluate", "perplexity"),
    "kl_nats": ("evaluate", "kl_nats"),
    "attention_cosine": ("diagnose", "attention_cosine"),
    "r2_key": ("diagnose", "r2_key"),
    "r2_value": ("diagnose", "r2_value"),
}
"""Numbers of the mapped arm by which runs are compared, with the stage and the metric each comes from."""
CHOSEN_TASKS = {"evaluate": ("average", "tasks_average"), "diagnose": ("held_out", "questions", "evaluation")}
"""Of several tasks or texts that have the metric, the first of these; else the one that there is."""

_logger = logging.getLogger(__name__)


def headline(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """The numbers that stand for a run, under `headline/<name>`; what it did not measure is left out."""
    return {f"headline/{name}": value for name, value in _headline(metrics)}


def _headline(metrics: Mapping[str, Metric]) -> Iterator[tuple[str, float]]:
    for name, (stage, metric) in HEADLINE.items():
        found = {
            key.split("/")[1]: entry.value
            for key, entry in metrics.items()
            if re.fullmatch(f"{stage}/[^/]+/mapped/{metric}", key) and math.isfinite(entry.value)
        }
        task = next((task for task in CHOSEN_TASKS[stage] if task in found), None)
        if task is None and len(found) == 1:
            task = next(iter(found))
        if task is not None:
            yield name, found[task]


def tags_of(config: Mapping[str, Any]) -> list[str]:
    """Pair, kind of the mapper, its support and the direction: what runs are filtered by."""
    pair, mapper = config.get("pair"), config.get("mapper")
    given = [
        pair.get("name") if isinstance(pair, Mapping) else pair,
        *([mapper.get("kind"), mapper.get("support")] if isinstance(mapper, Mapping) else [mapper]),
        config.get("direction"),
    ]
    return list(dict.fromkeys(str(tag)[:TAG_CHARACTERS] for tag in given if tag))


class WandbMirror:
    """One W&B run with an id of its own.

    Args:
        directory: The run directory; W&B keeps its files in `wandb/` below it.
        study: Group of the run, where `group` is None, and part of its name.
        config: What the run was asked to do.
        online: False: write files only, to be sent later with `wandb sync`. True: send while running.
        project: Name of the W&B project.
        entity: User or team that owns it; None: W&B's default.
        group: Group of the run.
        seconds: Longest time any one call may take.
    """

    def __init__(
        self,
        directory: Path,
        study: str,
        config: Mapping[str, Any],
        *,
        online: bool,
        project: str = "kvmap",
        entity: str | None = None,
        group: str | None = None,
        seconds: float = 30.0,
    ) -> None:
        self.id = secrets.token_hex(4)
        self.mode = "online" if online else "offline"
        self._seconds = seconds
        self._run: Any = None
        self._dead = False
        where = {"project": project, "entity": entity, "group": group or study, "job_type": JOB_TYPE}
        self._call("start", lambda: self._start(directory, study, config, where), seconds)

    def _start(
        self, directory: Path, study: str, config: Mapping[str, Any], where: Mapping[str, Any]
    ) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # else W&B looks up its error service
        import wandb

        settings = wandb.Settings(
            mode="online" if self.mode == "online" else "offline",
            console="off",
            silent=True,
            disable_git=True,
            save_code=False,
            init_timeout=self._seconds,
            finish_timeout=self._seconds,
        )
        self._run = wandb.init(
            **where,
            name=f"{study}/{directory.name}",
            id=self.id,
            resume="never",
            dir=str(directory),
            config=dict(config),
            tags=tags_of(config),
            reinit="create_new",  # a sweep in one process has one W&B run per job
            settings=settings,
        )

    def log(self, metrics: Mapping[str, Metric]) -> None:
        """Values under their keys, evidence under `<key>.n` and `<key>.standard_error`."""
        flat: dict[str, float] = {}
        for key, metric in metrics.items():
            flat[key] = metric.value
            if metric.n is not None:
                flat[f"{key}.n"] = metric.n
            if metric.standard_error is not None:
                flat[f"{key}.standard_error"] = metric.standard_error
        self._call("log", lambda: self._run.log(flat))

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> None:
        """A table, with every cell as text or number."""
        self._call("table", lambda: self._run.log({f"tables/{name}": _table(columns, rows)}))

    def figure(self, name: str, path: Path) -> None:
        """A picture that lies on disk."""

        def send() -> None:
            import wandb

            self._run.log({f"figures/{name}": wandb.Image(str(path))})

        self._call("figure", send)

    def results(
        self,
        study: str,
        directory: Path,
        metrics: Mapping[str, Metric],
        retention: tuple[Sequence[str], Sequence[Mapping[str, Any]]] | None,
    ) -> None:
        """The run's headline numbers into its summary, and its files as the artifact `<study>-results`.

        Args:
            study: part of the artifact's name.
            directory: of the run; its tables, records and reports go into the artifact.
            metrics: all of the run.
            retention: columns and rows of the table `arms`, shown in the artifact; None: there is none.
        """

        def send() -> None:
            import wandb

            numbers = headline(metrics)
            self._run.summary.update(numbers)
            name = f"{re.sub(r'[^A-Za-z0-9_.-]', '-', study)}-results"
            artifact = wandb.Artifact(
                name, type=ARTIFACT_TYPE, metadata={"run": str(directory.name), **numbers}
            )
            if retention is not None:
                artifact.add(_table(*retention), RETENTION_TABLE)
            files = [directory / record for record in RECORDS]
            for path in [*files, *sorted((directory / "tables").glob("*.csv"))]:
                if path.is_file():
                    artifact.add_file(str(path), path.relative_to(directory).as_posix())
            self._run.log_artifact(artifact)

        self._call("results", send)

    def note(self, facts: Mapping[str, Any]) -> None:
        """Facts learnt after the start, added to the W&B config."""
        self._call("note", lambda: self._run.config.update(dict(facts), allow_val_change=True))

    def finish(self, exit_code: int) -> None:
        """Ends the W&B run, waiting no longer than the limit."""
        self._call("finish", lambda: self._run.finish(exit_code=exit_code), 2 * self._seconds)

    def _call(self, what: str, action: Callable[[], None], seconds: float | None = None) -> None:
        if self._dead:
            return
        faults: list[BaseException] = []

        def guarded() -> None:
            try:
                action()
            except BaseException as fault:  # wandb ends processes with SystemExit in places
                faults.append(fault)

        limit = self._seconds if seconds is None else seconds
        thread = threading.Thread(target=guarded, daemon=True, name=f"wandb {what}")
        thread.start()
        thread.join(limit)
        if thread.is_alive():
            faults.append(TimeoutError(f"no answer within {limit:g} s"))
        if faults:
            self._dead = True
            reason = str(faults[0]).strip().splitlines() or [type(faults[0]).__name__]
            _logger.warning(
                "W&B %s failed (%s); going on without it, all results are in the run directory",
                what,
                reason[0],
            )


def _table(columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> Any:
    import wandb

    data = [[row.get(column) for column in columns] for row in rows]
    return wandb.Table(columns=list(columns), data=data, allow_mixed_types=True)
