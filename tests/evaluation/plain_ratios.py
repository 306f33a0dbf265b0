"""What an arm keeps of the target's accuracy, each ratio by itself: what summaries must agree with."""

from __future__ import annotations

from kvmap.evaluation.statistics import paired_ratio

SAMPLES = {"n_resamples": 2000, "seed": 0}


def retention(arm, target, **samples):
    return paired_ratio([arm, target], (0,), (1,), "the target's accuracy", **SAMPLES | samples)


def floor_retention(arm, target, chance, **samples):
    what = "the target's lead over chance"
    return paired_ratio([arm, target, chance], (0, 2), (1, 2), what, **SAMPLES | samples)


def gain_recovered(arm, target, source, **samples):
    what = "the target's lead over the source"
    return paired_ratio([arm, target, source], (0, 2), (1, 2), what, **SAMPLES | samples)
