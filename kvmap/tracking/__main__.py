"""The command line of tracking: upload later what runs have written offline.

    python -m kvmap.tracking sync outputs/<study> [--dry-run]

Exit status: 0 nothing is left but what is still being written; 1 something was not uploaded; 2 wrong usage.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from kvmap.errors import KvmapError
from kvmap.tracking.sync import TrackedRun, check_service, runs_to_send, send


def main(arguments: Sequence[str] | None = None) -> int:
    """Reads the command line, uploads or lists, and gives the exit status."""
    asked = _parser().parse_args(arguments)
    folder: Path = asked.path
    if not folder.is_dir():
        print(f"kvmap: {folder} is no folder; give a run, a sweep or a study", file=sys.stderr)
        return 2
    runs = runs_to_send(folder)
    if asked.dry_run:
        for run in runs:
            print(_line(run))
    if asked.dry_run or not runs:
        print(f"{len(runs)} runs to upload")
        return 0
    try:
        print(f"uploading {len(runs)} runs to {check_service()}", flush=True)
    except KvmapError as error:
        print(f"kvmap: {error}", file=sys.stderr)
        return 1
    return _upload(runs, asked)


def _upload(runs: list[TrackedRun], asked: argparse.Namespace) -> int:
    counts = dict.fromkeys(("sent", "running", "empty", "failed"), 0)
    outcomes = send(runs, seconds=asked.timeout, at_once=asked.jobs, also_running=asked.unfinished)
    for outcome in outcomes:
        counts[outcome.status] += 1
        to = sys.stderr if outcome.status == "failed" else sys.stdout
        said = f"; {'; '.join(outcome.said)}" if outcome.said else ""
        print(f"{outcome.status:8} {outcome.run.directory} ({outcome.run.id}){said}", file=to, flush=True)
    print(", ".join(f"{count} {status}" for status, count in counts.items() if count))
    return 1 if counts["failed"] else 0


def _line(run: TrackedRun) -> str:
    segments = run.to_send()
    size = sum(segment.file.stat().st_size for segment in segments)
    state = f", is being written by {writer}" if (writer := run.writer()) else ""
    parts = f"{len(segments)} of {len(run.segments)} segments, {size / 1024:.0f} KiB{state}"
    return f"{run.directory} ({run.id}): {parts}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m kvmap.tracking")
    commands = parser.add_subparsers(required=True, metavar="command")
    sync = commands.add_parser("sync", help="upload W&B runs that were written offline")
    sync.add_argument("path", type=Path, help="a run, a sweep, or outputs/<study>")
    sync.add_argument("--dry-run", action="store_true", help="list what would be uploaded")
    sync.add_argument("--unfinished", action="store_true", help="upload runs too that say they are running")
    sync.add_argument("--jobs", type=_positive, default=4, help="runs at a time (default 4)")
    sync.add_argument("--timeout", type=float, default=600.0, help="seconds for one segment (default 600)")
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return number


if __name__ == "__main__":
    sys.exit(main())
