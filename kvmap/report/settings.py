"""What a run was asked that it would not have done by itself: its settings against the composed defaults."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from kvmap.report.page import Grid

PLACES = ("outputs", "study")
"""Settings that say where results go, and nothing of what was done."""
TITLE = "Settings that differ from the defaults"
NOTE = "Defaults: what `python -m kvmap.run` composes to, in the version that wrote this report."


def changed_grid(settings: Mapping[str, Any], defaults: Mapping[str, Any] | None) -> Grid | None:
    """Settings that differ from the defaults, with both values; also those that only one of them knows.

    Args:
        settings: of the run, by flat key (`mapper.top_k`).
        defaults: likewise; None: not known, then there is no table.
    """
    if defaults is None:
        return None
    names = [name for name in dict.fromkeys([*settings, *defaults]) if name not in PLACES]
    rows = [
        [name, *(written(side[name]) if name in side else "(none)" for side in (settings, defaults))]
        for name in names
        if name not in settings or name not in defaults or written(settings[name]) != written(defaults[name])
    ]
    return Grid(
        TITLE, ["setting", "this run", "default"], rows, n_left=3, note=NOTE if rows else "None does."
    )


def settings_grid(title: str, settings: Mapping[str, Any]) -> Grid:
    """Settings by their flat key."""
    rows = [[name, written(value)] for name, value in settings.items()]
    return Grid(title, ["setting", "value"], rows, n_left=2, folded=True)


def shared(every: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Settings, by flat key, in which all runs agree."""
    return {
        name: value
        for name, value in every[0].items()
        if all(name in other and written(other[name]) == written(value) for other in every[1:])
    }


def written(value: Any) -> str:
    """A setting as a person would write it on the command line: `null`, `true`, `[a, b]`, `0.01`.

    Infinity is `null` too, as in run.json: JSON has no word for it.
    """
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(written, value))}]"
    return str(value)
