"""Several models at once: one trace of each, every ordered pair of them, and ways round by a third.

A trace is a model's own cache of the calibration text. Two traces are the captures of a pair, so n models are
read n times for n(n − 1) mappers. A relay A → B → C applies the mapper of B → C to what that of A → B made; B
itself does not run. Where both maps are linear the two are one (`fold`).
"""

from __future__ import annotations

from kvmap.fleet.fold import fold, folded_recipe
from kvmap.fleet.judge import Judged, judge, relayed
from kvmap.fleet.routes import Route, best_relays, hubs, routes_into
from kvmap.fleet.traces import PairedTraces, Trace, read_trace

__all__ = [
    "Judged",
    "PairedTraces",
    "Route",
    "Trace",
    "best_relays",
    "fold",
    "folded_recipe",
    "hubs",
    "judge",
    "read_trace",
    "relayed",
    "routes_into",
]
