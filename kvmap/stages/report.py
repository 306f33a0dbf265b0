"""Stage `report`: figures and pages, made of the run directory's own files."""

from __future__ import annotations

from kvmap.report import draw_figures, write_report
from kvmap.stages.context import Context


def run(ctx: Context) -> None:
    """Draw every figure the run's tables allow, then write report.html and report.md with them."""
    for name, figure in draw_figures(ctx.run.directory).items():
        ctx.run.figure(name, figure)
    write_report(ctx.run.directory)
