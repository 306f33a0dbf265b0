"""The record of one run: what was asked, what came out, where from. Disk first; a tracker gets a copy.

A run directory holds `run.json` (status, provenance, seconds per stage), `metrics.json`, `tables/*.csv`,
`figures/*.png`, `run.log` and, where the checkout was dirty beyond a few lines, `dirty.diff`.
"""

from __future__ import annotations

import logging
import re
import secrets
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from kvmap import preemption, provenance
from kvmap.errors import KvmapError, UnknownName
from kvmap.files import read_json, replacing, write_csv, write_json, write_text
from kvmap.metrics import Metric
from kvmap.tracking import usage
from kvmap.tracking.attempts import check_ours, known_id, put_away_earlier, this_process
from kvmap.tracking.headline import name_of
from kvmap.tracking.mirror import Identity, Mirror
from kvmap.tracking.tensorboard_mirror import FOLDER, TensorboardMirror
from kvmap.tracking.wandb_mirror import RETENTION_TABLE, WandbMirror

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BACKENDS = ("none", "wandb", "wandb_online", "tensorboard")
SCHEMA_VERSION = 1
DIFF_CHARACTERS_INLINE = 4000
ERROR_CHARACTERS = 500
ID_BYTES = 8
FIGURE_DPI = 300

_logger = logging.getLogger(__name__)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


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
        backend: `wandb` (offline files), `wandb_online`, `tensorboard` or `none`. Local files are the same
            with each.
        argv: Command line; `sys.argv` where None.
        seeds: Every seed, by what it seeds.
        wandb_project: Name of the W&B project.
        wandb_entity: User or team that owns the project; None: W&B's default.
        wandb_group: W&B group; the study where None.
        seconds: Longest wait for any call to a tracker, and for all calls after the run has ended.

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
        seconds: float = 30.0,
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
        self._seconds = seconds
        self._wandb: dict[str, Any] = {"project": wandb_project, "entity": wandb_entity, "group": wandb_group}
        self._mirror: Mirror | None = None
        self._record: dict[str, Any] = {}
        self._tables: dict[str, tuple[list[str], list[Mapping[str, Any]]]] = {}
        self._handler: logging.Handler | None = None
        self._usage = usage.Usage()
        self._started = 0.0
        self._entered = False

    @preemption.put_off()
    def __enter__(self) -> Run:
        """Writes run.json with status `running`, opens the log, starts the tracker."""
        attempts = put_away_earlier(self.directory)
        self._started = time.monotonic()
        self._usage = usage.Usage()
        self._entered = False
        self._record = self._first_record(attempts)
        earlier_id = known_id(attempts)
        identity = Identity(
            directory=self.directory,
            study=self.study,
            name=name_of(self.study, self.directory),
            id=earlier_id or secrets.token_hex(ID_BYTES),
            attempt=len(attempts),
            resumed=earlier_id is not None,
        )
        # Before the tracker starts: whoever is killed right after it finds the id again.
        if self.backend == "tensorboard":
            self._record["tensorboard"] = {"folder": FOLDER, "name": identity.name}
        elif self.backend != "none":
            mode = "online" if self.backend == "wandb_online" else "offline"
            self._record["wandb"] = {"id": identity.id, "mode": mode}
        self._write_record()
        self._entered = True
        self._write_metrics()
        self._open_log()
        self._mirror = self._open_mirror(identity)
        return self

    def _open_mirror(self, identity: Identity) -> Mirror | None:
        if self.backend == "none":
            return None
        if self.backend == "tensorboard":
            return TensorboardMirror(identity, self.config, seconds=self._seconds)
        online = self.backend == "wandb_online"
        return WandbMirror(identity, self.config, online=online, seconds=self._seconds, **self._wandb)

    @preemption.put_off()
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Writes how it ended; never hides the exception that ended it."""
        failed = error is not None and not (isinstance(error, SystemExit) and error.code in (0, None))
        try:
            check_ours(self.directory)
            self._record["status"] = _status(error) if failed else "done"
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
                self._hand_over(self._mirror, exit_code=int(failed))
            self._close_log()

    def _hand_over(self, mirror: Mirror, exit_code: int) -> None:
        mirror.hurry()
        for name, (columns, rows) in self._tables.items():
            mirror.table(name, columns, rows)
        retention = self._tables.get(RETENTION_TABLE)
        mirror.results(self.metrics, retention, usage.numbers(self._record["usage"]))
        mirror.finish(exit_code)

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

        A table may be written again as it grows; trackers get the last state, when the run ends.
        """
        check_ours(self.directory)
        path = self.directory / "tables" / f"{_plain_name('table', name)}.csv"
        columns = write_csv(path, rows)
        self._tables[name] = (columns, list(rows))
        return path

    def figure(self, name: str, figure: Figure) -> Path:
        """Writes a matplotlib figure to figures/<name>.png."""
        check_ours(self.directory)
        path = self.directory / "figures" / f"{_plain_name('figure', name)}.png"
        with replacing(path) as temporary:
            figure.savefig(temporary, dpi=FIGURE_DPI)
        if self._mirror is not None:
            self._mirror.figure(name, path)
        return path

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Times a stage, logs its begin and end, and records both in run.json."""
        preemption.check()
        began = time.monotonic()
        entry: dict[str, Any] = {"status": "running", "seconds": None}
        self._record["stages"][name] = entry
        self._write_record()
        _logger.info("stage %s begins", name)
        try:
            yield
            entry["status"] = "done"
        except BaseException as error:
            entry["status"] = _status(error)
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
            "host": {**provenance.host_facts(), "process": this_process()},
            "device": None,
            "usage": {},
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
        if self._entered:
            check_ours(self.directory)
        # Torch may be loaded by a later stage only; so these are looked up each time.
        self._record["usage"] = self._usage.facts()
        self._record["device"] = provenance.device_facts()
        self._record["threads"] = provenance.thread_facts()
        write_json(self.directory / "run.json", self._record)

    def _write_metrics(self) -> None:
        check_ours(self.directory)
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


def _status(error: BaseException | None) -> str:
    """How a run, or a stage of it, that did not get to its end is called."""
    return "preempted" if isinstance(error, preemption.Preempted) else "failed"


def _plain_name(what: str, name: str) -> str:
    if not _NAME.fullmatch(name):
        raise ValueError(f"{what} {name!r} is no plain name: letters, digits, '_', '-' and '.' are allowed")
    return name


def _utc_now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
