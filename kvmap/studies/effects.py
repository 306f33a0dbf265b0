"""What a setting changes: means over ordered pairs, and differences paired within them, with intervals.

The unit is the ordered pair of models. Seeds of one pair are draws of its calibration, text and questions;
pairs are draws of what a setting is to hold for. Pairs of one small family share models, so the intervals
tell of this family, and are narrower than those of as many unrelated pairs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import pandas as pd

from kvmap.errors import KvmapError
from kvmap.evaluation.statistics import LEVEL, N_RESAMPLES, Floats
from kvmap.studies.runs import PAIR, require

Setting: TypeAlias = dict[str, Any]


def select(table: pd.DataFrame, setting: Setting) -> pd.DataFrame:
    """Runs of which every setting named has that value; values are compared as text, as they are written."""
    require(table, setting)
    kept = pd.Series(True, index=table.index)
    for name, value in setting.items():
        kept &= table[name].astype(str) == str(value)
    return table[kept]


def pooled(
    table: pd.DataFrame,
    settings: Sequence[str],
    metrics: Sequence[str],
    *,
    n_resamples: int = N_RESAMPLES,
    seed: int = 0,
) -> pd.DataFrame:
    """Mean over ordered pairs of every metric, one row for each combination of settings.

    A pair counts once: it is the mean of its runs. Intervals are 95 % of resamples that draw pairs first,
    then runs within each. Runs without the metric (nan) are left out.

    Returns:
        Columns: the settings, `metric`, `value`, `low`, `high` (nan with one pair), `lowest` and `highest`
        pair, `n_pairs`, `n_runs`. Rows in the order of first appearance.

    Raises:
        KvmapError: a setting or metric that no run has.
    """
    require(table, [*settings, *metrics])
    rows = []
    for values, part in (
        table.groupby(list(settings), sort=False, dropna=False) if settings else [((), table)]
    ):
        for metric in metrics:
            by_pair = _by_pair(part, metric)
            rows.append(
                dict(zip(settings, values, strict=True))
                | {"metric": metric}
                | _summary(by_pair, _resampled(by_pair, n_resamples, seed))
            )
    return pd.DataFrame(rows)


def effect(
    table: pd.DataFrame,
    metric: str,
    setting: Setting,
    baseline: Setting,
    *,
    matched: Sequence[str] = (),
    n_resamples: int = N_RESAMPLES,
    seed: int = 0,
) -> dict[str, Any]:
    """What `setting` changes of a metric beyond `baseline`, paired within ordered pair and seed.

    Args:
        table: of `runs_table`.
        metric: its key.
        setting, baseline: settings with their values, which choose the runs on either side.
        matched: further columns (a seed, another setting) in which the two runs of a difference must agree.
        n_resamples, seed: of the bootstrap.

    Returns:
        `value` (mean over pairs of the mean difference), `low`, `high`, `lowest`, `highest`, `n_pairs`,
        `n_runs` (differences), and `n_pairs_above`, the pairs whose mean difference is above 0.

    Raises:
        KvmapError: no two runs to pair, or two on one side that agree in pair and `matched`.
    """
    require(table, [metric, *matched])
    keys = [PAIR, *matched]
    sides = []
    for name, choice in (("setting", setting), ("baseline", baseline)):
        side = select(table, choice)
        if doubled := int(side.duplicated(keys).sum()):
            raise KvmapError(
                f"{name} {choice}: {doubled} runs have the same {' and '.join(keys)} as another one; name "
                "more settings, or give what tells them apart in `matched`"
            )
        sides.append(side[[*keys, metric]])
    joined = sides[0].merge(sides[1], on=keys, suffixes=("", " of the baseline"))
    if joined.empty:
        raise KvmapError(f"no run of {setting} has the same {' and '.join(keys)} as one of {baseline}")
    joined[metric] = joined[metric] - joined[f"{metric} of the baseline"]
    by_pair = _by_pair(joined, metric)
    found = _summary(by_pair, _resampled(by_pair, n_resamples, seed))
    return found | {"n_pairs_above": sum(float(values.mean()) > 0 for values in by_pair.values())}


def _by_pair(table: pd.DataFrame, metric: str) -> dict[str, Floats]:
    """Values of the runs of each ordered pair; a pair without any is left out."""
    found = {
        str(pair): runs[metric].dropna().to_numpy(dtype=np.float64)
        for pair, runs in table.groupby(PAIR, sort=False)
    }
    return {pair: values for pair, values in found.items() if len(values)}


def _resampled(by_pair: dict[str, Floats], n_resamples: int, seed: int) -> Floats:
    """Means over pairs in resamples that draw pairs, then runs of each drawn pair."""
    random = np.random.default_rng(seed)
    groups = list(by_pair.values())
    if not groups:
        return np.full(n_resamples, math.nan)
    # a pair's own runs are drawn anew for each place it takes
    drawn = random.integers(0, len(groups), size=(n_resamples, len(groups)))
    means = np.empty((n_resamples, len(groups)))
    for number, values in enumerate(groups):
        places = drawn == number
        picks = random.integers(0, len(values), size=(int(places.sum()), len(values)))
        means[places] = values[picks].mean(axis=1)
    return means.mean(axis=1)


def _summary(by_pair: dict[str, Floats], resampled: Floats) -> dict[str, Any]:
    means = [float(values.mean()) for values in by_pair.values()]
    told = len(means) > 1
    low, high = np.quantile(resampled, ((1 - LEVEL) / 2, (1 + LEVEL) / 2)) if told else (math.nan, math.nan)
    return {
        "value": float(np.mean(means)) if means else math.nan,
        "low": float(low),
        "high": float(high),
        "lowest": min(means, default=math.nan),
        "highest": max(means, default=math.nan),
        "n_pairs": len(means),
        "n_runs": sum(map(len, by_pair.values())),
    }
