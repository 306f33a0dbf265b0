"""`python -m kvmap.sweep status`: how far a sweep or study got, and starting again what is not done."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvmap.errors import KvmapError
from kvmap.sweeps.board import Board, Entry
from kvmap.sweeps.resubmit import CHOICES, choose, command, launch
from kvmap.sweeps.states import STATES
from kvmap.sweeps.summary import varied_overrides, write_summary

EXIT_NOT_ALL_DONE, EXIT_WRONG = 1, 2
WIDTH_WITHOUT_TERMINAL = 160

Job = Callable[[Any], None]
Guard = Callable[[Callable[[], object]], int]


def main(job: Job, guard: Guard, arguments: Sequence[str] | None = None) -> int:
    """Entry point of `python -m kvmap.sweep`.

    Args:
        job: What runs one composed configuration, for points that are started again.
        guard: Turns what fails there into one message and an exit status.
        arguments: The command line; that of the process where None.

    Returns:
        0 if every point is done, 1 if not, 2 where that cannot be said.
    """
    given = _parser().parse_args(arguments)
    try:
        board = Board.read(given.path)
        if given.resubmit and given.dry_run:
            return _print_commands(board, given.resubmit)
        if given.resubmit:
            _start_again(board, given.resubmit, job, guard)
            board = Board.read(given.path)
        _write(board)
        print(json.dumps(as_json(board), indent=2) if given.json else "", end="")
        if not given.json:
            print_board(board)
    except KvmapError as error:
        print(f"kvmap: {error}", file=sys.stderr)
        return EXIT_WRONG
    return 0 if all_done(board) else EXIT_NOT_ALL_DONE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m kvmap.sweep", description=main.__doc__)
    parser.description = "How far a sweep or study got, by the project's own records."
    actions = parser.add_subparsers(dest="action", required=True)
    status = actions.add_parser(
        "status",
        help="a line a point; exit status 0 only if all are done; writes summary.csv",
        description="Print a line a point and write summary.csv. Exit status: 0 all done, 1 not all, "
        "2 it cannot be said.",
    )
    status.add_argument("path", type=Path, help="the folder of a study (outputs/<study>) or of a sweep in it")
    status.add_argument("--json", action="store_true", help="print JSON instead of a table")
    status.add_argument(
        "--resubmit",
        choices=CHOICES,
        help="start again what failed, died or was preempted (failed), what was never started (missing), or "
        "both (all): with the same overrides and launcher, never what is done or running",
    )
    status.add_argument("--dry-run", action="store_true", help="with --resubmit: print the commands only")
    return parser


def all_done(board: Board) -> bool:
    """Whether there are points, and all of them are done."""
    return bool(board.entries) and all(entry.state.status == "done" for entry in board.entries)


def _print_commands(board: Board, which: str) -> int:
    for submission, entries in choose(board.entries, which):
        for entry in entries:
            print(command(submission, entry))
    return 0 if all_done(board) else EXIT_NOT_ALL_DONE


def _start_again(board: Board, which: str, job: Job, guard: Guard) -> None:
    """One multirun for each submission; that one fails keeps no other from its start."""
    batches = choose(board.entries, which)
    if not batches:
        print(f"nothing to start again: no point is {' or '.join(CHOICES[which])}", file=sys.stderr)
    for submission, entries in batches:
        print(f"starting {len(entries)} of {submission.file} again", file=sys.stderr, flush=True)
        _survive(guard, lambda s=submission, e=entries: launch(s, e, job))  # type: ignore[misc]


def _survive(guard: Guard, action: Callable[[], object]) -> None:
    """Says what a launcher raised, and goes on: how far the points got is what counts."""
    try:
        guard(action)
    except Exception as error:
        print(f"kvmap: {type(error).__name__}: {error}", file=sys.stderr)


def _write(board: Board) -> None:
    """The summary is a by-product: a folder that cannot be written to is no reason to say nothing."""
    try:
        write_summary(board.root, board)
    except KvmapError as error:
        print(f"kvmap: no summary.csv: {error}", file=sys.stderr)


def as_json(board: Board) -> dict[str, Any]:
    """Everything the table shows, and the overrides of every point."""
    return {
        "root": str(board.root),
        "all_done": all_done(board),
        "counts": counts(board),
        "skipped_jobs": board.n_skipped,
        "points": [_facts(entry) for entry in board.entries],
    }


def _facts(entry: Entry) -> Mapping[str, Any]:
    state, point, submission = entry.state, entry.point, entry.submission
    return {
        "identity": entry.identity,
        "status": state.status,
        "number": None if point is None else point.number,
        "overrides": None if point is None else list(point.overrides),
        "submission": None if submission is None else str(submission.file),
        "directory": None if state.directory is None else str(state.directory),
        "holder": state.holder,
        "error": state.error,
        "log": None if state.log is None else str(state.log),
    }


def counts(board: Board) -> dict[str, int]:
    """Points by status, those that no point has left out."""
    found = Counter(entry.state.status for entry in board.entries)
    return {status: found[status] for status in (*STATES, *sorted(set(found) - set(STATES))) if found[status]}


def print_board(board: Board) -> None:
    """The table, what failed and where its log is, and the count."""
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else WIDTH_WITHOUT_TERMINAL)
    table = Table("job", "status", "overrides", "directory", "by")
    for entry, overrides in zip(board.entries, varied_overrides(board.entries), strict=True):
        state = entry.state
        number = "single" if entry.point is None else str(entry.point.number)
        place = "" if state.directory is None else os.path.relpath(state.directory, board.root)
        by = state.holder if state.status in ("running", "died") else None
        table.add_row(number, state.status, _plain(" ".join(overrides)), _plain(place), _plain(by or ""))
    console.print(table)
    for entry in board.entries:
        if entry.state.error is not None:
            said = f"{entry.state.status} {entry.identity}: {entry.state.error}\n  log: {entry.state.log}"
            console.print(said, markup=False, highlight=False, soft_wrap=True)
    said = ", ".join(f"{number} {status}" for status, number in counts(board).items())
    skipped = f"; jobs that found theirs done or running: {board.n_skipped}" if board.n_skipped else ""
    console.print(f"{len(board.entries)} points: {said}{skipped}", markup=False, highlight=False)


def _plain(text: str) -> Any:
    from rich.text import Text

    return Text(text, overflow="fold")
