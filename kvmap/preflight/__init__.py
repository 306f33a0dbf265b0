"""Before anyone deploys: what a small calibration says of a pair, held against recorded cases."""

from __future__ import annotations

from kvmap.preflight.evidence import Evidence, cases_of, read_evidence
from kvmap.preflight.measures import check_identity, measure
from kvmap.preflight.rules import Judgement, Rules, judge, overall

__all__ = [
    "Evidence",
    "Judgement",
    "Rules",
    "cases_of",
    "check_identity",
    "judge",
    "measure",
    "overall",
    "read_evidence",
]
