"""Stage `report`: tables and figures, drawn from the run directory's own files."""

from __future__ import annotations

from kvmap.report import draw_figures
from kvmap.stages.context import Context


def run(ctx: Context) -> None:
    """Draw every figure the run's tables allow."""
    for name, figure in draw_figures(ctx.run.directory).items():
        ctx.run.figure(name, figure)
