"""`python -m kvmap.report`: the report of a run, a sweep or a study, on the terminal and as pages."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvmap.errors import KvmapError
from kvmap.files import write_text
from kvmap.report.console import print_summary
from kvmap.report.page import Page
from kvmap.report.pictures import save_figures
from kvmap.report.reading import is_run
from kvmap.report.render import to_html, to_markdown
from kvmap.report.run_page import run_page

NAMES = ("report.html", "report.md")


def write_report(directory: Path, output: Path | None = None) -> list[Path]:
    """Writes report.html and report.md of a run, with the figures that lie there.

    Args:
        directory: of the run.
        output: where to write, and where its figures may lie too; None: the directory itself.

    Raises:
        KvmapError: The directory holds no run, or cannot be written to.
    """
    directory = Path(directory)
    return _write(run_page(directory, _defaults(), output), directory if output is None else output)


def _write(page: Page, folder: Path) -> list[Path]:
    texts = to_html(page, folder), to_markdown(page, folder)
    paths = [folder / name for name in NAMES]
    for path, text in zip(paths, texts, strict=True):
        write_text(path, text)
    return paths


def _defaults() -> Mapping[str, Any] | None:
    """What a run composes to; None where Hydra is not installed."""
    try:
        from kvmap.config import composed_defaults

        return composed_defaults()
    except ImportError:
        return None


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of `python -m kvmap.report`."""
    parser = argparse.ArgumentParser(
        prog="python -m kvmap.report",
        description="Print the tables of a finished run, draw its figures again and write report.html and "
        "report.md; of a sweep or a study, its runs side by side.",
    )
    parser.add_argument("path", type=Path, help="a run (it printed its directory last), a sweep or a study")
    parser.add_argument(
        "--output", type=Path, help="the folder for report.html, report.md and figures (default: PATH)"
    )
    given = parser.parse_args(arguments)
    try:
        paths = (
            _of_run(given.path, given.output) if is_run(given.path) else _of_study(given.path, given.output)
        )
    except KvmapError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for path in paths:
        print(f"{'figure' if path.suffix == '.png' else 'report'}: {path}")
    print(f"{'run' if is_run(given.path) else 'study'}: {given.path}")
    return 0


def _of_run(directory: Path, output: Path | None) -> list[Path]:
    print_summary(directory)
    return [*save_figures(directory, output), *write_report(directory, output)]


def _of_study(root: Path, output: Path | None) -> list[Path]:
    from kvmap.report.study import Study
    from kvmap.report.study_page import draw_study, print_study, study_page

    folder = root if output is None else output
    study = Study.read(root)
    print_study(study)
    figures = draw_study(study, folder)
    return [*figures, *_write(study_page(study, folder, _defaults()), folder)]
