"""The one place that touches Weights & Biases. It copies what already lies on disk; it may fail, never break.

Every call runs in a thread with a time limit. An error or a time-out is one warning, after which the mirror
stays silent: results, exit status and the local files are the same with and without it.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvmap.metrics import Metric

_logger = logging.getLogger(__name__)


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
        where = {"project": project, "entity": entity, "group": group or study}
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

        def send() -> None:
            import wandb

            data = [[row.get(column) for column in columns] for row in rows]
            table = wandb.Table(columns=list(columns), data=data, allow_mixed_types=True)
            self._run.log({f"tables/{name}": table})

        self._call("table", send)

    def figure(self, name: str, path: Path) -> None:
        """A picture that lies on disk."""

        def send() -> None:
            import wandb

            self._run.log({f"figures/{name}": wandb.Image(str(path))})

        self._call("figure", send)

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
