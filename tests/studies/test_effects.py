"""Means over pairs and paired differences, held against plain loops over planted numbers."""

from __future__ import annotations

import math
from itertools import product
from statistics import fmean

import numpy as np
import pandas as pd
import pytest

from kvmap.errors import KvmapError
from kvmap.studies.effects import effect, pooled, select
from kvmap.studies.runs import PAIR
from kvmap.studies.summary import SEED, effects, freeze, settings_of_table

METRIC = "evaluate/average/mapped/accuracy"
N_PAIRS, N_SEEDS = 5, 3


@pytest.fixture(scope="module")
def table() -> pd.DataFrame:
    """A step of k adds 0.1, a pair is worth 0.05 × its number, and noise of a run 0.01."""
    random = np.random.default_rng(0)
    rows = [
        {
            PAIR: f"p{pair}",
            SEED: seed,
            "mapper.top_k": k,
            METRIC: 0.1 * step + 0.05 * pair + 0.01 * random.standard_normal(),
        }
        for pair, seed, (step, k) in product(range(N_PAIRS), range(N_SEEDS), enumerate((1, 2, "all")))
    ]
    return pd.DataFrame(rows)


def values(table: pd.DataFrame, pair: str, k: object) -> list[float]:
    return [
        row[METRIC] for _, row in table.iterrows() if row[PAIR] == pair and str(row["mapper.top_k"]) == str(k)
    ]


def test_a_mean_counts_each_pair_once(table):
    lopsided = table.drop(table[(table[PAIR] == "p0") & (table[SEED] > 0)].index)
    found = pooled(lopsided, ["mapper.top_k"], [METRIC]).set_index("mapper.top_k")
    for k in (1, 2, "all"):
        by_pair = [fmean(values(lopsided, f"p{pair}", k)) for pair in range(N_PAIRS)]
        assert found.loc[k, "value"] == pytest.approx(fmean(by_pair))
        assert (found.loc[k, "lowest"], found.loc[k, "highest"]) == pytest.approx(
            (min(by_pair), max(by_pair))
        )
        assert (found.loc[k, "n_pairs"], found.loc[k, "n_runs"]) == (N_PAIRS, N_PAIRS * N_SEEDS - 2)
        assert found.loc[k, "low"] < found.loc[k, "value"] < found.loc[k, "high"]


def test_without_settings_everything_is_one_row(table):
    found = pooled(table, [], [METRIC])
    assert len(found) == 1
    assert found.loc[0, "n_runs"] == len(table)


def test_an_effect_is_paired_so_that_what_a_pair_is_worth_does_not_widen_it(table):
    found = effect(table, METRIC, {"mapper.top_k": 2}, {"mapper.top_k": 1}, matched=[SEED])
    by_pair = [
        fmean(a - b for a, b in zip(values(table, f"p{pair}", 2), values(table, f"p{pair}", 1), strict=True))
        for pair in range(N_PAIRS)
    ]
    assert found["value"] == pytest.approx(fmean(by_pair))
    assert (found["lowest"], found["highest"]) == pytest.approx((min(by_pair), max(by_pair)))
    assert (found["n_pairs"], found["n_runs"], found["n_pairs_above"]) == (
        N_PAIRS,
        N_PAIRS * N_SEEDS,
        N_PAIRS,
    )
    # noise of 0.014 a difference over 15 of them; the pairs themselves differ by up to 0.2
    assert 0.08 < found["low"] < 0.1 < found["high"] < 0.12


def test_intervals_cover_the_true_mean_about_as_often_as_they_say():
    """Pairs are draws around 0; a percentile interval of 12 of them is known to cover about .92."""
    covered = 0
    for seed in range(200):
        random = np.random.default_rng(seed)
        level = random.standard_normal(12).repeat(3)
        rows = pd.DataFrame({PAIR: np.arange(12).repeat(3), METRIC: level + 0.3 * random.standard_normal(36)})
        found = pooled(rows, [], [METRIC], n_resamples=400, seed=seed).iloc[0]
        covered += found["low"] <= 0 <= found["high"]
    assert 170 <= covered <= 198


def test_one_pair_has_no_interval(table):
    found = pooled(table[table[PAIR] == "p1"], ["mapper.top_k"], [METRIC])
    assert found["low"].isna().all()
    assert found["value"].notna().all()


def test_runs_without_the_metric_are_left_out(table):
    holes = table.copy()
    holes.loc[holes[PAIR] == "p0", METRIC] = math.nan
    assert set(pooled(holes, ["mapper.top_k"], [METRIC])["n_pairs"]) == {N_PAIRS - 1}


def test_values_of_settings_are_compared_as_text(table):
    assert len(select(table, {"mapper.top_k": "1"})) == N_PAIRS * N_SEEDS


@pytest.mark.parametrize(
    ("metric", "setting", "baseline", "matched", "said"),
    [
        ("evaluate/other/mapped/accuracy", {"mapper.top_k": 2}, {"mapper.top_k": 1}, [SEED], METRIC),
        (METRIC, {"mapper.top": 2}, {"mapper.top_k": 1}, [SEED], "mapper.top"),
        (METRIC, {"mapper.top_k": 3}, {"mapper.top_k": 1}, [SEED], "no run of"),
        (METRIC, {"mapper.top_k": 2}, {"mapper.top_k": 1}, [], "10 runs have the same ordered_pair"),
    ],
)
def test_what_cannot_be_paired_is_refused(table, metric, setting, baseline, matched, said):
    with pytest.raises(KvmapError, match=said):
        effect(table, metric, setting, baseline, matched=matched)


def test_every_setting_is_held_against_the_baseline(table, tmp_path, capsys):
    settings = settings_of_table(table, ["mapper.top_k"])
    found = effects(table, settings, {"mapper.top_k": "all"}, [METRIC])
    assert list(found["mapper.top_k"]) == [1, 2]
    assert list(found["value"]) == pytest.approx([-0.2, -0.1], abs=0.02)
    freeze(tmp_path, effects=found)
    assert pd.read_csv(tmp_path / "effects.csv")["n_pairs"].tolist() == [N_PAIRS] * 2
    assert "effects:" in capsys.readouterr().out
