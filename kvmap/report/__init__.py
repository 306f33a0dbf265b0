"""From run directories to tables, figures and pages; reads only what runs wrote, so it can be done any time.

    python -m kvmap.report PATH

PATH is a run, or a folder with runs in it: a sweep, or a study. The stages write these tables: `arms`
`{task, arm, metric, value, n, standard_error, low, high}`, `r2` `{layer, head, kind, split, r2}`, `latency`
`{length, arm, p20_ms, p50_ms, p80_ms, ...}`, and those of the stage `diagnose`, see docs/diagnostics.md.
"""

from __future__ import annotations

from kvmap.report.command import main, write_report
from kvmap.report.console import print_summary
from kvmap.report.pictures import draw_figures, save_figures
from kvmap.report.reading import read_arms, read_table
from kvmap.report.sweep import summary_rows

__all__ = [
    "draw_figures",
    "main",
    "print_summary",
    "read_arms",
    "read_table",
    "save_figures",
    "summary_rows",
    "write_report",
]
