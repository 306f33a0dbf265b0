"""Stage `merge`: the moments of all shards, added."""

from __future__ import annotations

from kvmap.stages.calibrate import log_moments
from kvmap.stages.context import Context


def run(ctx: Context) -> None:
    """Add the parts that `calibration.shard=i/n` left; later stages and runs find the whole as their own."""
    n_shards = ctx.cfg.calibration.n_shards
    assert n_shards is not None  # the configuration was judged
    log_moments(ctx, ctx.calibrated.merge_parts(n_shards), "moments")
