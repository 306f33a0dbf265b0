"""The record of one run: what was asked, what came out, where from. Disk first; W&B gets a copy.

A run directory holds `run.json` (status, provenance, seconds per stage), `metrics.json`, `tables/*.csv`,
`figures/*.png`, `run.log` and, where the checkout was dirty beyond a few lines, `dirty.diff`.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from kvmap import provenance
from kvmap.errors import KvmapError, UnknownName
from kvmap.files import read_json, replacing, write_csv, write_json, write_text
from kvmap.locks import machine, process_lives, process_start
from kvmap.metrics import Metric
from kvmap.wandb_mirror import RETENTION_TABLE, WandbMirror

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["BACKENDS", "Metric", "Run", "RunExists", "read_metrics"]

BACKENDS = ("none", "wandb", "wandb_online")
SCHEMA_VERSION = 1
DIFF_CHARACTERS_INLINE = 4000
ERROR_CHARACTERS = 500
FIGURE_DPI = 300

_logger = logging.getLogger(__name__)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


class RunExists(KvmapError):
    """The directory holds a finished run, or one that is being written."""


def read_metrics(directory: Path) -> dict[str, Metric]:
    """The metrics of a run directory; those that were not finite come back as NaN."""
    entries = read_json(Path(directory) / "metrics.json")
    return {
        key: Metric(
            value=float("nan") if entry["value"] is None else entry["value"],
            n=entry["n"],
            standard_error=entry["standard_error"],
        )
        for key, entry in entries.items()
    }


class Run:
    """Writes one run's record; a context manager around its stages.

    Args:
        directory: The run directory; made where missing. An unfinished record of an earlier attempt (failed,
            or its process is gone) is moved to `attempt-<n>/`.
        study: Name of the study, group of the W&B run.
        config: What the run was asked to do, as plain values.
        backend: `wandb` (offline files), `wandb_online`, or `none`. Local files are the same with each.
        argv: Command line; `sys.argv` where None.
        seeds: Every seed, by what it seeds.
        wandb_project: Name of the W&B project.
        wandb_entity: User or team that owns the project; None: W&B's default.
        wandb_group: W&B group; the study where None.
        wandb_seconds: Longest wait for any W&B call.

    Raises:
        RunExists: On entering, where the directory's run is done or alive.
    """

    def __init__(
        self,
        directory: Path,
        study: str,
        config: Mapping[str, Any],
        backend: str = "wandb",
        *,
        argv: Sequence[str] | None = None,
        seeds: Mapping[str, int] | None = None,
        wandb_project: str = "kvmap",
        wandb_entity: str | None = None,
        wandb_group: str | None = None,
        wandb_seconds: float = 30.0,
    ) -> None:
        if backend not in BACKENDS:
            raise UnknownName("tracking backend", backend, BACKENDS)
        self.directory = Path(directory)
        self.study = study
        self.config = config
        self.backend = backend
        self.metrics: dict[str, Metric] = {}
        self._argv = list(sys.argv if argv is None else argv)
        self._seeds = dict(seeds or {})
        self._wandb: dict[str, Any] = {
            "project": wandb_project,
            "entity": wandb_entity,
            "group": wandb_group,
            "seconds": wandb_seconds,
        }
        self._mirror: WandbMirror | None = None
        self._record: dict[str, Any] = {}
        self._tables: dict[str, tuple[list[str], list[Mapping[str, Any]]]] = {}
        self._handler: logging.Handler | None = None
        self._started = 0.0

    def __enter__(self) -> Run:
        """Writes run.json with status `running`, opens the log, starts W&B."""
        attempts = _put_away_earlier(self.directory)
        self._started = time.monotonic()
        self._record = self._first_record(attempts)
        self._write_record()
        self._write_metrics()
        self._open_log()
        if self.backend != "none":
            self._mirror = WandbMirror(
                self.directory,
                self.study,
                self.config,
                online=self.backend == "wandb_online",
                **self._wandb,
            )
            self._record["wandb"] = {"id": self._mirror.id, "mode": self._mirror.mode}
            self._write_record()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Writes how it ended; never hides the exception that ended it."""
        failed = error is not None and not (isinstance(error, SystemExit) and error.code in (0, None))
        try:
            self._record["status"] = "failed" if failed else "done"
            self._record["ended"] = _utc_now()
            self._record["seconds"] = round(time.monotonic() - self._started, 3)
            if error is not None and failed:
                self._record_failure(error)
            self._write_record()
        except (KvmapError, OSError) as fault:
            if not failed:
                raise
            _logger.warning("could not record how the run ended: %s", fault)
        finally:
            if self._mirror is not None:
                for name, (columns, rows) in self._tables.items():
                    self._mirror.table(name, columns, rows)
                retention = self._tables.get(RETENTION_TABLE)
                self._mirror.results(self.study, self.directory, self.metrics, retention)
                self._mirror.finish(exit_code=int(failed))
            self._close_log()

    def note(self, **facts: Any) -> None:
        """Adds facts learnt after the start (model and data revisions, ...) to run.json, under `facts`.

        A dict given for a name that already has one is merged into it.
        """
        known = self._record["facts"]
        for name, value in facts.items():
            both = isinstance(value, Mapping) and isinstance(known.get(name), dict)
            known[name] = {**known[name], **value} if both else value
        self._write_record()
        if self._mirror is not None:
            self._mirror.note({name: known[name] for name in facts})

    def log(self, metrics: Mapping[str, Metric]) -> None:
        """Merges metrics into metrics.json.

        Args:
            metrics: By `stage/task/arm/metric`, the unit in the metric's name where it has one.
        """
        self.metrics.update(metrics)
        self._write_metrics()
        if self._mirror is not None:
            self._mirror.log(metrics)

    def table(self, name: str, rows: Sequence[Mapping[str, Any]]) -> Path:
        """Writes rows to tables/<name>.csv; columns are all keys in the order of their first appearance.

        A table may be written again as it grows; W&B gets the last state, when the run ends.
        """
        path = self.directory / "tables" / f"{_plain_name('table', name)}.csv"
        columns = write_csv(path, rows)
        self._tables[name] = (columns, list(rows))
        return path

    def figure(self, name: str, figure: Figure) -> Path:
        """Writes a matplotlib figure to figures/<name>.png."""
        path = self.directory / "figures" / f"{_plain_name('figure', name)}.png"
        with replacing(path) as temporary:
            figure.savefig(temporary, dpi=FIGURE_DPI)
        if self._mirror is not None:
            self._mirror.figure(name, path)
        return path

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Times a stage, logs its begin and end, and records both in run.json."""
        began = time.monotonic()
        entry: dict[str, Any] = {"status": "running", "seconds": None}
        self._record["stages"][name] = entry
        self._write_record()
        _logger.info("stage %s begins", name)
        try:
            yield
            entry["status"] = "done"
        except BaseException:
            entry["status"] = "failed"
            raise
        finally:
            entry["seconds"] = round(time.monotonic() - began, 3)
            _logger.info("stage %s %s after %.1f s", name, entry["status"], entry["seconds"])
            if entry["status"] == "done":  # a failure is written out once, by __exit__
                self._write_record()

    def _first_record(self, attempts: list[dict[str, Any]]) -> dict[str, Any]:
        git, diff = provenance.git_state()
        if len(diff) > DIFF_CHARACTERS_INLINE:
            write_text(self.directory / "dirty.diff", diff)
            git["diff_file"] = "dirty.diff"
        elif diff:
            git["diff"] = diff
        return {
            "schema": SCHEMA_VERSION,
            "study": self.study,
            "status": "running",
            "started": _utc_now(),
            "ended": None,
            "seconds": None,
            "argv": self._argv,
            "seeds": self._seeds,
            "stages": {},
            "facts": {},
            "error": None,
            "traceback_file": None,
            "wandb": None,
            "git": git,
            "versions": provenance.package_versions(),
            "host": {**provenance.host_facts(), "process": _process()},
            "device": None,
            "threads": {},
            "slurm": provenance.slurm_facts(),
            "config": dict(self.config),
            "attempts": attempts,
        }

    def _record_failure(self, error: BaseException) -> None:
        interrupted = isinstance(error, KeyboardInterrupt)
        message = " ".join(str(error).split())[:ERROR_CHARACTERS]
        said = f"{type(error).__name__}: {message}".rstrip(": ")
        self._record["error"] = "interrupted" if interrupted else said
        write_text(self.directory / "traceback.txt", "".join(traceback.format_exception(error)))
        self._record["traceback_file"] = "traceback.txt"
        _logger.error("run failed: %s", self._record["error"])

    def _write_record(self) -> None:
        # Torch may be loaded by a later stage only; so these two are looked up each time.
        self._record["device"] = provenance.device_facts()
        self._record["threads"] = provenance.thread_facts()
        write_json(self.directory / "run.json", self._record)

    def _write_metrics(self) -> None:
        content = {
            key: {
                "value": float(metric.value),
                "n": None if metric.n is None else int(metric.n),
                "standard_error": None if metric.standard_error is None else float(metric.standard_error),
            }
            for key, metric in self.metrics.items()
        }
        write_json(self.directory / "metrics.json", content)

    def _open_log(self) -> None:
        path = self.directory / "run.log"
        root = logging.getLogger()
        open_files = {getattr(handler, "baseFilename", None) for handler in root.handlers}
        if str(path.resolve()) not in open_files:  # Hydra may write that very file
            self._handler = logging.FileHandler(path.resolve(), encoding="utf-8")
            formatter = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
            self._handler.setFormatter(formatter)
            root.addHandler(self._handler)
        package = logging.getLogger("kvmap")
        if package.level == logging.NOTSET:
            package.setLevel(logging.INFO)

    def _close_log(self) -> None:
        if self._handler is not None:
            logging.getLogger().removeHandler(self._handler)
            self._handler.close()
            self._handler = None


def _plain_name(what: str, name: str) -> str:
    if not _NAME.fullmatch(name):
        raise ValueError(f"{what} {name!r} is no plain name: letters, digits, '_', '-' and '.' are allowed")
    return name


def _utc_now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _process() -> dict[str, Any]:
    pid = os.getpid()
    return {"machine": machine(), "pid": pid, "start": process_start(pid)}


def _put_away_earlier(directory: Path) -> list[dict[str, Any]]:
    """Moves what an attempt that came to nothing left into `attempt-<n>/`; gives the attempts so far."""
    file = directory / "run.json"
    if not file.exists():
        return []
    earlier = read_json(file)
    if earlier["status"] == "done":
        raise RunExists(f"{directory} holds a finished run; give another directory, or delete that one")
    if earlier["status"] == "running" and _is_alive(earlier["host"]["process"]):
        process = earlier["host"]["process"]
        raise RunExists(f"{directory} is being written by process {process['pid']} on {process['machine']}")
    attempts = list(earlier.get("attempts", []))
    folder = directory / f"attempt-{len(attempts) + 1}"
    folder.mkdir()
    for name in ("run.json", "metrics.json", "tables", "figures", "traceback.txt", "dirty.diff"):
        if (directory / name).exists():
            (directory / name).rename(folder / name)
    facts = {name: earlier.get(name) for name in ("status", "started", "ended", "error", "wandb")}
    return [*attempts, {"directory": folder.name, **facts}]


def _is_alive(process: Mapping[str, Any]) -> bool:
    """False where it cannot be known: a requeued job comes back on another machine."""
    if process["machine"] != machine():
        return False
    return process_lives(process["pid"]) and process_start(process["pid"]) == process["start"]
