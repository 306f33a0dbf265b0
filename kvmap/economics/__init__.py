"""When a hand-off pays: time to first token and cost of serving, from latencies, prices and a workload.

`curves.py` (times by length) from `tables.py` (the benchmark's) or `planned.py`, `pairs.py` (the planner's),
`contexts.py` (how long contexts are) → `policies.py` (what each way of serving takes) → `outcomes.py` (means,
quantiles, cost), `break_even.py` and `surfaces.py` (where it pays) → `analysis.py` (all) → `command.py`.
"""

from __future__ import annotations

from kvmap.economics.analysis import Economics, analyse, as_text
from kvmap.economics.contexts import Contexts, counted, log_normal, log_normal_within, read_lengths
from kvmap.economics.curves import Latencies
from kvmap.economics.errors import EconomicsError
from kvmap.economics.outcomes import Quality
from kvmap.economics.policies import POLICIES, Prices, Workload
from kvmap.economics.surfaces import Axes
from kvmap.economics.tables import latencies_of_table, read_latencies

__all__ = [
    "POLICIES",
    "Axes",
    "Contexts",
    "Economics",
    "EconomicsError",
    "Latencies",
    "Prices",
    "Quality",
    "Workload",
    "analyse",
    "as_text",
    "counted",
    "latencies_of_table",
    "log_normal",
    "log_normal_within",
    "read_latencies",
    "read_lengths",
]
