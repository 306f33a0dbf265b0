"""The runs of a sweep side by side."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvmap.files import read_json
from kvmap.report.reading import Row
from kvmap.tracking import read_metrics


def summary_rows(runs: Sequence[tuple[Row, Path | None]]) -> list[Row]:
    """A row a run: what is said of it, the settings that differ, every metric.

    Args:
        runs: what is said first of each, and its directory; None where there is no run.
    """
    settings = [dict(leaves(read_json(run / "run.json")["config"])) if run else {} for _, run in runs]
    names = list(dict.fromkeys(name for setting in settings for name in setting))
    known = [setting for setting in settings if setting]
    varied = [name for name in names if len({repr(setting.get(name)) for setting in known}) > 1]
    rows = []
    for (said, run), setting in zip(runs, settings, strict=True):
        row = {**said, **{name: setting.get(name) for name in varied}}
        if run is not None and (run / "metrics.json").is_file():
            row.update({key: metric.value for key, metric in read_metrics(run).items()})
        rows.append(row)
    return rows


def leaves(config: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    """Settings by their flat key: `mapper.top_k` to its value."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
