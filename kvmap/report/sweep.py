"""The jobs of a sweep in one file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from kvmap.errors import KvmapError
from kvmap.files import read_json, write_csv
from kvmap.report.reading import Row, natural
from kvmap.tracking import read_metrics


def write_sweep_summary(root: Path) -> Path:
    """Writes `<root>/summary.csv`: a line a job with status, the settings that differ and every metric."""
    root = Path(root)
    jobs = sorted((path.parent for path in root.glob("*/run.json")), key=natural)
    if not jobs:
        raise KvmapError(f"{root} holds no jobs (no */run.json): give the directory of a sweep")
    records = [read_json(job / "run.json") for job in jobs]
    settings = [dict(leaves(record["config"])) for record in records]
    names = list(dict.fromkeys(name for setting in settings for name in setting))
    varied = [name for name in names if len({repr(setting.get(name)) for setting in settings}) > 1]
    rows = []
    for job, record, setting in zip(jobs, records, settings, strict=True):
        row: Row = {"job": job.name, "status": record["status"], "seconds": record["seconds"]}
        row.update({name: setting.get(name) for name in varied})
        row.update({key: metric.value for key, metric in read_metrics(job).items()})
        rows.append(row)
    write_csv(root / "summary.csv", rows)
    return root / "summary.csv"


def leaves(config: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    """Settings by their flat key: `mapper.top_k` to its value."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
