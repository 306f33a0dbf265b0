"""The one place that calls Weights & Biases: a copy of what lies on disk, and the address of its service."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from kvmap.metrics import Metric
from kvmap.tracking.bounded import Bounded
from kvmap.tracking.headline import headline, tags_of
from kvmap.tracking.mirror import STEPS_PER_ATTEMPT, Identity, flat

JOB_TYPE = "run"
ARTIFACT_TYPE = "results"
RETENTION_TABLE = "arms"
RECORDS = ("run.json", "metrics.json", "report.md", "report.html")
SYNCED = ".synced"
"""W&B's own mark, beside a segment: all of it has been sent. It sets none when it has sent while running."""


class WandbMirror:
    """One W&B run; each attempt writes a segment of it, a folder in `<run>/wandb/`.

    Args:
        run: Which run, and which attempt of it.
        config: What the run was asked to do.
        online: False: write files only, to be sent later (`kvmap.tracking sync`). True: send while running.
        project: Name of the W&B project.
        entity: User or team that owns it; None: W&B's default.
        group: Group of the run; the study where None.
        seconds: Longest time any one call may take, and the calls after `hurry` together.
    """

    def __init__(
        self,
        run: Identity,
        config: Mapping[str, Any],
        *,
        online: bool,
        project: str = "kvmap",
        entity: str | None = None,
        group: str | None = None,
        seconds: float = 30.0,
    ) -> None:
        self._identity = run
        self._mode = "online" if online else "offline"
        self._calls = Bounded("W&B", seconds, on_hang=_end_service)
        self._step = run.attempt * STEPS_PER_ATTEMPT
        self._run: Any = None
        where = {
            "project": project,
            "entity": entity,
            "group": group or run.study,
            "job_type": JOB_TYPE,
            "name": run.name,
        }
        self._calls.call("start", lambda: self._start(config, where))

    def _start(self, config: Mapping[str, Any], where: Mapping[str, Any]) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # else W&B looks up its error service
        if "wandb" not in sys.modules:  # the service of the process, or the machine, that submitted this one
            os.environ.pop("WANDB_SERVICE", None)
        import wandb

        settings = wandb.Settings(
            mode="online" if self._mode == "online" else "offline",
            console="off",
            silent=True,
            disable_git=True,
            save_code=False,
            init_timeout=self._calls.seconds,
            finish_timeout=0.8 * self._calls.seconds,  # it should say so before its thread is given up
            finish_timeout_raises=True,
        )
        _await_free_name(self._identity)
        self._run = wandb.init(
            **where,
            id=self._identity.id,
            resume="allow" if self._identity.resumed else None,
            dir=str(self._identity.directory),
            config=dict(config),
            tags=tags_of(config),
            reinit="create_new",  # a sweep in one process has one W&B run per job
            settings=settings,
        )

    def log(self, metrics: Mapping[str, Metric]) -> None:
        """Values under their keys, evidence under `<key>.n` and `<key>.standard_error`."""
        self._calls.call("log", lambda: self._row(flat(metrics)))

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> None:
        """A table, with every cell as text or number."""
        self._calls.call("table", lambda: self._row({f"tables/{name}": _table(columns, rows)}))

    def figure(self, name: str, path: Path) -> None:
        """A picture that lies on disk."""

        def send() -> None:
            import wandb

            self._row({f"figures/{name}": wandb.Image(str(path))})

        self._calls.call("figure", send)

    def _row(self, content: Mapping[str, Any]) -> None:
        self._run.log(dict(content), step=self._step, commit=True)
        self._step += 1

    def note(self, facts: Mapping[str, Any]) -> None:
        """Facts learnt after the start, added to the W&B config."""
        self._calls.call("note", lambda: self._run.config.update(dict(facts), allow_val_change=True))

    def results(
        self,
        metrics: Mapping[str, Metric],
        arms: tuple[Sequence[str], Sequence[Mapping[str, Any]]] | None,
        usage: Mapping[str, float],
    ) -> None:
        """Headline numbers and usage into the summary; the run's files as the artifact `<study>-results`.

        Args:
            metrics: all of the run.
            arms: columns and rows of that table, shown in the artifact; None: there is none.
            usage: what the run used, by name.
        """

        def send() -> None:
            import wandb

            directory = self._identity.directory
            numbers = headline(metrics)
            self._run.summary.update(numbers | {f"usage/{name}": value for name, value in usage.items()})
            name = f"{re.sub(r'[^A-Za-z0-9_.-]', '-', self._identity.study)}-results"
            artifact = wandb.Artifact(
                name, type=ARTIFACT_TYPE, metadata={"run": self._identity.name, **numbers}
            )
            if arms is not None:
                artifact.add(_table(*arms), RETENTION_TABLE)
            files = [directory / record for record in RECORDS]
            for path in [*files, *sorted((directory / "tables").glob("*.csv"))]:
                if path.is_file():
                    artifact.add_file(str(path), path.relative_to(directory).as_posix())
            self._run.log_artifact(artifact)

        self._calls.call("results", send)

    def hurry(self) -> None:
        """From now on all calls together get the time of one."""
        self._calls.hurry()

    def finish(self, exit_code: int) -> None:
        """Ends the W&B run."""

        def end() -> None:
            failed = self._calls.dead  # something else, and not for want of time
            self._run.finish(exit_code=exit_code)
            # `finish` swallows what goes wrong before the service's last answer.
            answered = getattr(self._run, "_poll_exit_response", None) is not None
            if self._mode == "online" and answered and not failed:
                folder = Path(self._run.dir).parent  # `dir` is the folder `files` in it
                (folder / f"run-{self._identity.id}.wandb{SYNCED}").touch()

        if self._run is not None:
            self._calls.last("finish", end)


def service_address() -> str:
    """Where W&B would send to: `WANDB_BASE_URL`, else what `wandb login --host` has stored, else its own.

    Raises:
        ImportError: W&B is not installed.
    """
    import wandb

    # W&B reads its environment once in a process, ours may have changed since.
    return (os.environ.get("WANDB_BASE_URL") or str(wandb.setup().settings.base_url)).rstrip("/")


def _await_free_name(run: Identity) -> None:
    """W&B names a segment by the second and the id: two attempts in one second would share one."""
    while any(run.directory.glob(f"wandb/*run-{datetime.now():%Y%m%d_%H%M%S}-{run.id}")):
        time.sleep(0.05)


def _end_service() -> None:
    """Kills the service process that hangs. W&B would wait for it, without limit, when Python ends."""
    import wandb

    for status in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, IndexError, ValueError):
            name, rest = status.read_text().rsplit(")", 1)
            if name.endswith("(wandb-core") and int(rest.split()[1]) == os.getpid():
                os.kill(int(status.parent.name), signal.SIGKILL)
    wandb.teardown()


def _table(columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> Any:
    import wandb

    data = [[row.get(column) for column in columns] for row in rows]
    return wandb.Table(columns=list(columns), data=data, allow_mixed_types=True)
