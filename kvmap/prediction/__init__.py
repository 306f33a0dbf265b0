"""What the diagnostics of a mapped cache say about what becomes of the hand-off, over finished runs."""

from __future__ import annotations

from kvmap.prediction.correlation import correlate
from kvmap.prediction.leave_out import LeaveOnePairOut, default_predictors, leave_one_pair_out

__all__ = ["LeaveOnePairOut", "correlate", "default_predictors", "leave_one_pair_out"]
