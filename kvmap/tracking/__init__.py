"""The record of one run, on disk first, and the copies of it that trackers get."""

from __future__ import annotations

from kvmap.metrics import Metric
from kvmap.tracking.attempts import RunExists
from kvmap.tracking.run import BACKENDS, FIGURE_DPI, Run, read_metrics

__all__ = ["BACKENDS", "FIGURE_DPI", "Metric", "Run", "RunExists", "read_metrics"]
