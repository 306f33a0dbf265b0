"""Where a run came from: command, code, machine, versions, seeds, models; and the files it left."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvmap.figures.style import spoken
from kvmap.report.page import Cell, Grid, Link
from kvmap.report.reading import Row

FILES = ("run.json", "metrics.json", "run.log", "dirty.diff", "traceback.txt", ".hydra/overrides.yaml")
SHORT = 12  # characters of a hash that tell it apart
MOST_VALUES = 6  # of a fact that are listed where runs differ


def environment_grid(run: Row) -> Grid:
    """Command, code, machine, device, threads, seeds and models of one run."""
    rows = [[name, value] for name, value in _facts(run) if value]
    return Grid("Where it came from", ["", ""], rows, n_left=2)


def _facts(run: Row) -> Iterator[tuple[str, str]]:
    yield "command", " ".join(map(str, run.get("argv") or []))
    yield "started", f"{run.get('started', '')}{_took(run)}"
    yield "code", _code(run.get("git") or {})
    host = run.get("host") or {}
    machine = [host.get("cpu"), f"{host['cores']} cores" if host.get("cores") else None, host.get("platform")]
    yield "machine", ", ".join(str(part) for part in machine if part)
    yield "python", str(host.get("python") or "")
    yield "device", _pairs(run.get("device") or {})
    yield "threads", _pairs(run.get("threads") or {})
    yield "Slurm", _pairs(run.get("slurm") or {})
    yield "seeds", _pairs(run.get("seeds") or {})
    facts = run.get("facts") or {}
    for role, model in (facts.get("models") or {}).items():
        yield role, _model(model)
    yield "calibration text", str((facts.get("calibration") or {}).get("source") or "")
    yield (
        "artifacts",
        _pairs({kind: str(key)[:SHORT] for kind, key in (facts.get("artifacts") or {}).items()}),
    )
    wandb = run.get("wandb") or {}
    yield "W&B", f"{wandb['id']} ({wandb.get('mode')})" if wandb.get("id") else ""


def _took(run: Row) -> str:
    seconds = run.get("seconds")
    return "" if seconds is None else f", {float(seconds):,.0f} s in all"


def _code(git: Mapping[str, Any]) -> str:
    commit = str(git.get("sha") or "")
    changed = " with uncommitted changes" if git.get("dirty") else ""
    return f"{commit[:SHORT]}{changed}" if commit else ""


def _model(model: Any) -> str:
    if not isinstance(model, Mapping):
        return str(model)
    weights = str(model.get("weights") or "")[:SHORT]
    parts = [
        model.get("name"),
        model.get("dtype"),
        model.get("revision"),
        f"weights {weights}" if weights else "",
    ]
    return ", ".join(str(part) for part in parts if part)


def _pairs(facts: Mapping[str, Any]) -> str:
    return ", ".join(f"{spoken(str(name))} {value}" for name, value in facts.items() if value is not None)


def versions_grid(runs: Sequence[Row]) -> Grid | None:
    """Versions of packages; where runs differ, all of them."""
    names = list(dict.fromkeys(name for run in runs for name in run.get("versions") or {}))
    if not names:
        return None
    rows = []
    for name in names:
        found = dict.fromkeys(str((run.get("versions") or {}).get(name, "none")) for run in runs)
        rows.append([name, ", ".join(found)])
    return Grid("Versions", ["package", "version"], rows, n_left=2, folded=True)


def files_grid(directory: Path) -> Grid:
    """Links to the files of a run: records, log, tables."""
    paths = [directory / name for name in FILES if (directory / name).is_file()]
    paths += sorted((directory / "tables").glob("*.csv"))
    rows: list[list[Cell]] = [
        [Link(path.relative_to(directory).as_posix(), path), _size(path)] for path in paths
    ]
    return Grid("Files", ["file", "size"], rows, n_left=1)


def _size(path: Path) -> str:
    size = float(path.stat().st_size)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def several_grid(runs: Sequence[Row]) -> Grid:
    """Where the runs of a study came from; where they differ, each value once."""
    found: dict[str, dict[str, None]] = {}
    for run in runs:
        for name, value in _facts(run):
            if value and name not in ("command", "started", "seeds", "artifacts", "W&B"):
                found.setdefault(name, {})[value] = None
    started = sorted(str(run.get("started") or "") for run in runs)
    seconds = sum(float(run.get("seconds") or 0) for run in runs)
    rows = [["started", f"{started[0]} to {started[-1]}, {seconds:,.0f} s in all"]]
    for name, values in found.items():
        shown = list(values)[:MOST_VALUES]
        more = f"; and {len(values) - len(shown)} more" if len(values) > len(shown) else ""
        rows.append([name, "; ".join(shown) + more])
    return Grid("Where they came from", ["", ""], rows, n_left=2)


def commands_grid(runs: Sequence[Row]) -> Grid:
    """Every command that started runs, once, and how many runs it started."""
    counts = Counter(" ".join(map(str, run.get("argv") or [])) for run in runs)
    rows = [[command, str(count)] for command, count in counts.items()]
    return Grid("Commands", ["command", "runs"], rows, n_left=1, folded=True)
